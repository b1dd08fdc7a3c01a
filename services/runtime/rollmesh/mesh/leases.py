"""Acquires engine leases over a `Dispatch` stream to one of the routers.

A request waits in the router's queue, not here. When this process dies, the stream ends and the
router frees every lease it held. A request that is cancelled before the router answers is released:
it leaves the queue, or frees the slot that it was granted meanwhile.

A router may die, fall silent or restart while leases are held: the generations continue, and the
next stream states the leases and the engines of the sessions, to the same router or to another.
"""

import asyncio
import itertools
import logging
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from rollmesh.internal.v1 import leases_pb2, leases_pb2_grpc
from rollmesh.mesh.routers import STEADY_MS, Preference, addresses_of
from rollmesh.runtime import Background, Backoff, clock
from rollmesh.runtime.errors import (
    EngineDeadError,
    EngineFaultError,
    EnginesBusyError,
    NoEngineError,
    RemoteError,
    RollmeshError,
)
from rollmesh.runtime.rpc import from_status, open_channel, typed_errors
from rollmesh.runtime.telemetry import fields, tracing
from rollmesh.v1 import sampling_pb2

# The leases and placements of a gateway, to be stated to another router: plain state.

MOST_IDS = 1_024
"""Maximum number of leases and sessions in one message, as the contract has it."""


