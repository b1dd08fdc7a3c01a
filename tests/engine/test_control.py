"""Control calls beside long operations, over real gRPC, on an engine with slow updates."""

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import aclosing
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from google.protobuf.message import Message
from safetensors.numpy import save_file

from rollmesh.engine import (
    Action,
    ControlState,
    EngineConfig,
    EngineService,
    EngineServicer,
    Held,
    ScoreInput,
    Scores,
    ScriptedBackend,
    Transfer,
)
from rollmesh.runtime.errors import (
    EngineAsleepError,
    InvalidFieldError,
    RollmeshError,
    StaleVersionError,
    SupersededError,
    WeightsDroppedError,
)
from rollmesh.runtime.rpc import open_channel, typed_errors
from rollmesh.v1 import engine_pb2, engine_pb2_grpc, sampling_pb2
from tests.controls import ABORT, ABORT_ALL, KEEP, RESUME, WAIT, WAKE_UP, abort, pause, sleep
from tests.engine.engines import PROMPT, Result, streamed
from tests.gateway.live import served
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="function")


class SlowUpdates(ScriptedBackend):
    """Loads weights when it is told to, and counts the tokens before and after."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.loading, self.loaded = asyncio.Event(), asyncio.Event()
        self.sampled: list[int] = []
        self.held_at = -1
        """Tokens of a request after which it waits for the update to begin."""
        self.sleeps = True
        self.scorings = 0

    async def _step(self, state: Any, most: int) -> None:
        if state.sampled == self.held_at:
            await self.loading.wait()
        await super()._step(state, most)

    async def load_weights(self, source: Path | Transfer, policy_version: int) -> None:
        self.sampled.append(self.count())
        self.loading.set()
        await self.loaded.wait()
        self.sampled.append(self.count())
        await super().load_weights(source, policy_version)

    async def score(self, request: ScoreInput) -> Scores | None:
        self.scorings += 1
        return await super().score(request)

    def check_sleep(self) -> None:
        if not self.sleeps:
            raise InvalidFieldError("level", "the engine cannot sleep")

    async def sleep(self, level: int) -> None:
        self.check_sleep()
        await super().sleep(level)

    def count(self) -> int:
        """Returns the tokens that running requests have."""
        return sum(request.sampled for request in self._requests.values())


class SlowEngine(EngineService):
    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.slow = self._backend = SlowUpdates(config)
        self._servicer = EngineServicer(self.slow, config.engine_id, config)

    @property
    def state(self) -> ControlState:
        return self._servicer.control.state


class World:
    """The engine, a stub for it, and calls that run."""

    def __init__(self, engine: SlowEngine, stub: Any, tasks: asyncio.TaskGroup) -> None:
        self.engine, self.backend = engine, engine.slow
        self.stub, self._tasks = stub, tasks

    def begin(self, work: Awaitable[Any]) -> "asyncio.Task[Any]":
        async def run() -> Any:
            """Returns the answer, or the error."""
            try:
                with typed_errors():
                    return await work
            except RollmeshError as error:
                return error

        return self._tasks.create_task(run())

    def pause(self, mode: Any = KEEP) -> "asyncio.Task[Any]":
        return self.begin(self.stub.ControlEngines(pause(mode)))

    def resume(self) -> "asyncio.Task[Any]":
        return self.begin(self.stub.ControlEngines(RESUME))

    def sleep(self, level: int = 1) -> "asyncio.Task[Any]":
        return self.begin(self.stub.ControlEngines(sleep(level)))

    def wake(self) -> "asyncio.Task[Any]":
        return self.begin(self.stub.ControlEngines(WAKE_UP))

    def update(
        self, folder: Path, mode: Any = KEEP, version: int = 1, push_id: str = ""
    ) -> "asyncio.Task[Any]":
        header = engine_pb2.UpdateWeightsHeader(
            policy_version=version, pause_mode=mode, checkpoint_dir=str(folder), push_id=push_id
        )
        return self.begin(
            self.stub.UpdateWeights(iter([engine_pb2.UpdateWeightsRequest(header=header)]))
        )

    def request(self, request_id: str, count: int) -> engine_pb2.StreamedGenerate:
        generate = engine_pb2.GenerateRequest(
            request_id=request_id, token_ids_u32le=PROMPT.tobytes()
        )
        generate.sampling.max_tokens = count
        return engine_pb2.StreamedGenerate(generate=generate, max_chunk_tokens=1)

    async def info(self) -> engine_pb2.GetInfoResponse:
        info: engine_pb2.GetInfoResponse = await self.stub.GetInfo(engine_pb2.GetInfoRequest())
        return info

    async def several_calls_later(self) -> None:
        """Gives the engine the time of some steps."""
        for _ in range(30):
            await self.info()

    def call(self, name: str) -> "asyncio.Task[Any]":
        name, _, mode = name.partition(" ")
        if name == "pause":
            return self.pause({"keep": KEEP, "wait": WAIT, "abort": ABORT}[mode])
        called: asyncio.Task[Any] = getattr(self, name)()
        return called


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose numbers the scripted engine does not read."""
    folder = tmp_path_factory.mktemp("checkpoint")
    save_file({"weight": np.zeros(8, np.float32)}, folder / "model.safetensors")
    return folder


