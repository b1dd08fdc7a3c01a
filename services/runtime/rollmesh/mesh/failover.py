"""Runs a generation on one engine, and on others if that one is lost."""

import asyncio
import logging
import uuid
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from weakref import WeakValueDictionary

from rollmesh.mesh.engines import Answer, EngineClients
from rollmesh.mesh.generation import Generation, Sampled, ended, newest_version, why_not_continued
from rollmesh.mesh.leases import LeaseClient, Offered
from rollmesh.runtime import Backoff, clock
from rollmesh.runtime.errors import (
    AdapterUnknownError,
    EngineDeadError,
    EngineFaultError,
    EngineLostError,
    EnginesBusyError,
    GenerationAbortedError,
    ImageUnknownError,
    OverloadedError,
    PoisonRequestError,
    RemoteError,
    RollmeshError,
    StartingError,
)
from rollmesh.runtime.telemetry import fields, genai, tracing
from rollmesh.v1 import engine_pb2, sampling_pb2

# Requests that engines die of, and the rule by which such a request is refused.
#
# An engine dies, or falls silent, after it took a request and before the request's first token. One
# such death says little: other requests were on the engine, and any process may die. So the first
# death changes nothing, and the request goes to another engine as every request does.
#
# After the second death the request is in quarantine: of all requests to a model in quarantine a
# process runs one at a time, until its first token. A request waits for its turn there after it has
# an engine, because a wait for engines may be long. A request whose third engine dies while it runs
# there is poison. It is refused, and so is every equal request for ten minutes. A first token, from
# whichever engine, clears the request.
#
# Requests are equal if they are so but for their session, id and seed, so the retry of an agent and
# the samples of a group count together.

_log = logging.getLogger(__name__)
_QUARANTINED, _POISON = 2, 3  # deaths
_KEPT_MS = 600_000
"""Time for which deaths and verdicts are remembered, milliseconds."""
_MOST_KEPT = 1_024
_RETRY_MS = 1_000


@dataclass(slots=True)
class _Record:
    """Deaths of engines that took equal requests."""

    deaths: list[tuple[str, int]] = field(default_factory=list)
    """Id of each engine that died, and the time, on the monotonic clock."""
    is_poison: bool = False


@dataclass(slots=True, eq=False)
class Suspicion:
    """One attempt to get the first token of a request."""

    request: engine_pb2.GenerateRequest
    began_ms: int = 0
    quarantine: asyncio.Lock | None = None
    """Held while the request runs alone. None if it does not."""
    is_alone: bool = False
    """Whether it ran alone in the end."""
    engine_id: str = ""
    """The engine that took the request. Empty until then."""
    is_answered: bool = False


