"""A push of weights beside one of an adapter and sessions that pin its revision, on two engines.

Adapters belong to the weights in use. So the weights are refused, or they come first: no engine is
left with adapters of other weights, and each session that opens keeps its revision.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from rollmesh.client import AdapterChoice, Client, Session
from rollmesh.v1 import router_pb2
from tests.engine.engines import CONFIG
from tests.faults.proxy import Proxy, proxy_to
from tests.meshes import Mesh, delivered, scripted_mesh
from tests.pairs.meshwork import LIMIT_S, TENSORS, ended
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")
PINNED = AdapterChoice(name="math", pinned=True)
LARGE = {f"w{at}": np.zeros(1 << 20, np.float32) for at in range(2)}
FIRST: list[Any] = [{"role": "user", "content": "first"}]


@dataclass
class Work:
    """A mesh with two engines. The router and the gateway reach the second one over a link."""

    mesh: Mesh
    client: Client
    link: Proxy
    revision: int = 0
    """The last one that was pushed."""
    sessions: list[Session] = field(default_factory=list)
    """Those that opened."""

    async def engines(self) -> list[router_pb2.Replica]:
        kind = router_pb2.REPLICA_KIND_ENGINE
        return [one for one in (await self.client.replicas()).replicas if one.hello.kind == kind]

    async def weights(self) -> router_pb2.ModelWeights:
        (model,) = (await self.client.replicas()).models
        return model

    async def push_weights(self) -> None:
        await self.client.push_weights(LARGE, await self.client.policy_version() + 1)

    async def push_adapter(self) -> None:
        self.revision += 1
        await self.client.push_adapter(TENSORS, "math", self.revision, CONFIG)

    async def open(self) -> None:
        request = self.client.session_request(adapters=[PINNED])
        self.sessions.append(await self.client.open_session(request))

    async def rest(self) -> None:
        """Waits until both engines hold the weights of the model and the retained revisions."""

        async def are_equal() -> bool:
            model, engines = await self.weights(), await self.engines()
            version, adapters = model.target_policy_version, list(model.adapters)
            return len(engines) == 2 and all(
                not one.HasField("exclusion")
                and not one.fenced
                and one.hello.load.policy_version == version
                and [held.adapter for held in one.hello.load.adapters] == adapters
                for one in engines
            )

        await until(are_equal, LIMIT_S)

    async def ask(self, session: Session) -> None:
        await self.mesh.openai(session).chat.completions.create(model="policy", messages=FIRST)

    async def check_sessions(self) -> None:
        """Checks that each session is answered by the revision that it pinned, and closes it."""
        for session in self.sessions:
            await self.ask(session)
            await self.client.close_session(session)
            for trajectory in (await delivered(self.client, session)).trajectories:
                found = {(one.adapter, one.policy_version) for one in trajectory.version_spans}
                assert found == {(one.name, one.version) for one in session.adapters}
        self.sessions.clear()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def work(
    tmp_path_factory: pytest.TempPathFactory, tokenizer_dir: Path
) -> AsyncIterator[Work]:
    folder = tmp_path_factory.mktemp("work")
    flags: dict[str, Any] = {"max_adapters": 64}
    first = {"router": {"max_adapter_lag": 0}}
    async with AsyncExitStack() as stack:
        mesh = await stack.enter_async_context(
            scripted_mesh(folder, tokenizer_dir, first=first, **flags)
        )
        link = await stack.enter_async_context(proxy_to(mesh.address("engine-1")))
        port = mesh.address("engine-1").rpartition(":")[2]
        flags = {**mesh.flags("engine"), **flags, "port": port, "advertise": link.address}
        await mesh.run("engine", "engine-1", engine_id="engine-1", **flags)
        client = await stack.enter_async_context(mesh.client())
        yield Work(mesh, client, link)


async def weights_are_offered(work: Work, before: router_pb2.ModelWeights) -> bool:
    return (await work.weights()).last_policy_version > before.last_policy_version


async def adapter_is_retained(work: Work, before: router_pb2.ModelWeights) -> bool:
    return len((await work.weights()).adapters) > len(before.adapters)


async def at_once(work: Work, before: router_pb2.ModelWeights) -> bool:
    return True


@pytest.mark.parametrize("link_is_cut", [False, True])
@pytest.mark.parametrize(
    ("has_adapter", "others_follow_once"),
    [
        (False, at_once),
        (False, weights_are_offered),
        (False, adapter_is_retained),
        (True, at_once),
        (True, adapter_is_retained),
    ],
)
async def test_either_the_weights_or_the_adapter_come_first(
    work: Work, has_adapter: bool, others_follow_once: Callable[..., Any], link_is_cut: bool
) -> None:
    if has_adapter:
        await work.push_adapter()
        await work.open()
    before = await work.weights()
    calls = [work.push_weights, work.push_adapter]
    if others_follow_once is adapter_is_retained:
        calls.reverse()
    async with asyncio.TaskGroup() as tasks:
        with ExitStack() as stack:
            if link_is_cut:
                stack.enter_context(work.link.partitioned())
            running = {calls[0]: tasks.create_task(ended(calls[0]()))}
            await until(lambda: others_follow_once(work, before))
            running[calls[1]] = tasks.create_task(ended(calls[1]()))
            opening = [tasks.create_task(ended(work.open())) for _ in range(6)]
            if has_adapter or others_follow_once is adapter_is_retained:
                await asyncio.wait(opening)  # also while the second engine has nothing yet
    weights, adapter = (running[one].result() for one in (work.push_weights, work.push_adapter))
    assert weights in {"", "INVALID_FIELD"}
    assert adapter in {"", "SUPERSEDED"}
    assert not (weights and adapter)
    assert not (has_adapter and not weights)
    reasons = {one.result() for one in opening}
    assert reasons <= ({""} if has_adapter else {"", "ADAPTER_UNKNOWN"})
    await work.rest()
    await work.check_sessions()
    await work.client.unload_adapter("math")
    await work.push_weights()
    await work.rest()


async def test_a_revision_that_is_pinned_beside_its_successors_push_stays(work: Work) -> None:
    """The router retains no revision below the newest one but for sessions."""
    await work.push_adapter()
    done = asyncio.Event()

    async def open_more() -> None:
        while not done.is_set():
            await work.open()

    async with asyncio.TaskGroup() as tasks:
        for _ in range(4):
            tasks.create_task(open_more())
        for _ in range(12):
            await work.push_adapter()
        done.set()
    assert len({one.version for session in work.sessions for one in session.adapters}) > 4
    await work.rest()
    await asyncio.gather(*(work.ask(session) for session in work.sessions))
    work.sessions, others = work.sessions[::20], work.sessions
    await work.check_sessions()
    await asyncio.gather(*(work.client.close_session(session) for session in others))
    await work.client.unload_adapter("math")
