"""The journals that a gateway serves, each with its sessions.

With a journal in a file there is one. Where several gateways share a database, a gateway opens
sessions in one journal, takes over journals of others, and may lose each of them.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

from rollmesh.gateway import metrics
from rollmesh.gateway.deps import Deps
from rollmesh.gateway.journal import Journal, closed_session, moved
from rollmesh.gateway.outbox import Outbox, is_undelivered
from rollmesh.gateway.registry import GroupSizes, Registry, close_idle
from rollmesh.gateway.session import SessionSpec
from rollmesh.gateway.starts import Start
from rollmesh.gateway.upstream import UpstreamDeps
from rollmesh.mesh import CollectorDirectory, journal_of
from rollmesh.runtime import clock
from rollmesh.runtime.errors import (
    AdapterUnknownError,
    RollmeshError,
    SessionUnknownError,
    ShuttingDownError,
    StoreFullError,
    TooManySessionsError,
)
from rollmesh.runtime.telemetry import fields
from rollmesh.v1 import gateway_admin_pb2, gateway_pb2, router_pb2, sampling_pb2

if TYPE_CHECKING:  # a journal in a file does not need the database's driver
    from rollmesh.gateway.postgres import PostgresJournals

_log = logging.getLogger(__name__)
_RETRY_MS = 1000
_LOOK_S = 0.02


async def _none_lost() -> set[tuple[str, int]]:
    return set()


class Gateway:
    """All sessions of this process. Everything here runs on the event loop.

    Invariant: a session is served by the registry of the journal that its id names, and a journal
    has at most one registry.
    """

    def __init__(
        self,
        deps: Deps | UpstreamDeps,
        collectors: CollectorDirectory,
        tasks: asyncio.TaskGroup,
    ) -> None:
        """Starts without journals."""
        self.deps = deps
        """What turns are run with."""
        self._config = deps.config
        self._collectors = collectors
        self._tasks = tasks
        self._is_shared = deps.config.journal != "sqlite"
        """Whether other gateways may serve journals of the same database."""
        self._registries: dict[str, Registry] = {}
        self._groups = GroupSizes()
        self._refusal: ShuttingDownError | None = None
        self.changed: Callable[[], None] = lambda: None
        """Called when the journals change."""
        self.name_adapters: Callable[[], Awaitable[set[tuple[str, int]]]] = _none_lost
        """Tells routers which adapter revisions are named. Returns those that they have dropped."""
        self._claims: Counter[tuple[str, int]] = Counter()
        """Revisions that sessions name which are being opened."""

    @property
    def registries(self) -> Sequence[Registry]:
        """The journals that are served, with their sessions."""
        return list(self._registries.values())

    @property
    def home(self) -> Registry | None:
        """The journal in which sessions are opened, if there is one now."""
        return next(iter(self._registries.values()), None)

    @property
    def is_draining(self) -> bool:
        """Whether the gateway is about to stop."""
        return self._refusal is not None

    @property
    def adapters(self) -> set[str]:
        """Names of the adapters that the router retains."""
        return {name for name, _ in self.deps.leases.offered.adapters(self._config.model)}

    @property
    def live_sessions(self) -> int:
        """Number of open sessions."""
        return sum(one.live_sessions for one in self._registries.values())

    @property
    def undelivered_sessions(self) -> int:
        """Number of closed sessions that the collector has not taken."""
        return sum(one.outbox.undelivered for one in self._registries.values())

    @property
    def count_dead_letters(self) -> int:
        """Number of sessions that were set aside."""
        return sum(len(one.outbox.dead) for one in self._registries.values())

    def load(self) -> router_pb2.ReplicaLoad:
        """Returns the load that the router is told."""
        journals = [one.journal for one in self._registries.values()]
        return router_pb2.ReplicaLoad(
            live_sessions=self.live_sessions,
            draining=self.is_draining or not journals,
            journals=[
                router_pb2.ServedJournal(journal_id=one.journal_id, epoch=one.epoch)
                for one in journals
            ],
            pinned_adapters=[
                sampling_pb2.AdapterRef(name=name, version=version)
                for name, version in sorted(
                    self._claims.keys()
                    | {one for registry in self.registries for one in registry.named_adapters}
                )
            ],
        )

    def of(self, session_id: str) -> Registry:
        """Returns the registry that a session belongs to.

        Raises:
            JournalMovedError: Another gateway serves the session's journal.
        """
        journal_id = journal_of(session_id)
        registry = self._registries.get(journal_id)
        if registry is None and not self._is_shared:
            registry = self.home
        if registry is None:
            raise moved(journal_id)
        return registry

    async def hold(self, journal: Journal) -> None:
        """Serves the sessions of a journal from now on.

        Raises:
            RollmeshError: They could not be rebuilt.
        """
        held: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tasks.create_task(self._serve(journal, held))
        await held

    async def create(
        self,
        request: gateway_pb2.CreateSessionRequest,
        adapters: Sequence[tuple[str, int]] | None = None,
        start: Start | None = None,
    ) -> tuple[SessionSpec, str]:
        """Opens a session, or finds the session of the same request id. Returns its key too.

        Raises:
            SessionClosedError: The session opened by the same request id is closed.
            TooManySessionsError: The gateway is full.
            StoreFullError: Too many closed sessions wait for the collector.
            InvalidFieldError: The group has another size.
            SessionLimitError: The context is too large.
            AdapterUnknownError: No router retains an adapter of its policies.
            JournalMovedError: The gateway has no journal now.
        """
        for registry in self._registries.values():
            opening = registry.opened(request.request_id) if request.request_id else None
            if opening is not None:
                spec = await asyncio.shield(opening)
                return spec, registry.keys.key(spec.session_id)
        if request.adapters and adapters is None:
            async with self._claimed(request.adapters) as found:
                return await self.create(request, found, start)  # it may have been opened meanwhile
        if self._refusal is not None:
            raise self._refusal
        booked = sum(one.booked_sessions for one in self._registries.values())
        if booked >= self._config.max_sessions:
            raise TooManySessionsError(
                f"the gateway holds {self._config.max_sessions} open sessions; close some",
                retry_delay_ms=_RETRY_MS,
            )
        if self.undelivered_sessions >= self._config.max_undelivered_sessions:
            raise StoreFullError(
                "too many closed sessions wait for the collector", retry_delay_ms=_RETRY_MS
            )
        home = self.home
        if home is None:
            raise moved("for new sessions")
        spec = await home.create(request, adapters or (), start)
        return spec, home.keys.key(spec.session_id)

    @asynccontextmanager
    async def _claimed(
        self, choices: Sequence[sampling_pb2.AdapterChoice]
    ) -> AsyncIterator[list[tuple[str, int]]]:
        """Yields the policies. Routers retain the named revisions while the block runs.

        A later revision may have outlived one before the routers heard of it. Then a pinned policy
        has that one.
        """
        lost = set[tuple[str, int]]()
        while True:
            policies = await self._policies(choices, lost)
            named = {one for one in policies if one[1]}
            kept = {one for registry in self.registries for one in registry.named_adapters}
            self._claims.update(named)
            try:
                new = set[tuple[str, int]]() if named <= kept else await self.name_adapters()
                lost |= new & named
                if not lost & named:
                    yield policies
                    return
            finally:
                self._claims -= Counter(named)

    async def _policies(
        self, choices: Sequence[sampling_pb2.AdapterChoice], lost: Collection[tuple[str, int]]
    ) -> list[tuple[str, int]]:
        """Returns the name and version of each policy. 0 is the newest version at each turn."""
        wanted = [(one.name, one.version) for one in choices if one.name]
        retained = set[tuple[str, int]]()
        if wanted:
            offered = self.deps.leases.offered
            retained = await offered.until_adapters(self._config.model, wanted, lost)
        policies: list[tuple[str, int]] = []
        for one in choices:
            newest = max((version for name, version in retained if name == one.name), default=0)
            known = (one.name, one.version) in retained if one.version else newest
            if one.name and not known:
                what = f"version {one.version} of {one.name!r}" if one.version else repr(one.name)
                raise AdapterUnknownError(
                    f"adapters: {what} is not retained; push it, or name one that is"
                )
            policies.append((one.name, newest if one.pinned else one.version))
        return policies

    async def find(self, request_id: str) -> gateway_pb2.FindSessionResponse:
        """Returns the session that a request id opened, open or closed.

        Raises:
            SessionUnknownError: It opened none here, or the close is not remembered.
        """
        for registry in list(self._registries.values()):
            if (opening := registry.opened(request_id)) is not None:
                opened = await asyncio.shield(opening)
                return gateway_pb2.FindSessionResponse(session_id=opened.session_id)
        for registry in list(self._registries.values()):
            found = await registry.journal.read(lambda tx: closed_session(tx, request_id))
            if found:
                waits = await registry.journal.read(partial(is_undelivered, session_id=found))
                return gateway_pb2.FindSessionResponse(
                    session_id=found, closed=True, undelivered=waits
                )
        raise SessionUnknownError(f"request_id: {request_id!r} opened no session here")

    async def list_dead_letters(self, after: str, count: int) -> list[gateway_admin_pb2.DeadLetter]:
        """Returns up to `count` dead letters with session ids after the given one, in id order."""
        letters: list[gateway_admin_pb2.DeadLetter] = []
        for journal_id in sorted(self._registries):
            registry = self._registries.get(journal_id)
            if registry is not None and journal_of(after) <= journal_id and len(letters) < count:
                letters += await registry.outbox.list_dead_letters(after, count - len(letters))
        return letters

    def drain(self) -> None:
        """Refuses new sessions and turns from now on."""
        self._refusal = ShuttingDownError("the gateway is about to stop", retry_delay_ms=_RETRY_MS)
        for registry in self._registries.values():
            registry.refuse(self._refusal)

    async def hand_over(self) -> None:
        """Leaves each journal to another gateway as soon as none of its sessions is in use."""
        while self._is_shared and self._registries:
            for registry in self.registries:
                if not registry.is_busy:
                    await self._let_go(registry)
            await asyncio.sleep(_LOOK_S)

    async def rest(self) -> None:
        """Waits until no turn runs."""
        while self._registries:
            if not any(one.is_busy for one in self.registries):
                return
            await asyncio.sleep(_LOOK_S)

    async def _let_go(self, registry: Registry) -> None:
        """Gives up a journal: its running turns end, and any gateway may take it.

        It may be lost meanwhile. A journal that cannot be stopped or released delays no other one:
        its lease ends by itself.
        """
        try:
            await registry.stop()
            await registry.journal.release()
        except RollmeshError as error:
            _log.warning(
                "releasing a journal failed, its lease will expire",
                extra=fields(journal=registry.journal.journal_id, error=error.message),
            )
        self._remove(registry)

    async def remove_empty(self, empty_ms: int) -> None:
        """Removes taken-over journals that have had no sessions for so long."""
        for registry in self.registries[1:]:
            if registry.empty_ms() >= empty_ms and await registry.journal.remove():
                self._remove(registry)

    async def stop(self) -> None:
        """Ends the running turns, waits for those being committed, and gives up the journals."""
        for registry in self.registries:
            await self._let_go(registry)

    async def _serve(self, journal: Journal, held: "asyncio.Future[None]") -> None:
        """Serves one journal until it is lost or given up."""
        outbox = Outbox(journal, self._collectors, remembered=self._config.remembered_closes)
        try:
            async with asyncio.TaskGroup() as tasks:
                registry = Registry(self.deps, journal, outbox, tasks, self._groups)
                try:
                    await registry.restore()
                except RollmeshError as error:
                    held.set_exception(error)
                    await journal.release()
                    return
                if self._refusal is not None:
                    registry.refuse(self._refusal)
                self._registries[journal.journal_id] = registry
                self.changed()
                held.set_result(None)
                owned = [
                    tasks.create_task(outbox.run()),
                    tasks.create_task(registry.sent.run()),
                    tasks.create_task(close_idle(registry, self._config.session_idle_ms)),
                ]
                if self._is_shared:
                    owned.append(tasks.create_task(self._watch(registry)))
                await registry.over.wait()
                for task in owned:
                    task.cancel()
        finally:
            if not held.done():
                held.set_exception(moved(journal.journal_id))

    async def _watch(self, registry: Registry) -> None:
        """Gives up the sessions of a journal once it is lost."""
        error = await registry.journal.lost()
        journal_id = registry.journal.journal_id
        if self._registries.get(journal_id) is registry:
            _log.warning("journal was lost", extra=fields(journal=journal_id, error=error.message))
            registry.abandon(error)
            self._remove(registry)

    def _remove(self, registry: Registry) -> None:
        journal_id = registry.journal.journal_id
        if self._registries.get(journal_id) is registry:
            del self._registries[journal_id]
            registry.leave()
            registry.over.set()
            self.changed()


# Renews the leases of this gateway's journals, and takes over journals that others have left.

_RENEWALS = 4
"""Renewals of a lease while it lasts."""
_LONGEST_LOOK_S = 1.0
_EMPTY_MS = 3_600_000
"""How long a journal of another gateway is kept after its last session: closes are remembered."""
_HOUSEKEEPING_MS = 60_000


class Tenancy:
    """The leases of the journals in a database that gateways share."""

    def __init__(self, journals: "PostgresJournals", gateway: Gateway, lease_ms: int) -> None:
        self._journals = journals
        self._gateway = gateway
        self._lease_ms = lease_ms
        self._away_ms: int | None = None
        """Time of the last failure, on the monotonic clock."""
        self._next_housekeeping_ms = 0

    async def run(self) -> None:
        """Renews and takes leases until it is cancelled."""
        renew_s = self._lease_ms / _RENEWALS / 1000
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._repeat(self._journals.renew, renew_s))
            tasks.create_task(self._repeat(self._take, min(renew_s, _LONGEST_LOOK_S)))

    async def _repeat(self, work: Callable[[], Awaitable[None]], interval_s: float) -> None:
        while True:
            try:
                await work()
            except RollmeshError as error:
                self._away_ms = clock.monotonic_ms()
                _log.warning(
                    "renewing or taking journal leases failed, will retry",
                    extra=fields(reason=error.reason, error=error.message),
                )
            await asyncio.sleep(interval_s)

    async def _take(self) -> None:
        """Takes free journals, and opens a journal for new sessions if there is none."""
        gateway = self._gateway
        if gateway.is_draining:
            return
        now_ms = clock.monotonic_ms()
        # A gateway that could not renew its leases because the server was away gets time to do so.
        is_steady = self._away_ms is None or now_ms - self._away_ms > self._lease_ms
        while (is_steady or gateway.home is None) and not gateway.is_draining:
            journal = await self._journals.take()
            if journal is None:
                break
            await gateway.hold(journal)
            metrics.TAKEOVERS.inc()
        if gateway.home is None and not gateway.is_draining:
            await gateway.hold(await self._journals.create())
        if now_ms >= self._next_housekeeping_ms:
            self._next_housekeeping_ms = now_ms + _HOUSEKEEPING_MS
            await gateway.remove_empty(_EMPTY_MS)
            await self._journals.remove_abandoned()
