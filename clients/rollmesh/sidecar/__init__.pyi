"""The door of `rollmesh.sidecar`: its names for other rooms and tests."""

from rollmesh.sidecar.app import (
    PROTOCOLS as PROTOCOLS,
    ROUTES as ROUTES,
    Opens as Opens,
    make_app as make_app,
    prefixes as prefixes,
    protocol_of as protocol_of,
    serving as serving,
)
from rollmesh.sidecar.body import seal as seal, sealed_answer as sealed_answer
from rollmesh.sidecar.config import SidecarConfig as SidecarConfig, advertised as advertised
from rollmesh.sidecar.errors import to_http as to_http
from rollmesh.sidecar.http import (
    HttpServer as HttpServer,
    Places as Places,
    address_of as address_of,
    bound as bound,
    certificate_of as certificate_of,
    http_served as http_served,
)
from rollmesh.sidecar.relay import RelayConfig as RelayConfig, RelayService as RelayService
from rollmesh.sidecar.responses import (
    answer_of_response as answer_of_response,
    item_of as item_of,
    response_id as response_id,
)
from rollmesh.sidecar.turn import (
    TURNS as TURNS,
    Head as Head,
    Protocol as Protocol,
    read_head as read_head,
)
