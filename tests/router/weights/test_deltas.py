"""Pushes by difference over a mesh: the engines that get them, and whole weights instead."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollmesh.client import Client, MeshAddresses, WeightDeltas, WeightsPushError, file_of
from rollmesh.runtime.errors import InvalidFieldError, StaleVersionError
from tests.processes import ServiceProcess, reserved_port, running
from tests.router.engines import noting_engine
from tests.router.routers import running_router
from tests.waiting import until

Tensors = dict[str, np.ndarray[Any, Any]]
ELEMENTS = 20_000


def first_weights() -> Tensors:
    return {"a": np.zeros(ELEMENTS, np.uint16), "b.c": np.ones((100, 3), np.float32)}


def stepped(weights: Tensors, step: int, changed: int = 200) -> Tensors:
    """Returns weights of which some elements have changed, in another array."""
    new = {name: one.copy() for name, one in weights.items()}
    new["a"][step :: ELEMENTS // changed] += step
    return new


def file(tensors: Tensors) -> bytes:
    return b"".join(file_of(tensors)[1])


class Mesh:
    """A router and engines that run in processes, and a client."""

    def __init__(self, folder: Path, stack: AsyncExitStack) -> None:
        self.folder = folder
        self.stack = stack
        self.router: ServiceProcess
        self.client: Client

    async def engine(self, name: str) -> ServiceProcess:
        flags = {"router": self.router.address, "engine_id": name, "backend": "scripted"}
        started = running("engine", self.folder / name, model="policy", **flags)
        return await self.stack.enter_async_context(started)

    def another_client(self) -> Client:
        addresses = MeshAddresses(router=self.router.address, gateway="", collector="", sidecar="")
        return Client(addresses)

    def sent(self) -> dict[int, int]:
        """Sizes of the files that the router keeps, by version."""
        files = (self.folder / "router" / "weights").rglob("*.safetensors")
        return {int(one.name.partition("-")[0]): one.stat().st_size for one in files}

    def kept(self) -> list[bytes]:
        """The files that engines keep."""
        files = (self.folder / "scratch").rglob("weights.safetensors")
        return [one.read_bytes() for one in files]

    async def until_current(self, version: int, *engines: str) -> None:
        """Waits until the router leases these engines with a version, and no others."""

        async def leased() -> bool:
            async with self.another_client() as client:
                found = await client.replicas()
            names = sorted(one.hello.replica_id for one in found.replicas if not one.fenced)
            versions = [one.target_policy_version for one in found.models]
            return (versions, names) == ([version], list(engines))

        await until(leased)


@pytest.fixture
async def mesh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Mesh]:
    (tmp_path / "scratch").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "scratch"))
    async with AsyncExitStack() as stack:
        made = Mesh(tmp_path, stack)
        with reserved_port() as holder:
            port = holder.getsockname()[1]
        made.router = await stack.enter_async_context(running_router(tmp_path, port=port))
        made.client = await stack.enter_async_context(made.another_client())
        yield made


async def test_a_late_engine_gets_the_base_and_the_differences(mesh: Mesh) -> None:
    weights = first_weights()
    await mesh.engine("early")
    await mesh.client.push_weights(weights, 1, delta=True)
    for version in (2, 3, 4):
        weights = stepped(weights, version)
        results = await mesh.client.push_weights(weights, version, delta=True)
        assert [one.engine_id for one in results] == ["early"]
    sizes = mesh.sent()
    assert sorted(sizes) == [1, 2, 3, 4]
    assert max(sizes[version] for version in (2, 3, 4)) < sizes[1] / 10
    late = await mesh.engine("late")
    await mesh.until_current(4, "early", "late")
    assert mesh.kept() == [file(weights)] * 2
    # An engine that was killed has lost its file. It gets all of it again.
    await late.kill()
    weights = stepped(weights, 5)
    await mesh.client.push_weights(weights, 5, delta=True)
    await mesh.engine("late")
    await mesh.until_current(5, "early", "late")
    assert mesh.kept() == [file(weights)] * 2


async def test_a_router_that_restarts_has_the_base_and_the_differences(mesh: Mesh) -> None:
    weights = first_weights()
    await mesh.engine("early")
    await mesh.client.push_weights(weights, 1, delta=True)
    weights = stepped(weights, 2)
    await mesh.client.push_weights(weights, 2, delta=True)
    port = mesh.router.port
    await mesh.router.kill()
    mesh.router = await mesh.stack.enter_async_context(running_router(mesh.folder, port=port))
    weights = stepped(weights, 3)
    await mesh.until_current(2, "early")
    await mesh.client.push_weights(weights, 3, delta=True)
    assert mesh.sent()[3] < mesh.sent()[1] / 10
    await mesh.engine("late")
    await mesh.until_current(3, "early", "late")
    assert mesh.kept() == [file(weights)] * 2


async def test_every_nth_push_and_one_that_changes_much_are_whole(mesh: Mesh) -> None:
    weights, deltas = first_weights(), WeightDeltas(full_every=3)
    whole = len(file(weights))
    await mesh.engine("one")
    for version in range(1, 8):
        weights = stepped(weights, version)
        await mesh.client.push_weights(weights, version, delta=deltas)
        starts_anew = version in {1, 4, 7}
        assert (mesh.sent()[version] == whole) == starts_anew
        assert sorted(mesh.sent()) == list(range((version - 1) // 3 * 3 + 1, version + 1))
    weights = stepped(weights, 8, changed=ELEMENTS)
    await mesh.client.push_weights(weights, 8, delta=deltas)
    assert mesh.sent() == {8: whole}
    weights["another"] = np.zeros(3, np.float32)
    await mesh.client.push_weights(weights, 9, delta=deltas)
    assert list(mesh.sent()) == [9]
    assert mesh.kept() == [file(weights)]


async def test_a_late_engine_gets_64_differences_and_the_65th_push_after_them_is_whole(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The router restarts at the limit, where a trainer that counts no pushes meets it."""
    monkeypatch.setattr("rollmesh.client.weights._MOST_FULL_EVERY", 1000)
    weights, deltas = first_weights(), WeightDeltas(full_every=1000)
    whole = len(file(weights))
    await mesh.engine("early")
    await mesh.client.push_weights(weights, 1, delta=deltas)
    for version in range(2, 66):
        weights = stepped(weights, version, changed=20)
        await mesh.client.push_weights(weights, version, delta=deltas)
    assert [version for version, size in mesh.sent().items() if size >= whole] == [1]
    assert len(mesh.sent()) == 65
    port = mesh.router.port
    await mesh.router.kill()
    mesh.router = await mesh.stack.enter_async_context(running_router(mesh.folder, port=port))
    await mesh.engine("late")
    await mesh.until_current(65, "early", "late")
    assert mesh.kept() == [file(weights)] * 2
    for version, sizes in ((66, {66: True}), (67, {66: True, 67: False})):
        weights = stepped(weights, version, changed=20)
        await mesh.client.push_weights(weights, version, delta=deltas)
        assert {at: size >= whole for at, size in mesh.sent().items()} == sizes
        assert mesh.kept() == [file(weights)] * 2


