"""Pins of weights, with real routers: a push waits for an evaluation, whatever dies meanwhile."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from rollmesh.client import Client, MeshAddresses, WeightsPushError
from rollmesh.router import Fleet, Members, Models, RouterConfig
from rollmesh.runtime.errors import (
    InvalidFieldError,
    OverloadedError,
    RunAbandonedError,
    StaleVersionError,
    VersionGoneError,
    WeightsPinnedError,
)
from rollmesh.runtime.rpc import open_channel, typed_errors
from rollmesh.v1 import engine_pb2, router_pb2, router_pb2_grpc
from tests.processes import ServiceProcess, reserved_port
from tests.router.engines import NotingEngine, noting_engine
from tests.router.routers import running_router
from tests.waiting import until

TENSORS = {"w": np.zeros(1, np.float32)}
LONG_MS, SHORT_MS = 60_000, 400
"""Time in which a pin must be renewed: longer than a test, and one that a test can wait for."""


@dataclass
class Place:
    """Routers that are peers, an engine with version 1, and a client of each router."""

    folder: Path
    stack: AsyncExitStack
    pin_ms: int
    routers: list[ServiceProcess] = field(default_factory=list)
    clients: list[Client] = field(default_factory=list)
    engine: NotingEngine = field(default_factory=NotingEngine)

    async def begin(self, count: int) -> None:
        holders = [self.stack.enter_context(reserved_port()) for _ in range(count)]
        self.ports = [str(one.getsockname()[1]) for one in holders]
        addresses = [f"127.0.0.1:{port}" for port in self.ports]
        self.peers = ",".join(addresses)
        for at in range(count):
            self.routers.append(await self.router(at))
            self.clients.append(await self.client(*addresses[at:], *addresses[:at]))
        self.engine = await self.stack.enter_async_context(noting_engine(self.peers, "engine"))
        await self.clients[0].push_weights(TENSORS, 1)

    async def router(self, at: int, **flags: object) -> ServiceProcess:
        flags = {"port": self.ports[at], "peers": self.peers, "pin_ms": self.pin_ms, **flags}
        folder = self.folder / f"router-{at}"
        return await self.stack.enter_async_context(running_router(folder, **flags))

    async def client(self, *routers: str) -> Client:
        addresses = MeshAddresses(router=",".join(routers), gateway="", collector="", sidecar="")
        return await self.stack.enter_async_context(Client(addresses))

    async def until_it_waits(self, at: int = 0) -> None:
        log = self.folder / f"router-{at}" / "router.log"
        await until(lambda: "push waits for pinned weights" in log.read_text())


async def passed_over(push: Awaitable[object]) -> None:
    """Waits for a push that a later one may overtake."""
    with suppress(StaleVersionError, WeightsPushError):
        await push


@pytest.fixture
async def place(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Place]:
    count, pin_ms = getattr(request, "param", (1, LONG_MS))
    async with AsyncExitStack() as stack:
        found = Place(tmp_path, stack, pin_ms)
        await found.begin(count)
        yield found


async def test_a_push_waits_until_the_evaluation_ends(place: Place) -> None:
    client = place.clients[0]
    assert await client.pin_weights("math", 1, 60) == LONG_MS / 1000
    async with asyncio.TaskGroup() as tasks:
        push = tasks.create_task(client.push_weights(TENSORS, 3))
        await place.until_it_waits()
        tasks.create_task(passed_over(client.push_weights(TENSORS, 2)))
        (model,) = (await client.replicas()).models
        assert [(one.holder, one.policy_version) for one in model.pins] == [("math", 1)]
        assert 0 < model.pins[0].remaining_ms <= 60_000
        # While pushes wait, other evaluations of the version are not let in before them.
        with pytest.raises(VersionGoneError, match="version 1 cannot stay: other weights are"):
            await client.pin_weights("code", 1, 60)
        await client.pin_weights("math", 1, 60)  # but the first one goes on
        with pytest.raises(StaleVersionError):  # at once
            await client.push_weights(TENSORS, 1)
        assert [version for version, _ in place.engine.taken] == [1]
        await client.pin_weights("math", 1, 0)
        await push
    assert place.engine.taken[-1][0] == 3
    with pytest.raises(VersionGoneError, match="version 1 cannot stay: engines hold version 3"):
        await client.pin_weights("math", 1, 60)
    await client.pin_weights("math", 3, 60)


@pytest.mark.parametrize("place", [(1, SHORT_MS)], indirect=True)
async def test_a_dead_evaluation_holds_a_push_for_the_time_of_a_renewal(place: Place) -> None:
    client = place.clients[0]
    await client.pin_weights("dead", 1, 3_600)
    begun = time.monotonic()
    await client.push_weights(TENSORS, 2)
    assert time.monotonic() - begun > SHORT_MS / 1000 / 2  # it did wait
    assert not (await client.replicas()).models[0].pins


async def test_a_pin_ends_at_the_time_that_the_evaluation_named(place: Place) -> None:
    client = place.clients[0]
    await client.pin_weights("slow", 1, 0.4)
    await client.push_weights(TENSORS, 2)
    with pytest.raises(InvalidFieldError, match=r"^remaining_ms: is 3601000; give at most 3600000"):
        await client.pin_weights("slow", 2, 3_601)


async def test_a_push_with_a_deadline_says_who_pins_the_weights(place: Place) -> None:
    client = place.clients[0]
    await client.pin_weights("math", 1, 60)
    header = router_pb2.PushWeightsHeader(
        policy_version=2, checkpoint_dir="/nowhere", pause_mode=engine_pb2.PAUSE_MODE_KEEP
    )
    async with open_channel(place.routers[0].address) as channel:
        stub = router_pb2_grpc.RouterServiceStub(channel)
        request = router_pb2.PushWeightsRequest(header=header)
        call = stub.PushWeights(iter([request]), timeout=5.2)
        refusal = r"^math pins version 1 for up to \d+ s more"
        with pytest.raises(WeightsPinnedError, match=refusal), typed_errors(call):
            await call
    await client.pin_weights("math", 1, 0)
    await client.push_weights(TENSORS, 2)


async def test_a_push_whose_trainer_left_does_not_follow_the_evaluation(place: Place) -> None:
    client = place.clients[0]
    await client.pin_weights("math", 1, 60)
    async with asyncio.TaskGroup() as tasks:
        push = tasks.create_task(client.push_weights(TENSORS, 2))
        await place.until_it_waits()
        push.cancel()

    async def pinned() -> bool:  # the router has noticed when a further pin is let in
        try:
            return bool(await client.pin_weights("code", 1, 60))
        except VersionGoneError:
            return False

    await until(pinned)
    assert [version for version, _ in place.engine.taken] == [1]


async def test_an_abandoned_trainer_is_refused_at_once(place: Place) -> None:
    client = place.clients[0]
    await client.pin_weights("math", 1, 60)
    restored = await place.client(place.routers[0].address)
    await restored.open_run(1)
    with pytest.raises(RunAbandonedError):
        await client.push_weights(TENSORS, 2)
    await client.pin_weights("math", 1, 60)  # a run that is only opened changes no weights


async def test_an_engine_that_joins_meanwhile_gets_the_pinned_weights(place: Place) -> None:
    client = place.clients[0]
    await client.pin_weights("math", 1, 60)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(client.push_weights(TENSORS, 2))
        await place.until_it_waits()
        late = await place.stack.enter_async_context(
            noting_engine(place.routers[0].address, "late")
        )
        await late.until_taken(1)
        await client.pin_weights("math", 1, 0)
        await late.until_taken(2)
    assert [version for version, _ in late.taken] == [1, 2]


async def test_a_router_that_was_killed_waits_for_the_renewals_of_pins(place: Place) -> None:
    client = place.clients[0]
    await client.pin_weights("math", 1, 60)
    await place.routers[0].kill()
    await place.router(0, gather_ms=16_000)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(client.push_weights(TENSORS, 2))
        async with asyncio.timeout(10):  # the push waits longer, for the members
            assert await client.pin_weights("math", 1, 60)
        await place.until_it_waits()
        await client.pin_weights("math", 1, 0)
    await place.engine.until_taken(2)


@pytest.mark.parametrize("place", [(2, LONG_MS)], indirect=True)
async def test_a_push_at_another_router_waits_also_after_that_of_the_pin_was_killed(
    place: Place,
) -> None:
    first, second = place.clients
    await first.pin_weights("math", 1, 60)
    async with asyncio.TaskGroup() as tasks:
        push = tasks.create_task(second.push_weights(TENSORS, 2))
        await place.until_it_waits(1)
        with pytest.raises(VersionGoneError):
            await first.pin_weights("code", 1, 60)
        await place.routers[0].kill()
        await second.pin_weights("math", 1, 60)  # the renewal, at the other router
        assert not push.done()
        await second.pin_weights("math", 1, 0)
        (model,) = (await second.replicas()).models
        assert [one.holder for one in model.pins] == ["math"]  # the dead router's, until it lapses
        push.cancel()


@pytest.mark.parametrize("place", [(2, LONG_MS)], indirect=True)
async def test_a_release_at_one_router_ends_the_wait_at_the_other(place: Place) -> None:
    first, second = place.clients
    await first.pin_weights("math", 1, 60)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(second.push_weights(TENSORS, 2))
        await place.until_it_waits(1)
        await first.pin_weights("math", 1, 0)
    assert [version for version, _ in place.engine.taken] == [1, 2]


def test_a_pin_is_renewed_among_as_many_as_there_may_be(tmp_path: Path) -> None:
    config = RouterConfig(data_dir=tmp_path)
    pins = Models(Fleet(None), Members(config.missed_reports), config).pins
    assert all(pins.hold("policy", f"evaluation {at}", 1, 60_000) for at in range(1_024))
    with pytest.raises(OverloadedError, match="1024 evaluations pin the weights"):
        pins.hold("policy", "one more", 1, 60_000)
    assert not pins.hold("policy", "evaluation 7", 1, 60_000)
