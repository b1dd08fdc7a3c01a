"""The sidecar: OpenAI's, Anthropic's and Google's HTTP APIs in front of the gateways.

Read first: `turn`, `chat`, `gateways`, `app`.

`turn` is one request, from its head to its answer. `chat` is a protocol, `gateways` has the calls
and `app` the routes. `messages`, `responses` and `google` are the other protocols, `body` reads
values for all of them, and `http` bounds connections. `relay` is another process.

May import `mesh`, `runtime` and `v1`. The names below are for other rooms and for tests. They are
loaded on first use, because settings are read where the sidecar's packages are not installed.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

import rollmesh.runtime  # noqa: F401 - before gRPC

if TYPE_CHECKING:
    from rollmesh.sidecar.app import (
        PROTOCOLS as PROTOCOLS,
        ROUTES as ROUTES,
        Opens as Opens,
        make_app as make_app,
        prefixes as prefixes,
        protocol_of as protocol_of,
        serving as serving,
    )
    from rollmesh.sidecar.config import SidecarConfig as SidecarConfig, advertised as advertised
    from rollmesh.sidecar.errors import to_http as to_http
    from rollmesh.sidecar.http import (
        Places as Places,
        address_of as address_of,
        certificate_of as certificate_of,
    )
    from rollmesh.sidecar.relay import RelayConfig as RelayConfig, RelayService as RelayService
    from rollmesh.sidecar.seals import seal as seal, sealed_answer as sealed_answer
    from rollmesh.sidecar.turn import Head as Head, Protocol as Protocol, read_head as read_head

_MODULES = {
    "app": "PROTOCOLS ROUTES Opens make_app prefixes protocol_of serving",
    "config": "SidecarConfig advertised",
    "errors": "to_http",
    "http": "Places address_of certificate_of",
    "relay": "RelayConfig RelayService",
    "seals": "seal sealed_answer",
    "turn": "Head Protocol read_head",
}
_DOOR = {name: module for module, names in _MODULES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    """Returns a name of the door."""
    if name not in _DOOR:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_DOOR[name]}"), name)
