"""Log-probabilities of given tokens under a model of the mesh, such as a teacher."""

import asyncio
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any, Protocol, TypeAlias, TypedDict, Unpack, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rollmesh.client.arguments import filled
from rollmesh.client.retries import retried
from rollmesh.client.sessions import Trajectory
from rollmesh.client.weights import WeightCalls, weights_of
from rollmesh.runtime import clock
from rollmesh.runtime.codec.arrays import Logprobs, pack_ids, unpack_ids, unpack_logprobs
from rollmesh.runtime.errors import (
    EngineFaultError,
    GenerationAbortedError,
    InvalidFieldError,
    NoEngineError,
    RollmeshError,
)
from rollmesh.runtime.rpc.channels import read_stream, request_metadata, stub_of
from rollmesh.v1 import engine_pb2, engine_pb2_grpc, router_pb2

_ENGINE = router_pb2.REPLICA_KIND_ENGINE
_CAN_SCORE = {router_pb2.EXCLUSION_REASON_UNSPECIFIED, router_pb2.EXCLUSION_REASON_MISFIT}
"""A tokenizer that does not fit a gateway is no obstacle: the caller gives ids."""
_LIST_AGE_MS = 1_000
_LOST_MS = 5_000
"""Time for which an engine that failed is asked last, milliseconds."""
_MOST_ID = 2**31 - 1


class _HasTrajectory(Protocol):
    """A row of a batch."""

    @property
    def trajectory(self) -> Trajectory:
        """Its trajectory."""
        ...


Tokens: TypeAlias = NDArray[np.integer[Any]] | Sequence[int] | Trajectory | _HasTrajectory
"""A sequence: its token ids, or a trajectory or a row that has them."""


class ScoreOptions(TypedDict, total=False):
    """Options of `Client.score`."""

    model: str
    """Name of the model. May be empty if the mesh has only one."""
    top_k: int
    """Number K of most likely ids to return at each position, at most 256. Default 0."""
    start: int | Sequence[int]
    """Index of the first token to score, or one for each sequence. Default 1: the first token of a
    sequence has no log-probability."""
    ids: ArrayLike
    """Ids to score at each position instead of the most likely ones, integers [N, K], or one such
    array for each sequence. -1 is no id. Rows before `start` do not count. Engines with the
    capability SCORE_GIVEN_IDS take them."""
    same_vocabulary_as: str
    """Name of a model, such as the policy. The call is refused unless the tokenizer is the same."""
    concurrency: int
    """Maximum number of sequences that are scored at a time. Default 32."""
    timeout_s: float
    """Longest time for one sequence, with its repetitions, seconds. Default 600."""


@dataclass(frozen=True, slots=True)
class Scores:
    """Log-probabilities at the N positions of a sequence, all under one version of a model.

    They are in nats, at temperature 1 and without truncation.
    """

    logprobs: Logprobs
    """float32 [N]: of each token. 0.0 before `start`."""
    top_ids: NDArray[np.int64]
    """int64 [N, K]: the most likely ids, in descending order, or the given ones. -1 before `start`,
    and where no id was given."""
    top_logprobs: Logprobs
    """float32 [N, K]: of those. Minus infinity where `top_ids` is -1."""
    start: int
    """Index of the first scored token."""
    policy_version: int
    """Version of the weights."""
    engine_id: str


class ScoreCalls(WeightCalls):
    """Has the engines of a model score tokens."""

    @overload
    async def score(  # type: ignore[overload-overlap]  # an array iterates over anything
        self, sequences: Tokens, **options: Unpack[ScoreOptions]
    ) -> Scores: ...

    @overload
    async def score(
        self, sequences: Iterable[Tokens], **options: Unpack[ScoreOptions]
    ) -> list[Scores]: ...

    async def score(
        self, sequences: Tokens | Iterable[Tokens], **options: Unpack[ScoreOptions]
    ) -> Scores | list[Scores]:
        """Returns the log-probabilities of a sequence, or of several in their order.

        Sequences are spread over the engines of the model, the least busy first. What an engine
        cannot finish, because it is lost or full or was told to abort, another one scores.

        Args:
            sequences: One sequence, or several.
            **options: As `ScoreOptions` says.

        Raises:
            InvalidFieldError: An argument is invalid, a sequence has images, or the tokenizers
                differ.
            RollmeshError: A sequence was not scored in time. A note names it.
        """
        if (concurrency := options.get("concurrency", 32)) < 1:
            raise InvalidFieldError("concurrency", f"is {concurrency}; give at least 1")
        if unknown := options.keys() - ScoreOptions.__annotations__.keys():
            raise TypeError(f"score() has no option {', '.join(sorted(unknown))}")
        is_one = _is_one(sequences)
        listed: list[Any] = [sequences] if is_one else list(sequences)  # type: ignore[arg-type]
        requests = _requests(listed, options, is_one=is_one)
        engines = _Engines(self, options.get("model", ""), options.get("same_vocabulary_as", ""))
        found: dict[int, Scores] = {}
        waiting = iter(enumerate(requests))

        async def work() -> None:
            for at, request in waiting:
                try:
                    found[at] = await self._score(request, engines, options.get("timeout_s", 600.0))
                except RollmeshError as error:
                    error.add_note(f"in sequences[{at}]")
                    raise

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(concurrency, len(requests))):
                    group.create_task(work())
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return found[0] if is_one else [found[at] for at in range(len(requests))]

    async def _score(
        self, request: engine_pb2.ScoreTokensRequest, engines: "_Engines", timeout_s: float
    ) -> Scores:
        """Has one engine after another score a sequence, until one did."""

        async def once(left_s: float) -> Scores:
            async with engines.least_busy() as engine:
                request.request_id, request.model = uuid.uuid4().hex, engine.model
                stub: engine_pb2_grpc.EngineServiceAsyncStub
                stub = stub_of(self._channel(engine.address), engine_pb2_grpc.EngineServiceStub)
                call = stub.ScoreTokens(request, timeout=left_s, metadata=request_metadata())
                async with aclosing(read_stream(call)) as parts:
                    return _read(request, [part async for part in parts], engine.replica_id)

        return await retried(once, timeout_s, GenerationAbortedError)


