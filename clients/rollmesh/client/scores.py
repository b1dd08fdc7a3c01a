"""Log-probabilities of given tokens under a model of the mesh, such as a teacher."""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypedDict, Unpack, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rollmesh.client.arguments import filled
from rollmesh.client.connections import Connections
from rollmesh.runtime import version_of
from rollmesh.runtime.codec import Logprobs, TokenIds, pack_ids, unpack_ids, unpack_logprobs
from rollmesh.runtime.errors import InvalidFieldError, RollmeshError
from rollmesh.v1 import engine_pb2, trajectory_pb2

_MOST_ID = 2**31 - 1


class _HasTokens(Protocol):
    """A trajectory."""

    @property
    def token_ids(self) -> TokenIds:
        """uint32 [N]."""
        ...


class _HasTrajectory(Protocol):
    """A row of a batch."""

    @property
    def trajectory(self) -> _HasTokens:
        """Its trajectory."""
        ...


Tokens: TypeAlias = NDArray[np.integer[Any]] | Sequence[int] | _HasTokens | _HasTrajectory
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
    engine_id: str = ""
    """Empty in deliveries."""


class ScoreCalls(Connections):
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

        Sequences are spread over the engines of the model, the least busy first. If
        an engine is lost, full or told to abort, another one scores the rest.

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
        found: dict[int, Scores] = {}
        waiting = iter(enumerate(requests))

        async def work() -> None:
            for at, request in waiting:
                try:
                    answer = await self._scoring.score(
                        request,
                        options.get("timeout_s", 600.0),
                        model=options.get("model", ""),
                        same_vocabulary_as=options.get("same_vocabulary_as", ""),
                    )
                except RollmeshError as error:
                    error.add_note(f"in sequences[{at}]")
                    raise
                found[at] = read_scores(request, *answer)

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(concurrency, len(requests))):
                    group.create_task(work())
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return found[0] if is_one else [found[at] for at in range(len(requests))]


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


def read_scores(
    request: engine_pb2.ScoreTokensRequest,
    found: engine_pb2.ScoreTokensResponse | trajectory_pb2.TeacherScores,
    engine_id: str = "",
) -> Scores:
    """Reads the scores of a request's sequence.

    Raises:
        InvalidFieldError: The arrays do not fit the sequence.
    """
    tokens, start = len(request.token_ids_u32le) // 4, max(request.start, 1)
    logprobs = np.zeros(tokens, np.float32)
    own = unpack_logprobs(found.logprobs_f32le, "logprobs_f32le")
    ids = unpack_ids(request.ids_u32le or found.top_ids_u32le, "top_ids_u32le")
    of_ids = unpack_logprobs(found.top_logprobs_f32le, "top_logprobs_f32le")
    count = tokens - start
    if len(own) != count or len(ids) != len(of_ids) or len(ids) % count:
        raise InvalidFieldError("scores", f"do not fit {count} tokens; the answer is damaged")
    width = len(ids) // count
    top_ids = np.full((tokens, width), -1, np.int64)
    top_logprobs = np.full((tokens, width), -np.inf, np.float32)
    logprobs[start:] = own
    top_ids[start:] = ids.view(np.int32).reshape(count, width)  # the id that fills a row is -1
    top_logprobs[start:] = of_ids.reshape(count, width)
    return Scores(
        logprobs, top_ids, top_logprobs, start, version_of(found.policy_version), engine_id
    )
