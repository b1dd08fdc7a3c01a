"""What cannot work in a mesh although each setting by itself is right."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rollmesh.cli.config.members import Member

_CALLS = {
    "router": ("engine",),
    "engine": ("router",),
    "collector": ("router", "scorer"),
    "gateway": ("router", "engine", "collector"),
    "sidecar": ("router", "gateway"),
}
"""Whom each service calls."""
_ALL_ADDRESSES = {"", "0.0.0.0", "::"}  # noqa: S104 - what settings may say
_SAME_HOST = {"localhost": "127.0.0.1"}


@dataclass(frozen=True, slots=True)
class Listener:
    """A port that a process would take."""

    setting: str
    """`engine.port`."""
    process: str
    """`engine-1`."""
    host: str
    port: int


def check_calls(members: Sequence[Member]) -> Iterator[str]:
    """Yields which services could not call others: tokens and TLS of both sides do not fit."""
    for caller in members:
        for name in _CALLS.get(caller.service, ()):
            for server in members:
                if server.service == name:
                    yield from _check_call(caller, server)


def _check_call(caller: Member, server: Member) -> Iterator[str]:
    own, asked = caller.config, server.config
    serves_tls, calls_tls = bool(asked.tls_certificate_file), bool(own.tls_ca_file)
    if serves_tls and not calls_tls:
        yield (
            f"{caller.service}.tls_ca_file: is empty, and the {server.label} serves TLS; give the "
            "file of its CA, or certificates_dir under [mesh]"
        )
    if calls_tls and not serves_tls:
        yield (
            f"{server.service}.tls_certificate_file: is empty, and the {caller.label} calls over "
            "TLS; give its certificate and key, or certificates_dir under [mesh]"
        )
    asks = serves_tls and bool(asked.tls_ca_file) and asked.tls_client_certificates
    if asks and calls_tls and not own.tls_certificate_file:
        yield (
            f"{caller.service}.tls_certificate_file: is empty, and the {server.label} asks for one"
        )
    if asked.tokens_dir and not own.token_file and not (asks and own.tls_certificate_file):
        yield (
            f"{caller.service}.token_file: is empty, and the {server.label} accepts nobody without "
            "a token; `rollmesh tokens DIR` makes one for each service"
        )


def check_sizes(members: Sequence[Member]) -> Iterator[str]:
    """Yields limits of gateways that are above what those accept to whom they send."""
    for gateway in members:
        if gateway.service != "gateway":
            continue
        for name, limit in (
            ("collector", "max_session_record_bytes"),
            ("engine", "max_session_image_bytes"),
        ):
            for other in members:
                if other.service != name:
                    continue
                most, sent = other.config.max_request_bytes, getattr(gateway.config, limit)
                if sent > most:
                    yield (
                        f"gateway.{limit}: is {sent}, and the {other.label} takes messages of "
                        f"{most} bytes; lower it, or raise {name}.max_request_bytes"
                    )


def check_ports(listeners: Iterable[Listener]) -> Iterator[str]:
    """Yields the ports that two processes of one host would take."""
    taken: list[Listener] = []
    for one in listeners:
        for other in taken:
            if one.port == other.port and _overlap(one.host, other.host):
                yield (
                    f"{one.setting}: {one.process} would take port {one.port}, which is "
                    f"{other.process}'s ({other.setting}); give another one"
                )
                break
        taken.append(one)


def listeners_of(service: str, process: str, config: Any) -> Iterator[Listener]:
    """Yields the ports that the settings of a process name."""
    for setting in ("port", "metrics_port"):
        if (port := getattr(config, setting)) > 0:
            yield Listener(f"{service}.{setting}", process, config.host, port)


def _overlap(one: str, other: str) -> bool:
    one, other = (_SAME_HOST.get(host, host) for host in (one, other))
    return one == other or bool({one, other} & _ALL_ADDRESSES)
