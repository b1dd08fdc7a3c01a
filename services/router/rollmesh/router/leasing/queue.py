"""The requests that wait for a slot on an engine, and the order in which they get one.

The rule: slots are given out in rounds.

1. In a round each group with a waiting request gets one slot. The earliest deadline goes first.
2. Within a group the same holds for its sessions: the slots of the group go to each session with a
   waiting request in turn, the earliest deadline first.
3. Within a session the earliest deadline goes first. Equal deadlines go in the order of asking.

A group that begins to wait joins the round that is under way, unless it had its slot in it. A
session without a group is a group of its own. So while two groups wait, neither gets more than two
slots in a row from the other, however many it asked for: a session that asks for 16 samples at
once delays every other session by one slot for each slot that it gets itself. A slot is never
left free to be fair: a group that waits alone gets all of them.
"""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from rollmesh.router.leasing.ranking import Ranking

Position = tuple[int, int, int]
"""A position in the order: round, deadline, number of the request."""
_Due = tuple[int, int]  # deadline, number
_LEAST_KEPT = 64


class Slots(Hashable, Protocol):
    """The slots that can serve a request."""

    def any_free(self) -> bool:
        """Returns whether one of them is free."""
        ...


@dataclass(slots=True, eq=False)
class Waiting:
    """A request that waits; times are monotonic milliseconds."""

    number: int
    """Numbers grow in the order in which requests came."""
    session_id: str
    group_id: str
    """May be empty."""
    asked_ms: int
    deadline_ms: int

    @property
    def group(self) -> Hashable:
        """Its group; a session without a group is one of its own."""
        return self.group_id or (self.session_id,)


_Slots = TypeVar("_Slots", bound=Slots)
_Request = TypeVar("_Request", bound=Waiting)


class Rounds:
    """Parties that get one slot a round.

    Invariant: a party that waits gets its next slot in this round or the one after it.
    """

    def __init__(self, first_round: int = 0) -> None:
        """Starts without parties."""
        self._round = first_round
        self._next: dict[Hashable, int] = {}  # round of the next slot; kept while it matters
        self._order: Ranking[Hashable, Position] = Ranking()

    def __bool__(self) -> bool:
        """Returns whether a party waits."""
        return bool(self._order)

    def rank(self, party: Hashable, due: _Due) -> None:
        """Ranks a party that waits by its first request."""
        self._next[party] = max(self._next.get(party, 0), self._round)
        self._order.set(party, (self._next[party], *due))

    def discard(self, party: Hashable) -> None:
        """Removes a party that waits no longer; remembers that it had its slot in this round."""
        self._order.discard(party)
        if len(self._next) > 2 * len(self._order) + _LEAST_KEPT:
            self._next = {
                one: round_
                for one, round_ in self._next.items()
                if round_ > self._round or one in self._order
            }

    def serve(self, party: Hashable) -> None:
        """Notes that a party gets its slot; rank or discard it then."""
        self._round = self._next[party]
        self._next[party] += 1

    def first(self) -> tuple[Position, Hashable]:
        """Returns the first party and its position in the order."""
        party = self._order.first()
        if party is None:
            raise LookupError("nobody waits")
        return self._order.key(party), party


class Group(Generic[_Request]):
    """The waiting requests of one group."""

    def __init__(self) -> None:
        """Starts empty."""
        self.sessions = Rounds()
        self._requests: dict[str, Ranking[_Request, _Due]] = {}  # by session

    def add(self, request: _Request) -> None:
        """Adds a request."""
        own = self._requests.setdefault(request.session_id, Ranking())
        own.set(request, (request.deadline_ms, request.number))
        self._rank(request.session_id, own)

    def remove(self, request: _Request) -> None:
        """Removes a request."""
        own = self._requests[request.session_id]
        own.discard(request)
        self._rank(request.session_id, own)

    def first(self) -> _Request:
        """Returns the first request."""
        _, session_id = self.sessions.first()
        request = self._requests[str(session_id)].first()
        if request is None:
            raise LookupError("nobody waits")
        return request

    def _rank(self, session_id: str, own: Ranking[_Request, _Due]) -> None:
        first = own.first()
        if first is None:
            del self._requests[session_id]
            self.sessions.discard(session_id)
        else:
            self.sessions.rank(session_id, own.key(first))


