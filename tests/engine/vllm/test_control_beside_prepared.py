"""Control calls, stops and kills while weights are prepared beside sampling, or exchanged."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from rollmesh.client import Client, MeshAddresses, WeightsPushError
from rollmesh.runtime.rpc import open_channel, typed_errors
from rollmesh.v1 import engine_pb2_grpc
from tests import models
from tests.controls import ABORT_ALL, RESUME, WAKE_UP, pause, sleep
from tests.engine.engines import LONG, PROMPT, Engine, Result
from tests.engine.gated_weights import EXCHANGE, PREPARE
from tests.engine.vllm.test_transfer import install_plugin
from tests.faults.test_deltas import Trainer
from tests.processes import running
from tests.router.routers import running_router
from tests.waiting import until

pytestmark = [pytest.mark.long, pytest.mark.vllm]
STEPS = (PREPARE, EXCHANGE)


class Mesh:
    """A router, a trainer that pushes differences, and engines that wait at gates."""

    def __init__(self, folder: Path, model: Path, router: str, client: Client) -> None:
        self.trainer = Trainer(model)
        self.log = folder / "engine.log"
        self.version = 0
        self._gates = folder / "gates"
        self._gates.mkdir()
        os.environ["GATES"] = str(self._gates)
        self._folder, self._client = folder, client
        self._flags = {"router": router, "backend": "vllm", "model_path": model, "port": 0}
        self._flags |= {"dtype": "float32", "enforce_eager": True, "max_context_tokens": 2048}
        self._flags["grace_ms"] = 2000

    @asynccontextmanager
    async def engine(self, **changes: object) -> AsyncIterator[Engine]:
        flags: dict[str, object] = {"engine_id": "engine", **self._flags, **changes}
        async with (
            running("engine", self._folder, **flags) as process,
            open_channel(process.address) as channel,
        ):
            yield Engine(process, engine_pb2_grpc.EngineServiceStub(channel), Path())

    async def push(self, *, delta: bool = True) -> None:
        self.version += 1
        await self._client.push_weights(self.trainer.step(self.version), self.version, delta=delta)

    @contextmanager
    def closed(self, step: str) -> Iterator[Path]:
        """Closes a gate. Yields the file that says that weights wait there."""
        gate = self._gates / step
        gate.touch()
        waits = gate.with_suffix(".waits")
        waits.unlink(missing_ok=True)
        try:
            yield waits
        finally:
            gate.unlink(missing_ok=True)

    def check(self, result: Result) -> None:
        """Each token has the log-probability that torch gives under the version of its span."""
        for version, start, end in result.spans:
            ids = [*PROMPT.tolist(), *result.ids[:end]]
            wanted = self.trainer.logprobs(version, ids)[len(PROMPT) - 1 + start :]
            assert np.abs(wanted - result.logprobs[start:end]).max() < 1e-5, version
        assert result.spans[-1][2] == len(result.ids)


@pytest.fixture
async def mesh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Mesh]:
    monkeypatch.setenv("GATES", "")  # put back at the end
    install_plugin(tmp_path / "plugin", monkeypatch, "tests.engine.gated_weights")
    model = models.make_model_dir(tmp_path / "model", spread=0.1)
    async with AsyncExitStack() as stack:
        router = await stack.enter_async_context(running_router(tmp_path))
        addresses = MeshAddresses(router=router.address, gateway="", collector="", sidecar="")
        client = await stack.enter_async_context(Client(addresses))
        yield Mesh(tmp_path, model, router.address, client)


async def test_control_calls_wait_for_the_new_weights(mesh: Mesh) -> None:
    """They wait, one that is given up changes nothing, and no token has a wrong version."""
    async with mesh.engine() as engine:
        await mesh.push()
        for step in STEPS:
            await control_at(step, mesh, engine, pause())
            assert (await engine.info()).paused
            await control_at(step, mesh, engine, RESUME)
            assert not (await engine.info()).paused
            await control_at(step, mesh, engine, sleep(1))
            assert (await engine.info()).sleeping
            await controlled(engine, WAKE_UP)
            await control_at(step, mesh, engine, WAKE_UP)
            after = await engine.generate(engine.request(20, 0))
            assert after.spans == [(mesh.version, 0, 20)]
            mesh.check(after)


async def control_at(step: str, mesh: Mesh, engine: Engine, call: Any) -> None:
    """Makes a call while a push waits at a step, in the middle of an answer."""
    result, is_paused = Result(), (await engine.info()).paused

    async def collect() -> None:
        async with aclosing(engine.stream(engine.request(LONG, 1))) as responses:
            async for response in responses:
                result.take(response)

    async with asyncio.timeout(100), asyncio.TaskGroup() as tasks:
        tasks.create_task(collect())
        await until(lambda: is_paused or result.messages > 2)
        with mesh.closed(step) as waits:
            push = tasks.create_task(mesh.push())
            await until(waits.exists)
            with pytest.raises(grpc.aio.AioRpcError) as given_up:
                await engine.stub.ControlEngines(call, timeout=0.3)
            assert given_up.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
            calling = tasks.create_task(controlled(engine, call))
            if step == PREPARE and not is_paused:  # it samples meanwhile
                seen = result.messages
                await until(lambda: result.messages > seen + 2 or bool(result.spans))
            else:
                await asyncio.sleep(0.2)
            assert not calling.done()
            assert not push.done()
        await push
        await calling
        assert (await engine.info()).policy_version == mesh.version
        await controlled(engine, ABORT_ALL)
    if result.ids:
        mesh.check(result)


async def controlled(engine: Engine, call: Any) -> None:
    with typed_errors():
        await engine.stub.ControlEngines(call, timeout=60)


async def test_an_engine_that_ends_meanwhile_comes_back_with_the_weights(mesh: Mesh) -> None:
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(mesh.engine())
        await mesh.push()
        await mesh.push()
        for step in STEPS:
            for sent in (signal.SIGTERM, signal.SIGKILL):
                with mesh.closed(step) as waits:
                    push = asyncio.create_task(mesh.push())
                    await until(waits.exists)
                    async with asyncio.timeout(60):
                        if sent == signal.SIGKILL:
                            await engine.process.kill()
                        else:
                            assert await engine.process.terminate() == 0
                            assert "unexpected error" not in mesh.log.read_text()
                        with pytest.raises(WeightsPushError):
                            await push
                await stack.aclose()
                engine = await stack.enter_async_context(mesh.engine())
                await engine.until(lambda info: info.policy_version > 0)
                result = await engine.generate(engine.request(20, 0))
                mesh.check(result)
                await mesh.push()
                result = await engine.generate(engine.request(20, 0))
                assert result.spans == [(mesh.version, 0, 20)]
                mesh.check(result)


async def test_two_workers_exchange_prepared_weights(mesh: Mesh) -> None:
    async with mesh.engine(vllm='{"tensor_parallel_size": 2}') as engine:
        for delta in (False, True, True, True, False):
            with mesh.closed(EXCHANGE) as waits:
                push = asyncio.create_task(mesh.push(delta=delta))
                if delta:
                    await until(waits.exists)
                else:
                    await push
            await push
            result = await engine.generate(engine.request(40, 0))
            assert result.spans == [(mesh.version, 0, 40)]
            mesh.check(result)
