"""Two routers keep the same weights, whichever of them received a push and whichever dies."""

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollmesh.client import Client, MeshAddresses, file_of
from rollmesh.internal.v1 import peers_pb2, peers_pb2_grpc
from rollmesh.router import KeptWeights, restored
from rollmesh.runtime.errors import InvalidFieldError, RemoteError, StaleVersionError
from rollmesh.runtime.rpc import open_channel, typed_errors
from rollmesh.v1 import engine_pb2, router_pb2, router_pb2_grpc
from tests.processes import ServiceProcess, reserved_port
from tests.router.engines import NotingEngine, noting_engine
from tests.router.routers import running_router
from tests.waiting import until, until_says

FIRST, SECOND = b"first" * 100, b"second" * 100


class Pair:
    """Two routers that are peers."""

    def __init__(self, folder: Path, stack: AsyncExitStack) -> None:
        self.folder = folder
        self.stack = stack
        holders = [stack.enter_context(reserved_port()) for _ in range(2)]
        self.addresses = [f"127.0.0.1:{one.getsockname()[1]}" for one in holders]
        self.processes: dict[int, ServiceProcess] = {}

    @property
    def both(self) -> str:
        return ",".join(self.addresses)

    async def start(self, number: int, **flags: object) -> ServiceProcess:
        folder = self.folder / f"router-{number}"
        port = self.addresses[number].rpartition(":")[2]
        settings = {"peers": self.addresses[1 - number], "port": port, **flags}
        process = await self.stack.enter_async_context(running_router(folder, **settings))
        self.processes[number] = process
        return process

    async def knows_model(self, number: int) -> bool:
        """Whether an engine has registered with one of them, or it keeps weights."""
        async with open_channel(self.addresses[number]) as channel:
            stub = router_pb2_grpc.RouterServiceStub(channel)
            with typed_errors():
                found = await stub.ListReplicas(router_pb2.ListReplicasRequest(), timeout=60)
        return bool(found.replicas or found.models)

    async def push(self, number: int, version: int, data: bytes, request_id: str = "") -> int:
        """Pushes weights to one of them. Returns the version that engines must hold."""
        await until(lambda: self.knows_model(number))
        header = router_pb2.PushWeightsHeader(
            model="policy",
            policy_version=version,
            pause_mode=engine_pb2.PAUSE_MODE_KEEP,
            safetensors_bytes=len(data),
            request_id=request_id,
        )
        requests = [
            router_pb2.PushWeightsRequest(header=header),
            router_pb2.PushWeightsRequest(safetensors_chunk=data),
        ]
        async with open_channel(self.addresses[number]) as channel:
            stub = router_pb2_grpc.RouterServiceStub(channel)
            call = stub.PushWeights(iter(requests), timeout=60)
            with typed_errors(call):
                response = await call
        return response.policy_version

    async def kept(self, number: int) -> peers_pb2.KeptWeights | None:
        async with open_channel(self.addresses[number]) as channel:
            stub = peers_pb2_grpc.PeerServiceStub(channel)
            request = peers_pb2.ListKeptWeightsRequest()
            with typed_errors():
                response = await stub.ListKeptWeights(request, timeout=60)
        return response.kept[0] if response.kept else None

    async def target(self, number: int) -> int:
        kept = await self.kept(number)
        return kept.current.policy_version if kept is not None else 0


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Pair]:
    async with AsyncExitStack() as stack:
        yield Pair(tmp_path, stack)


async def start_both(pair: Pair) -> None:
    for number in range(2):
        await pair.start(number)


def files(engine: NotingEngine) -> list[tuple[int, bytes]]:
    return engine.taken


async def test_a_late_engine_gets_weights_from_the_router_that_did_not_receive_the_push(
    pair: Pair,
) -> None:
    await start_both(pair)
    async with noting_engine(pair.both, "a") as engine:
        assert await pair.push(0, 1, FIRST) == 1
        assert files(engine) == [(1, FIRST)]
        await pair.processes[0].kill()
        await until(lambda: pair.target(1))
        async with noting_engine(pair.addresses[1], "late") as late:
            await late.until_taken(1)
            assert files(late) == [(1, FIRST)]
        with pytest.raises(StaleVersionError):
            await pair.push(1, 1, SECOND)
        assert await pair.push(1, 2, SECOND) == 2
        await engine.until_taken(2)