async def test_trainers_that_push_by_turns_push_whole_weights_and_none_are_mixed(
    mesh: Mesh,
) -> None:
    trained = [first_weights(), stepped(first_weights(), 7)]
    await mesh.engine("one")
    async with mesh.another_client() as other:
        for version in range(1, 7):
            mine = version % 2
            trained[mine] = stepped(trained[mine], version)
            client = mesh.client if mine else other
            await client.push_weights(trained[mine], version, delta=True)
            assert mesh.sent() == {version: len(file(trained[mine]))}
            assert mesh.kept() == [file(trained[mine])]
        trained[0] = stepped(trained[0], 7)
        await other.push_weights(trained[0], 7, delta=True)  # a second one in sequence
        assert mesh.sent()[7] < mesh.sent()[6] / 10
        assert mesh.kept() == [file(trained[0])]


async def test_of_two_trainers_that_push_at_once_one_is_refused_and_no_weights_mix(
    mesh: Mesh,
) -> None:
    weights = first_weights()
    await mesh.engine("one")
    async with mesh.another_client() as other:
        await mesh.client.push_weights(weights, 1, delta=True)
        await other.push_weights(weights, 2, delta=True)
        mine, theirs = stepped(weights, 3), stepped(weights, 5)
        outcomes = await asyncio.gather(
            mesh.client.push_weights(mine, 3, delta=True),
            other.push_weights(theirs, 3, delta=True),
            return_exceptions=True,
        )
        refused = [isinstance(one, StaleVersionError) for one in outcomes]
        assert sorted(refused) == [False, True]
        assert mesh.kept() == [file(theirs if refused[0] else mine)]
        assert not list(mesh.folder.rglob("*.part"))
        # Each goes on from weights that are not the mesh's, or from those that are.
        for version, client, one in ((4, mesh.client, mine), (5, other, theirs)):
            last = stepped(one, version)
            await client.push_weights(last, version, delta=True)
            assert mesh.kept() == [file(last)]


async def test_weights_that_the_router_forgot_are_pushed_whole(mesh: Mesh) -> None:
    weights = first_weights()
    await mesh.engine("one")
    await mesh.client.push_weights(weights, 7, delta=True)
    await mesh.client.forget_weights()
    weights = stepped(weights, 8)
    await mesh.client.push_weights(weights, 3, delta=True)
    assert mesh.sent() == {3: len(file(weights))}
    assert mesh.kept() == [file(weights)]


async def test_a_damaged_file_is_replaced_and_damaged_differences_are_refused(mesh: Mesh) -> None:
    """The engine's file heals from the router's, and the trainer's push heals the router's."""
    weights = first_weights()
    await mesh.engine("one")
    await mesh.client.push_weights(weights, 1, delta=True)
    _damage(mesh.folder / "scratch", "weights.safetensors")
    weights = stepped(weights, 2)
    await mesh.client.push_weights(weights, 2, delta=True)
    assert mesh.kept() == [file(weights)]
    assert mesh.sent()[2] < mesh.sent()[1] / 10
    for folder, name in (("scratch", "weights.safetensors"), ("router", "1-*.safetensors")):
        _damage(mesh.folder / folder, name)
    weights = stepped(weights, 3)
    await mesh.client.push_weights(weights, 3, delta=True)
    assert mesh.kept() == [file(weights)]
    assert mesh.sent() == {3: len(file(weights))}