class _Engines:
    """The engines of a model that can score, and the sequences that one call has on each."""

    def __init__(self, client: WeightCalls, model: str, same_vocabulary_as: str) -> None:
        """Lists nothing yet."""
        self._client = client
        self._model = model
        self._same_as = same_vocabulary_as
        self._listing = asyncio.Lock()
        self._listed_ms: int | None = None
        self._found: Sequence[router_pb2.ReplicaHello] = ()
        self._running: Counter[str] = Counter()  # by address
        self._lost_ms: dict[str, int] = {}  # until when an engine is asked last

    @asynccontextmanager
    async def least_busy(self) -> AsyncIterator[router_pb2.ReplicaHello]:
        """Yields an engine for a sequence. If the block fails, others are asked first for 5 s.

        Raises:
            InvalidFieldError: The mesh has no such model, or the tokenizers differ.
            NoEngineError: None can score now.
        """
        now_ms = clock.monotonic_ms()
        async with self._listing:
            if self._listed_ms is None or now_ms - self._listed_ms >= _LIST_AGE_MS:
                self._take(await self._client.replicas())
                self._listed_ms = clock.monotonic_ms()

        def busy(one: router_pb2.ReplicaHello) -> tuple[bool, bool, float, str]:
            count = one.load.running + one.load.waiting + self._running[one.address]
            is_lost = self._lost_ms.get(one.address, 0) > now_ms
            # Callers that begin at the same time begin at different engines.
            return is_lost, one.load.paused, count / one.lease_capacity, uuid.uuid4().hex

        engine = min(self._found, key=busy)
        self._running[engine.address] += 1
        try:
            yield engine
        except RollmeshError:
            self._lost_ms[engine.address] = clock.monotonic_ms() + _LOST_MS
            raise
        finally:
            self._running[engine.address] -= 1

    def _take(self, listed: router_pb2.ListReplicasResponse) -> None:
        model = weights_of(listed, self._model).model
        hellos = [one.hello for one in listed.replicas if one.hello.kind == _ENGINE]
        engines = [one for one in hellos if one.model == model]
        if self._same_as:
            same_as = weights_of(listed, self._same_as, "same_vocabulary_as").model
            _check_vocabularies(engines, [one for one in hellos if one.model == same_as])
        why = {
            one.hello.replica_id: one.exclusion.explanation
            for one in listed.replicas
            if one.exclusion.reason not in _CAN_SCORE
        }
        self._found = [one for one in engines if one.replica_id not in why]
        if not self._found:
            said = "; ".join(f"{one.replica_id}: {why[one.replica_id]}" for one in engines)
            raise NoEngineError(
                f"no engine of {model!r} can score now ({said or 'none is there'}); try again",
                retry_delay_ms=_LIST_AGE_MS,
            )


def _check_vocabularies(
    engines: Sequence[router_pb2.ReplicaHello], others: Sequence[router_pb2.ReplicaHello]
) -> None:
    """Checks that engines have the tokenizer of the engines of another model.

    Sizes are compared only of engines without a tokenizer: models of one family fill up their
    vocabularies differently.

    Raises:
        InvalidFieldError: They have different ones.
        NoEngineError: The other model has no engine to compare with.
    """
    if not others:
        raise NoEngineError(
            "same_vocabulary_as: the model has no engine to compare with; try again",
            retry_delay_ms=_LIST_AGE_MS,
        )
    for engine, other in product(engines, others):
        if (mine := _vocabulary(engine)) != (its := _vocabulary(other)):
            raise InvalidFieldError(
                "same_vocabulary_as",
                f"engine {engine.replica_id} of {engine.model!r} has {mine}, and "
                f"{other.replica_id} of {other.model!r} has {its}; name a model with the same",
            )


