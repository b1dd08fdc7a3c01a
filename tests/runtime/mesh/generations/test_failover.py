"""One generation on engines that do what a test says."""

import asyncio
import zlib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from typing import Any, TypeAlias

import pytest

from rollmesh.internal.v1 import leases_pb2
from rollmesh.mesh import (
    Answer,
    Failover,
    Generation,
    OfferedVersions,
    Order,
    SentImages,
)
from rollmesh.runtime import clock
from rollmesh.runtime.errors import (
    AdapterUnknownError,
    EngineDeadError,
    EngineFaultError,
    EngineLostError,
    EnginesBusyError,
    GenerationAbortedError,
    ImageUnknownError,
    OverloadedError,
    PromptEmptyError,
    RollmeshError,
    StartingError,
)
from rollmesh.v1 import engine_pb2, sampling_pb2
from tests.runtime.mesh.generations.answers import PROMPT, message

Step: TypeAlias = engine_pb2.TokenChunk | RollmeshError
STOP, ABORT = sampling_pb2.FINISH_REASON_STOP, sampling_pb2.FINISH_REASON_ABORT


class Fleet:
    """Leases and clients of engines. Each lease is on the next one, which takes the next steps."""

    def __init__(self, *engines: Sequence[Step]) -> None:
        self.offered = OfferedVersions()
        self.requests: list[engine_pb2.GenerateRequest] = []
        self.asked: list[tuple[str, int, int, int]] = []
        """Address, `max_chunk_tokens`, `collect_ms` and time limit of each call."""
        self.sent = SentImages()
        self.suspended_ms: list[int] = []
        self.excluded: list[list[str]] = []
        self.adapters: list[sampling_pb2.AdapterRef | None] = []
        self.outcomes: list[str] = []
        self.aborted: list[str] = []
        self.losses = self.migrations = 0
        self.engines = list(engines)
        self.failover = Failover(
            self,  # type: ignore[arg-type]  # what is used of leases
            self,  # type: ignore[arg-type]  # what is used of engines
            on_loss=self.lose,
            on_migration=self.migrate,
        )
        self.suspects = self.failover.suspects
        self.gates: dict[str, asyncio.Event] = {}
        """By session: no engine can be leased for it before."""
        self.waiting: set[str] = set()
        """The sessions that came to their gates."""
        self.takes = False
        """Whether the engines say that they have a request."""

    @asynccontextmanager
    async def lease(
        self, *, session_id: str, excluded: Sequence[str], suspended_ms: int, **more: Any
    ) -> AsyncIterator[leases_pb2.LeaseGrant]:
        self.adapters.append(more["adapter"])
        if session_id in self.gates:
            self.waiting.add(session_id)
            await self.gates[session_id].wait()
        self.excluded.append(list(excluded))
        self.suspended_ms.append(suspended_ms)
        try:
            number = len(self.requests)
            grant = leases_pb2.LeaseGrant(engine_id=f"e{number}", address=f"a{number}")
            if (asked := more["adapter"]) is not None:
                grant.adapter.name, grant.adapter.version = asked.name, asked.version or 7
            yield grant
            self.outcomes.append("answered")
        except RollmeshError as error:
            self.outcomes.append(error.reason)
            raise

    def of(self, address: str) -> "Fleet":
        self.address = address
        return self

    @contextmanager
    def begin(
        self,
        request: engine_pb2.StreamedGenerate,
        timeout_ms: int,
        images: Mapping[str, bytes],
    ) -> Iterator[Answer]:
        given = engine_pb2.GenerateRequest()
        given.CopyFrom(request.generate)
        self.sent.fill(given.images, images)
        self.requests.append(given)
        self.asked.append((self.address, request.max_chunk_tokens, request.collect_ms, timeout_ms))
        answer = Answer(given.request_id, 0, lambda: self.aborted.append(given.request_id))
        answer.is_taken = self.takes
        tokens = 0
        for step in [*self.engines.pop(0), ENDED]:
            sent: Any = step
            if not isinstance(step, RollmeshError):
                sent = engine_pb2.TokenChunk()
                sent.CopyFrom(step)
                tokens += len(step.token_ids_u32le) // 4
                name, version = given.adapter.name, given.adapter.version or 1
                if name and sent.HasField("policy_version"):
                    sent.policy_version, sent.adapter = version, name
                if sent.HasField("finish"):
                    sent.finish.prompt_crc32 = zlib.crc32(given.token_ids_u32le)
                    if tokens:
                        spans = sent.finish.version_spans
                        spans.add(policy_version=version, end=tokens, adapter=name)
            answer.put(sent)
        yield answer

    @property
    def images(self) -> SentImages:
        return self.sent

    def lose(self) -> None:
        self.losses += 1

    def migrate(self) -> None:
        self.migrations += 1


