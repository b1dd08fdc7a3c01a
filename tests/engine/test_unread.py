"""A gateway that stops reading a generation: its slot is free for others after a time."""

from pathlib import Path
from typing import Any

import pytest

from rollmesh.runtime.errors import DeadlineError
from rollmesh.runtime.rpc import open_channel, typed_errors
from rollmesh.v1 import engine_pb2, engine_pb2_grpc
from tests.engine.engines import Engine
from tests.processes import running
from tests.waiting import until_says

TOKENS = 100_000
FLAGS = {"backend": "scripted", "lease_capacity": 1, "reply_tokens": TOKENS}
ENDED = "does not read the stream"


async def rest(call: Any) -> None:
    """Reads a call to its end."""
    with typed_errors():
        async for _ in call:
            pass


async def test_a_generation_that_nobody_reads_ends_and_frees_its_slot(tmp_path: Path) -> None:
    async with (
        running("engine", tmp_path, unread_timeout_ms=4_000, **FLAGS) as process,
        open_channel(process.address, own_connection=True) as unread,
        open_channel(process.address) as channel,
    ):
        engine = Engine(process, engine_pb2_grpc.EngineServiceStub(channel), Path())
        stub: engine_pb2_grpc.EngineServiceAsyncStub = engine_pb2_grpc.EngineServiceStub(unread)
        request = engine.request(TOKENS, 64, top_logprobs=20)
        begin = engine_pb2.BeginGeneration(number=1, request=request)
        call = stub.Generations(iter([engine_pb2.GenerationsRequest(begin=[begin])]))
        log = tmp_path / "engine.log"
        await engine.until(lambda info: info.running > 0 or ENDED in log.read_text())
        assert len((await engine.generate(engine.request(8, 4))).ids) == 8  # it waits for the slot
        info = await engine.info()
        assert (info.running, info.waiting) == (0, 0)
        await until_says(log, ENDED)
        with pytest.raises(DeadlineError, match="read nothing of the stream for 4 s"):
            await rest(call)
        assert len((await engine.generate(request)).ids) == TOKENS  # under the same id