def _vocabulary(engine: router_pb2.ReplicaHello) -> str:
    if engine.tokenizer_sha256:
        return f"the tokenizer {engine.tokenizer_sha256}"
    return f"no tokenizer and {engine.vocabulary_tokens} ids"


def _is_one(sequences: Any) -> bool:
    """Returns whether an argument is one sequence, not several."""
    if isinstance(sequences, list | tuple):
        return bool(sequences) and isinstance(sequences[0], int | np.integer)
    one_dimension = getattr(sequences, "ndim", 0) == 1
    return one_dimension or hasattr(sequences, "token_ids") or hasattr(sequences, "trajectory")


def _requests(
    sequences: Sequence[Any], options: ScoreOptions, *, is_one: bool
) -> list[engine_pb2.ScoreTokensRequest]:
    """Returns the requests for sequences, without request ids.

    Raises:
        InvalidFieldError: An argument is invalid. The error names it.
    """
    start, ids = options.get("start", 1), options.get("ids")
    starts = [start] * len(sequences) if isinstance(start, int) else list(start)
    given: list[Any] = [ids] * len(sequences) if is_one or ids is None else list(ids)  # type: ignore[arg-type]
    for name, values in (("start", starts), ("ids", given)):
        if len(values) != len(sequences):
            raise InvalidFieldError(
                name, f"has {len(values)} for {len(sequences)} sequences; give one for each"
            )
    return [
        _request(sequence, starts[at], given[at], options.get("top_k", 0), f"sequences[{at}]")
        for at, sequence in enumerate(sequences)
    ]


def _request(
    sequence: Any, start: int, ids: Any, top_k: int, field: str
) -> engine_pb2.ScoreTokensRequest:
    sequence = getattr(sequence, "trajectory", sequence)
    if getattr(sequence, "images", ()):
        raise InvalidFieldError(field, "has images, which are not scored; leave it out")
    token_ids = _packed(getattr(sequence, "token_ids", sequence), field, "[N]")
    request = filled(
        engine_pb2.ScoreTokensRequest, token_ids_u32le=token_ids, start=start, top_k=top_k
    )
    if ids is not None:
        rows = np.asarray(ids)
        if 4 * len(rows) != len(token_ids):
            raise InvalidFieldError("ids", f"has {len(rows)} rows for {field}; give one a token")
        request.ids_u32le = _packed(rows[max(start, 1) :], "ids", "[N, K]", least=-1)
    return request


def _packed(values: Any, field: str, shape: str, least: int = 0) -> bytes:
    found = np.asarray(values)
    fits = found.dtype.kind in "iu" and found.ndim == shape.count(",") + 1
    if not fits or (found.size and not least <= found.min() <= found.max() <= _MOST_ID):
        raise InvalidFieldError(field, f"is no array of ids; give integers {shape} from {least} on")
    return pack_ids(found.astype(np.uint32))


def _read(
    request: engine_pb2.ScoreTokensRequest,
    parts: Sequence[engine_pb2.ScoreTokensResponse],
    engine_id: str,
) -> Scores:
    """Reads the answer to a request.

    Raises:
        EngineFaultError: It does not fit the request.
    """
    tokens, start = len(request.token_ids_u32le) // 4, max(request.start, 1)
    count = tokens - start
    given = request.ids_u32le
    width = len(given) // 4 // count if given else request.top_k
    own = unpack_logprobs(b"".join(one.logprobs_f32le for one in parts), "logprobs_f32le")
    ids = unpack_ids(given or b"".join(one.top_ids_u32le for one in parts), "top_ids_u32le")
    of_ids = unpack_logprobs(
        b"".join(one.top_logprobs_f32le for one in parts), "top_logprobs_f32le"
    )
    versions = {one.policy_version for one in parts}
    sizes = (len(own), len(ids), len(of_ids), len(versions))
    if sizes != (count, count * width, count * width, 1):
        raise EngineFaultError(f"engine {engine_id} answered {sizes} for {count} tokens")
    logprobs = np.zeros(tokens, np.float32)
    top_ids = np.full((tokens, width), -1, np.int64)
    top_logprobs = np.full((tokens, width), -np.inf, np.float32)
    logprobs[start:] = own
    top_ids[start:] = ids.view(np.int32).reshape(count, width)  # the id that fills a row is -1
    top_logprobs[start:] = of_ids.reshape(count, width)
    return Scores(logprobs, top_ids, top_logprobs, start, versions.pop(), engine_id)