class Line(Generic[_Request]):
    """The waiting requests that the same slots can serve, in the order of the rule."""

    def __init__(self, first_round: int) -> None:
        """Starts empty, in a round."""
        self._requests: dict[_Request, None] = {}  # oldest first
        self._groups: dict[Hashable, Group[_Request]] = {}
        self._rounds = Rounds(first_round)

    def __len__(self) -> int:
        """Returns the number of requests."""
        return len(self._requests)

    def __iter__(self) -> Iterator[_Request]:
        """Iterates over the requests, oldest first."""
        return iter(self._requests)

    @property
    def oldest_ms(self) -> int:
        """Time at which the oldest request came."""
        return next(iter(self._requests)).asked_ms

    def add(self, request: _Request) -> None:
        """Adds a request."""
        self._requests[request] = None
        self._groups.setdefault(request.group, Group()).add(request)
        self._rank(request.group)

    def remove(self, request: _Request) -> None:
        """Removes a request."""
        del self._requests[request]
        self._groups[request.group].remove(request)
        self._rank(request.group)

    def serve(self, request: _Request) -> int:
        """Removes a request that gets a slot; returns the round."""
        (round_, _, _), _ = self._rounds.first()
        self._rounds.serve(request.group)
        self._groups[request.group].sessions.serve(request.session_id)
        self.remove(request)
        return round_

    def first(self) -> tuple[Position, _Request]:
        """Returns the first request and its position in the order."""
        position, group = self._rounds.first()
        return position, self._groups[group].first()

    def _rank(self, key: Hashable) -> None:
        group = self._groups[key]
        if group.sessions:
            first = group.first()
            self._rounds.rank(key, (first.deadline_ms, first.number))
        else:
            del self._groups[key]
            self._rounds.discard(key)


class Queue(Generic[_Slots, _Request]):
    """All waiting requests: one line for each set of slots.

    Requests that the same slots can serve wait in one line, so one that cannot be served never
    holds up one that can. Rounds are counted in each line; between lines that could take the same
    slot, the one in the earlier round gets it.
    """

    def __init__(self, limit: int) -> None:
        """Starts empty.

        Args:
            limit: Maximum number of waiting requests.
        """
        self._limit = limit
        self._round = 0
        self._lines: dict[_Slots, Line[_Request]] = {}
        self._slots: dict[_Request, _Slots] = {}
        self._deadlines: Ranking[_Request, _Due] = Ranking()

    def __len__(self) -> int:
        """Returns the number of waiting requests."""
        return len(self._slots)

    @property
    def is_full(self) -> bool:
        """Whether no more requests may wait."""
        return len(self) >= self._limit

    def lines(self) -> list[tuple[_Slots, Line[_Request]]]:
        """Returns the lines with the slots that each waits for."""
        return list(self._lines.items())

    def add(self, request: _Request, slots: _Slots) -> None:
        """Adds a request."""
        self._slots[request] = slots
        self._deadlines.set(request, (request.deadline_ms, request.number))
        if slots not in self._lines:
            self._lines[slots] = Line(self._round)
        self._lines[slots].add(request)

    def remove(self, request: _Request) -> None:
        """Removes a request that gets no slot."""
        slots = self._forget(request)
        self._lines[slots].remove(request)
        self._tidy(slots)

    def serve(self, request: _Request) -> None:
        """Removes a request that gets a slot."""
        slots = self._forget(request)
        self._round = max(self._round, self._lines[slots].serve(request))
        self._tidy(slots)

    def prolong(self, request: _Request, until_ms: int) -> None:
        """Lets a request wait beyond its deadline; its place in the order stays."""
        self._deadlines.set(request, (until_ms, request.number))

    def next(self) -> _Request | None:
        """Returns the request that gets a slot now; None if nobody waits for a free one."""
        firsts = [line.first() for slots, line in self._lines.items() if slots.any_free()]
        return min(firsts)[1] if firsts else None

    def overdue(self, now_ms: int) -> _Request | None:
        """Returns a request whose deadline has passed; None if there is none."""
        due_ms = self.first_deadline_ms()
        return self._deadlines.first() if due_ms is not None and due_ms <= now_ms else None

    def first_deadline_ms(self) -> int | None:
        """Returns the earliest deadline; None if nobody waits."""
        request = self._deadlines.first()
        return None if request is None else self._deadlines.key(request)[0]

    def _forget(self, request: _Request) -> _Slots:
        self._deadlines.discard(request)
        return self._slots.pop(request)

    def _tidy(self, slots: _Slots) -> None:
        if not self._lines[slots]:
            del self._lines[slots]
