"""The sessions whose placements a router keeps are bounded: the one used longest ago leaves."""

from pathlib import Path

import pytest

from rollmesh.engine.config import EngineConfig
from rollmesh.engine.service import EngineService
from rollmesh.router.config import RouterConfig
from rollmesh.router.generations import servicer
from rollmesh.router.generations.recent import RecentSessions
from rollmesh.router.service import RouterService
from rollmesh.runtime.rpc.channels import open_channel
from rollmesh.v1 import engine_pb2, engine_pb2_grpc
from tests.gateway.live import served
from tests.waiting import until


def test_the_session_that_was_used_longest_ago_leaves_for_a_new_one() -> None:
    sessions = RecentSessions(most=2)
    assert [sessions.use("m", name) for name in ("a", "b", "a")] == [None] * 3
    assert sessions.use("m", "c") == ("m", "b")
    assert sessions.use("m", "a") is None
    assert sessions.use("m", "b") == ("m", "c")


def test_sessions_of_two_models_are_two_sessions() -> None:
    sessions = RecentSessions(most=1)
    assert sessions.use("m", "a") is None
    assert sessions.use("n", "a") == ("m", "a")


async def test_a_router_keeps_so_many_placements_for_its_own_clients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servicer, "_MOST_SESSIONS", 2)
    config = RouterConfig(port=0, data_dir=tmp_path, grace_ms=0)
    router = RouterService(config)
    async with served(router, config) as address:
        engine = EngineConfig(port=0, router=address, engine_id="e", backend="scripted", grace_ms=0)
        async with served(EngineService(engine), engine), open_channel(address) as channel:
            stub = engine_pb2_grpc.EngineServiceStub(channel)
            await until(lambda: router.table.engines)
            for name in ("a", "b", "c", "d"):
                request = engine_pb2.GenerateRequest(
                    request_id=name, session_id=name, token_ids_u32le=bytes([5, 0, 0, 0])
                )
                await stub.Generate(request, timeout=60)
            await until(lambda: router.table.sessions == 2)
