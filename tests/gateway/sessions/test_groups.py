"""Sessions of one group agree on its size for as long as one of them is open."""

import asyncio
from contextlib import nullcontext
from copy import copy
from pathlib import Path

import grpc
import pytest

from rollmesh.gateway import GroupSizes, Registry, SessionSpec
from rollmesh.runtime.errors import GroupSizeError, StoreAwayError
from rollmesh.runtime.rpc import from_rpc_error
from rollmesh.v1 import gateway_pb2
from tests.gateway.live import LiveMesh
from tests.messages import close_of


async def test_a_later_run_may_give_a_group_another_size(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    async with LiveMesh(tmp_path, tokenizer_dir) as mesh:

        async def opened(at: int, size: int) -> gateway_pb2.CreateSessionResponse:
            return await mesh.stub.CreateSession(
                gateway_pb2.CreateSessionRequest(group_id="g", sample_index=at, group_size=size)
            )

        first = [await opened(at, 2) for at in range(2)]
        await mesh.start_gateway()  # which restores both
        for session in first:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await opened(0, 3)
            assert isinstance(from_rpc_error(refused.value), GroupSizeError)
            await mesh.stub.CloseSession(close_of(session))
        assert (await opened(0, 3)).session_id


@pytest.mark.parametrize("is_stored", [True, False])
async def test_a_journal_that_is_left_while_a_session_is_stored_keeps_no_size(
    tmp_path: Path, tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch, *, is_stored: bool
) -> None:
    storing, left = asyncio.Event(), asyncio.Event()

    async def run(_work: object) -> None:
        storing.set()
        await left.wait()
        if not is_stored:
            raise StoreAwayError("the server is away")

    def request(size: int) -> gateway_pb2.CreateSessionRequest:
        return gateway_pb2.CreateSessionRequest(group_id="g", group_size=size)

    async with LiveMesh(tmp_path, tokenizer_dir) as mesh, asyncio.TaskGroup() as tasks:
        held, groups, slow = mesh.gateway, GroupSizes(), copy(mesh.gateway.journal)
        monkeypatch.setattr(slow, "run", run)
        registry = Registry(held.deps, slow, held.outbox, tasks, groups)
        opening = asyncio.create_task(registry.create(request(2)))
        await storing.wait()
        registry.leave()
        left.set()
        with nullcontext() if is_stored else pytest.raises(StoreAwayError):
            await opening
        other = Registry(held.deps, held.journal, held.outbox, tasks, groups)
        assert (await other.create(request(3))).group_size == 3


def test_sizes_are_forgotten_with_the_last_open_session() -> None:
    def spec(size: int, **group: str) -> SessionSpec:
        return SessionSpec("s", 0, group_size=size, **({"group_id": "g"} | group))  # type: ignore[arg-type]

    sizes = GroupSizes()
    sizes.remove(spec(1, group_id="unknown"))
    for _ in range(2):
        sizes.check(spec(2))
        sizes.add(spec(2))
    sizes.remove(spec(2))
    with pytest.raises(GroupSizeError, match="run_id"):
        sizes.check(spec(3))
    sizes.check(spec(3, run_id="r"))
    sizes.add(spec(3, run_id="r"))
    with pytest.raises(GroupSizeError):
        sizes.check(spec(2, run_id="r"))
    sizes.remove(spec(2))
    sizes.check(spec(3))
    sizes.add(spec(1, group_id=""))
    sizes.check(spec(5, group_id=""))
