"""Records in the journal which answers were sent; retries depend on it after a restart."""

import asyncio
import logging
from collections import deque

from rollmesh.gateway.conversation.session import Session, Turn
from rollmesh.gateway.storage import journal
from rollmesh.gateway.storage.transaction import Journal
from rollmesh.runtime.errors import RollmeshError
from rollmesh.runtime.telemetry.logs import fields

_log = logging.getLogger(__name__)
_INTERVAL_S = 0.2
_MAX_PENDING = 4096


class SentAnswers:
    """The answers that were sent completely and are not recorded yet.

    They are written in batches, and no request waits for that. An answer may stay unrecorded: the
    process is killed, or the journal cannot be written. After a restart it counts as lost, so an
    equal request gets it again and no sample is lost.
    """

    def __init__(self, store: Journal) -> None:
        """Starts empty; takes the journal."""
        self._journal = store
        self._pending: deque[tuple[Session, int]] = deque(maxlen=_MAX_PENDING)
        self._added = asyncio.Event()

    def add(self, session: Session, turn: Turn) -> None:
        """Adds the answer of a turn; the oldest one is dropped if too many wait to be written."""
        self._pending.append((session, turn.node_id))
        self._added.set()

    async def run(self) -> None:
        """Records answers until it is cancelled when the gateway stops."""
        while True:
            await self._added.wait()
            await asyncio.sleep(_INTERVAL_S)
            await self.flush()

    async def flush(self) -> None:
        """Records the answers, except those of closed sessions and those that were continued.

        A continued answer has been received, and no request can retry one of a closed session.
        """
        self._added.clear()
        rows = [
            (session.spec.session_id, node_id)
            for session, node_id in self._pending
            if not (session.closing or session.tree.nodes[node_id].children)
        ]
        self._pending.clear()
        if not rows:
            return
        try:
            await self._journal.run(lambda tx: journal.insert_sent(tx, rows))
        except RollmeshError as error:
            _log.warning(
                "sent answers not recorded", extra=fields(count=len(rows), error=str(error))
            )
