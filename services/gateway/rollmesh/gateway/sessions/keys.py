"""Session keys, each of which grants access to one session only.

A key is derived from the session's id, the journal's secret and the key's revision. So keys need
not be stored, a repeated CreateSession returns the same key, and a gateway that takes over the
journal accepts it. To end a key is to count its revision up.
"""

import asyncio
import base64
import hashlib
import hmac
from collections.abc import Iterable

from rollmesh.gateway.storage.keys import KeyRevision, read_revisions, store_revision
from rollmesh.gateway.storage.transaction import Journal
from rollmesh.runtime.errors import RepeatConflictError, SessionKeyWrongError
from rollmesh.runtime.tasks import begun

_FIRST = KeyRevision(0, "")


class SessionKeys:
    """The keys of one journal's sessions; everything here runs on the event loop."""

    def __init__(self, store: Journal, tasks: asyncio.TaskGroup) -> None:
        """Takes the journal and what owns its writes; `restore` loads the revisions."""
        self._journal = store
        self._tasks = tasks
        self._revisions: dict[str, KeyRevision] = {}
        self._ending = asyncio.Lock()

    async def restore(self) -> None:
        """Reads the revisions from the journal."""
        self._revisions = await self._journal.read(read_revisions)

    def key(self, session_id: str) -> str:
        """Returns the current key of a session: `rmk-<session id>-<43 characters>`."""
        return self._derive(session_id, self._revision(session_id).number)

    def check(self, session_id: str, key: str) -> None:
        """Checks a key in constant time.

        Raises:
            SessionKeyWrongError: The key is empty, was ended, or is not the key of this session.
        """
        if not _equal(key, self.key(session_id)):
            problem = "does not open this session" if key else "is empty"
            raise SessionKeyWrongError(
                f"session_key: {problem}; give the key that CreateSession returned with the id, "
                "or the one that followed it"
            )

    async def revoke(self, session_id: str, key: str, request_id: str) -> str:
        """Ends a key; returns the one that follows, once that is durable.

        A caller that leaves does not stop it: the journal and this process must agree.

        Raises:
            SessionKeyWrongError: The key is not the current one, and this is no repeat.
            RepeatConflictError: The request id ended another key of the session.
        """
        return await asyncio.shield(begun(self._tasks, self._revoke(session_id, key, request_id)))

    async def _revoke(self, session_id: str, key: str, request_id: str) -> str:
        async with self._ending:
            revision = self.next_revision(session_id, key, request_id)
            if revision is not None:
                await self._store(session_id, revision)
            return self.key(session_id)

    async def end(self, session_id: str, request_id: str) -> None:
        """Ends the current key, whatever it is; returns once that is durable.

        A repeat of the call that ended the last key changes nothing. A caller that leaves does not
        stop it.

        Args:
            session_id: Id of the session.
            request_id: Identifies a repeat; may be empty.
        """
        await asyncio.shield(begun(self._tasks, self._end(session_id, request_id)))

    async def _end(self, session_id: str, request_id: str) -> None:
        # An operator's id returns no key, so it must not equal any that `revoke` is given. Those
        # have 128 characters at most.
        digest = hashlib.sha512(request_id.encode()).hexdigest()
        ended_by = f"operator:{digest}"
        async with self._ending:
            number, last = self._revision(session_id)
            if not (request_id and ended_by == last):
                await self._store(session_id, KeyRevision(number + 1, ended_by))

    async def _store(self, session_id: str, revision: KeyRevision) -> None:
        await self._journal.run(lambda tx: store_revision(tx, session_id, revision))
        self._revisions[session_id] = revision

    def next_revision(self, session_id: str, key: str, request_id: str) -> KeyRevision | None:
        """Returns the revision that follows if a key is ended; None if a repeat asks for it again.

        Args:
            session_id: Id of the session.
            key: The key to end.
            request_id: Identifies a repeat; may be empty.

        Raises:
            SessionKeyWrongError: The key is not the current one, and this is no repeat.
            RepeatConflictError: The request id ended another key of the session.
        """
        number, ended_by = self._revision(session_id)
        is_repeat = bool(request_id) and request_id == ended_by
        if is_repeat and _equal(key, self._derive(session_id, number - 1)):
            return None
        self.check(session_id, key)
        if is_repeat:
            raise RepeatConflictError(
                f"request_id: {request_id!r} ended another key of the session; "
                "give another id to end this one"
            )
        return KeyRevision(number + 1, request_id)

    def forget(self, session_ids: Iterable[str]) -> None:
        """Forgets the revisions of sessions that the journal does not know any more."""
        for session_id in session_ids:
            self._revisions.pop(session_id, None)

    def _revision(self, session_id: str) -> KeyRevision:
        return self._revisions.get(session_id, _FIRST)

    def _derive(self, session_id: str, number: int) -> str:
        derived_from = f"{session_id}/{number}" if number else session_id
        digest = hmac.digest(self._journal.secret, derived_from.encode(), hashlib.sha256)
        return f"rmk-{session_id}-{base64.urlsafe_b64encode(digest).decode().rstrip('=')}"


def _equal(given: str, key: str) -> bool:
    return hmac.compare_digest(given.encode(), key.encode())
