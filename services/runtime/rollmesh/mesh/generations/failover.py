"""Runs a generation on one engine, and on others if that one is lost."""

import asyncio
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field
from typing import TypeAlias

from rollmesh.mesh.generations.checking import newest_version
from rollmesh.mesh.generations.continuing import ended, why_not_continued
from rollmesh.mesh.generations.engines import EngineClients
from rollmesh.mesh.generations.generation import Generation
from rollmesh.mesh.generations.sampled import Sampled
from rollmesh.mesh.leasing.leases import LeaseClient
from rollmesh.runtime import clock
from rollmesh.runtime.backoff import Backoff
from rollmesh.runtime.errors import (
    EngineDeadError,
    EngineFaultError,
    EngineLostError,
    GenerationAbortedError,
    ImageUnknownError,
    OverloadedError,
    RemoteError,
    RollmeshError,
    StartingError,
)
from rollmesh.v1 import engine_pb2, router_pb2, sampling_pb2

LoadImages: TypeAlias = Callable[[Sequence[str]], Awaitable[Mapping[str, bytes]]]
"""Returns the bytes of images by hash, as far as there are any."""
COLLECTED_TOKENS, MOST_COLLECTED_TOKENS = 16, 256
"""Tokens that an engine collects for a message if nobody waits for each, at least and at most; it
may lose as many."""
_ATTEMPTS = 8
"""Engines lost in a row, none of which brought a token that is kept, before a generation fails."""
_FIRST_RETRY_S, _LONGEST_RETRY_S = 0.05, 1.0
_RETRY_MS = 1000
_LAST_WORD_MS = 1000
"""Time before the limit at which a wait for engines ends, so that the error says why."""


@dataclass(slots=True, eq=False)
class Order:
    """A generation that is wanted, and how it is to be run."""

    generation: Generation
    """What was sampled; another one after the generation began anew."""
    session_id: str
    """Its generations stay on one engine as long as the balance allows."""
    max_chunk_tokens: int
    """As in StreamGenerateRequest."""
    min_chunk_tokens: int
    """As in StreamGenerateRequest."""
    lease_timeout_ms: int
    """Longest wait for a lease while an engine samples, or if there is none, milliseconds."""
    timeout_ms: int
    """Longest generation on one engine, and longest wait for engines that are paused, asleep or
    being updated, milliseconds."""
    is_sent: Callable[[], bool]
    """Returns whether a part was sent to somebody who cannot take it back."""
    group_id: str = ""
    prefixes: Sequence[int] = ()
    """Digests of the beginnings of its prompt, the shortest first."""
    images: Mapping[str, bytes] = field(default_factory=dict)
    """Bytes of the images of its prompt, by hash; those in the request have none."""
    load_images: LoadImages | None = None
    """Returns the bytes of others when an engine asks for them; None if `images` has all."""
    stop_reason: sampling_pb2.FinishReason.ValueType | None = None
    """Why no more is wanted; None while it goes on."""
    running: tuple[str, str] | None = None
    """Address of the engine that samples, and the id of the generation there."""
    waiting: asyncio.Timeout | None = None
    """Ends the wait for a lease."""
    began_ms: int = field(default_factory=clock.monotonic_ms)
    """When it was wanted, on the monotonic clock."""

    @property
    def is_complete(self) -> bool:
        """Whether it has ended, other than by an abort that nobody here asked for."""
        finish = self.generation.finish
        return finish is not None and (
            finish.reason != sampling_pb2.FINISH_REASON_ABORT or self.stop_reason is not None
        )

    def stop(self, reason: sampling_pb2.FinishReason.ValueType) -> None:
        """Notes that no more is wanted; ends a wait for a lease."""
        self.stop_reason = reason
        if self.waiting is not None and self.waiting.when() is None:
            self.waiting.reschedule(0)


