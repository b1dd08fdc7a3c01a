"""A service as a process of its own, from its flags to its exit code."""

import json
import os
import signal
from pathlib import Path

import pytest

from rollmesh.runtime.rpc import open_channel
from tests.processes import ServiceProcess
from tests.runtime.services import begin, started


async def ports(process: ServiceProcess) -> dict[str, int | None]:
    found: dict[str, int | None] = json.loads(await process.wait_line("READY"))
    return found


def log_of(folder: Path) -> str:
    return (folder / "scripted.log").read_text()


@pytest.mark.parametrize("setting", ["port", "metrics_port"])
async def test_a_second_process_on_a_taken_port_exits_2_and_names_it(
    tmp_path: Path, setting: str
) -> None:
    flag = f"--{setting.replace('_', '-')}"
    async with started(tmp_path, f"{flag}=0") as first:
        port = (await ports(first))[setting]
        async with started(tmp_path, f"{flag}={port}") as second:
            assert await second.exit_code() == 2
    last = log_of(tmp_path).splitlines()[-1]
    assert last.startswith(f"rollmesh scripted: {setting}: ")
    assert f"{port}" in last
    assert "Traceback" not in log_of(tmp_path)


@pytest.mark.parametrize(
    "flag",
    [
        pytest.param("--port=http", id="no-number"),
        pytest.param("--port=70000", id="no-such-port"),
        pytest.param("--host=no.such.host.invalid", id="no-such-host"),
        pytest.param("--log-level=loud", id="no-such-level"),
    ],
)
async def test_a_setting_that_cannot_be_exits_2_and_is_named(tmp_path: Path, flag: str) -> None:
    async with started(tmp_path, flag) as process:
        code = await process.exit_code()
    setting = flag.removeprefix("--").partition("=")[0].replace("-", "_")
    assert log_of(tmp_path).splitlines()[-1].startswith(f"rollmesh scripted: {setting}: ")
    assert code == 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_lets_a_running_call_finish_and_exits_0(
    tmp_path: Path, number: signal.Signals
) -> None:
    async with started(tmp_path) as process:
        process.port = (await ports(process))["port"] or 0
        async with open_channel(process.address) as channel:
            call = begin(channel, b"wait for the stop")
            assert await call.read() == b"first"
            os.kill(process.pid, number)
            assert await call.read() == b"finished"
        assert await process.exit_code() == 0


async def test_a_supervised_process_stops_when_its_supervisor_is_gone(tmp_path: Path) -> None:
    read_end, write_end = os.pipe()
    with os.fdopen(read_end) as stdin, os.fdopen(write_end, "wb") as held_open:
        async with started(tmp_path, "--supervised=true", stdin=stdin.fileno()) as process:
            await process.wait_line("READY")
            held_open.close()
            assert await process.exit_code() == 0


async def test_a_service_that_fails_exits_1_and_logs_why(tmp_path: Path) -> None:
    async with started(tmp_path) as process:
        process.port = (await ports(process))["port"] or 0
        async with open_channel(process.address) as channel:
            call = begin(channel, b"fail", kind="unary_unary")
            await call.code()
        assert await process.exit_code() == 1
    assert "told to" in log_of(tmp_path)
