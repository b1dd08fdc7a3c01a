"""The address and the id of a replica that was given none."""

import asyncio
import ipaddress
import socket
from typing import Any

from rollmesh.runtime.errors import RemoteError

_LOOKUP_S = 5.0


async def reachable(address: str, router: str) -> str:
    """Returns the address under which others reach a service.

    A service that listens on all addresses (0.0.0.0, ::) is reached at the one from which this host
    reaches the router: in a container that of its network, in a pod the pod's. It is looked up at
    each registration, because a container may return with another one.

    Args:
        address: host:port as the service knows it.
        router: host:port of the router that is told.

    Raises:
        RemoteError: The name of the router is unknown, or no route leads to it.
    """
    host, _, port = address.rpartition(":")
    if (family := _family_of_all(host.strip("[]"))) is None:
        return address
    router_host, _, router_port = router.rpartition(":")
    try:
        async with asyncio.timeout(_LOOKUP_S):
            found = await asyncio.get_running_loop().getaddrinfo(
                router_host.strip("[]"), router_port, family=family, type=socket.SOCK_DGRAM
            )
        own = _own_address(found[0][0], found[0][4])
    except OSError as error:  # a TimeoutError is one
        raise RemoteError(f"router {router}: {error or 'unknown'}", "UNAVAILABLE") from error
    return f"[{own}]:{port}" if ":" in own else f"{own}:{port}"


def own_id(service: str) -> str:
    """Returns the id of a service that was given none; each host may have one such service."""
    return f"{service}-{socket.gethostname()}"


def _family_of_all(host: str) -> socket.AddressFamily | None:
    """Returns in which family an address means all addresses; None if it means one."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    if not address.is_unspecified:
        return None
    return socket.AF_INET if address.version == 4 else socket.AF_UNSPEC


def _own_address(family: int, router: tuple[Any, ...]) -> str:
    """Returns from which address packets to a router would leave; none is sent."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(router)
        return str(probe.getsockname()[0])