@pytest.mark.parametrize("advertised", [False, True])
async def test_a_router_whose_own_address_is_among_its_peers_does_not_ask_itself(
    pair: Pair, *, advertised: bool
) -> None:
    own = pair.addresses[0]
    advertise = own if advertised else ""
    router = await pair.start(0, peers=own, advertise=advertise, metrics_port=0)
    async with noting_engine(own, "a"):
        assert await pair.push(0, 1, FIRST) == 1
    called = await router.samples("rollmesh_rpcs_total")
    assert any("PushWeights" in name for name in called)
    assert not any("ListKeptWeights" in name or "SyncWeights" in name for name in called)


async def test_a_starting_router_learns_of_pushes_before_it_serves(pair: Pair) -> None:
    await pair.start(0)
    async with noting_engine(pair.addresses[0], "a"):
        await pair.push(0, 1, FIRST)
        await pair.start(1)
        assert await pair.target(1) == 1
        await pair.processes[0].kill()
        async with noting_engine(pair.addresses[1], "late") as late:
            await late.until_taken(1)
            assert files(late) == [(1, FIRST)]


async def test_a_router_that_slept_through_pushes_brings_no_engine_back(pair: Pair) -> None:
    await start_both(pair)
    async with noting_engine(pair.both, "a") as engine:
        await pair.push(0, 1, FIRST)
        os.kill(pair.processes[0].pid, signal.SIGSTOP)
        await pair.push(1, 2, SECOND)
        os.kill(pair.processes[0].pid, signal.SIGCONT)

        async def awake() -> bool:
            return await pair.target(0) == 2

        await until(awake)
        assert files(engine) == [(1, FIRST), (2, SECOND)]
        assert engine.load.policy_version == 2


async def test_a_router_whose_peer_is_away_leaves_an_engine_with_later_weights_alone(
    pair: Pair,
) -> None:
    await start_both(pair)
    async with noting_engine(pair.both, "a") as engine:
        await pair.push(0, 1, FIRST)
        await pair.processes[0].kill()
        await pair.push(1, 2, SECOND)
        await pair.processes[1].kill()
        await pair.start(0)
        await until_says(pair.folder / "router-0" / "router.log", "a peer is away")
        assert files(engine) == [(1, FIRST), (2, SECOND)]
        await pair.start(1)
        await until(lambda: pair.target(0))
        assert await pair.push(0, 3, FIRST) == 3
        assert files(engine)[2:] == [(3, FIRST)]


async def refused(pair: Pair, data: bytes) -> None:
    with pytest.raises(RemoteError):
        await pair.push(0, 1, data, "once")


async def test_a_repeated_push_is_finished_by_the_other_router(
    pair: Pair,
) -> None:
    await pair.start(0, fault="router-offered")
    await pair.start(1)
    async with noting_engine(pair.both, "a") as engine:
        async with asyncio.TaskGroup() as tasks:
            pushed = tasks.create_task(refused(pair, FIRST))
            await pair.processes[0].wait_line("FAULT router-offered")
            await pair.processes[0].kill()
            await pushed
        assert not files(engine)
        assert await pair.target(1) == 0
        assert await pair.push(1, 1, FIRST, "once") == 1
        assert await pair.push(1, 1, FIRST, "once") == 1
        assert files(engine) == [(1, FIRST)]
        await pair.start(0)  # with what it had when it died
        assert await pair.target(0) == 1


class Stalling(dict[str, Any]):
    """Tensors of which the last one comes when it may, the first time that it is sent.

    A thread sends them. Before that the event loop's own reads their sizes.
    """

    def __init__(self) -> None:
        super().__init__(a=np.arange(700_000, dtype=np.float32), z=np.zeros(3, np.uint8))
        self.reached, self.may_go_on = threading.Event(), threading.Event()

    def __getitem__(self, name: str) -> Any:
        is_sent = threading.current_thread() is not threading.main_thread()
        if name == "z" and is_sent and not self.reached.is_set():
            self.reached.set()
            self.may_go_on.wait(60)
        return super().__getitem__(name)


@pytest.mark.parametrize("moment", ["received", "router-offered", "router-before-accept"])
async def test_the_sdk_finishes_a_push_at_the_other_router_if_the_first_one_dies(
    pair: Pair, moment: str
) -> None:
    await pair.start(0, fault="" if moment == "received" else moment)
    await pair.start(1)
    tensors = Stalling()
    if moment != "received":
        tensors.may_go_on.set()
    size, chunks = file_of(dict(tensors))
    async with (
        noting_engine(pair.both, "a") as engine,
        Client(MeshAddresses(router=pair.both)) as client,
        asyncio.TaskGroup() as tasks,
    ):
        pushing = tasks.create_task(client.push_weights(tensors, 1))
        if moment == "received":
            assert await asyncio.to_thread(tensors.reached.wait, 60)
        else:
            await pair.processes[0].wait_line(f"FAULT {moment}")
        await pair.processes[0].kill()
        tensors.may_go_on.set()
        assert not any(result.status.code for result in await pushing)
        assert await pair.target(1) == 1
        assert files(engine) == [(1, b"".join(chunks))]
        assert len(files(engine)[0][1]) == size
        await client.push_weights({"w": np.ones(1, np.float32)}, 2)