def some(*ids: int, version: int = 1) -> engine_pb2.TokenChunk:
    return message(ids, spans=None, version=version)


def last(*ids: int, reason: int = STOP) -> engine_pb2.TokenChunk:
    return message(ids, spans=(), reason=reason)


def order_of(*, sent: Callable[[], bool] = lambda: False, **sampling: Any) -> Order:
    params = sampling_pb2.SamplingParams(max_tokens=6, **sampling)
    request = engine_pb2.GenerateRequest(token_ids_u32le=PROMPT, sampling=params, model="m")
    return Order(Generation(request, 100), "s", 16, 4, 1000, 2000, is_sent=sent)


async def run(
    fleet: Fleet, order: Order, stop_after: int = 0
) -> tuple[list[list[int] | None], list[int]]:
    """What is yielded, and what the generation is in the end."""
    seen: list[list[int] | None] = []
    async with aclosing(fleet.failover.run(order)) as runs:
        async for one in runs:
            if one is None:
                order.stop_reason = None
                seen.append(None)
                continue
            seen.append([int(id_) for id_ in one.token_ids])
            if stop_after and order.generation.taken >= stop_after:
                order.stop(STOP)
    return seen, [int(id_) for id_ in order.generation.token_ids()]


DEAD, ENDED = EngineDeadError("it died"), EngineDeadError("it ended without a finish")
LIE = some(500)
STUCK = EngineFaultError("it is stuck", spoils_tokens=False)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollmesh.mesh.failover._FIRST_RETRY_S", 0.001)
    monkeypatch.setattr("rollmesh.mesh.failover._LONGEST_RETRY_S", 0.001)


@pytest.mark.parametrize(
    ("engines", "yielded", "sampled"),
    [
        pytest.param([[some(1, 2), last(3)]], [[1, 2], [3]], [1, 2, 3], id="one engine"),
        pytest.param([[some(1, 2), DEAD], [last(3)]], [[1, 2], [3]], [1, 2, 3], id="continues"),
        pytest.param(
            [[some(1, 2), STUCK], [last(3)]], [[1, 2], [3]], [1, 2, 3], id="stuck, and continues"
        ),
        pytest.param([[some(1, 2)], [last(3)]], [[1, 2], [3]], [1, 2, 3], id="ends without end"),
        pytest.param([[DEAD], [last(3)]], [[3]], [3], id="dead at once"),
        pytest.param(
            [[some(1), LIE], [last(3)]], [[1], None, [3]], [3], id="a lie spoils what was before"
        ),
        pytest.param(
            [[some(1), DEAD], [LIE], [last(3)]], [[1], [3]], [1, 3], id="not what others sampled"
        ),
        pytest.param(
            [[some(1, 2, 3, 4, 5, 6), DEAD]],
            [[1, 2, 3, 4, 5, 6]],
            [1, 2, 3, 4, 5, 6],
            id="dead after the last token",
        ),
        pytest.param(
            [[some(1), last(2, reason=ABORT)], [last(3)]],
            [[1], [2], [3]],
            [1, 2, 3],
            id="aborted by somebody else",
        ),
    ],
)
async def test_outcomes_of_engines(
    engines: list[list[Step]], yielded: list[list[int] | None], sampled: list[int]
) -> None:
    fleet, order = Fleet(*engines), order_of()
    assert await run(fleet, order) == (yielded, sampled)
    assert order.generation.finish is not None
    assert not fleet.engines


async def test_an_engine_is_asked_for_the_remaining_tokens_and_lost_ones_are_left_out() -> None:
    fleet = Fleet([some(1, 2), DEAD], [DEAD], [last(3)])
    await run(fleet, order_of())
    assert [one.sampling.max_tokens for one in fleet.requests] == [6, 4, 4]
    assert [one.sampled_tokens for one in fleet.requests] == [0, 2, 2]
    assert fleet.excluded == [[], ["e0"], ["e0", "e1"]]
    assert fleet.outcomes == ["ENGINE_DEAD", "ENGINE_DEAD", "answered"]
    assert (fleet.losses, fleet.migrations) == (2, 2)
    assert len({one.request_id for one in fleet.requests}) == 3
    assert fleet.asked == [(f"a{number}", 16, 4, 2000) for number in range(3)]


async def test_images_that_an_engine_asks_for_are_loaded_once_and_sent() -> None:
    loaded: list[list[str]] = []

    async def load(wanted: Sequence[str]) -> dict[str, bytes]:
        loaded.append(list(wanted))
        return {one: one.encode() for one in wanted}

    asks = ImageUnknownError.of(["x", "y"], 2)
    fleet, order = Fleet([asks], [last(3)]), order_of()
    order.generation.request.images.extend(
        engine_pb2.PromptImage(sha256=one, length=1) for one in ("x", "y")
    )
    order.images, order.load_images = {"x": b"x"}, load
    assert await run(fleet, order) == ([[3]], [3])
    assert loaded == [["y"]]
    assert [[one.data for one in sent.images] for sent in fleet.requests] == [
        [b"x", b""],
        [b"x", b"y"],
    ]
    assert fleet.outcomes == ["answered"]


