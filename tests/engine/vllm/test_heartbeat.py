import asyncio

import pytest

from rollmesh.engine.vllm import Heartbeat
from rollmesh.runtime import clock
from tests.waiting import until


async def test_a_call_that_is_not_answered_is_silence_until_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_ms, calls, may_answer = 5_000, 0, asyncio.Event()

    async def ping() -> None:
        nonlocal calls
        calls += 1
        await may_answer.wait()

    monkeypatch.setattr(clock, "monotonic_ms", lambda: now_ms)
    async with Heartbeat(ping) as heartbeat:
        heartbeat.look(needed=False)
        now_ms += 1_000
        assert heartbeat.silent_ms == 0
        for _ in range(3):
            heartbeat.look(needed=True)
            await asyncio.sleep(0)
            now_ms += 1_000
        assert (heartbeat.silent_ms, calls) == (3_000, 1)
        may_answer.set()
        await until(lambda: not heartbeat.silent_ms)
        heartbeat.look(needed=True)
        await asyncio.sleep(0)
        assert calls == 2


async def test_a_call_that_fails_is_an_answer() -> None:
    async def ping() -> None:
        raise ConnectionError

    async with Heartbeat(ping) as heartbeat:
        heartbeat.look(needed=True)
        await until(lambda: not heartbeat.silent_ms)
