"""Dead letters, the sessions that were set aside: list, retry and drop."""

from collections.abc import Callable

from rollmesh.gateway.conversation.tree import Tree
from rollmesh.gateway.storage import closed
from rollmesh.gateway.storage.journal import DamagedSessionError, StoredSession
from rollmesh.gateway.storage.outbox import Outbox
from rollmesh.gateway.storage.transaction import Journal
from rollmesh.runtime.errors import SessionDamagedError, SessionUnknownError
from rollmesh.v1 import gateway_pb2


class DeadLetters:
    """The operations on dead letters that an operator can run."""

    def __init__(
        self,
        journal: Journal,
        outbox: Outbox,
        new_tree: Callable[[], Tree],
        reopen: Callable[[StoredSession], None],
    ) -> None:
        """Takes the journal, the outbox for closed sessions, and `reopen` for open ones."""
        self._journal = journal
        self._outbox = outbox
        self._new_tree = new_tree
        self._reopen = reopen

    @property
    def count(self) -> int:
        """Number of dead letters."""
        return len(self._outbox.dead)

    async def list(self, after: str, count: int) -> list[gateway_pb2.DeadLetter]:
        """Returns up to `count` dead letters with session ids after the given one, in id order."""
        return await self._journal.run(lambda tx: closed.dead_letters(tx, after, count))

    async def retry(self, session_id: str) -> None:
        """Revives a session: a closed one is sent again, an open one is reopened.

        Raises:
            SessionUnknownError: It is not a dead letter.
            SessionDamagedError: It still cannot be read, and stays a dead letter.
        """
        self._check(session_id)
        try:
            stored = await self._journal.run(
                lambda tx: closed.revive(tx, session_id, self._new_tree)
            )
        except DamagedSessionError as error:
            raise damaged_error(session_id, f": {error}") from error
        self._outbox.dead.discard(session_id)
        if stored is None:
            self._outbox.added()
        else:
            self._reopen(stored)

    async def drop(self, session_id: str) -> None:
        """Drops a session and deletes its data from the journal.

        Raises:
            SessionUnknownError: It is not a dead letter.
        """
        self._check(session_id)
        await self._journal.run(lambda tx: closed.give_up(tx, session_id))
        self._outbox.dead.discard(session_id)
        self._outbox.wake()

    def _check(self, session_id: str) -> None:
        if session_id not in self._outbox.dead:
            raise SessionUnknownError(
                f"session_id: {session_id!r} is not a dead letter; ListDeadLetters lists all",
                session_id=session_id,
            )


def damaged_error(session_id: str, why: str = "") -> SessionDamagedError:
    """Returns the error of a session that was set aside."""
    return SessionDamagedError(
        f"session {session_id} cannot be read from the journal{why}; open another, and ask the "
        "operator to look at the gateway's dead letters",
        session_id=session_id,
    )