async def test_an_engine_that_asks_for_the_same_image_again_is_wrong() -> None:
    asks = ImageUnknownError.of(["x"], 1)
    fleet, order = Fleet([asks], [asks], [last(3)]), order_of()
    order.generation.request.images.add(sha256="x", length=1)
    order.images = {"x": b"x"}
    assert await run(fleet, order) == ([[3]], [3])
    assert fleet.outcomes == ["ENGINE_FAULT", "answered"]


async def test_images_that_nobody_has_are_the_callers() -> None:
    order = order_of()
    order.generation.request.images.add(sha256="x", length=1)
    with pytest.raises(ImageUnknownError):
        await run(Fleet([ImageUnknownError.of(["x"], 1)]), order)


def with_adapter(version: int = 7) -> Order:
    order = order_of()
    adapter = order.generation.request.adapter
    adapter.name, adapter.version = "math", version
    return order


async def test_a_generation_continues_with_the_same_adapter_revision() -> None:
    fleet, order = Fleet([some(3), DEAD], [last(4)]), with_adapter()
    assert await run(fleet, order) == ([[3], [4]], [3, 4])
    adapter = order.generation.request.adapter
    assert [one.adapter for one in fleet.requests] == fleet.adapters == [adapter] * 2
    spans = [(s.adapter, s.policy_version, s.engine_id) for s in order.generation.spans]
    assert spans == [("math", 7, "e0"), ("math", 7, "e1")]


async def test_an_engine_without_the_adapter_is_left_for_another_and_is_no_loss() -> None:
    unknown = AdapterUnknownError("not loaded")
    fleet, order = Fleet([unknown], [last(4)]), with_adapter()
    assert await run(fleet, order) == ([[4]], [4])
    assert (fleet.excluded, fleet.losses) == ([[], ["e0"]], 0)
    assert fleet.outcomes == ["ADAPTER_UNKNOWN", "answered"]


async def test_an_answer_goes_on_with_its_revision_where_an_engine_still_has_it() -> None:
    fleet, order = (
        Fleet([some(1, 2), DEAD], [AdapterUnknownError("unloaded")], [last(4)]),
        with_adapter(0),
    )
    assert await run(fleet, order) == ([[1, 2], [4]], [1, 2, 4])
    assert [one.version for one in fleet.adapters if one] == [0, 7, 7]


@pytest.mark.parametrize("is_sent", [False, True])
async def test_an_answer_begins_anew_where_its_revision_is_retained_no_longer(
    monkeypatch: pytest.MonkeyPatch, *, is_sent: bool
) -> None:
    fleet, order = Fleet([some(1, 2), DEAD], [last(4)]), with_adapter(0)
    order.is_sent = lambda: is_sent
    lease = fleet.lease

    @asynccontextmanager
    async def retaining_none(**asked: Any) -> AsyncIterator[leases_pb2.LeaseGrant]:
        if asked["adapter"].version:
            raise AdapterUnknownError("not retained")
        async with lease(**asked) as grant:
            yield grant

    monkeypatch.setattr(fleet, "lease", retaining_none)
    if is_sent:
        with pytest.raises(AdapterUnknownError):
            await run(fleet, order)
        assert len(fleet.requests) == 1
    else:
        assert await run(fleet, order) == ([[1, 2], None, [4]], [4])
        assert order.generation.restarted


async def test_an_adapter_that_no_engine_has_is_the_callers() -> None:
    fleet, order = Fleet(*[[AdapterUnknownError("not loaded")]] * 9), with_adapter()
    with pytest.raises(AdapterUnknownError):
        await run(fleet, order)
    assert len(fleet.requests) == 8


async def test_a_router_that_does_not_retain_the_adapter_ends_the_generation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet = Fleet()

    @asynccontextmanager
    async def refused(**_: Any) -> AsyncIterator[leases_pb2.LeaseGrant]:
        raise AdapterUnknownError("not retained")
        yield

    monkeypatch.setattr(fleet, "lease", refused)
    with pytest.raises(AdapterUnknownError, match="not retained"):
        await run(fleet, with_adapter())


async def test_engines_that_rest_are_waited_for_until_a_second_before_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(clock, "monotonic_ms", lambda: 15_000)
    for began_ms, left_ms in ((14_500, 500), (13_900, 0), (5_000, 0)):
        fleet, order = Fleet([last(1)]), order_of()
        order.began_ms = began_ms
        await run(fleet, order)
        assert fleet.suspended_ms == [left_ms]