class Suspects:
    """The requests that engines died of, as one process knows them."""

    def __init__(self) -> None:
        self._records: OrderedDict[bytes, _Record] = OrderedDict()  # the last changed last
        self._quarantines: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """Held by the request that runs in quarantine, by model."""

    def __len__(self) -> int:
        return len(self._records)

    @contextmanager
    def attempt(self, request: engine_pb2.GenerateRequest) -> Iterator[Suspicion]:
        """Runs one attempt at a request.

        The caller calls `isolate` when it has a lease, sets `engine_id` when the engine has taken
        the request, and calls `answered` at the first token.

        Raises:
            PoisonRequestError: The request is poison.
        """
        if self._records:
            self._deaths(request)  # refuses it if it is poison
        attempt = Suspicion(request)
        try:
            yield attempt
        except (EngineDeadError, EngineFaultError, RemoteError) as error:
            is_lie = isinstance(error, EngineFaultError) and error.spoils_tokens
            is_refusal = isinstance(error, RemoteError) and error.code != "UNAVAILABLE"
            is_lost = not (is_lie or is_refusal)  # it died or fell silent
            if attempt.engine_id and not attempt.is_answered and is_lost:
                self._died(attempt, error)
            raise
        finally:
            if attempt.quarantine is not None:
                attempt.quarantine.release()

    async def isolate(self, attempt: Suspicion, within_ms: int) -> None:
        """Waits until the request of an attempt may run: alone, if it is in quarantine.

        Raises:
            PoisonRequestError: The request is poison, as another attempt may have shown meanwhile.
            EnginesBusyError: Other requests in quarantine ran for that long.
        """
        attempt.began_ms = clock.monotonic_ms()
        if not self._records or self._deaths(attempt.request) < _QUARANTINED:
            return
        quarantine = self._quarantines.setdefault(attempt.request.model, asyncio.Lock())
        try:
            async with asyncio.timeout(within_ms / 1000):
                await quarantine.acquire()
        except TimeoutError as error:
            raise EnginesBusyError(
                "engines died of this request and of others, which run one at a time until their "
                f"first tokens; its turn did not come within {within_ms} ms, try again",
                retry_delay_ms=_RETRY_MS,
            ) from error
        attempt.quarantine = quarantine
        attempt.is_alone = self._deaths(attempt.request) >= _QUARANTINED
        if not attempt.is_alone:  # it was cleared meanwhile
            quarantine.release()
            attempt.quarantine = None
        attempt.began_ms = clock.monotonic_ms()

    def answered(self, attempt: Suspicion) -> None:
        """Clears the request of an attempt, which got a token. Ends its turn in quarantine."""
        attempt.is_answered = True
        if self._records:
            self._records.pop(_digest(attempt.request), None)
        if attempt.quarantine is not None:
            attempt.quarantine.release()
            attempt.quarantine = None

    def _deaths(self, request: engine_pb2.GenerateRequest) -> int:
        """Returns how many engines died of a request.

        Raises:
            PoisonRequestError: The request is poison.
        """
        record = self._records.get(_digest(request))
        if record is None or clock.monotonic_ms() - record.deaths[-1][1] > _KEPT_MS:
            return 0
        if record.is_poison:
            raise _refusal(record)
        return len(record.deaths)

    def _died(self, attempt: Suspicion, error: RollmeshError) -> None:
        """Notes that the engine of an attempt died.

        Raises:
            PoisonRequestError: The request is poison from now on.
        """
        key, now_ms = _digest(attempt.request), clock.monotonic_ms()
        record = self._records.get(key)
        if record is None or now_ms - record.deaths[-1][1] > _KEPT_MS:
            record = self._records[key] = _Record()
        self._records.move_to_end(key)
        if any(
            engine_id == attempt.engine_id and attempt.began_ms <= at_ms
            for engine_id, at_ms in record.deaths
        ):
            return  # an equal request on that engine has counted it
        record.deaths.append((attempt.engine_id, now_ms))
        while len(self._records) > _MOST_KEPT:
            self._records.popitem(last=False)
        if attempt.is_alone and len(record.deaths) >= _POISON:
            record.is_poison = True
            engines = ", ".join(engine_id for engine_id, _ in record.deaths)
            _log.error(
                "request refused: engines die of it",
                extra=fields(session_id=attempt.request.session_id, engines=engines),
            )
            raise _refusal(record) from error


def _digest(request: engine_pb2.GenerateRequest) -> bytes:
    asked = engine_pb2.GenerateRequest()
    asked.CopyFrom(request)
    asked.ClearField("session_id")
    asked.ClearField("request_id")
    asked.sampling.ClearField("seed")
    return sha256(asked.SerializeToString(deterministic=True)).digest()


def _refusal(record: _Record) -> PoisonRequestError:
    engines = ", ".join(engine_id for engine_id, _ in record.deaths[-_POISON:])
    return PoisonRequestError(
        f"{len(record.deaths)} engines died or fell silent before the first token of this request "
        f"({engines}), so it is refused for {_KEPT_MS // 60_000} minutes; send another request, "
        "and read the engines' logs for the cause",
        engines=engines,
    )


COLLECT_MS = 250
"""Time for which an engine collects tokens for a message if no client reads each, milliseconds.
The death of an engine loses as much."""
MOST_COLLECTED_TOKENS = 256
"""Maximum number of tokens in such a message."""
_ATTEMPTS = 8
"""Engines lost in a row, none of which brought a token that is kept, before a generation fails."""
_FIRST_RETRY_S, _LONGEST_RETRY_S = 0.05, 1.0
_LAST_WORD_MS = 1000
"""Time before the limit at which a wait for engines ends, so that the error says why."""


