"""The drain of an engine that is attached to a server, beside a push of weights and a pause.

The engine ends in its time, the push ends with a result of the engine, and the server, which goes
on, samples.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from rollmesh.client import Client, MeshAddresses
from tests.processes import ServiceProcess, running
from tests.router.engines import reason_of
from tests.router.routers import running_router
from tests.waiting import until

pytest.importorskip("aiohttp")
from aiohttp import web

from tests.engine.servers import EXTENSION
from tests.engine.test_attached import VOCABULARY, SglangStandIn, StandIn, served

WEIGHTS = {"w": np.zeros(4, np.float32)}


class Pausing(StandIn):
    """A server that notes whether it is paused, and loads weights when a test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.paused = False
        self.stands_at = ""
        """The step that is not answered until `goes_on` is set."""
        self.reached, self.goes_on = asyncio.Event(), asyncio.Event()

    async def step(self, name: str) -> None:
        if name == self.stands_at:
            self.reached.set()
            await self.goes_on.wait()

    async def _answered(self, request: web.Request) -> web.StreamResponse:
        match request.path.rpartition("/")[2]:
            case "pause" | "pause_generation":
                await self.step("pause")
                self.paused = True
            case "resume" | "continue_generation":
                self.paused = False
            case "is_paused":
                return web.json_response({"is_paused": self.paused})
            case "collective_rpc":
                method = self.bodies[-1]["method"]
                await self.step("check" if method == "check_weights" else "load")
                return web.json_response({"results": [None]})
            case "update_weights_from_disk":
                await self.step("load")
        return await super()._answered(request)


class PausingVllm(Pausing):
    """A vLLM server with the extension."""

    def __init__(self) -> None:
        super().__init__()
        self.info["vllm_config"]["parallel_config"]["worker_extension_cls"] = EXTENSION


class PausingSglang(Pausing, SglangStandIn):
    """An SGLang server."""


@dataclass
class Work:
    """A router, a server, and the engine that is attached to it."""

    client: Client
    server: Pausing
    engine: ServiceProcess


@pytest.fixture(params=[PausingVllm, PausingSglang])
async def work(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Work]:
    async with AsyncExitStack() as stack:
        server: Pausing = request.param()
        await stack.enter_async_context(served(server))
        save_file(WEIGHTS, tmp_path / "model.safetensors")
        if isinstance(server, SglangStandIn):
            server.info["model_path"] = str(tmp_path)
        router = await stack.enter_async_context(running_router(tmp_path))
        flags: dict[str, Any] = {"attach": server.url, "router": router.address}
        flags |= {"vocabulary_tokens": VOCABULARY, "grace_ms": 3_000}
        engine = await stack.enter_async_context(running("engine", tmp_path / "engine", **flags))
        addresses = MeshAddresses(router=router.address, gateway="", collector="", sidecar="")
        client = await stack.enter_async_context(Client(addresses))
        yield Work(client, server, engine)


@pytest.mark.parametrize("stands_at", ["pause", "load"])
async def test_a_drain_lets_the_server_load_the_weights(work: Work, stands_at: str) -> None:
    work.server.stands_at = stands_at
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        pushing = tasks.create_task(work.client.push_weights(WEIGHTS, 1, allow_partial=True))
        await work.server.reached.wait()
        ending = tasks.create_task(work.engine.terminate())
        await until(lambda: left(work.client))
        work.server.goes_on.set()
    (result,) = pushing.result()
    assert reason_of(result) in {"", "SUPERSEDED"}
    assert ending.result() == 0
    assert not work.server.paused
    assert work.server.name.endswith("-1")


async def left(client: Client) -> bool:
    return not (await client.replicas()).replicas


@pytest.mark.parametrize("stands_at", ["check", "pause", "load"])
async def test_a_drain_ends_although_the_server_does_not_answer(work: Work, stands_at: str) -> None:
    """The server answers once the engine has gone."""
    if stands_at == "check" and isinstance(work.server, PausingSglang):
        pytest.skip("the engine checks weights for SGLang")
    work.server.stands_at = stands_at
    pushing = asyncio.create_task(work.client.push_weights(WEIGHTS, 1, allow_partial=True))
    async with asyncio.timeout(60):
        await work.server.reached.wait()
        code = await work.engine.terminate()
        (result,) = await pushing
    work.server.goes_on.set()
    assert reason_of(result) == "SUPERSEDED"
    assert code == 0
    if stands_at == "load":  # a part of the weights may be loaded, and nobody samples with them
        assert work.server.name.endswith("-none")
    else:
        assert not work.server.paused
        assert work.server.name.endswith("-0")


async def test_a_server_that_is_paused_goes_on_once_the_engine_has_left(work: Work) -> None:
    await work.client.pause_engines()
    assert work.server.paused
    async with asyncio.timeout(60):
        assert await work.engine.terminate() == 0
    assert not work.server.paused