@pytest_asyncio.fixture
async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    config = EngineConfig(
        backend="scripted", router="", port=0, vocabulary_tokens=365, reply_tokens=10_000,
        tokens_per_second=getattr(request, "param", 500),
    )  # fmt: skip
    engine = SlowEngine(config)
    async with (
        served(engine, config) as address,
        open_channel(address) as channel,
        asyncio.TaskGroup() as tasks,
    ):
        yield World(engine, engine_pb2_grpc.EngineServiceStub(channel), tasks)


async def collected(world: World, request_id: str, count: int, first: asyncio.Event) -> Result:
    result = Result()
    async with aclosing(streamed(world.stub, world.request(request_id, count))) as responses:
        async for response in responses:
            result.take(response)
            first.set()
    return result


CALLS = ["resume", "pause keep", "pause wait", "pause abort", "sleep", "wake"]


def after(calls: tuple[str, ...], *, paused: bool) -> tuple[bool, bool]:
    """Whether an engine is paused and sleeps after such calls."""
    sleeping = False
    for call in calls:
        paused = call.startswith("pause") or (paused and call != "resume")
        sleeping = call == "sleep" or (sleeping and call != "wake")
    return paused, sleeping


@pytest.mark.parametrize("was_paused", [False, True])
@pytest.mark.parametrize("calls", [*product(CALLS), *product(CALLS, CALLS)])
async def test_calls_in_an_update_change_only_later_tokens(
    world: World, checkpoint: Path, calls: tuple[str, ...], *, was_paused: bool
) -> None:
    first = asyncio.Event()
    world.backend.held_at = 20
    answer = world.begin(collected(world, "r", 40, first))
    await first.wait()
    if was_paused:
        await world.pause()
    update = world.update(checkpoint)
    await world.backend.loading.wait()
    made = []
    for call in calls:
        made.append(world.call(call))
        await world.several_calls_later()
    world.backend.loaded.set()
    await update
    *ends, last = await asyncio.gather(*made)
    assert not isinstance(last, RollmeshError)
    assert all(isinstance(end, SupersededError | Message) for end in ends)
    info = await world.info()
    assert (info.paused, info.sleeping) == after(calls, paused=was_paused)
    assert info.policy_version == 1
    await world.wake()
    await world.resume()
    result = await answer
    before, at_the_end = world.backend.sampled
    assert before == at_the_end  # no step while weights were loaded
    assert result.spans[0] == (0, 0, before)
    assert [version for version, _, _ in result.spans] in ([0, 1], [0])
    assert result.spans[-1][2] == len(result.ids)
    if "pause abort" not in calls and "sleep" not in calls:
        assert len(result.ids) == 40


@pytest.mark.parametrize("was_paused", [False, True])
async def test_a_sleep_that_an_engine_cannot_do_is_refused_in_an_update_and_leaves_it_alone(
    world: World, checkpoint: Path, *, was_paused: bool
) -> None:
    world.backend.sleeps = False
    if was_paused:
        await world.pause()
    update = world.update(checkpoint)
    await world.backend.loading.wait()
    sleep = world.sleep()
    await world.several_calls_later()
    world.backend.loaded.set()
    assert isinstance(await sleep, InvalidFieldError)
    answer = await update
    assert not isinstance(answer, RollmeshError), answer
    info = await world.info()
    assert (info.policy_version, info.paused, info.sleeping) == (1, was_paused, False)
    await world.resume()
    assert len((await collected(world, "r", 3, asyncio.Event())).ids) == 3


