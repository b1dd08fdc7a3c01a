"""What a gateway holds of the engines, so that it can tell another router: plain state."""

from collections.abc import Iterable

from rollmesh.v1 import router_pb2

MOST_IDS = 1_024
"""Maximum number of leases and sessions in one message, as the contract has it."""


class Holdings:
    """The leases of a gateway and the engines of its sessions."""

    def __init__(self) -> None:
        """Starts empty."""
        self.leases: dict[str, str] = {}
        """Engine ids by lease id."""
        self.sessions: dict[str, tuple[str, str]] = {}
        """Engine id and group id by session id; the group may be empty."""
        self._addresses: dict[str, str] = {}  # of the engines, by lease id

    def granted(
        self, lease_id: str, engine_id: str, address: str, *, session_id: str, group_id: str
    ) -> None:
        """Notes a lease; its session is on its engine from now on."""
        self.leases[lease_id] = engine_id
        self._addresses[lease_id] = address
        _, former_group = self.sessions.get(session_id, ("", ""))
        self.sessions[session_id] = engine_id, group_id or former_group

    def released(self, lease_id: str) -> None:
        """Notes that a lease has ended; unknown ids are ignored."""
        self.leases.pop(lease_id, None)
        self._addresses.pop(lease_id, None)

    def addresses(self, engine_id: str) -> set[str]:
        """Returns where an engine is on which leases are held."""
        return {self._addresses[id_] for id_, engine in self.leases.items() if engine == engine_id}

    def forgotten(self, session_id: str) -> None:
        """Notes that a session has ended; unknown ids are ignored."""
        self.sessions.pop(session_id, None)


class Restating:
    """States the holdings to one router, a bounded number of them in each message.

    Leases come before sessions: they say how full the engines are. What ends meanwhile is left out.
    """

    def __init__(self, holdings: Holdings) -> None:
        """Begins with what is held now."""
        self._holdings = holdings
        self._leases = list(holdings.leases)
        self._sessions = dict.fromkeys(holdings.sessions)

    def next(self) -> router_pb2.Restatement | None:
        """Returns the next message; None if all is stated."""
        held = self._holdings
        if self._leases:
            lease_ids, self._leases = self._leases[:MOST_IDS], self._leases[MOST_IDS:]
            return _statement([one for one in lease_ids if one in held.leases], [], held)
        if self._sessions:
            session_ids = [
                self._sessions.popitem()[0] for _ in range(min(len(self._sessions), MOST_IDS))
            ]
            return _statement([], [one for one in session_ids if one in held.sessions], held)
        return None

    def before(self, session_id: str) -> router_pb2.Restatement | None:
        """Returns what must be stated before a request of a session; None if it is stated."""
        if session_id not in self._sessions:
            return None
        del self._sessions[session_id]
        known = [session_id] if session_id in self._holdings.sessions else []
        return _statement([], known, self._holdings)


def _statement(
    lease_ids: Iterable[str], session_ids: Iterable[str], held: Holdings
) -> router_pb2.Restatement:
    engines: dict[str, router_pb2.EngineHoldings] = {}

    def on(engine_id: str) -> router_pb2.EngineHoldings:
        if engine_id not in engines:
            engines[engine_id] = router_pb2.EngineHoldings(engine_id=engine_id)
        return engines[engine_id]

    for lease_id in lease_ids:
        on(held.leases[lease_id]).lease_ids.append(lease_id)
    for session_id in session_ids:
        engine_id, group_id = held.sessions[session_id]
        on(engine_id).sessions.add(session_id=session_id, group_id=group_id)
    return router_pb2.Restatement(engines=engines.values())