def _damage(folder: Path, name: str) -> None:
    (path,) = folder.rglob(name)
    with path.open("r+b") as opened:
        opened.seek(-3, 2)
        opened.write(b"\xff")


async def test_after_a_difference_without_its_base_at_one_engine_whole_weights_reach_all(
    mesh: Mesh,
) -> None:
    weights = first_weights()
    await mesh.engine("one")
    for version in (1, 2):
        weights = stepped(weights, version)
        await mesh.client.push_weights(weights, version, delta=True)
    _damage(mesh.folder / "router", "1-*.safetensors")
    await mesh.engine("two")
    weights = stepped(weights, 3)
    results = await mesh.client.push_weights(weights, 3, delta=True, allow_partial=True)
    assert [one.engine_id for one in results if one.status.code] == ["two"]
    await mesh.until_current(3, "one")
    weights = stepped(weights, 4)
    await mesh.client.push_weights(weights, 4, delta=True)
    await mesh.until_current(4, "one", "two")
    assert mesh.kept() == [file(weights)] * 2
    assert mesh.sent() == {4: len(file(weights))}


async def test_a_push_that_sleeping_engines_refuse_is_followed_by_a_difference(mesh: Mesh) -> None:
    weights = first_weights()
    await mesh.engine("one")
    await mesh.client.push_weights(weights, 1, delta=True)
    await mesh.client.sleep_engines()
    weights = stepped(weights, 2)
    with pytest.raises(WeightsPushError, match="sleeps"):
        await mesh.client.push_weights(weights, 2, delta=True)
    await mesh.client.wake_up_engines()
    weights = stepped(weights, 3)
    await mesh.client.push_weights(weights, 2, delta=True)
    assert mesh.sent()[2] < mesh.sent()[1] / 10
    assert mesh.kept() == [file(weights)]


async def test_peers_keep_the_base_and_the_differences(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "scratch").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "scratch"))
    async with AsyncExitStack() as stack:
        mesh = Mesh(tmp_path, stack)
        holders = [stack.enter_context(reserved_port()) for _ in range(2)]
        ports = [one.getsockname()[1] for one in holders]
        routers = []
        for number in (0, 1):
            flags = {"port": ports[number], "peers": f"127.0.0.1:{ports[1 - number]}"}
            started = running_router(tmp_path / str(number), **flags)
            routers.append(await stack.enter_async_context(started))
        mesh.router = routers[0]
        addresses = ",".join(one.address for one in routers)
        mesh.client = await stack.enter_async_context(
            Client(MeshAddresses(router=addresses, gateway="", collector="", sidecar=""))
        )
        await mesh.engine("early")
        weights = first_weights()
        await mesh.client.push_weights(weights, 1, delta=True)
        for version in (2, 3):
            weights = stepped(weights, version)
            await mesh.client.push_weights(weights, version, delta=True)
        mesh.router = routers[1]
        await mesh.until_current(3)
        await routers[0].kill()
        await mesh.engine("late")
        await mesh.until_current(3, "late")
        assert mesh.kept() == [file(weights)] * 2
        weights = stepped(weights, 4)
        await mesh.client.push_weights(weights, 4, delta=True)
        folder = tmp_path / "1" / "router" / "weights"
        assert len(list(folder.rglob("*.safetensors"))) == 4


async def test_a_push_in_the_middle_of_another_update_changes_the_right_weights(
    mesh: Mesh,
) -> None:
    """A late engine is brought the base and differences while the next ones are pushed."""
    weights = first_weights()
    await mesh.engine("early")
    await mesh.client.push_weights(weights, 1, delta=True)
    joining = asyncio.create_task(mesh.engine("late"))
    for version in range(2, 10):
        weights = stepped(weights, version)
        await mesh.client.push_weights(weights, version, delta=True, allow_partial=True)
    await joining
    await mesh.until_current(9, "early", "late")
    assert mesh.kept() == [file(weights)] * 2


async def test_only_tensors_have_differences(mesh: Mesh) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        await mesh.client.push_weights(mesh.folder, 1, delta=True)
    assert caught.value.field == "delta"
    with pytest.raises(InvalidFieldError, match="full_every"):
        WeightDeltas(full_every=0)


async def test_an_engine_is_sent_the_pushes_that_it_lacks(mesh: Mesh) -> None:
    weights = first_weights()
    async with noting_engine(mesh.router.address, "noting") as engine:
        await mesh.client.push_weights(weights, 1, delta=True)
        for version in (2, 3):
            weights = stepped(weights, version)
            await mesh.client.push_weights(weights, version, delta=True)
        assert [version for version, _ in engine.taken] == [1, 2, 3]
        async with noting_engine(mesh.router.address, "late") as late:
            await late.until_taken(3)
            assert late.taken == engine.taken
