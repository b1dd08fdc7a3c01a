"""The sidecar as a process of its own."""

import asyncio
import json
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx2
from openai import AsyncOpenAI

from rollmesh.runtime.access import write_private
from tests.sidecar.scripted_gateway import (
    KEY,
    ScriptedGateway,
    done,
    serving,
    text,
    waiting,
)


@asynccontextmanager
async def started(*flags: str) -> AsyncIterator[Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "rollmesh.sidecar", *flags, stdout=PIPE, stderr=PIPE
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def ready(process: Process) -> str:
    """Returns the line of a sidecar that serves."""
    assert process.stdout is not None
    line = (await process.stdout.readline()).decode()
    assert line, (await process.communicate())[1].decode()
    return line


async def port_of(process: Process) -> int:
    word, _, line = (await ready(process)).partition(" ")
    assert word == "READY"
    port: int = json.loads(line)["port"]
    return port


async def test_a_sidecar_serves_and_a_stop_lets_a_running_answer_end() -> None:
    gateway, reached, go_on = ScriptedGateway(), asyncio.Event(), asyncio.Event()

    async def until() -> None:
        reached.set()
        await go_on.wait()

    gateway.script = waiting(until, [text("Hel")], [text("lo"), done("Hello")])
    async with (
        asyncio.timeout(200),
        serving(gateway) as address,
        started("--port", "0", "--gateway", address) as process,
    ):
        base_url = f"http://127.0.0.1:{await port_of(process)}/sessions/{KEY}/v1"
        async with AsyncOpenAI(base_url=base_url, api_key="any", max_retries=0) as client:
            stream = await client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "Hi"}], stream=True
            )
            await reached.wait()
            process.send_signal(signal.SIGTERM)
            go_on.set()
            pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
        assert "".join(pieces) == "Hello"
        assert await process.wait() == 0


async def test_ignored_parameters_are_counted_at_the_metrics_endpoint() -> None:
    gateway = ScriptedGateway()
    async with (
        asyncio.timeout(200),
        serving(gateway) as address,
        started("--port", "0", "--gateway", address, "--metrics-port", "0") as process,
        httpx2.AsyncClient(timeout=60) as http,
    ):
        ports = json.loads((await ready(process)).removeprefix("READY "))
        body = {"messages": [{"role": "user", "content": "Hi"}], "store": True}
        path = f"http://127.0.0.1:{ports['port']}/sessions/{KEY}/v1/chat/completions"
        assert (await http.post(path, json=body)).status_code == 200
        metrics = await http.get(f"http://127.0.0.1:{ports['metrics_port']}/metrics")
    assert 'rollmesh_sidecar_ignored_parameters_total{name="store"} 1.0' in metrics.text


async def test_the_metrics_endpoint_asks_for_the_token_of_its_file(tmp_path: Path) -> None:
    write_private(tmp_path, {"scraper": b"s" * 32})
    flags = ("--metrics-port", "0", "--metrics-token-file", str(tmp_path / "scraper"))
    async with (
        asyncio.timeout(200),
        started("--port", "0", *flags) as process,
        httpx2.AsyncClient(timeout=60) as http,
    ):
        port = json.loads((await ready(process)).removeprefix("READY "))["metrics_port"]
        path, token = f"http://127.0.0.1:{port}/metrics", {"authorization": f"Bearer {'s' * 32}"}
        found = [await http.get(path), await http.get(path, headers=token)]
    assert [one.status_code for one in found] == [401, 200]


async def test_a_port_that_is_taken_is_an_exit_code_and_a_line() -> None:
    async with asyncio.timeout(200), started("--port", "0") as first:
        port = await port_of(first)
        async with started("--port", str(port)) as second:
            _, errors = await second.communicate()
    assert second.returncode == 2
    assert b"port" in errors
    assert b"Traceback" not in errors


async def test_it_does_without_numpy() -> None:
    """Its image has none, and beside an agent each MiB counts."""
    check = "import sys, rollmesh.sidecar.__main__; sys.exit('numpy' in sys.modules)"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", check)
    assert await process.wait() == 0
