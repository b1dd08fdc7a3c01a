"""Has teachers score the trajectories of consumers before they are delivered."""

import asyncio
import logging
from collections.abc import Callable
from weakref import WeakValueDictionary

from rollmesh.collector import metrics
from rollmesh.collector.log import Unit
from rollmesh.collector.store import Store, Unscored
from rollmesh.mesh.scores import ScoringEngines
from rollmesh.runtime.backoff import Backoff
from rollmesh.runtime.errors import (
    InvalidFieldError,
    RollmeshError,
    VocabularyMismatchError,
)
from rollmesh.runtime.telemetry.logs import fields
from rollmesh.v1 import collector_pb2 as pb, engine_pb2, trajectory_pb2

_log = logging.getLogger(__name__)
_AT_ONCE = 8
"""Sessions that a teacher scores for this process at the same time."""
_OF_SEQUENCE = ("token_ids_u32le", "start")
"""The fields of a refusal that another try would not change."""
_TIMEOUT_S = 60.0
_FIRST_RETRY_S, _LONGEST_RETRY_S = 0.2, 5.0


class Teachers:
    """The models of a mesh that score trajectories."""

    def __init__(self, store: Store, engines: ScoringEngines) -> None:
        """Takes an open store, and the engines of the mesh."""
        self._store = store
        self._engines = engines
        self._places: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        """By teacher."""
        self._locks: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()
        """By teacher and session. Consumers with the same teacher share its work."""

    async def score(self, consumer: pb.Consumer, unit: Unit, wanted: Callable[[], bool]) -> None:
        """Has the scores stored that a unit lacks. Waits while no engine of the teacher can score.

        A trajectory that the teacher cannot score is stored as refused.

        Args:
            consumer: The consumer's settings.
            unit: A unit that was fetched for it.
            wanted: Whether the consumer still waits for the unit. Otherwise the work ends early.

        Raises:
            InvalidFieldError: The consumer's settings do not fit the teacher: it has another
                tokenizer than the model of a session, or offers fewer ids at each position.
        """
        try:
            async with asyncio.TaskGroup() as group:
                for session_id in unit.session_ids:
                    group.create_task(self._session(consumer, unit, session_id, wanted))
        except* InvalidFieldError as errors:
            raise errors.exceptions[0] from None

    async def _session(
        self, consumer: pb.Consumer, unit: Unit, session_id: str, wanted: Callable[[], bool]
    ) -> None:
        key = (consumer.teacher.SerializeToString().hex(), session_id)
        lock = self._locks.setdefault(key, asyncio.Lock())
        place = self._places.setdefault(key[0], asyncio.Semaphore(_AT_ONCE))
        backoff = Backoff(_FIRST_RETRY_S, _LONGEST_RETRY_S)
        while wanted():
            try:
                async with lock, place:
                    for one in await self._store.unscored(consumer, unit, session_id):
                        scores = await self._scores(consumer.teacher, one)
                        await self._store.add_scores(consumer.teacher, one.key, scores)
                        metrics.TEACHER_SCORES.labels("scored" if scores else "refused").inc()
            except RollmeshError as error:
                if (refusal := _refusal(error)) is not None:
                    raise refusal from error
                # No engine now, an unknown model, or the store.
                metrics.TEACHER_SCORES.labels("failed").inc()
                _log.warning(
                    "trajectory not scored, will retry",
                    extra=fields(
                        teacher=consumer.teacher.model,
                        session_id=session_id,
                        reason=error.reason,
                        error=str(error),
                    ),
                )
                await asyncio.sleep(backoff.next_s())
            else:
                return

    async def _scores(self, teacher: pb.Teacher, one: Unscored) -> bytes:
        """Returns the scores of a trajectory as they are stored. Empty bytes are a refusal."""
        start = max(one.start, 1)
        request = engine_pb2.ScoreTokensRequest(
            token_ids_u32le=one.token_ids, start=start, top_k=teacher.top_k
        )
        try:
            found, _ = await self._engines.score(
                request, _TIMEOUT_S, model=teacher.model, same_vocabulary_as=one.model
            )
        except InvalidFieldError as error:
            if error.field not in _OF_SEQUENCE:
                raise
            _log.warning(
                "trajectory refused by its teacher",
                extra=fields(teacher=teacher.model, session_id=one.key[0], error=str(error)),
            )
            return b""
        scores = trajectory_pb2.TeacherScores(
            model=teacher.model,
            policy_version=found.policy_version,
            start=start,
            logprobs_f32le=found.logprobs_f32le,
            top_ids_u32le=found.top_ids_u32le,
            top_logprobs_f32le=found.top_logprobs_f32le,
        )
        return scores.SerializeToString()


def _refusal(error: RollmeshError) -> InvalidFieldError | None:
    """Returns the refusal of a consumer's settings. None if another try may succeed."""
    if isinstance(error, VocabularyMismatchError):
        return VocabularyMismatchError("consumer.teacher.model", error.message)
    if isinstance(error, InvalidFieldError) and error.field == "top_k":
        return InvalidFieldError("consumer.teacher.top_k", error.message.removeprefix("top_k: "))
    return None