async def test_a_version_that_no_router_has_offered_is_a_lie(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rollmesh.mesh.leases._NEWS_S", 0.001)
    fleet, order = Fleet([some(1, version=2)], [last(3)]), order_of()
    fleet.offered.take("r", leases_pb2.OfferedWeights(model="m", policy_version=1))
    assert await run(fleet, order) == ([[3]], [3])
    assert fleet.losses == 1


@pytest.mark.parametrize(
    ("error", "said"),
    [pytest.param(DEAD, "e0 went away", id="dead"), pytest.param(LIE, "e0 is wrong", id="lies")],
)
async def test_a_sent_answer_cannot_begin_anew(error: Step, said: str) -> None:
    fleet, order = Fleet([some(1), error]), order_of(sent=lambda: True, seed=1)
    with pytest.raises(EngineLostError, match=said):
        await run(fleet, order)
    assert len(fleet.requests) == 1


async def test_an_abort_of_what_cannot_be_continued_is_typed() -> None:
    with pytest.raises(GenerationAbortedError):
        await run(Fleet([some(1), last(reason=ABORT)]), order_of(sent=lambda: True, seed=1))


async def test_eight_attempts_in_vain_are_the_last() -> None:
    fleet = Fleet(*[[DEAD]] * 8)
    with pytest.raises(EngineLostError):
        await run(fleet, order_of())
    assert len(fleet.requests) == 8


async def test_a_token_begins_the_count_again() -> None:
    fleet = Fleet(*[[DEAD]] * 7, [some(1), DEAD], *[[DEAD]] * 6, [last(2)])
    assert await run(fleet, order_of()) == ([[1], [2]], [1, 2])


async def test_backpressure_is_no_attempt() -> None:
    busy = OverloadedError("slow down", retry_delay_ms=1)
    fleet = Fleet(*[[busy]] * 20, [last(1)])
    await run(fleet, order_of())
    assert (fleet.losses, fleet.excluded[-1]) == (0, [])


@pytest.mark.parametrize("refusal", [OverloadedError, StartingError])
async def test_backpressure_until_the_limit_is_said(refusal: type[RollmeshError]) -> None:
    busy = refusal("slow down", retry_delay_ms=10)
    fleet, order = Fleet(*[[busy]] * 200), order_of()
    order.began_ms -= 900  # of 2,000, and the last second is for the error
    with pytest.raises(EnginesBusyError, match=r"busy or .*2000 ms.* slow down") as caught:
        await run(fleet, order)
    assert caught.value.__cause__ is busy
    assert fleet.losses == 0


async def test_a_refusal_is_the_callers() -> None:
    with pytest.raises(PromptEmptyError):
        await run(Fleet([PromptEmptyError("token_ids_u32le", "is empty")]), order_of())


async def test_an_engine_is_told_once_that_no_more_is_wanted() -> None:
    fleet, order = Fleet([some(1), some(2), some(3), last(reason=ABORT)]), order_of()
    assert await run(fleet, order, stop_after=1) == ([[1], [2], [3]], [1, 2, 3])
    assert fleet.aborted == [fleet.requests[0].request_id]
    assert order.generation.finish is not None


async def test_a_generation_stopped_before_it_has_an_engine_asks_none() -> None:
    fleet, order = Fleet([last(1)]), order_of()
    order.stop(STOP)
    assert await run(fleet, order) == ([], [])
    assert not fleet.requests
    assert order.generation.finish == engine_pb2.GenerateFinish(reason=STOP)


async def test_an_engine_that_dies_when_no_more_is_wanted_is_not_replaced() -> None:
    fleet, order = Fleet([some(1), DEAD]), order_of()
    assert await run(fleet, order, stop_after=1) == ([[1]], [1])
    assert order.generation.finish is not None
    assert order.generation.finish.reason == STOP


async def test_an_earlier_proof_of_a_lie_is_not_enough() -> None:
    fleet, order = Fleet([some(1), LIE], [some(2), last(3)]), order_of()
    assert await run(fleet, order, stop_after=1) == ([[1], None, [2], [3]], [2, 3])


@pytest.mark.parametrize(
    ("engines", "restarted"),
    [
        pytest.param([[some(1), DEAD], [DEAD], [last(2)]], True, id="its tokens were dropped"),
        pytest.param([[DEAD], [last(2)]], False, id="no token had arrived"),
        pytest.param([[some(1), last(2)]], False, id="undisturbed"),
    ],
)
async def test_a_generation_says_whether_its_tokens_were_dropped(
    engines: list[list[Step]], *, restarted: bool
) -> None:
    order = order_of(seed=1)
    await run(Fleet(*engines), order)
    assert order.generation.restarted == restarted