@dataclass(slots=True, eq=False)
class Order:
    """A generation that is wanted, and how it is to be run."""

    generation: Generation
    """The sampled tokens. Another object after the generation began anew."""
    session_id: str
    """Its generations stay on one engine as long as the balance allows."""
    max_chunk_tokens: int
    """As in StreamedGenerate."""
    collect_ms: int
    """As in StreamedGenerate."""
    lease_timeout_ms: int
    """Longest wait for a lease while an engine samples, or if there is none, milliseconds."""
    timeout_ms: int
    """Longest generation on one engine, and longest wait in all for engines that are paused,
    asleep, being updated or overloaded, and in quarantine, milliseconds."""
    is_sent: Callable[[], bool]
    """Returns whether a part was sent to a client that cannot take it back."""
    group_id: str = ""
    images: Mapping[str, bytes] = field(default_factory=dict)
    """Bytes of the images of its prompt, by hash. Those in the request have none."""
    load_images: Callable[[Sequence[str]], Awaitable[Mapping[str, bytes]]] | None = None
    """Returns the bytes of others when an engine asks for them. None if `images` has all."""
    stop_reason: sampling_pb2.FinishReason.ValueType | None = None
    """Why no more is wanted. None while it runs."""
    answer: Answer | None = None
    """The messages of the engine that samples. None before it does."""
    waiting: asyncio.Timeout | None = None
    """Ends the wait for a lease, and in quarantine."""
    began_ms: int = field(default_factory=clock.monotonic_ms)
    """When it was wanted, on the monotonic clock."""

    @property
    def left_ms(self) -> int:
        """Time for which it may still wait, milliseconds. After that there is time to say why."""
        most_ms = self.timeout_ms - min(_LAST_WORD_MS, self.timeout_ms // 2)
        return max(self.began_ms + most_ms - clock.monotonic_ms(), 0)

    def stop(self, reason: sampling_pb2.FinishReason.ValueType) -> None:
        """Ends the generation with the tokens sampled so far. Ends a wait for an engine."""
        if self.answer is not None and self.stop_reason is None:
            self.answer.abort()
        self.stop_reason = reason
        if self.waiting is not None and self.waiting.when() is None:
            self.waiting.reschedule(0)


class Failover:
    """Runs generations."""

    def __init__(
        self,
        leases: LeaseClient,
        engines: EngineClients,
        *,
        on_loss: Callable[[], None],
        on_migration: Callable[[], None],
    ) -> None:
        """Takes its dependencies."""
        self._leases = leases
        self._engines = engines
        self._on_loss = on_loss
        self._on_migration = on_migration
        self.suspects = Suspects()
        """The requests that engines died of."""

    async def run(self, order: Order) -> AsyncGenerator[Sampled | None, None]:
        """Yields sampled tokens until the generation is complete, also when engines are lost.

        If an engine is lost, another one continues from the tokens that it sampled. Where that is
        not exact, the generation begins anew, unless `is_sent`: then None is yielded, and the
        tokens before it are void. The caller resets `stop_reason` if it set it because of that.

        Raises:
            EngineLostError: The engines were lost, and the generation cannot continue.
            PoisonRequestError: Engines die of the request.
            GenerationAbortedError: An operator aborted it, and it cannot continue.
            EnginesBusyError: Every engine was busy until the limit.
            AdapterUnknownError: The router does not retain the adapter, or engines do not have it.
            RollmeshError: No engine can be leased, or one refused the request.
        """
        wanted = sampling_pb2.AdapterRef()  # version 0: the newest at the first engine
        wanted.CopyFrom(order.generation.request.adapter)
        lost: list[str] = []  # engines, since the last token that is kept
        backoff = Backoff(_FIRST_RETRY_S, _LONGEST_RETRY_S)
        while True:
            generation, held = order.generation, order.generation.taken
            order.answer = None
            try:
                async with aclosing(self._attempt(order, wanted, lost)) as runs:
                    async for run in runs:
                        yield run
                assert generation.finish is not None
                was_aborted = generation.finish.reason == sampling_pb2.FINISH_REASON_ABORT
                if order.stop_reason is not None or not was_aborted:
                    return
                error: RollmeshError = GenerationAbortedError(
                    "the generation was aborted; nothing was committed, try again"
                )
            except (OverloadedError, StartingError) as refusal:  # backpressure is not a failure
                delay_ms = refusal.retry_delay_ms or _RETRY_MS
                if delay_ms >= order.left_ms:
                    raise EnginesBusyError(
                        f"engines were busy or starting, and the turn's limit of "
                        f"{order.timeout_ms} ms is near; the last one said: {refusal.message}",
                        retry_delay_ms=delay_ms,
                    ) from refusal
                await asyncio.sleep(delay_ms / 1000)
                continue
            except AdapterUnknownError:
                refused = order.answer is None  # by the router
                if refused and generation.taken and not wanted.version and not order.is_sent():
                    order.generation = generation.anew()  # it need not have this revision
                    yield None
                    continue
                if refused or len(lost) >= _ATTEMPTS - 1:
                    raise
                lost.append(generation.engine_id)
                await asyncio.sleep(backoff.next_s())
                continue
            except PoisonRequestError as refusal:
                if refusal.__cause__ is not None:  # else no engine was asked
                    self._on_loss()
                raise
            except (EngineDeadError, EngineFaultError, RemoteError) as loss:
                self._on_loss()
                engine_id = generation.engine_id
                tracing.note(genai.ENGINE_LOST, {genai.ENGINE_ID: engine_id})
                did = "is wrong" if isinstance(loss, EngineFaultError) else "went away"
                error = EngineLostError(
                    f"engine {engine_id} {did} in the middle of the turn; nothing was committed, "
                    "try again",
                    retry_delay_ms=_RETRY_MS,
                )
                error.__cause__ = loss
            cause = error.__cause__
            is_lie = isinstance(cause, EngineFaultError) and cause.spoils_tokens
            goes_on = generation.is_known and not (is_lie and generation.fresh)
            if goes_on:
                reason = order.stop_reason or ended(generation.request, generation.token_ids())
                if reason is not None:  # its tokens are all of it
                    generation.finish = engine_pb2.GenerateFinish(reason=reason)
                    return
                goes_on = not generation.taken or not why_not_continued(generation.request)
            if not goes_on:
                if order.is_sent():
                    raise error from cause
                order.generation = generation.anew()
                yield None
            # An engine that aborted obeyed an operator, and may be tried again.
            was_lost = not isinstance(error, GenerationAbortedError)
            if order.generation.taken > held:
                lost.clear()
                backoff.reset()
            elif was_lost and len(lost) >= _ATTEMPTS - 1:
                raise error from error.__cause__
            else:
                await asyncio.sleep(backoff.next_s())
            if was_lost:
                lost.append(generation.engine_id)

    async def _attempt(
        self, order: Order, wanted: sampling_pb2.AdapterRef, lost: Sequence[str]
    ) -> AsyncGenerator[Sampled, None]:
        """Leases an engine, and yields its tokens until the generation has a finish.

        Raises:
            RollmeshError: No engine can be leased, the request is poison, or the engine is lost or
                refused the request.
        """
        generation, versions, suspects = order.generation, self._leases.offered, self.suspects
        asked, grant = generation.request, None
        has_adapter = asked.HasField("adapter")
        adapter = (asked.adapter if generation.taken else wanted) if has_adapter else None
        async with AsyncExitStack() as stack:
            suspect = stack.enter_context(suspects.attempt(asked))
            order.waiting = waiting = asyncio.timeout(None)
            try:
                # A stop in quarantine leaves the lease by an error: the engine answered nothing.
                async with waiting, AsyncExitStack() as holds:
                    lease = self._leases.lease(
                        session_id=order.session_id,
                        group_id=order.group_id,
                        excluded=lost,
                        adapter=adapter,
                        deadline_ms=order.lease_timeout_ms,
                        suspended_ms=order.left_ms,
                    )
                    grant = await holds.enter_async_context(lease)
                    await suspects.isolate(suspect, order.left_ms)
                    stack.push_async_exit(holds.pop_all())
            except TimeoutError:
                if not waiting.expired():
                    raise
            finally:
                order.waiting = None
            if order.stop_reason is not None or grant is None:
                assert order.stop_reason is not None  # the end of the wait has a reason
                generation.finish = engine_pb2.GenerateFinish(reason=order.stop_reason)
                return
            if grant.HasField("adapter"):
                asked.adapter.CopyFrom(grant.adapter)
            request = engine_pb2.StreamedGenerate(
                max_chunk_tokens=order.max_chunk_tokens, collect_ms=order.collect_ms
            )
            where, offered = grant.engine_id, versions.of(asked.model)
            generation.begin(where, uuid.uuid4().hex, offered, request.generate, grant.numerics)
            if generation.taken:
                self._on_migration()
                tracing.note(genai.MIGRATION, genai.moved(where, generation.taken))
            engine, image_requests = self._engines.of(grant.address), 0
            begun = engine.begin(request, order.timeout_ms, order.images)
            order.answer = stack.enter_context(begun)
            while generation.finish is None:
                answer = order.answer
                try:
                    response = await answer.next()
                    offered = Offered() if has_adapter else versions.of(asked.model)
                    if offered.newest is not None:
                        newest = newest_version(response)
                        if newest > offered.newest:  # news of a push may follow its first tokens
                            offered = await versions.until(asked.model, newest)
                    run = generation.take(response, offered)
                except ImageUnknownError as error:  # the engine is sent the request again with them
                    image_requests += 1
                    if generation.fresh or image_requests > len(request.generate.images):
                        problem = "the engine lost images that it was sent"
                        raise EngineFaultError(problem) from error
                    lacking = [one for one in error.sha256s if one not in order.images]
                    if lacking and order.load_images is not None:
                        order.images = {**order.images, **await order.load_images(lacking)}
                    engine = self._engines.of(grant.address)
                    engine.images.lost(error, order.images)
                    begun = engine.begin(request, order.timeout_ms, order.images)
                    order.answer = stack.enter_context(begun)
                    continue
                except EngineFaultError as error:
                    if error.spoils_tokens or generation.fresh or not answer.is_taken:
                        raise
                    # The request may be to blame for the silence: the engine is lost, not wrong.
                    raise EngineDeadError(error.message) from error
                finally:
                    if answer.is_taken:
                        suspect.engine_id = where
                if not suspect.is_answered:
                    suspects.answered(suspect)
                if len(run.token_ids):
                    yield run
