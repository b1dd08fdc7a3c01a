"""TLS on real sockets: who is known by a certificate, and certificates that change."""

from pathlib import Path
from typing import Any

import grpc
import pytest

from rollmesh.runtime.access import CallerConfig, Identity, TlsFiles
from rollmesh.runtime.config import ConfigError
from rollmesh.runtime.rpc import open_channel
from tests.locks import Locks, reason_of_call
from tests.runtime.access.methods import methods
from tests.runtime.services import KINDS, ScriptedService, ask, served
from tests.trial_certificates import copy_certificates, make_certificates

INFO = "/rollmesh.v1.ServerService/GetServerInfo"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"


@pytest.fixture(autouse=True)
def _look_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollmesh.runtime.access.tls._LOOK_MS", 0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    copy_certificates(tmp_path / "certs")
    return tmp_path / "certs"


def tls(folder: Path, role: str) -> dict[str, Any]:
    """Settings of a process that shows the certificate of a role."""
    return {
        "tls_ca_file": str(folder / "ca.crt"),
        "tls_certificate_file": str(folder / f"{role}.crt"),
        "tls_key_file": str(folder / f"{role}.key"),
    }


def calling(port: int, **shown: str) -> grpc.aio.Channel:
    """A channel whose connection nobody else has."""
    identity = Identity(CallerConfig(**shown))
    return open_channel(f"127.0.0.1:{port}", identity=identity, own_connection=True)


async def reason(channel: grpc.aio.Channel, name: str = INFO) -> str:
    return await reason_of_call(channel, name, methods()[name])


async def test_a_certificate_shows_a_role(folder: Path) -> None:
    settings = {**tls(folder, "router"), "reflection": True}
    async with served(ScriptedService(), **settings) as (_, bound):
        async with calling(bound.port, **tls(folder, "trainer")) as channel:
            assert await reason(channel) == ""
            assert await reason(channel, REFLECTION) == "ROLE_REFUSED"
        async with calling(bound.port, **tls(folder, "operator")) as channel:
            assert await reason(channel, REFLECTION) == ""
        async with calling(bound.port, **tls(folder, "scorer")) as channel:
            assert await reason(channel) == "CALLER_UNKNOWN"


async def test_a_caller_without_a_certificate_of_the_ca_cannot_connect(
    folder: Path, tmp_path: Path
) -> None:
    make_certificates(tmp_path / "other")
    foreign = {**tls(tmp_path / "other", "trainer"), "tls_ca_file": str(folder / "ca.crt")}
    async with served(ScriptedService(), **tls(folder, "router")) as (plain, bound):
        assert await reason(plain) == "REMOTE"
        for shown in ({"tls_ca_file": str(folder / "ca.crt")}, foreign):
            async with calling(bound.port, **shown) as channel:
                assert await reason(channel) == "REMOTE"


async def test_tokens_show_roles_where_certificates_are_not_asked_for(
    folder: Path, tmp_path: Path
) -> None:
    locks = Locks(tmp_path / "locks")
    tokens = {name: str(path) for name, path in locks.flags("router").items()}
    settings = {**tls(folder, "router"), **tokens, "tls_client_certificates": False}
    settings = {
        name: str(value) if isinstance(value, Path) else value for name, value in settings.items()
    }
    shown = {"tls_ca_file": str(folder / "ca.crt")}
    async with served(ScriptedService(), **settings) as (_, bound):
        token_file = str(locks.token_file("trainer"))
        async with calling(bound.port, token_file=token_file, **shown) as channel:
            assert await reason(channel) == ""
        async with calling(bound.port, **shown) as channel:
            assert await reason(channel) == "CALLER_UNKNOWN"


async def test_a_service_is_known_by_its_name_and_a_client_serves_nothing(folder: Path) -> None:
    async with served(ScriptedService(), **tls(folder, "router")) as (_, bound):
        for name, found in (("rollmesh", ""), ("elsewhere", "REMOTE")):
            shown = {**tls(folder, "trainer"), "tls_server_name": name}
            async with calling(bound.port, **shown) as channel:
                assert await reason(channel) == found
    async with served(ScriptedService(), **tls(folder, "trainer")) as (_, bound):
        async with calling(bound.port, **tls(folder, "router")) as channel:
            assert await reason(channel) == "REMOTE"


async def test_certificates_are_changed_while_both_sides_run(folder: Path, tmp_path: Path) -> None:
    """They get another CA: with what it began with, neither side could connect."""
    async with served(ScriptedService(), **tls(folder, "router")) as (_, bound):
        async with calling(bound.port, **tls(folder, "operator")) as opened:
            make_certificates(tmp_path / "next")
            for path in (tmp_path / "next").iterdir():
                path.replace(folder / path.name)
            async with calling(bound.port, **tls(folder, "operator")) as channel:
                assert await reason(channel) == ""
            assert await reason(opened) == ""


def test_a_certificate_whose_key_gets_the_mode_that_the_error_asks_for_is_shown(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files_of = TlsFiles(**{name[4:-5]: path for name, path in tls(folder, "engine").items()})
    before = files_of.get()
    make_certificates(tmp_path / "next")
    for name in ("engine.crt", "engine.key"):
        (tmp_path / "next" / name).replace(folder / name)
    (folder / "engine.key").chmod(0o644)
    assert files_of.get() == before
    assert "chmod 0600" in caplog.text
    (folder / "engine.key").chmod(0o600)
    after = files_of.get()
    assert after.certificate == (folder / "engine.crt").read_bytes() != before.certificate
    assert files_of.revision == 1


async def test_every_kind_of_call_goes_over_tls(folder: Path) -> None:
    settings = {**tls(folder, "router"), "tls_client_certificates": False}
    async with served(ScriptedService(), **settings) as (_, bound):
        async with calling(bound.port, tls_ca_file=str(folder / "ca.crt")) as channel:
            assert [await ask(channel, kind=kind) for kind in KINDS] == [b"x"] * len(KINDS)


def test_files_that_do_not_fit_are_refused(folder: Path) -> None:
    fits = tls(folder, "engine")
    for changed, problem in (
        ({"tls_key_file": fits["tls_key_file"].replace("engine", "router")}, "KEY_VALUES_MISMATCH"),
        ({"tls_key_file": ""}, "tls_key_file: is missing"),
        ({"tls_certificate_file": ""}, "tls_certificate_file: is missing"),
        ({"tls_ca_file": fits["tls_key_file"]}, "tls_ca_file: "),
    ):
        with pytest.raises(ConfigError, match=problem):
            Identity(CallerConfig(**{**fits, **changed}))
    (folder / "engine.key").chmod(0o644)
    with pytest.raises(ConfigError, match=r"tls_key_file: .*chmod 0600"):
        Identity(CallerConfig(**fits))
