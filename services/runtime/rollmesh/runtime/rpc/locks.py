"""The lock of a server: who is let in and by which certificate it is known."""

import ipaddress
import logging
from pathlib import Path
from typing import Any

import grpc

from rollmesh.runtime.access.guard import Guard
from rollmesh.runtime.access.tls import TlsFiles
from rollmesh.runtime.access.tokens import AcceptedTokens
from rollmesh.runtime.config import ConfigError
from rollmesh.runtime.rpc.listening import ListeningConfig, ServerConfig
from rollmesh.runtime.telemetry.metrics import count_refused

LOCK = "--tokens-dir, or --tls-certificate-file with --tls-ca-file"
"""Flags that lock a server."""
_log = logging.getLogger(__name__)


def guard_of(config: ServerConfig) -> Guard | None:
    """Returns the guard of a server; None if its settings let everybody in.

    Raises:
        ConfigError: A file with tokens cannot be read, or others may read it.
    """
    certificates = _asks_certificates(config)
    if not config.tokens_dir and not certificates:
        return None
    tokens = AcceptedTokens(Path(config.tokens_dir)) if config.tokens_dir else None
    return Guard(tokens, certificates=certificates, count=count_refused)


def credentials_of(config: ServerConfig) -> grpc.ServerCredentials | None:
    """Returns what a server shows and asks for in a TLS handshake; None if it serves plain text.

    Raises:
        ConfigError: A file cannot be read, others may read the key, or they do not fit.
    """
    if not config.tls_certificate_file and not config.tls_key_file:
        return None
    files = TlsFiles(config.tls_ca_file, config.tls_certificate_file, config.tls_key_file)
    requires = _asks_certificates(config)
    known = files.revision

    def fetch() -> "grpc.ServerCertificateConfiguration | None":
        """Returns the files' contents if they have changed; gRPC asks before each handshake."""
        nonlocal known
        if (revision := files.revision) == known:
            return None
        known = revision
        return _certificates(files, requires=requires)

    first = _certificates(files, requires=requires)
    fetcher: Any = fetch  # None says that nothing has changed; the stubs do not know that
    return grpc.dynamic_ssl_server_credentials(first, fetcher, requires)


def check_exposed(config: ListeningConfig, host: str, remedy: str, *, locked: bool) -> None:
    """Refuses to let other machines reach a service that lets everybody in.

    Args:
        config: Its settings.
        host: The address that it binds.
        remedy: What to set, as flags.
        locked: Whether callers have to show who they are.

    Raises:
        ConfigError: The address is not a loopback address and the service is not locked.
    """
    if ipaddress.ip_address(host.strip("[]")).is_loopback or config.insecure_bind:
        return
    if not locked:
        raise ConfigError(
            f"host: {config.host} is reached from other machines, and everybody may call this "
            f"service; set {remedy}, or --insecure-bind=true"
        )
    if not config.tls_certificate_file:
        _log.warning("tokens and sessions travel in plain text to %s; set TLS", config.host)


def _asks_certificates(config: ServerConfig) -> bool:
    return bool(
        config.tls_certificate_file and config.tls_ca_file and config.tls_client_certificates
    )


def _certificates(files: TlsFiles, *, requires: bool) -> grpc.ServerCertificateConfiguration:
    pems = files.get()
    assert pems.key is not None
    assert pems.certificate is not None
    return grpc.ssl_server_certificate_configuration(
        [(pems.key, pems.certificate)], pems.ca if requires else None
    )
