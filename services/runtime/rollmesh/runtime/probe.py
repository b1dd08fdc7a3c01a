"""`rollmesh probe SERVICE`: exits 0 if a service of this host serves, as probes of containers ask.

It takes the service's own flags and variables and its mesh file (`--config`), and reaches the
service as it listens: in plain text or over TLS, with the service's own certificate where
certificates are asked for. Of the sidecar it asks `/healthz`, of the others their gRPC health. It
exits with 1 if the service does not serve, and with 2 for an invalid setting.
"""

import os
import socket
import ssl
import sys
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from rollmesh.runtime.access.tls import read_file
from rollmesh.runtime.config import (
    LOOPBACK,
    ROUTER_PORT,
    SCORER_PORT,
    Bounds,
    Config,
    ConfigError,
    parse_config,
)

_TIMEOUT_S = 5.0
_HTTP_SERVICE = "sidecar"
PORTS = {
    "router": ROUTER_PORT,
    "gateway": 7200,
    "collector": 7300,
    "scorer": SCORER_PORT,
    "sidecar": 8000,
}
"""Defaults of the services. An engine takes a free port."""


class NotServingError(Exception):
    """The service does not serve. The message says why."""


@dataclass(frozen=True, kw_only=True)
class ProbeConfig(Config):
    """Settings of the service that is asked. Others are not read."""

    host: str = "127.0.0.1"
    """Address that the service listens on."""
    port: Annotated[int, Bounds(0, 65_535)] = 0
    """Port that the service listens on. 0 means the service's default."""
    model: str = ""
    """Model of the engine or gateway, where the mesh file has a table for it."""
    tls_certificate_file: str = ""
    """File with the certificate of the service. It serves TLS if it has one."""
    tls_key_file: str = ""
    """File with the key of the certificate."""
    tls_ca_file: str = ""
    """File with the CAs of the mesh. Empty trusts the certificate file."""
    https_certificate_file: str = ""
    """File with the certificate that a sidecar shows agents."""


def probe(service: str, config: ProbeConfig) -> None:
    """Returns if a service serves.

    Raises:
        ConfigError: There is no port, or a file cannot be read.
        NotServingError: It does not answer, or answers that it does not serve.
    """
    port = config.port or PORTS.get(service, 0)
    if not port:
        variable = f"ROLLMESH_{service.upper()}_PORT"
        raise ConfigError(f"port: is 0; give the service's port by --port or {variable}")
    host = LOOPBACK.get(config.host, config.host)
    try:
        if service == _HTTP_SERVICE:
            _ask_http(host, port, config)
        else:
            _ask_grpc(host, port, config)
    except (grpc.RpcError, ssl.SSLError, OSError) as error:
        raise NotServingError(f"no answer at {host}:{port}: {error}") from error


def _ask_http(host: str, port: int, config: ProbeConfig) -> None:
    scheme, context = "http", None
    if config.https_certificate_file:
        trusted = read_file("https_certificate_file", Path(config.https_certificate_file))
        scheme, context = "https", _trusting(trusted)
    shown = f"[{host}]" if ":" in host else host
    handlers = [urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)]
    opener = urllib.request.build_opener(*handlers)
    with opener.open(f"{scheme}://{shown}:{port}/healthz", timeout=_TIMEOUT_S):
        pass  # every other status is an error


def _ask_grpc(host: str, port: int, config: ProbeConfig) -> None:
    target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    options: list[tuple[str, Any]] = [("grpc.enable_http_proxy", 0)]
    if config.tls_certificate_file:
        certificate = read_file("tls_certificate_file", Path(config.tls_certificate_file))
        key, trusted = read_file("tls_key_file", Path(config.tls_key_file)), certificate
        if config.tls_ca_file:
            trusted = read_file("tls_ca_file", Path(config.tls_ca_file))
        context = _trusting(trusted)
        context.load_cert_chain(config.tls_certificate_file, config.tls_key_file)
        options.append(("grpc.ssl_target_name_override", _name_of(host, port, context)))
        credentials = grpc.ssl_channel_credentials(trusted, key, certificate)
        channel = grpc.secure_channel(target, credentials, options=options)
    else:
        channel = grpc.insecure_channel(target, options=options)
    with channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        status = stub.Check(health_pb2.HealthCheckRequest(), timeout=_TIMEOUT_S).status
    if status != health_pb2.HealthCheckResponse.SERVING:
        raise NotServingError(health_pb2.HealthCheckResponse.ServingStatus.Name(status))


def _name_of(host: str, port: int, context: ssl.SSLContext) -> str:
    """Returns a name in a server's certificate, which need not be that of a loopback address."""
    with (
        socket.create_connection((host, port), timeout=_TIMEOUT_S) as plain,
        context.wrap_socket(plain) as secure,
    ):
        shown: Any = secure.getpeercert()
    names = [
        name for kind, name in shown.get("subjectAltName", ()) if kind in {"DNS", "IP Address"}
    ]
    if not names:
        raise NotServingError("the certificate of the service has no name")
    return str(names[0])


def _trusting(certificates: bytes) -> ssl.SSLContext:
    """Returns what trusts certificates in PEM, under any name."""
    context = ssl.create_default_context(cadata=certificates.decode("ascii", "replace"))
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT  # which Python 3.13 sets, and gRPC does not
    context.set_alpn_protocols(["h2", "http/1.1"])
    return context


def main() -> int:
    """Returns the exit code."""
    service, flags = "".join(sys.argv[1:2]), sys.argv[2:]
    if not service or service.startswith("-"):
        print(__doc__, file=sys.stderr)
        return 2
    try:
        config = parse_config(ProbeConfig, service, flags, os.environ, in_part=True)
        probe(service, config)
    except (ConfigError, NotServingError) as error:
        print(f"rollmesh probe: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
