"""Which sessions of the router's own clients keep their placements."""

from collections import OrderedDict


class RecentSessions:
    """The sessions that were used last, up to a number."""

    def __init__(self, most: int) -> None:
        """Starts empty; `most` is the number of sessions that are kept."""
        self._most = most
        self._sessions: OrderedDict[tuple[str, str], None] = OrderedDict()  # last used last

    def use(self, model: str, session_id: str) -> tuple[str, str] | None:
        """Keeps a session.

        Returns:
            The model and the id of the session that leaves for it; None if there was room.
        """
        self._sessions[model, session_id] = None
        self._sessions.move_to_end((model, session_id))
        if len(self._sessions) <= self._most:
            return None
        return self._sessions.popitem(last=False)[0]
