"""`rollmesh scorer` as a process, and what becomes of functions that misbehave."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from rollmesh.runtime.config import ConfigError
from rollmesh.runtime.errors import DeadlineError, RemoteError, ScorerBusyError, ScorerFailedError
from rollmesh.runtime.rpc import open_channel, typed_errors
from rollmesh.scorer import ScorerConfig
from rollmesh.v1 import scorer_pb2, scorer_pb2_grpc, session_pb2
from tests.processes import ServiceProcess, run_refused, running
from tests.scorer.sessions import FUNCTION, REWARD, Hanging, unscored

TIMEOUT_S = 180


class Scorer:
    """A running scorer with one worker."""

    def __init__(self, process: ServiceProcess, stub: Any) -> None:
        self.process = process
        self._stub = stub

    async def score(
        self, session: session_pb2.SessionRecord, timeout_s: float = TIMEOUT_S
    ) -> session_pb2.SessionRewards:
        request = scorer_pb2.ScoreRequest(session=session)
        with typed_errors():
            return (await self._stub.Score(request, timeout=timeout_s)).rewards  # type: ignore[no-any-return]


@asynccontextmanager
async def scorer_at(folder: Path, **flags: object) -> AsyncIterator[Scorer]:
    settings = {"function": FUNCTION, "workers": 1, **flags}
    async with running("scorer", folder, **settings) as process:
        async with open_channel(process.address) as channel:
            yield Scorer(process, scorer_pb2_grpc.ScorerServiceStub(channel))


async def test_a_bad_session_fails_alone(tmp_path: Path) -> None:
    async with scorer_at(tmp_path, timeout_ms=2000) as scorer:
        for behave, said in [
            ("raise", r"ValueError\('no'\)"),
            ("rubbish", "it returned float; return SessionRewards"),
            ("crash", "its process died with exit code 3"),
            ("hang", "not done after 2 s; its process was killed"),
        ]:
            with pytest.raises(ScorerFailedError, match=f"^{FUNCTION}: .*{said}"):
                await scorer.score(unscored("bad", behave))
            assert (await scorer.score(unscored("good"))).reward == REWARD


async def test_a_caller_that_leaves_frees_its_worker(tmp_path: Path) -> None:
    hanging = Hanging(tmp_path)
    async with scorer_at(tmp_path) as scorer:
        call = asyncio.get_running_loop().create_task(scorer.score(hanging.session))
        await hanging.begun()
        call.cancel()
        await hanging.ended()
        assert (await scorer.score(unscored("good"))).reward == REWARD


async def test_more_calls_than_may_wait_are_rejected(tmp_path: Path) -> None:
    hanging = Hanging(tmp_path)
    async with scorer_at(tmp_path, max_waiting=0) as scorer, asyncio.TaskGroup() as group:
        call = group.create_task(scorer.score(hanging.session))
        await hanging.begun()
        with pytest.raises(ScorerBusyError) as busy:
            await scorer.score(unscored("good"))
        assert busy.value.retry_delay_ms
        call.cancel()
        await hanging.ended()


async def test_a_call_that_waits_is_scored_when_a_worker_is_free(tmp_path: Path) -> None:
    hanging = Hanging(tmp_path)
    async with scorer_at(tmp_path) as scorer, asyncio.TaskGroup() as group:
        call = group.create_task(scorer.score(hanging.session))
        await hanging.begun()
        with pytest.raises((DeadlineError, RemoteError)):
            await scorer.score(unscored("waits"), timeout_s=0.2)
        waiting = [group.create_task(scorer.score(unscored(name))) for name in "abc"]
        call.cancel()
        await hanging.ended()
        assert [(await one).reward for one in waiting] == [REWARD] * 3


async def test_no_worker_outlives_a_scorer_that_was_killed(tmp_path: Path) -> None:
    hanging = Hanging(tmp_path)
    async with scorer_at(tmp_path) as scorer:
        call = asyncio.get_running_loop().create_task(scorer.score(hanging.session))
        await hanging.begun()
        await scorer.process.kill()
        await hanging.ended()
        with pytest.raises(RemoteError):
            await call


async def test_a_stop_kills_what_exceeds_the_grace_period(tmp_path: Path) -> None:
    hanging = Hanging(tmp_path)
    async with scorer_at(tmp_path, grace_ms=100) as scorer:
        call = asyncio.get_running_loop().create_task(scorer.score(hanging.session))
        await hanging.begun()
        assert await scorer.process.terminate() == 0
        await hanging.ended()
        with pytest.raises(RemoteError):
            await call


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("tests.nothing:here", "ModuleNotFoundError"),
        ("tests.scorer.functions:nothing", "AttributeError"),
    ],
)
async def test_a_function_that_cannot_be_imported_stops_the_start(function: str, said: str) -> None:
    code, errors = await run_refused("scorer", function=function, port=0)
    assert code == 1
    last = errors.strip().splitlines()[-1]
    assert last.startswith(f"rollmesh scorer: {function}: ")
    assert said in last


async def test_a_scorer_without_a_function_names_the_command() -> None:
    code, errors = await run_refused("scorer", port=0)
    assert code == 2
    assert errors.startswith("rollmesh scorer: function: is empty; run rollmesh scorer package")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        pytest.param("function", "my_scorer", id="no function"),
        pytest.param("workers", 0, id="nobody scores"),
        pytest.param("timeout_ms", 0, id="no time"),
        pytest.param("start_timeout_ms", 0, id="no time to start"),
        pytest.param("max_waiting", -1, id="fewer than none waiting"),
    ],
)
def test_a_setting_that_no_scorer_can_work_with_is_named(name: str, value: object) -> None:
    settings: dict[str, Any] = {name: value}
    with pytest.raises(ConfigError, match=f"^{name}: "):
        ScorerConfig(**settings)
