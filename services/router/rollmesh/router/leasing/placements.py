"""Which engine serves which session."""

from collections.abc import Callable
from dataclasses import dataclass

from rollmesh.router.leasing.engines import Engine


@dataclass(slots=True, eq=False)
class Session:
    """One session."""

    stream_id: str
    """The gateway's stream that used it last."""
    group_id: str = ""
    engine: Engine | None = None


class Placements:
    """The sessions, their engines and their groups.

    Invariant: `engine.sessions` is the set of sessions placed on that engine; a session has at most
    one engine.
    """

    def __init__(self, moved: Callable[[Engine, int], None]) -> None:
        """Starts empty.

        Args:
            moved: Called with an engine and by how many its sessions have changed.
        """
        self._moved = moved
        self._sessions: dict[str, Session] = {}
        self._groups: dict[str, dict[str, None]] = {}  # group -> sessions, oldest first
        self._of_stream: dict[str, set[str]] = {}
        self.placed = 0
        """Number of sessions that have an engine."""

    def __bool__(self) -> bool:
        """Returns whether anything is kept."""
        return bool(self._sessions or self._groups or self._of_stream or self.placed)

    def engine_of(self, session_id: str) -> Engine | None:
        """Returns the engine of a session; None if it has none."""
        session = self._sessions.get(session_id)
        return None if session is None else session.engine

    def engine_of_group(self, group_id: str) -> Engine | None:
        """Returns the engine of the oldest placed session of a group; None if there is none."""
        for session_id in self._groups.get(group_id, ()):
            if engine := self._sessions[session_id].engine:
                return engine
        return None

    def place(self, session_id: str, engine: Engine, *, stream_id: str, group_id: str) -> None:
        """Places a session, which a stream uses now; an empty group leaves its group as it is."""
        session = self._sessions.get(session_id)
        if session is None:
            session = self._sessions[session_id] = Session(stream_id)
            self._of_stream.setdefault(stream_id, set()).add(session_id)
        elif session.stream_id != stream_id:
            self._leave_stream(session_id, session)
            session.stream_id = stream_id
            self._of_stream.setdefault(stream_id, set()).add(session_id)
        if session.engine is not engine:
            self._unplace(session_id, session)
            session.engine = engine
            engine.sessions.add(session_id)
            self.placed += 1
            self._moved(engine, 1)
        if group_id not in {"", session.group_id}:
            self._leave_group(session_id, session)
            session.group_id = group_id
            self._groups.setdefault(group_id, {})[session_id] = None

    def restate(self, session_id: str, engine: Engine, *, stream_id: str, group_id: str) -> None:
        """Places a session as another router did, unless the stream has placed it already."""
        session = self._sessions.get(session_id)
        if session is None or session.engine is None or session.stream_id != stream_id:
            self.place(session_id, engine, stream_id=stream_id, group_id=group_id)

    def move(self, former: Engine, engine: Engine) -> None:
        """Moves all sessions of an engine to the one that takes its place."""
        for session_id in former.sessions:
            self._sessions[session_id].engine = engine
        engine.sessions |= former.sessions
        self._moved(former, -len(former.sessions))
        self._moved(engine, len(former.sessions))
        former.sessions = set()

    def forget(self, session_id: str) -> None:
        """Forgets a session."""
        session = self._sessions.pop(session_id, None)
        if session is not None:
            self._unplace(session_id, session)
            self._leave_stream(session_id, session)
            self._leave_group(session_id, session)

    def forget_stream(self, stream_id: str) -> None:
        """Forgets the sessions that a stream used last."""
        for session_id in tuple(self._of_stream.get(stream_id, ())):
            self.forget(session_id)

    def forget_engine(self, engine: Engine) -> None:
        """Leaves the sessions of an engine without one."""
        for session_id in tuple(engine.sessions):
            self._unplace(session_id, self._sessions[session_id])

    def _unplace(self, session_id: str, session: Session) -> None:
        engine, session.engine = session.engine, None
        if engine is not None:
            engine.sessions.remove(session_id)
            self.placed -= 1
            self._moved(engine, -1)

    def _leave_stream(self, session_id: str, session: Session) -> None:
        own = self._of_stream[session.stream_id]
        own.remove(session_id)
        if not own:
            del self._of_stream[session.stream_id]

    def _leave_group(self, session_id: str, session: Session) -> None:
        if not session.group_id:
            return
        siblings = self._groups[session.group_id]
        del siblings[session_id]
        if not siblings:
            del self._groups[session.group_id]