@dataclass(slots=True, eq=False)
class Holdings:
    """The leases of a gateway and the engines of its sessions."""

    leases: dict[str, leases_pb2.LeaseGrant] = field(default_factory=dict)
    """Grants by lease id."""
    sessions: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Engine id and group id by session id. The group may be empty."""

    def granted(
        self, lease_id: str, grant: leases_pb2.LeaseGrant, acquire: leases_pb2.AcquireLease
    ) -> None:
        """Notes a lease. Its session is on its engine from now on."""
        self.leases[lease_id] = grant
        _, former_group = self.sessions.get(acquire.session_id, ("", ""))
        self.sessions[acquire.session_id] = grant.engine_id, acquire.group_id or former_group

    def addresses(self, engine_id: str) -> set[str]:
        """Returns the addresses of an engine on which leases are held."""
        return {one.address for one in self.leases.values() if one.engine_id == engine_id}


class Restating:
    """States the holdings to one router, a bounded number of them in each message.

    Leases come before sessions: they say how full the engines are. Holdings that end meanwhile are
    left out.
    """

    def __init__(self, holdings: Holdings) -> None:
        self._held = holdings
        self._leases = list(holdings.leases)
        self._sessions = dict.fromkeys(holdings.sessions)

    def next(self) -> leases_pb2.Restatement | None:
        """Returns the next message. None if all is stated."""
        if self._leases:
            lease_ids, self._leases = self._leases[:MOST_IDS], self._leases[MOST_IDS:]
            return self._statement(lease_ids, [])
        if self._sessions:
            count = min(len(self._sessions), MOST_IDS)
            return self._statement([], [self._sessions.popitem()[0] for _ in range(count)])
        return None

    def before(self, session_id: str) -> leases_pb2.Restatement | None:
        """Returns the message that a request of a session must follow. None if it was sent."""
        if session_id not in self._sessions:
            return None
        del self._sessions[session_id]
        return self._statement([], [session_id])

    def _statement(
        self, lease_ids: Iterable[str], session_ids: Iterable[str]
    ) -> leases_pb2.Restatement:
        engines: defaultdict[str, leases_pb2.EngineHoldings]
        engines = defaultdict(leases_pb2.EngineHoldings)
        for lease_id in lease_ids:
            if (grant := self._held.leases.get(lease_id)) is not None:
                engines[grant.engine_id].lease_ids.append(lease_id)
                engines[grant.engine_id].adapters.append(grant.adapter.name)
        for session_id in session_ids:
            if session_id in self._held.sessions:
                engine_id, group_id = self._held.sessions[session_id]
                engines[engine_id].sessions.add(session_id=session_id, group_id=group_id)
        for engine_id, one in engines.items():
            one.engine_id = engine_id
        return leases_pb2.Restatement(engines=engines.values())


_log = logging.getLogger(__name__)
TICK_S = 0.125
"""Time between two ticks of a link, seconds."""
PATIENCE, LONG_PATIENCE = 4, 80
"""Ticks for which a ping may stay unanswered: at first, and at most."""
_WAITING, _IDLE = 2, 8
"""Ticks of silence before a ping, while a request is unanswered and otherwise."""
_TRUSTED = 240
"""Ticks after which a router that was silent once is trusted again: half a minute."""
_MOST_OUTGOING = 65_536
_RELEASE_S = 0.002
"""Time for which a release waits to share a message with the next acquire, seconds."""
_FIRST_RETRY_S, _LONGEST_RETRY_S = 0.05, 0.5
_WELCOME_S = 5.0


class Link:
    """A gateway's `Dispatch` stream to one router, also while another router is used.

    It is opened again whenever it ends. A router may be silent although its connection is open: its
    host has lost power, or its process is stopped. While a request is unanswered the router is
    pinged after 250 ms of silence, otherwise after a second, and it has 500 ms to answer. So a busy
    gateway sends no pings, and leaves a silent router within a second of the first request that it
    does not answer. Ticks are counted instead of time: when this process stalls, the router's
    messages are read before the next tick.
    """

    def __init__(self, address: str, patience: int, client: "LeaseClient") -> None:
        """Takes the router's `host:port`, and the client that gives the hello and hears the router.

        `patience` is the number of ticks for which a ping may stay unanswered.
        """
        self.address = address
        self.is_up = False
        """Whether the router has welcomed the stream."""
        self.releases: list[leases_pb2.ReleaseLease] = []
        """Those that wait to share a message."""
        self.restating: Restating | None = None
        """The rest of the statement of the holdings. None if it is complete."""
        self._patience = self._first_patience = patience
        self._client = client
        self._quiet = self._up_ticks = 0  # ticks since the last message, and since the welcome
        self._is_pinged = False
        self._scope: asyncio.Timeout | None = None
        self._messages: asyncio.Queue[leases_pb2.DispatchRequest | None] = asyncio.Queue(1)

    async def run(self) -> None:
        """Keeps the stream open, forever."""
        backoff = Backoff(_FIRST_RETRY_S, _LONGEST_RETRY_S)
        while True:
            messages: asyncio.Queue[leases_pb2.DispatchRequest | None]
            self._messages = messages = asyncio.Queue(_MOST_OUTGOING)
            self.releases, self.restating = [], None
            # A new channel each time: gRPC would share a connection that may be half open.
            async with open_channel(self.address, own_connection=True) as channel:
                requests = self._requests(messages)
                call = leases_pb2_grpc.LeaseServiceStub(channel).Dispatch(requests)
                try:
                    async with asyncio.timeout(_WELCOME_S) as self._scope:
                        with typed_errors(call):
                            async for response in call:
                                self._quiet, self._is_pinged = 0, False
                                if not response.HasField("welcome"):
                                    self._client.answered(self, response)
                                elif not self._scope.expired():
                                    backoff.reset()
                                    self._scope.reschedule(None)
                                    self._up_ticks, self.is_up = 0, True
                                    self._client.changed(self)
                except (RollmeshError, ConnectionError, TimeoutError) as error:
                    reason = str(error) or "it was left, or does not answer"
                    text = fields(router=self.address, error=reason)
                    _log.info("router unreachable", extra=text)
                finally:
                    call.cancel()
                    with suppress(asyncio.QueueFull):
                        messages.put_nowait(None)  # so that the call's own task can finish
                    self._down()
            await asyncio.sleep(backoff.next_s())

    def tick(self, *, is_waiting: bool) -> None:
        """Counts a tick: pings the router if it is quiet, and leaves it if it is silent."""
        if not self.is_up:
            return
        self._up_ticks += 1
        if self._up_ticks == _TRUSTED:
            self._patience = self._first_patience
        self._quiet += 1
        is_waiting = is_waiting or self.restating is not None
        if not self._is_pinged and self._quiet >= (_WAITING if is_waiting else _IDLE):
            self._quiet, self._is_pinged = 0, True
            self.try_to_send(leases_pb2.DispatchRequest(ping=leases_pb2.DispatchPing()))
        elif self._is_pinged and self._quiet >= self._patience:
            _log.warning("router silent", extra=fields(router=self.address))
            # An overloaded router would suffer from gateways that leave and return.
            self._patience = min(2 * self._patience, LONG_PATIENCE)
            self.leave()

    def leave(self) -> None:
        """Ends the stream, so that the router frees its leases. Another stream follows."""
        if self._scope is not None:
            self._scope.reschedule(asyncio.get_running_loop().time())
        self._down()

    def send(self, message: leases_pb2.DispatchRequest) -> None:
        """Sends a message, with the releases that wait for one.

        Raises:
            asyncio.QueueFull: The router reads too slowly.
        """
        message.releases.extend(self.releases)
        self._messages.put_nowait(message)
        self.releases.clear()

    def try_to_send(self, message: leases_pb2.DispatchRequest) -> None:
        """Sends a message, unless the router reads too slowly."""
        with suppress(asyncio.QueueFull):
            self.send(message)

    def flush(self) -> None:
        """Sends the releases that wait."""
        if self.is_up and self.releases:  # else they were sent with another message
            try:
                self.send(leases_pb2.DispatchRequest())
            except asyncio.QueueFull:
                asyncio.get_running_loop().call_later(_RELEASE_S, self.flush)

    async def _requests(
        self, messages: "asyncio.Queue[leases_pb2.DispatchRequest | None]"
    ) -> AsyncIterator[leases_pb2.DispatchRequest]:
        """Yields the messages of a stream.

        Restatements are made as the router reads them, with other messages in between, which do not
        wait for 100,000 sessions. A request for a lease comes after the statement of its session.
        """
        yield leases_pb2.DispatchRequest(hello=self._client.next_hello())
        while messages is self._messages:
            if self.restating is not None:
                stated = self.restating.next()
                if stated is None:
                    self.restating = None
                else:
                    yield leases_pb2.DispatchRequest(restate=stated)
                    if messages.empty():
                        continue
            if (message := await messages.get()) is None:
                return
            if self.restating is not None and message.HasField("acquire"):
                stated = self.restating.before(message.acquire.session_id)
                if stated is not None:
                    yield leases_pb2.DispatchRequest(restate=stated)
            yield message

    def _down(self) -> None:
        if self.is_up:
            self.is_up = False
            self._client.changed(self)


# The policy versions that a router has offered, by which an answer from the future is known.

_NEWS_S = 5.0  # a push may reach an engine before its news reach all gateways


class Offered(NamedTuple):
    """The policy versions that a router has offered to the engines of a model."""

    epoch: int = 0
    """Counts up when `newest` becomes known or unknown, and when it falls. For some other models,
    too."""
    newest: int | None = None
    """The highest of them. None if nothing was pushed, or no router is known."""


class OfferedVersions:
    """The policy versions that the routers have offered, by model.

    A push goes through one router, and the others hear of it later, so the highest version counts.
    """

    def __init__(self) -> None:
        self._models: dict[str, Offered] = {}  # without models of unknown versions
        self._epochs = itertools.count(1)
        self._lost_epoch = 0
        """Epoch of models with unknown versions."""
        self._said: dict[tuple[str, str], int] = {}  # by model and router
        self._adapters: dict[tuple[str, str], set[tuple[str, int]]] = {}  # likewise
        self._news = asyncio.Event()

    @property
    def models(self) -> int:
        """Number of models with known versions."""
        return len(self._models)

    def of(self, model: str) -> Offered:
        """Returns the versions offered to the engines of a model."""
        return self._models.get(model) or Offered(self._lost_epoch)

    def adapters(self, model: str) -> set[tuple[str, int]]:
        """Returns the adapter revisions of a model that routers retain: names and versions."""
        return {
            revision
            for (one, _), retained in self._adapters.items()
            for revision in retained
            if one == model
        }

    async def until_adapters(
        self,
        model: str,
        wanted: Iterable[tuple[str, int]],
        lost: Collection[tuple[str, int]] = (),
    ) -> set[tuple[str, int]]:
        """Waits for up to 5 s until adapter revisions are retained. Returns the retained revisions.

        Args:
            model: Name of the model.
            wanted: Names and versions. A version of 0 means any.
            lost: Revisions that are known to be dropped.
        """

        def are_retained() -> bool:
            retained = self.adapters(model).difference(lost)
            names = {name for name, _ in retained}
            return all(one in retained or (not one[1] and one[0] in names) for one in wanted)

        wanted = list(wanted)
        with suppress(TimeoutError):
            async with asyncio.timeout(_NEWS_S):
                while not are_retained():
                    await self._news.wait()
        return self.adapters(model).difference(lost)

    async def until(self, model: str, policy_version: int) -> Offered:
        """Waits for up to 5 s until a version is offered. Returns the versions offered then."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_NEWS_S):
                while (offered := self.of(model)).newest is not None:
                    if offered.newest >= policy_version:
                        break
                    await self._news.wait()
        return self.of(model)

    def take(self, router: str, weights: leases_pb2.OfferedWeights) -> None:
        """Takes news from the router of an address."""
        if weights.HasField("policy_version"):
            self._said[weights.model, router] = weights.policy_version
        else:
            self._said.pop((weights.model, router), None)
        retained = {(one.name, one.version) for one in weights.adapters}
        self._adapters[weights.model, router] = retained
        self._changed(weights.model)

    def lose(self, router: str) -> None:
        """Notes that a router went away."""
        for key in [one for one in self._adapters if one[1] == router]:
            del self._adapters[key]
        for model, one in list(self._said):
            if one == router:
                del self._said[model, one]
                self._changed(model)

    def _changed(self, model: str) -> None:
        said = (version for (one, _), version in self._said.items() if one == model)
        newest, before = max(said, default=None), self._models.get(model)
        if newest is None:
            if self._models.pop(model, None) is not None:
                self._lost_epoch = next(self._epochs)
        elif before is None or newest < (before.newest or 0):
            self._models[model] = Offered(next(self._epochs), newest)
        else:
            self._models[model] = Offered(before.epoch, newest)
        self._news.set()
        self._news = asyncio.Event()