@pytest.mark.parametrize("world", [0, 500], indirect=True)
async def test_an_abort_lets_no_other_paused_request_sample(world: World) -> None:
    running = [(name, asyncio.Event()) for name in ("aborted", "other")]
    answers = [world.begin(collected(world, name, 9_000, first)) for name, first in running]
    for _, first in running:
        await first.wait()
    await world.pause()
    await world.several_calls_later()
    before = world.backend.count()
    for name in ("aborted", "unknown"):
        await world.stub.ControlEngines(abort(name))
    await world.several_calls_later()
    await world.stub.ControlEngines(ABORT_ALL)
    ends = await asyncio.gather(*answers)
    assert [len(end.ids) < 9_000 for end in ends] == [True, True]
    assert sum(len(end.ids) for end in ends) == before


async def test_a_resume_ends_a_pause_that_waits_for_requests(world: World) -> None:
    first = asyncio.Event()
    answer = world.begin(collected(world, "r", 400, first))
    await first.wait()
    pause = world.pause(WAIT)
    await world.several_calls_later()
    await world.resume()
    assert isinstance(await pause, SupersededError)
    assert not (await world.info()).paused
    assert len((await answer).ids) == 400


async def test_a_pause_outlasts_a_sleep(world: World) -> None:
    await world.pause()
    await world.sleep()
    await world.wake()
    info = await world.info()
    assert (info.paused, info.sleeping) == (True, False)
    waiting = world.begin(collected(world, "r", 3, asyncio.Event()))
    await world.several_calls_later()
    assert not waiting.done()
    await world.resume()
    assert len((await waiting).ids) == 3


async def test_a_resume_does_not_wake_a_sleeping_engine(world: World) -> None:
    await world.sleep()
    await world.resume()
    waiting = world.begin(collected(world, "r", 3, asyncio.Event()))
    await world.several_calls_later()
    assert not waiting.done()
    await world.wake()
    assert len((await waiting).ids) == 3


@pytest.mark.parametrize("mode", [KEEP, WAIT, ABORT])
async def test_a_pause_in_an_update_whose_caller_leaves_changes_nothing(
    world: World, checkpoint: Path, mode: Any
) -> None:
    update = world.update(checkpoint)
    await world.backend.loading.wait()
    pause = world.pause(mode)
    await until(lambda: world.engine.state.paused)
    pause.cancel()
    await until(lambda: not world.engine.state.paused)
    world.backend.loaded.set()
    await update
    assert len((await collected(world, "r", 3, asyncio.Event())).ids) == 3
    assert not (await world.info()).paused


async def test_a_pause_whose_caller_leaves_is_withdrawn_beside_a_later_call_of_another_kind(
    world: World, checkpoint: Path
) -> None:
    update = world.update(checkpoint)
    await world.backend.loading.wait()
    pause = world.pause()
    await until(lambda: world.engine.state.paused)
    wake = world.wake()
    await world.several_calls_later()
    pause.cancel()
    await until(lambda: not world.engine.state.paused)
    world.backend.loaded.set()
    await asyncio.gather(update, wake)
    assert len((await collected(world, "r", 3, asyncio.Event())).ids) == 3
    assert not (await world.info()).paused


async def test_a_second_pause_whose_caller_leaves_keeps_the_first(
    world: World, checkpoint: Path
) -> None:
    update = world.update(checkpoint)
    await world.backend.loading.wait()
    first = world.pause()
    await until(lambda: world.engine.state.paused)
    second = world.pause()
    await world.several_calls_later()
    second.cancel()
    await world.several_calls_later()
    world.backend.loaded.set()
    await asyncio.gather(update, first)
    assert (await world.info()).paused


async def test_an_update_that_waits_for_requests_is_given_up_by_its_caller(
    world: World, checkpoint: Path
) -> None:
    first = asyncio.Event()
    answer = world.begin(collected(world, "r", 400, first))
    await first.wait()
    update = world.update(checkpoint, WAIT)
    await world.several_calls_later()
    update.cancel()
    assert len((await collected(world, "s", 3, asyncio.Event())).ids) == 3
    assert (await answer).spans == [(0, 0, 400)]
    assert (await world.info()).policy_version == 0


async def test_an_update_whose_caller_leaves_in_the_load_is_known_by_its_push(
    world: World, checkpoint: Path
) -> None:
    """The router that sent it may have been restarted, and looks for its push at the engines."""
    await world.sleep(level=2)
    await world.wake()
    update = world.update(checkpoint, push_id="p")
    await world.backend.loading.wait()
    update.cancel()
    await world.several_calls_later()
    world.backend.loaded.set()
    assert isinstance(await world.update(checkpoint, push_id="p"), Message)
    assert len(world.backend.sampled) == 2  # it was loaded once
    assert world.engine.state.push_id == "p"
    assert (await collected(world, "r", 3, asyncio.Event())).spans == [(1, 0, 3)]


