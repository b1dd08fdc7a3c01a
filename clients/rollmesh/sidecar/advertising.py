"""Where agents reach a sidecar, as it tells the router."""

from typing import NamedTuple
from urllib.parse import urlsplit

from rollmesh.runtime.config import ConfigError
from rollmesh.sidecar.config import PathPrefix, SidecarConfig

_PORTS = {"http": 80, "https": 443}


class Door(NamedTuple):
    """Where agents reach a sidecar."""

    address: str
    """`host:port`."""
    https: bool
    path_prefix: str
    """What paths begin with; may be empty."""


def advertised(config: SidecarConfig, port: int) -> Door:
    """Returns where agents reach a sidecar that listens on a port.

    Raises:
        ConfigError: `advertise` is a URL, but not one of HTTP without a query.
    """
    given = config.advertise or f"{config.host}:{port}"
    if "://" not in given:
        return Door(given, bool(config.https_certificate_file), config.path_prefix)
    problem = ConfigError(f"advertise: is {given!r}; give https://HOST, https://HOST:PORT/PATH")
    try:
        url = urlsplit(given)
        port_of_url = url.port or _PORTS[url.scheme]
    except (ValueError, KeyError) as error:
        raise problem from error
    prefix = url.path.rstrip("/")
    is_plain = not (url.query or url.fragment or "@" in url.netloc)
    if not (url.hostname and is_plain) or PathPrefix().problem(prefix):
        raise problem
    host = f"[{url.hostname}]" if ":" in url.hostname else url.hostname
    return Door(f"{host}:{port_of_url}", url.scheme == "https", prefix)
