"""Services that anybody may call listen where only this machine reaches them."""

import asyncio
from pathlib import Path

import pytest

from rollmesh.runtime.config import ConfigError
from rollmesh.runtime.rpc import ServerConfig, serve
from tests.locks import Locks
from tests.processes import run_refused
from tests.runtime.services import ScriptedService

ALL = "0.0.0.0"  # noqa: S104 - what the tests are about


async def served_at(host: str, **settings: object) -> None:
    stop = asyncio.Event()
    config = ServerConfig(host=host, **settings)  # type: ignore[arg-type]
    async with asyncio.timeout(60):
        await serve(ScriptedService(), config, announce=lambda _: stop.set(), stop=stop)


@pytest.mark.parametrize("host", [ALL, "::"])
async def test_an_open_service_listens_on_loopback_only(host: str) -> None:
    with pytest.raises(ConfigError, match=f"host: {host} is reached from other machines"):
        await served_at(host)
    await served_at("127.0.0.1")


async def test_locked_services_and_insecure_binds_listen_anywhere(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await served_at(ALL, insecure_bind=True)
    assert "plain text" not in caplog.text
    await served_at(ALL, tokens_dir=str(Locks(tmp_path).folder / "accepted"))
    assert "travel in plain text" in caplog.text


@pytest.mark.parametrize(
    ("service", "flag"),
    [("router", "set --tokens-dir, or --tls-certificate-file"), ("sidecar", "set --token-file")],
)
async def test_the_error_names_the_flags_to_set(service: str, flag: str) -> None:
    code, errors = await run_refused(service, host=ALL, port=0)
    assert code == 2
    assert errors.startswith(f"rollmesh {service}: host: {ALL} is reached from other machines")
    assert flag in errors
    assert "--insecure-bind=true" in errors
    assert len(errors.splitlines()) == 1