class Failover:
    """Runs generations; holds no state of its own."""

    def __init__(
        self,
        leases: LeaseClient,
        engines: EngineClients,
        *,
        on_loss: Callable[[], None],
        on_migration: Callable[[], None],
    ) -> None:
        """Takes its dependencies.

        Args:
            leases: Where engines are leased.
            engines: Clients of the engines.
            on_loss: Called when a generation loses its engine.
            on_migration: Called when another engine continues what was sampled.
        """
        self._leases = leases
        self._engines = engines
        self._on_loss = on_loss
        self._on_migration = on_migration

    async def run(self, order: Order) -> AsyncGenerator[Sampled | None, None]:
        """Yields what is sampled until the generation is complete, whatever becomes of the engines.

        If an engine is lost, another one continues from the tokens that it sampled. Where that is
        not exact, the generation begins anew, unless `is_sent`: then None is yielded, and what was
        yielded before is void. The caller resets `stop_reason` if it set it because of that.

        Raises:
            EngineLostError: The engines were lost, and the generation cannot go on.
            GenerationAbortedError: An operator aborted it, and it cannot go on.
            RollmeshError: No engine can be leased, or one refused the request.
        """
        attempts = _Attempts()
        while True:
            generation, held = order.generation, order.generation.taken
            try:
                async with aclosing(self._attempt(order, attempts.lost)) as runs:
                    async for run in runs:
                        yield run
                if order.is_complete:
                    return
                error: RollmeshError = GenerationAbortedError(
                    "the generation was aborted; nothing was committed, try again"
                )
            except (OverloadedError, StartingError) as refusal:  # backpressure is not a failure
                await asyncio.sleep((refusal.retry_delay_ms or _RETRY_MS) / 1000)
                continue
            except (EngineDeadError, EngineFaultError, RemoteError) as loss:
                self._on_loss()
                error = _lost(loss, generation.engine_id)
            if not _goes_on(order, error):
                if order.is_sent():
                    raise error from error.__cause__
                order.generation = generation.anew()
                yield None
            elif order.is_complete:
                return
            await attempts.failed(
                generation.engine_id, error, in_vain=order.generation.taken <= held
            )

    async def stop(self, order: Order, reason: sampling_pb2.FinishReason.ValueType) -> None:
        """Ends a generation with what was sampled so far.

        Raises:
            RollmeshError: The engine could not be told.
        """
        order.stop(reason)
        if order.running is not None:
            await self._engines.abort(*order.running)

    async def _attempt(self, order: Order, lost: list[str]) -> AsyncGenerator[Sampled, None]:
        """Yields what one engine samples, until its end or the engine's.

        Raises:
            RollmeshError: The engine is lost, or refuses the request.
        """
        now_ms = clock.monotonic_ms()
        async with AsyncExitStack() as stack:
            lease = self._leases.lease(
                session_id=order.session_id,
                group_id=order.group_id,
                excluded=lost,
                prefixes=order.prefixes,
                deadline_ms=order.lease_timeout_ms,
                suspended_ms=max(order.began_ms + order.timeout_ms - _LAST_WORD_MS - now_ms, 0),
            )
            grant: router_pb2.LeaseGrant | None = None
            order.waiting = waiting = asyncio.timeout(None)
            try:
                async with waiting:
                    grant = await stack.enter_async_context(lease)
            except TimeoutError:
                if not waiting.expired():
                    raise
            finally:
                order.waiting = None
            if grant is None or order.stop_reason is not None:
                assert order.stop_reason is not None  # whoever ends the wait gives the reason
                order.generation.end(engine_pb2.GenerateFinish(reason=order.stop_reason))
                return
            runs = await stack.enter_async_context(aclosing(self._generate(order, grant)))
            async for run in runs:
                yield run

    async def _generate(
        self, order: Order, grant: router_pb2.LeaseGrant
    ) -> AsyncGenerator[Sampled, None]:
        generation, request_id = order.generation, uuid.uuid4().hex
        offered = self._leases.offered.of(generation.request.model)
        request = engine_pb2.StreamGenerateRequest(
            max_chunk_tokens=order.max_chunk_tokens, min_chunk_tokens=order.min_chunk_tokens
        )
        generation.begin(grant.engine_id, request_id, offered, request.generate)
        if generation.taken:
            self._on_migration()
        stream = self._responses(order, grant.address, request)
        order.running, aborted = (grant.address, request_id), False
        last: Sampled | None = None
        try:
            async with aclosing(stream) as responses:
                async for response in responses:
                    run = await self._take(generation, response)
                    if generation.finish is not None:
                        last = run  # if another message comes, nothing of the answer is right
                    elif len(run):
                        yield run
                    if order.stop_reason is not None and not aborted:
                        aborted = True  # the engine then finishes its stream, with version spans
                        await self._engines.abort(grant.address, request_id)
        except (EngineDeadError, RemoteError):
            if generation.finish is None:
                raise
        finally:
            order.running = None
        if last is not None and len(last):
            yield last
        if generation.finish is None:
            raise EngineDeadError(
                f"engine {grant.engine_id} ended its stream without a finish reason"
            )

    async def _responses(
        self, order: Order, address: str, request: engine_pb2.StreamGenerateRequest
    ) -> AsyncGenerator[engine_pb2.StreamGenerateResponse, None]:
        """Yields what an engine answers; images that it asks for are loaded and sent."""
        while True:
            stream = self._engines.generate(address, request, order.timeout_ms, order.images)
            try:
                async with aclosing(stream) as responses:
                    async for response in responses:
                        yield response
            except ImageUnknownError as error:  # before the first response
                wanted = [one for one in error.sha256s if one not in order.images]
                loaded = await order.load_images(wanted) if order.load_images and wanted else {}
                if not loaded:
                    raise
                order.images = {**order.images, **loaded}
            else:
                return

    async def _take(
        self, generation: Generation, response: engine_pb2.StreamGenerateResponse
    ) -> Sampled:
        """Takes a message of an engine; news of a push may come after the first of its tokens."""
        versions, model = self._leases.offered, generation.request.model
        offered, newest = versions.of(model), newest_version(response)
        if offered.newest is not None and newest > offered.newest:
            offered = await versions.until(model, newest)
        return generation.take(response, offered)


