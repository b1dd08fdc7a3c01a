"""How many connections may be open, in total and from each address."""

import ipaddress
from collections import Counter

_NETWORK_BITS = 64
"""An IPv6 host has all addresses of such a network."""


class Places:
    """Places for the connections of a server."""

    def __init__(self, most: int, most_per_address: int) -> None:
        """Takes the bounds; all places are free."""
        self._most = most
        self._most_per_address = most_per_address
        self._taken: Counter[str] = Counter()
        self.taken = 0
        """Number of places that are taken."""

    def take(self, address: str) -> str:
        """Takes a place; returns why there is none, or an empty text.

        Args:
            address: Whom it counts for, from `address_of`.
        """
        if self.taken >= self._most:
            return f"the sidecar already has {self._most} connections"
        if self._taken[address] >= self._most_per_address:
            return f"your address already has {self._most_per_address} connections"
        self.taken += 1
        self._taken[address] += 1
        return ""

    def leave(self, address: str) -> None:
        """Leaves a place."""
        self.taken -= 1
        self._taken[address] -= 1
        if not self._taken[address]:
            del self._taken[address]


def address_of(peer: object) -> str:
    """Returns whom a connection counts for: the IPv4 address, or the network of an IPv6 address.

    Args:
        peer: The `peername` of its socket.
    """
    try:
        address = ipaddress.ip_address(str(peer[0]).partition("%")[0])  # type: ignore[index]
    except (ValueError, TypeError, IndexError):
        return ""  # no IP: all such connections together
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((int(address), _NETWORK_BITS), strict=False))
