"""Control calls go on at another router, or at the same one when it is back, if theirs is lost."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import numpy as np
import pytest

from rollmesh.client import Client, MeshAddresses
from rollmesh.runtime.errors import RemoteError
from rollmesh.v1 import engine_pb2
from tests.processes import ServiceProcess, reserved_port
from tests.router.engines import noting_engine
from tests.router.routers import running_router


class Routers:
    """Two routers that know nothing of each other, at addresses that do not change."""

    def __init__(self, folder: Path, stack: AsyncExitStack) -> None:
        holders = [stack.enter_context(reserved_port()) for _ in range(2)]
        self.addresses = [f"127.0.0.1:{one.getsockname()[1]}" for one in holders]
        self.processes: dict[int, ServiceProcess] = {}
        self._folder = folder
        self._stack = stack

    @property
    def both(self) -> str:
        return ",".join(self.addresses)

    async def start(self, number: int, **flags: object) -> None:
        folder = self._folder / f"router-{number}"
        port = self.addresses[number].rpartition(":")[2]
        self.processes[number] = await self._stack.enter_async_context(
            running_router(folder, port=port, **flags)
        )


@pytest.fixture
async def routers(tmp_path: Path) -> AsyncIterator[Routers]:
    async with AsyncExitStack() as stack:
        yield Routers(tmp_path, stack)


CALLS: dict[str, Callable[[Client], Awaitable[list[engine_pb2.EngineResult]]]] = {
    "Pause": lambda client: client.pause_engines("abort"),
    "Abort": lambda client: client.abort_generations(),
}


@pytest.mark.parametrize(
    ("call", "ending"),
    [
        pytest.param("Pause", signal.SIGKILL, id="killed"),
        pytest.param("Abort", signal.SIGKILL, id="killed-abort"),
        pytest.param("Pause", signal.SIGSTOP, id="stopped"),
    ],
)
async def test_a_control_call_whose_router_is_lost_is_repeated_at_the_other(
    routers: Routers, call: str, ending: signal.Signals
) -> None:
    for number in range(2):
        await routers.start(number)
    async with (
        noting_engine(routers.addresses[0], "a") as engine,
        noting_engine(routers.addresses[1], "b") as other,
        Client(MeshAddresses(router=routers.both)) as client,
        asyncio.TaskGroup() as tasks,
    ):
        engine.hangs.clear()
        asked = tasks.create_task(_list(CALLS[call](client)))
        await engine.until_controlled(1)
        os.kill(routers.processes[0].pid, ending)
        assert [one.engine_id for one in await asked] == ["b"]
        assert other.controls == engine.controls  # under one request id
        assert engine.controls[0][1]


async def _list(
    call: Awaitable[list[engine_pb2.EngineResult]],
) -> list[engine_pb2.EngineResult]:
    return await call


async def test_a_control_call_is_repeated_at_the_only_router_when_it_is_back(
    routers: Routers,
) -> None:
    await routers.start(0)
    only = routers.addresses[0]
    async with (
        noting_engine(only, "a") as engine,
        Client(MeshAddresses(router=only)) as client,
        asyncio.TaskGroup() as tasks,
    ):
        engine.hangs.clear()
        asked = tasks.create_task(client.pause_engines())
        await engine.until_controlled(1)
        await routers.processes[0].kill()
        engine.hangs.set()
        await routers.start(0, gather_ms=8_000)
        assert [one.engine_id for one in await asked] == ["a"]
        assert engine.controls[0] == engine.controls[1]


async def test_a_router_that_has_just_started_waits_for_its_engines(routers: Routers) -> None:
    await routers.start(0, gather_ms=8_000)
    only = routers.addresses[0]
    async with Client(MeshAddresses(router=only)) as client, asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(client.pause_engines())
        async with noting_engine(only, "a"), noting_engine(only, "b"):
            assert sorted(one.engine_id for one in await asked) == ["a", "b"]


async def test_a_push_to_a_router_that_has_just_started_waits_for_its_model(
    routers: Routers,
) -> None:
    await routers.start(0, gather_ms=8_000)
    only = routers.addresses[0]
    async with Client(MeshAddresses(router=only)) as client, asyncio.TaskGroup() as tasks:
        pushing = tasks.create_task(client.push_weights({"w": np.ones(1, np.float32)}, 1))
        async with noting_engine(only, "a") as engine:
            await pushing
            await engine.until_taken(1)


async def test_joining_a_transfer_is_not_repeated(routers: Routers) -> None:
    for number in range(2):
        await routers.start(number)
    async with (
        noting_engine(routers.addresses[0], "a") as engine,
        Client(MeshAddresses(router=routers.both)) as client,
    ):
        engine.hangs.clear()
        asked = asyncio.ensure_future(client.init_weight_transfer("nccl", {}))
        await engine.until_controlled(1)
        await routers.processes[0].kill()
        with pytest.raises(RemoteError):
            await asked
        assert len(engine.controls) == 1