async def test_a_sleep_that_comes_while_an_update_is_received_refuses_the_update(
    world: World, checkpoint: Path
) -> None:
    world.backend.loaded.set()
    data = (checkpoint / "model.safetensors").read_bytes()
    header = engine_pb2.UpdateWeightsHeader(
        policy_version=1, pause_mode=KEEP, safetensors_bytes=len(data)
    )
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def parts() -> AsyncIterator[engine_pb2.UpdateWeightsRequest]:
        yield engine_pb2.UpdateWeightsRequest(header=header)
        yield engine_pb2.UpdateWeightsRequest(safetensors_chunk=data[:10])
        begun.set()
        await go_on.wait()
        yield engine_pb2.UpdateWeightsRequest(safetensors_chunk=data[10:])

    update = world.begin(world.stub.UpdateWeights(parts()))
    await begun.wait()
    await world.several_calls_later()
    await world.sleep()
    go_on.set()
    assert isinstance(await update, EngineAsleepError)
    assert (await world.info()).policy_version == 0


@pytest.mark.parametrize("version", [0, 1], ids=["of the same version", "of a new version"])
async def test_an_engine_whose_weights_were_dropped_samples_after_an_update(
    world: World, checkpoint: Path, version: int
) -> None:
    world.backend.loaded.set()
    first = asyncio.Event()
    answer = world.begin(collected(world, "r", 5_000, first))
    await first.wait()
    await world.sleep(level=2)
    assert (await answer).finish.reason == sampling_pb2.FINISH_REASON_ABORT
    early = [world.begin(collected(world, "early", 3, asyncio.Event()))]
    assert isinstance(await early[0], WeightsDroppedError)
    await world.wake()
    await world.pause()
    await world.resume()
    late = await world.begin(collected(world, "late", 3, asyncio.Event()))
    assert isinstance(late, WeightsDroppedError)
    assert "push weights" in late.message
    assert late.retry_delay_ms
    assert isinstance(await world.update(checkpoint / "none", version=version), RollmeshError)
    late = await world.begin(collected(world, "late", 3, asyncio.Event()))
    assert isinstance(late, WeightsDroppedError)  # a failed update brings none
    assert isinstance(await world.update(checkpoint, version=version), Message)
    result = await collected(world, "last", 3, asyncio.Event())
    assert result.spans == [(version, 0, 3)]
    assert isinstance(await world.update(checkpoint, version=version), StaleVersionError)


async def test_a_sleep_of_level_two_during_an_update_drops_its_weights(
    world: World, checkpoint: Path
) -> None:
    update = world.update(checkpoint)
    await world.backend.loading.wait()
    sleep = world.sleep(level=2)
    await until(lambda: world.engine.state.sleep_level)
    world.backend.loaded.set()
    await asyncio.gather(update, sleep)
    await world.wake()
    late = await world.begin(collected(world, "late", 3, asyncio.Event()))
    assert isinstance(late, WeightsDroppedError)


@pytest.mark.parametrize("world", [2], indirect=True, ids=["two tokens per second"])
@pytest.mark.parametrize("mode", [KEEP, WAIT], ids=["kept", "waited for"])
async def test_a_sequence_is_scored_anew_if_new_weights_came_in_the_middle(
    world: World, other_model_dir: Path, mode: Any
) -> None:
    """Whatever a backend does in such a moment, weights are not mixed."""
    request = engine_pb2.ScoreTokensRequest(
        request_id="s", token_ids_u32le=PROMPT.tobytes(), top_k=2
    )
    scoring = world.begin(anext(aiter(world.stub.ScoreTokens(request))))
    await until(lambda: world.backend.scorings)
    update = world.update(other_model_dir, mode)
    world.backend.loaded.set()
    await update
    scored = await scoring
    kept = mode == KEEP
    assert (scored.policy_version, world.backend.scorings) == ((1, 2) if kept else (0, 1))


@pytest.mark.parametrize("paused", [False, True])
async def test_a_hold_that_was_left_half_done_is_completed_or_undone(*, paused: bool) -> None:
    state = ControlState(paused=paused, held=Held.PARTLY)
    action = Action.HOLD if paused else Action.RELEASE
    assert state.next() is action
    state.did(action)
    assert state.next() is None
