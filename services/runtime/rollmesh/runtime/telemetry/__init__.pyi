"""The door of `rollmesh.runtime.telemetry`: its names for other rooms and tests."""

from rollmesh.runtime.telemetry.contents import (
    content_of as content_of,
    genai_message as genai_message,
)
from rollmesh.runtime.telemetry.logs import (
    JsonFormatter as JsonFormatter,
    configure_logging as configure_logging,
    current_request as current_request,
    fields as fields,
    without_keys as without_keys,
)
from rollmesh.runtime.telemetry.metrics import (
    BYTES_IN_FLIGHT as BYTES_IN_FLIGHT,
    count_refused as count_refused,
    count_rpc as count_rpc,
    metrics_endpoint as metrics_endpoint,
    show_alarms as show_alarms,
    watch_bytes as watch_bytes,
)
from rollmesh.runtime.telemetry.otlp import Encoder as Encoder, Exporter as Exporter
from rollmesh.runtime.telemetry.tracing import (
    NOWHERE as NOWHERE,
    Place as Place,
    Span as Span,
    carried as carried,
    join as join,
    place_of as place_of,
    span as span,
)