class _Attempts:
    """The engines that one generation has tried since it got its last token."""

    def __init__(self) -> None:
        self.lost: list[str] = []
        self._backoff = Backoff(_FIRST_RETRY_S, _LONGEST_RETRY_S)

    async def failed(self, engine_id: str, error: RollmeshError, *, in_vain: bool) -> None:
        """Notes that an engine was lost, or aborted, and waits before the next one.

        An engine that aborted did what an operator asked, so it may be tried again, however often.

        Raises:
            RollmeshError: The error, after the last attempt.
        """
        was_lost = not isinstance(error, GenerationAbortedError)
        if not in_vain:
            self.lost.clear()
            self._backoff.reset()
        elif was_lost and len(self.lost) == _ATTEMPTS - 1:
            raise error from error.__cause__
        else:
            await asyncio.sleep(self._backoff.next_s())
        if was_lost:
            self.lost.append(engine_id)


def _lost(loss: RollmeshError, engine_id: str) -> EngineLostError:
    did = "is wrong" if isinstance(loss, EngineFaultError) else "went away"
    error = EngineLostError(
        f"engine {engine_id} {did} in the middle of the turn; nothing was committed, try again",
        retry_delay_ms=_RETRY_MS,
    )
    error.__cause__ = loss
    return error


def _goes_on(order: Order, error: RollmeshError) -> bool:
    """Returns whether a generation goes on from its tokens after an engine was lost.

    If they are all of it, it is ended.
    """
    generation, cause = order.generation, error.__cause__
    spoilt = isinstance(cause, EngineFaultError) and cause.spoils_tokens and generation.fresh
    if spoilt or not generation.is_known:
        return False
    reason = order.stop_reason or ended(generation.request, generation.token_ids())
    if reason is not None:
        generation.end(engine_pb2.GenerateFinish(reason=reason))
        return True
    return not generation.taken or not why_not_continued(generation.request)
