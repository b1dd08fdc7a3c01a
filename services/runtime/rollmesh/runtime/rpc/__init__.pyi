"""The door of `rollmesh.runtime.rpc`: its names for other rooms and tests."""

from rollmesh.runtime.access.guard import Context as Context
from rollmesh.runtime.rpc.channels import (
    KEEPALIVE_MS as KEEPALIVE_MS,
    SERVER_BOUNDS as SERVER_BOUNDS,
    SHORT_KEEPALIVE_MS as SHORT_KEEPALIVE_MS,
    check_address as check_address,
    drained_on_refusal as drained_on_refusal,
    ended_with as ended_with,
    is_tunnel as is_tunnel,
    offer_tunnel as offer_tunnel,
    open_channel as open_channel,
    read_answer as read_answer,
    read_stream as read_stream,
    request_metadata as request_metadata,
    stub_of as stub_of,
    target_of as target_of,
    tunnel_address as tunnel_address,
    tunnel_target as tunnel_target,
    typed_errors as typed_errors,
    withdraw_tunnel as withdraw_tunnel,
)
from rollmesh.runtime.rpc.interceptors import RpcInterceptor as RpcInterceptor
from rollmesh.runtime.rpc.listening import (
    GRACE_MS as GRACE_MS,
    Bound as Bound,
    ListeningConfig as ListeningConfig,
    Port as Port,
    PortInUseError as PortInUseError,
    RequestBytes as RequestBytes,
    ServerConfig as ServerConfig,
    bind_host as bind_host,
    check_exposed as check_exposed,
)
from rollmesh.runtime.rpc.repeats import Repeats as Repeats, digest_of as digest_of
from rollmesh.runtime.rpc.server import (
    LOCK as LOCK,
    Service as Service,
    guard_of as guard_of,
    serve as serve,
)
from rollmesh.runtime.rpc.statuses import (
    DOMAIN as DOMAIN,
    MAX_MESSAGE_BYTES as MAX_MESSAGE_BYTES,
    cut_text as cut_text,
    from_rpc_error as from_rpc_error,
    from_status as from_status,
    status_code_of as status_code_of,
    to_status as to_status,
)
from rollmesh.runtime.rpc.uploads import (
    check_action as check_action,
    check_adapter as check_adapter,
    check_adapter_header as check_adapter_header,
    check_room as check_room,
    check_update as check_update,
    chunks_of as chunks_of,
    header_of as header_of,
    write_chunks as write_chunks,
)