async def test_loaded_weights_are_accepted_by_the_other_router_if_the_first_dies(
    pair: Pair,
) -> None:
    await pair.start(0, fault="router-before-accept")
    await pair.start(1)
    async with noting_engine(pair.both, "a") as engine:
        async with asyncio.TaskGroup() as tasks:
            pushed = tasks.create_task(refused(pair, FIRST))
            await pair.processes[0].wait_line("FAULT router-before-accept")
            await pair.processes[0].kill()
            await pushed
        engine.member.notify()
        await until(lambda: pair.target(1))
        assert files(engine) == [(1, FIRST)]


async def test_weights_forgotten_at_one_router_are_forgotten_at_both(pair: Pair) -> None:
    await start_both(pair)
    async with noting_engine(pair.both, "a") as engine:
        await pair.push(0, 9, FIRST)
        async with open_channel(pair.addresses[1]) as channel:
            stub = router_pb2_grpc.RouterServiceStub(channel)
            await stub.ForgetWeights(router_pb2.ForgetWeightsRequest(), timeout=60)

        async def is_forgotten() -> bool:
            return await pair.target(0) == 0

        await until(is_forgotten)
        assert await pair.push(0, 1, SECOND) == 1
        assert files(engine) == [(9, FIRST), (1, SECOND)]


async def test_of_two_pushes_on_the_sides_of_a_cut_network_the_later_revision_wins(
    pair: Pair,
) -> None:
    await pair.start(0, peers="")
    await pair.start(1, peers="")
    async with (
        noting_engine(pair.addresses[0], "a") as one,
        noting_engine(pair.addresses[1], "b") as other,
    ):
        await pair.push(0, 1, FIRST)
        await pair.push(0, 2, FIRST)
        await pair.push(1, 2, SECOND)
        await pair.processes[1].kill()
        await pair.start(1)  # the cut is healed
        await until(lambda: (2, FIRST) in files(other))
        assert files(one) == [(1, FIRST), (2, FIRST)]
        assert (await pair.kept(0)) == (await pair.kept(1))


def state(revision: int, *, offered: str = "", current: str = "") -> peers_pb2.KeptWeights:
    header = engine_pb2.UpdateWeightsHeader
    return peers_pb2.KeptWeights(
        model="m",
        revision=revision,
        offered=header(push_id=offered) if offered else None,
        current=header(push_id=current) if current else None,
    )


@pytest.mark.parametrize(
    ("earlier", "later"),
    [
        pytest.param(state(0), state(1, offered="a"), id="first"),
        pytest.param(state(1, offered="b"), state(2, current="a"), id="higher-revision"),
        pytest.param(state(3, current="a"), state(4), id="forgotten"),
        pytest.param(state(1, offered="a"), state(1, offered="b"), id="at-the-same-time"),
        pytest.param(state(2, current="a"), state(2, current="b"), id="accepted-on-both-sides"),
    ],
)
def test_both_sides_agree_which_of_two_states_is_later(
    tmp_path: Path, earlier: peers_pb2.KeptWeights, later: peers_pb2.KeptWeights
) -> None:
    kept = KeptWeights(tmp_path, "m")
    kept.adopt(earlier)
    assert kept.is_behind(later)
    kept.adopt(later)
    assert not kept.is_behind(earlier)
    assert not kept.is_behind(later)
    (again,) = restored(tmp_path)
    assert again.state == later


@pytest.mark.parametrize("push_id", ["", "../../../../etc/x", "a" * 31 + "/", "A" * 32])
def test_a_push_id_of_a_peer_names_no_file_elsewhere(tmp_path: Path, push_id: str) -> None:
    header = engine_pb2.UpdateWeightsHeader(
        policy_version=1, push_id=push_id, safetensors_bytes=1, model="policy"
    )
    state = peers_pb2.KeptWeights(model="policy", revision=1, current=header)
    with pytest.raises(InvalidFieldError, match="push_id"):
        KeptWeights(tmp_path, "policy").missing(state)
