"""The Prometheus endpoint under its attacks, over raw sockets."""

import hashlib
import os
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from http.client import HTTPConnection, HTTPSConnection
from pathlib import Path

import pytest

from rollmesh.runtime.access import CallerConfig, write_private
from rollmesh.runtime.config import ConfigError
from rollmesh.runtime.telemetry import metrics_endpoint
from tests.trial_certificates import make_certificates

TOKEN, NEXT = "a" * 32, "b" * 32
MOST = 16


@pytest.fixture
def port() -> Iterator[int]:
    with metrics_endpoint("127.0.0.1", 0) as bound:
        assert bound is not None
        yield bound


def scrape(
    port: int, token: str = "", path: str = "/metrics", tls: ssl.SSLContext | None = None
) -> int:
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    if tls is not None:
        connection = HTTPSConnection("localhost", port, timeout=60, context=tls)
    with closing(connection):
        connection.request("GET", path, headers={"Authorization": f"Bearer {token}"})
        answer = connection.getresponse()
        assert (b"rollmesh_rpcs_total" in answer.read()) == (answer.status == 200)
        return answer.status


def connected(port: int, sent: bytes = b"") -> socket.socket:
    client = socket.create_connection(("127.0.0.1", port), timeout=60)
    client.sendall(sent)
    return client


def ended(client: socket.socket) -> None:
    """Reads until the server closes the connection."""
    with suppress(ConnectionResetError):
        while client.recv(65_536):
            pass


def test_only_the_path_of_metrics_is_served(port: int) -> None:
    assert scrape(port) == 200
    assert scrape(port, path="/") == scrape(port, path="/metrics/..") == 404


def test_a_port_that_there_is_not_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^metrics_port: .*:65536: "):
        with metrics_endpoint("127.0.0.1", 65_536):
            pass


def test_a_file_of_tokens_locks_it(tmp_path: Path) -> None:
    digest = f"sha256:{hashlib.sha256(NEXT.encode()).hexdigest()}\n"
    write_private(tmp_path, {"scrapers": f"# Prometheus\n{TOKEN}\n{digest}".encode()})
    with metrics_endpoint("127.0.0.1", 0, str(tmp_path / "scrapers")) as port:
        assert port is not None
        assert [scrape(port, token) for token in ("", "guess", TOKEN, NEXT)] == [401, 401, 200, 200]
        assert scrape(port, digest.strip()) == 401


def test_tokens_change_while_it_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollmesh.runtime.access.tls._LOOK_MS", 0)
    write_private(tmp_path, {"scrapers": TOKEN.encode()})
    with metrics_endpoint("127.0.0.1", 0, str(tmp_path / "scrapers")) as port:
        assert port is not None
        assert [scrape(port, token) for token in (TOKEN, NEXT)] == [200, 401]
        (tmp_path / "scrapers").write_text(f"{TOKEN}\n{NEXT}\n")
        assert [scrape(port, token) for token in (TOKEN, NEXT)] == [200, 200]
        (tmp_path / "scrapers").write_text(NEXT)
        assert [scrape(port, token) for token in (TOKEN, NEXT)] == [401, 200]
        (tmp_path / "scrapers").write_text("half")  # the last one holds
        assert [scrape(port, token) for token in (TOKEN, NEXT)] == [401, 200]


def test_it_shows_the_current_certificate_of_its_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(name: str) -> Path:
        make_certificates(tmp_path / name)
        return tmp_path / name

    monkeypatch.setattr("rollmesh.runtime.access.tls._LOOK_MS", 0)
    served = make("served")
    write_private(tmp_path, {"scrapers": TOKEN.encode()})
    tls = CallerConfig(
        tls_certificate_file=str(served / "router.crt"),
        tls_key_file=str(served / "router.key"),
    )
    with metrics_endpoint("127.0.0.1", 0, str(tmp_path / "scrapers"), tls) as port:
        assert port is not None
        trusted = ssl.create_default_context(cafile=str(served / "ca.crt"))
        assert [scrape(port, token, tls=trusted) for token in (TOKEN, NEXT)] == [200, 401]
        with connected(port, b"GET /metrics HTTP/1.0\r\n\r\n") as plain:
            ended(plain)
        with ExitStack() as stack:  # handshakes that never end
            slow = [stack.enter_context(connected(port, b"\x16\x03")) for _ in range(3 * MOST)]
            assert scrape(port, TOKEN, tls=trusted) == 200
            assert slow[0].recv(1) == b""
        for path in make("next").iterdir():
            path.replace(served / path.name)
        with pytest.raises(ssl.SSLCertVerificationError):
            scrape(port, TOKEN, tls=trusted)
        renewed = ssl.create_default_context(cafile=str(served / "ca.crt"))
        assert scrape(port, TOKEN, tls=renewed) == 200


def test_a_file_that_others_may_read_or_without_a_token_is_refused(tmp_path: Path) -> None:
    write_private(tmp_path, {"open": TOKEN.encode(), "empty": b"# none\n"})
    (tmp_path / "open").chmod(0o644)
    for name in ("open", "empty", "absent"):
        with (
            pytest.raises(ConfigError, match="metrics_token_file"),
            metrics_endpoint("127.0.0.1", 0, str(tmp_path / name)),
        ):
            pass


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(b"", id="silent"),
        pytest.param(b"GET /met", id="half a line"),
        pytest.param(b"GET /metrics HTTP/1.1\r\nX: ", id="half a head"),
    ],
)
def test_slow_clients_leave_room_for_a_scrape(port: int, sent: bytes) -> None:
    with ExitStack() as stack:
        slow = [stack.enter_context(connected(port, sent)) for _ in range(3 * MOST)]
        assert scrape(port) == 200
        assert threading.active_count() < 3 * MOST
        assert slow[0].recv(1) == b""  # the oldest was closed


def test_a_client_that_does_not_read_ends_for_another(port: int) -> None:
    with ExitStack() as stack:
        for _ in range(2 * MOST):
            client = stack.enter_context(socket.socket())
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
            client.connect(("127.0.0.1", port))
            client.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        assert scrape(port) == 200


def test_a_head_without_end_is_cut_off(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollmesh.runtime.telemetry.metrics._LONGEST_S", 1000)
    line = b"X: " + b"x" * 995 + b"\r\n"
    with connected(port, b"GET /metrics HTTP/1.1\r\n" + line * 17) as client:
        ended(client)
    assert scrape(port) == 200


@pytest.mark.parametrize("sent", [b"", b"GET /metrics HTTP/1.1\r\nX: "])
def test_a_request_ends_after_its_time(
    port: int, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr("rollmesh.runtime.telemetry.metrics._LONGEST_S", 0.1)
    with connected(port, sent) as client:
        ended(client)


def test_a_flood_leaves_no_connection_and_no_thread(port: int) -> None:
    before = threading.active_count()
    for _ in range(200):
        connected(port).close()
    assert scrape(port) == 200
    assert threading.active_count() <= before + 2 * MOST


def test_rubbish_is_no_end(port: int) -> None:
    for sent in (os.urandom(4096), b"\x16\x03\x01\x02\x00", b"GET\r\n\r\n", b"\r\n" * 100):
        with connected(port, sent) as client:
            client.shutdown(socket.SHUT_WR)
            ended(client)
    assert scrape(port) == 200
