"""Images of https URLs: the name of the URL is certified at the address that was checked."""

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest

from rollmesh.runtime.errors import InvalidImageError
from tests.sidecar.image_hosts import asking, fetcher, hosted

pytest.importorskip("cryptography", reason="certificates are made with cryptography")
from tests.certificates import Authority

NAME = "images.test"


@pytest.fixture
def authority(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Authority:
    """The only authority that fetchers trust from now on."""
    made = Authority(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(made.certificate))
    return made


class Names:
    """Looks up `NAME`: 127.0.0.1 the first time, another address afterwards."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[str] = []
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(loop, "getaddrinfo", self._look_up)

    async def _look_up(self, host: str, port: int, **_: Any) -> list[Any]:
        self.asked.append(host)
        address = "127.0.0.1" if len(self.asked) == 1 else "127.0.0.2"
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))]


@pytest.fixture
async def names(monkeypatch: pytest.MonkeyPatch) -> Names:
    return Names(monkeypatch)


async def test_the_name_is_certified_at_the_address_that_was_checked(
    authority: Authority, names: Names
) -> None:
    checked: list[str] = []

    def is_allowed(address: str) -> bool:
        checked.append(address)
        return True

    async with hosted(NAME, authority.server(NAME)) as host:
        chat = asking(f"{host.url}/a")
        await fetcher(host.name, is_allowed).fill(chat)
    assert chat.messages[0].content[0].image.data == b"PNG"
    assert (names.asked, checked) == ([NAME], ["127.0.0.1"])


async def test_a_certificate_of_another_name_is_refused(authority: Authority, names: Names) -> None:
    await _is_refused(authority, "other.test", "Hostname mismatch")


async def test_an_expired_certificate_is_refused(authority: Authority, names: Names) -> None:
    await _is_refused(authority, NAME, "certificate has expired", expired=True)


async def test_an_authority_that_is_not_trusted_is_refused(
    authority: Authority, names: Names, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    await _is_refused(Authority(tmp_path / "other"), NAME, "issuer certificate")


async def _is_refused(
    authority: Authority, name: str, problem: str, *, expired: bool = False
) -> None:
    async with hosted(NAME, authority.server(name, expired=expired)) as host:
        with pytest.raises(InvalidImageError, match=problem) as caught:
            await fetcher(host.name).fill(asking(f"{host.url}/a"))
    assert caught.value.field == "messages[0].content[0]"
    assert not host.asked
