"""Addresses of peers: which ones are accepted, and how they are dialled.

gRPC dials more than TCP: `unix:/run/socket`, `vsock:2:80`, `xds:///name`, `ipv4:10.0.0.1:80`. An
address that comes over the wire never selects such a scheme.
"""

import ipaddress
import re
from urllib.parse import quote

from rollmesh.runtime.errors import InvalidFieldError

_FORM = re.compile(r"(?:\[(?P<ipv6>[0-9A-Fa-f:.]+)\]|(?P<name>[A-Za-z0-9_.-]+)):(?P<port>[0-9]+)")
_LABEL = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)")
_MOST_CHARS = 253 + len(":65535")
_MOST_PORT = 65_535
_NUMBER = re.compile(r"[0-9]+|0[xX][0-9A-Fa-f]*")
_SCHEMES = {"dns", "ipv4", "ipv6", "unix", "unix-abstract", "vsock", "xds", "google-c2p", "inproc"}
"""Host names that clients in other languages would read as a scheme."""


def check_address(address: str, field: str = "address") -> None:
    """Checks an address that came over the wire.

    Allowed are an IPv4 address, a bracketed IPv6 address without a zone, or a DNS name, each with a
    port from 1 to 65535.

    Raises:
        InvalidFieldError: It has another form; the error names `field`.
    """
    if problem := _problem(address):
        raise InvalidFieldError(
            field, f"{address[:_MOST_CHARS]!r} {problem}; give host:port, such as 10.0.0.7:7400"
        )


def target_of(address: str) -> str:
    """Returns the gRPC target of an address: always TCP, whatever the address looks like."""
    return "dns:///" + quote(address, safe=":")


def _problem(address: str) -> str:
    """Returns what is wrong with an address; empty if it is allowed."""
    if not address:
        return "is empty"
    form = _FORM.fullmatch(address) if len(address) <= _MOST_CHARS else None
    if form is None:
        return "is not host:port"
    if not 1 <= int(form["port"]) <= _MOST_PORT:
        return "has no port from 1 to 65535"
    return _host_problem(form["ipv6"] or form["name"], is_ipv6=form["ipv6"] is not None)


def _host_problem(host: str, *, is_ipv6: bool) -> str:
    labels = host.removesuffix(".").split(".")
    if is_ipv6 or _NUMBER.fullmatch(labels[-1]):  # no top-level domain is a number
        try:
            number = ipaddress.IPv6Address(host) if is_ipv6 else ipaddress.IPv4Address(host)
        except ValueError:
            return "is not an IP address"
        return "is no address of one host" if number.is_unspecified or number.is_multicast else ""
    if not all(_LABEL.fullmatch(label) for label in labels):
        return "is not a DNS name"
    return "begins with the name of a scheme" if host.lower() in _SCHEMES else ""