_BUSY_MS = 1000
_ANSWER_MS = 1000  # between a deadline and the router's refusal
_MOST_WAIT_MS = 2**32 - 1
_LOST_CODES = {
    "UNAVAILABLE",
    "UNKNOWN",
    "INTERNAL",
}  # and not backpressure, a deadline or a refusal


class LeaseClient(Background):
    """The engine leases of one gateway. Leaving the context frees them."""

    def __init__(
        self,
        router: str,
        gateway_id: str,
        *,
        model: str = "",
        tokenizer_sha256: str = "",
        vocabulary_tokens: int = 0,
        steady_ms: int = STEADY_MS,
    ) -> None:
        """Identifies the gateway to the routers.

        Args:
            router: `host:port`, or several separated by commas: the first that is up is used.
            gateway_id: Id of the gateway.
            model: Name of the engines' model. Empty means the only model in the mesh.
            tokenizer_sha256: Digest of the tokenizer that the engines must have. Empty means any.
            vocabulary_tokens: Vocabulary size of the model, ids. 0 means any.
            steady_ms: Time for which a router must be up before it is returned to, milliseconds.
        """
        super().__init__()
        addresses = addresses_of(router)
        patience = PATIENCE if len(addresses) > 1 else LONG_PATIENCE // 2
        self._links = [Link(address, patience, self) for address in addresses]
        self._preference = Preference(len(addresses), steady_ms)
        self._active: Link | None = None
        self._holdings = Holdings()
        self._hello = leases_pb2.DispatchHello(
            gateway_id=gateway_id,
            model=model,
            tokenizer_sha256=tokenizer_sha256,
            vocabulary_tokens=vocabulary_tokens,
            instance_id=uuid.uuid4().hex,
        )
        self._ids = itertools.count(1)
        self._asked: dict[
            str, tuple[leases_pb2.AcquireLease, asyncio.Future[leases_pb2.DispatchResponse]]
        ] = {}
        """The requests that the router has not answered, by lease id."""
        self._connected = asyncio.Event()
        self.offered = OfferedVersions()
        """The policy versions that the router has offered."""
        self.on_silent: Callable[[str], None] = lambda _: None
        """Called with the address of an engine that is leased and has stopped reporting."""

    @asynccontextmanager
    async def lease(
        self,
        *,
        session_id: str,
        group_id: str = "",
        excluded: Sequence[str] = (),
        adapter: sampling_pb2.AdapterRef | None = None,
        deadline_ms: int,
        suspended_ms: int = 0,
    ) -> AsyncIterator[leases_pb2.LeaseGrant]:
        """Holds a lease on an engine while the block runs.

        How the block ends tells the router about the engine. An `EngineFaultError` takes it out of
        service. An `EngineDeadError`, or an error of the transport, counts as a loss. Several in a
        row open the engine's circuit. Other errors say nothing about it.

        Args:
            session_id: Id of the session.
            group_id: Id of its group. May be empty.
            excluded: Ids of engines that have failed this turn.
            adapter: Adapter revision that the engine must hold. None if the base model samples. A
                version of 0 means any: the grant names the newest one that the engine holds.
            deadline_ms: Longest wait, for a router and then in its queue, milliseconds.
            suspended_ms: Longest wait while engines are there and each is paused, asleep or being
                updated, milliseconds. `deadline_ms` applies otherwise.

        Raises:
            InvalidLeaseError: The mesh has several models and none was named.
            EnginesBusyError: Every engine was at capacity until the deadline, or the router's queue
                is full.
            NoEngineError: No engine, or no router, was available until the deadline.
            AdapterUnknownError: The router does not retain the adapter revision.
        """
        request = leases_pb2.AcquireLease(
            session_id=session_id,
            group_id=group_id,
            excluded_engine_ids=excluded,
            adapter=adapter,
            traceparent=tracing.carried(),
        )
        grant = await self._acquire(request, deadline_ms, suspended_ms)
        release = leases_pb2.ReleaseLease(lease_id=request.lease_id)
        try:
            yield grant
            release.outcome = leases_pb2.LEASE_OUTCOME_ANSWERED
        except EngineFaultError as error:
            release.engine_fault = error.message
            raise
        except (EngineDeadError, RemoteError) as error:
            if error.code in _LOST_CODES:
                release.outcome = leases_pb2.LEASE_OUTCOME_LOST
            raise
        finally:
            self._release(release)

    @property
    def router(self) -> str:
        """Address of the router in use. Empty if none can be reached."""
        return self._active.address if self._active is not None else ""

    def forget(self, session_id: str) -> None:
        """Tells the router that a session has ended. It forgets all when the stream ends."""
        self._holdings.sessions.pop(session_id, None)
        if self._active is not None and self._active.is_up:
            forget = leases_pb2.ForgetSession(session_id=session_id)
            self._active.try_to_send(leases_pb2.DispatchRequest(forget=forget))

    def _release(self, release: leases_pb2.ReleaseLease) -> None:
        """Releases a lease, with the next request or within 2 ms: a turn costs one message."""
        self._holdings.leases.pop(release.lease_id, None)
        link = self._active
        if link is None or not link.is_up:  # the router has freed it
            return
        if not link.releases:
            asyncio.get_running_loop().call_later(_RELEASE_S, link.flush)
        link.releases.append(release)
        if release.engine_fault:
            link.flush()  # at once, so that no other session gets that engine

    async def _acquire(
        self, request: leases_pb2.AcquireLease, deadline_ms: int, suspended_ms: int
    ) -> leases_pb2.LeaseGrant:
        """Waits for a router and in its queue. Asks again, by another id, if the router goes away.

        A wait that is longer than `deadline_ms` already, because no engine sampled, begins again at
        the next router.
        """
        deadline = clock.monotonic_ms() + deadline_ms
        last = deadline + max(suspended_ms - deadline_ms, 0)
        with suppress(TimeoutError):
            while (left_ms := deadline - clock.monotonic_ms()) > 0:
                if not self._connected.is_set():
                    async with asyncio.timeout(left_ms / 1000):
                        await self._connected.wait()
                if (link := self._active) is None or not link.is_up:
                    continue
                now = clock.monotonic_ms()
                request.lease_id = lease_id = str(next(self._ids))
                request.wait_ms = min(max(deadline - now, 1), _MOST_WAIT_MS)
                request.suspended_wait_ms = min(max(last - now, 1), _MOST_WAIT_MS)
                answer: asyncio.Future[leases_pb2.DispatchResponse]
                answer = asyncio.get_running_loop().create_future()
                self._asked[lease_id] = request, answer
                try:
                    async with asyncio.timeout((request.suspended_wait_ms + _ANSWER_MS) / 1000):
                        link.send(leases_pb2.DispatchRequest(acquire=request))
                        response = await answer
                except asyncio.QueueFull:
                    raise EnginesBusyError(
                        "the router has too many bookings; try again later", retry_delay_ms=_BUSY_MS
                    ) from None
                except (asyncio.CancelledError, TimeoutError):  # it frees the lease, or the wait
                    self._release(leases_pb2.ReleaseLease(lease_id=lease_id))
                    raise
                except ConnectionError:  # the router went away
                    now = clock.monotonic_ms()
                    if now > deadline:
                        deadline = min(now + deadline_ms, last)
                    continue
                finally:
                    del self._asked[lease_id]
                if response.HasField("grant"):
                    return response.grant
                refusal = from_status(response.refusal)
                if isinstance(refusal, (EnginesBusyError, NoEngineError)):
                    refusal = type(refusal)(
                        f"no lease on an engine: {refusal.message}",
                        retry_delay_ms=max(refusal.retry_delay_ms or 0, _BUSY_MS),
                    )
                raise refusal
        raise NoEngineError(
            f"no router could be reached within {deadline_ms} ms; try again",
            retry_delay_ms=_BUSY_MS,
        )

    async def _stay(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for link in self._links:
                tasks.create_task(link.run())
            while True:
                await asyncio.sleep(TICK_S)
                for link in self._links:
                    link.tick(is_waiting=link is self._active and bool(self._asked))
                if len(self._links) > 1:  # one may have been up for long enough to return to it
                    self._choose()

    def next_hello(self) -> leases_pb2.DispatchHello:
        """Returns the first message of another stream."""
        self._hello.stream_number += 1
        return self._hello

    def answered(self, link: Link, response: leases_pb2.DispatchResponse) -> None:
        """Takes the router's answer to a request, from which on a lease is held. Or news."""
        if response.HasField("silent_engine"):
            for address in self._holdings.addresses(response.silent_engine.engine_id):
                self.on_silent(address)
        if response.HasField("offered"):
            self.offered.take(link.address, response.offered)
        acquire, answer = self._asked.get(response.lease_id, (None, None))
        if link is not self._active or acquire is None or answer is None or answer.done():
            return
        if response.HasField("grant"):
            self._holdings.granted(response.lease_id, response.grant, acquire)
        answer.set_result(response)

    def changed(self, link: Link) -> None:
        """Takes note that a router has come up or gone down."""
        number = self._links.index(link)
        if not link.is_up:
            self._preference.down(number)
            self.offered.lose(link.address)
        else:
            self._preference.up(number, clock.monotonic_ms())
        self._choose()

    def _choose(self) -> None:
        """Uses another router if there is reason to. The leases are stated to it."""
        number = self._preference.choose(clock.monotonic_ms())
        link = None if number is None else self._links[number]
        if link is self._active:
            return
        former, self._active = self._active, link
        self._connected.clear()
        for _, answer in self._asked.values():  # they ask again
            if not answer.done():
                answer.set_exception(ConnectionError("the router went away"))
        if link is not None and link.is_up:
            _log.info(
                "router in use",
                extra=fields(
                    router=link.address,
                    leases=len(self._holdings.leases),
                    sessions=len(self._holdings.sessions),
                ),
            )
            link.restating = Restating(self._holdings)
            link.try_to_send(leases_pb2.DispatchRequest(ping=leases_pb2.DispatchPing()))  # wakes it
            self._connected.set()
        if former is not None and former.is_up:
            former.leave()  # it frees the leases of this gateway
