"""The journals that a gateway serves, each with its sessions.

With a journal in a file there is one. Where several gateways share a database, a gateway opens
sessions in one journal, takes over those of others, and may lose each of them.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence

from rollmesh.gateway.conversation.spec import SessionSpec
from rollmesh.gateway.conversation.tree import Tree
from rollmesh.gateway.sessions.groups import GroupSizes
from rollmesh.gateway.sessions.idle import close_idle
from rollmesh.gateway.sessions.registry import Registry
from rollmesh.gateway.storage.outbox import Outbox
from rollmesh.gateway.storage.request_ids import closed_session
from rollmesh.gateway.storage.transaction import Journal, moved
from rollmesh.gateway.turns.turns import TurnRunner
from rollmesh.mesh.directories.gateways import journal_of
from rollmesh.runtime.errors import (
    RollmeshError,
    SessionUnknownError,
    ShuttingDownError,
    StoreFullError,
    TooManySessionsError,
)
from rollmesh.runtime.telemetry.logs import fields
from rollmesh.v1 import gateway_pb2, router_pb2

_log = logging.getLogger(__name__)
_RETRY_MS = 1000
_LOOK_S = 0.02


class Gateway:
    """All sessions of this process; everything here runs on the event loop.

    Invariant: a session is served by the registry of the journal that its id names, and a journal
    has at most one registry.
    """

    def __init__(  # noqa: PLR0913 - keywords, given once
        self,
        *,
        new_tree: Callable[[], Tree],
        new_outbox: Callable[[Journal], Outbox],
        runner: TurnRunner,
        tasks: asyncio.TaskGroup,
        model: str,
        forgotten: Callable[[str], None],
        max_sessions: int,
        max_undelivered: int,
        session_idle_ms: int,
        is_shared: bool,
    ) -> None:
        """Starts without journals.

        Args:
            new_tree: Returns an empty tree.
            new_outbox: Returns the outbox of a journal.
            runner: Runs the turns.
            tasks: Owns the journals.
            model: Name of the model that answers.
            forgotten: Called with the id of each closed session, to drop its engine affinity.
            max_sessions: Largest number of open sessions.
            max_undelivered: Number of closed sessions that wait for the collector at which new ones
                are refused.
            session_idle_ms: Time after which an unused session is closed, milliseconds.
            is_shared: Whether other gateways may serve journals of the same database.
        """
        self._new_tree = new_tree
        self._new_outbox = new_outbox
        self._runner = runner
        self._tasks = tasks
        self._model = model
        self._forgotten = forgotten
        self._max_sessions = max_sessions
        self._max_undelivered = max_undelivered
        self._session_idle_ms = session_idle_ms
        self._is_shared = is_shared
        self._registries: dict[str, Registry] = {}
        self._groups = GroupSizes()
        self._refusal: ShuttingDownError | None = None
        self.changed: Callable[[], None] = lambda: None
        """Called when the journals change."""

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
    def live_sessions(self) -> int:
        """Number of open sessions."""
        return sum(one.live_sessions for one in self._registries.values())

    @property
    def undelivered_sessions(self) -> int:
        """Number of closed sessions that the collector has not taken."""
        return sum(one.undelivered_sessions for one in self._registries.values())

    @property
    def count_dead_letters(self) -> int:
        """Number of sessions that were set aside."""
        return sum(one.dead_letters.count for one in self._registries.values())

    def load(self) -> router_pb2.ReplicaLoad:
        """Returns what the router must know."""
        journals = [one.journal for one in self._registries.values()]
        return router_pb2.ReplicaLoad(
            live_sessions=self.live_sessions,
            draining=self.is_draining or not journals,
            journals=[
                router_pb2.ServedJournal(journal_id=one.journal_id, epoch=one.epoch)
                for one in journals
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

    async def create(self, request: gateway_pb2.CreateSessionRequest) -> tuple[SessionSpec, str]:
        """Opens a session, or finds the one that the same request id opened; returns its key too.

        Raises:
            SessionClosedError: The session opened by the same request id is closed.
            TooManySessionsError: The gateway is full.
            StoreFullError: Too many closed sessions wait for the collector.
            InvalidFieldError: The group has another size.
            JournalMovedError: The gateway has no journal now.
        """
        for registry in self._registries.values():
            opening = registry.opened(request.request_id) if request.request_id else None
            if opening is not None:
                spec = await asyncio.shield(opening)
                return spec, registry.keys.key(spec.session_id)
        if self._refusal is not None:
            raise self._refusal
        if sum(one.booked_sessions for one in self._registries.values()) >= self._max_sessions:
            raise TooManySessionsError(
                f"the gateway holds {self._max_sessions} open sessions; close some",
                retry_delay_ms=_RETRY_MS,
            )
        if self.undelivered_sessions >= self._max_undelivered:
            raise StoreFullError(
                "too many closed sessions wait for the collector", retry_delay_ms=_RETRY_MS
            )
        home = self.home
        if home is None:
            raise moved("for new sessions")
        spec = await home.create(request)
        return spec, home.keys.key(spec.session_id)

    async def find(self, request_id: str) -> tuple[str, bool]:
        """Returns the session that a request id opened, and whether it is closed.

        Raises:
            SessionUnknownError: It opened none here, or the close is not remembered.
        """
        for registry in list(self._registries.values()):
            if (opening := registry.opened(request_id)) is not None:
                return (await asyncio.shield(opening)).session_id, False
        for registry in list(self._registries.values()):
            found = await registry.journal.read(lambda tx: closed_session(tx, request_id))
            if found:
                return found, True
        raise SessionUnknownError(f"request_id: {request_id!r} opened no session here")

    async def list_dead_letters(self, after: str, count: int) -> list[gateway_pb2.DeadLetter]:
        """Returns up to `count` dead letters with session ids after the given one, in id order."""
        letters: list[gateway_pb2.DeadLetter] = []
        for journal_id in sorted(self._registries):
            registry = self._registries.get(journal_id)
            if registry is not None and journal_of(after) <= journal_id and len(letters) < count:
                letters += await registry.dead_letters.list(after, count - len(letters))
        return letters

    def drain(self) -> None:
        """Refuses new sessions and turns from now on."""
        self._refusal = ShuttingDownError("the gateway is about to stop", retry_delay_ms=_RETRY_MS)
        for registry in self._registries.values():
            registry.refuse(self._refusal)

    async def hand_over(self) -> None:
        """Leaves each journal to another gateway as soon as none of its sessions is in use."""
        while self._is_shared and self._registries:
            for journal_id, registry in list(self._registries.items()):
                if not registry.is_busy:
                    await self.let_go(journal_id)
            await asyncio.sleep(_LOOK_S)

    async def let_go(self, journal_id: str) -> None:
        """Gives up a journal: its running turns end, and any gateway may take it."""
        registry = self._registries[journal_id]
        await registry.stop()
        await registry.journal.release()
        self._remove(registry)

    async def remove_empty(self, empty_ms: int) -> None:
        """Removes journals of others that have had no sessions for so long."""
        for registry in self.registries[1:]:
            if registry.empty_ms() >= empty_ms and await registry.journal.remove():
                self._remove(registry)

    async def stop(self) -> None:
        """Ends the running turns, waits for those being committed, and gives up the journals."""
        for journal_id in list(self._registries):
            await self.let_go(journal_id)

    async def _serve(self, journal: Journal, held: "asyncio.Future[None]") -> None:
        """Serves one journal until it is lost or given up."""
        outbox = self._new_outbox(journal)
        try:
            async with asyncio.TaskGroup() as tasks:
                registry = Registry(
                    new_tree=self._new_tree,
                    store=journal,
                    runner=self._runner,
                    outbox=outbox,
                    tasks=tasks,
                    model=self._model,
                    groups=self._groups,
                    forgotten=self._forgotten,
                )
                try:
                    await registry.restore()
                except RollmeshError as error:
                    held.set_exception(error)
                    await journal.release()
                    return
                self._add(registry)
                held.set_result(None)
                owned = [
                    tasks.create_task(outbox.run()),
                    tasks.create_task(registry.sent.run()),
                    tasks.create_task(close_idle(registry, self._session_idle_ms)),
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
            _log.warning("journal lost", extra=fields(journal=journal_id, error=error.message))
            registry.abandon(error)
            self._remove(registry)

    def _add(self, registry: Registry) -> None:
        if self._refusal is not None:
            registry.refuse(self._refusal)
        self._registries[registry.journal.journal_id] = registry
        self.changed()

    def _remove(self, registry: Registry) -> None:
        journal_id = registry.journal.journal_id
        if self._registries.get(journal_id) is registry:
            del self._registries[journal_id]
            registry.over.set()
            self.changed()
