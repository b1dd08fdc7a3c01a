"""The requests that wait for a lease: which engines each line waits for, and who waits in vain."""

from rollmesh.router.leasing.awaited import AwaitedSlots
from rollmesh.router.leasing.engines import Engine
from rollmesh.router.leasing.fleet import Fleet
from rollmesh.router.leasing.pools import Choice, Pool
from rollmesh.router.leasing.queue import Line, Queue
from rollmesh.router.leasing.streams import Request, Stream
from rollmesh.runtime.errors import EnginesBusyError, NoEngineError, RollmeshError

_PATIENCE_MS = 200
_NO_ENGINE_MS = 200
_MOST_PROLONGED = 256


class Waits(Queue[Choice | AwaitedSlots, Request]):
    """The queue; some lines wait for engines of the fleet, some for one that is awaited."""

    def __init__(self, limit: int, fleet: Fleet) -> None:
        """Starts empty.

        Args:
            limit: Maximum number of waiting requests.
            fleet: The engines.
        """
        super().__init__(limit)
        self._fleet = fleet
        self.prolonged = 0
        """Number of waits that began again because no engine sampled."""

    def overdue(self, now_ms: int) -> Request | None:
        """Returns a request whose wait is over; None if there is none.

        The wait begins again while engines are there and none of them samples, for as long as the
        request allows. At most 256 waits begin again in one step.
        """
        suspended: dict[Pool, bool] = {}
        for _ in range(_MOST_PROLONGED):
            request = super().overdue(now_ms)
            if request is None or request.last_ms <= now_ms:
                return request
            pool = request.stream.pool
            if pool not in suspended:
                suspended[pool] = self._fleet.is_suspended(pool)
            if not suspended[pool]:
                return request
            self.prolonged += 1
            wait_ms = request.deadline_ms - request.asked_ms
            self.prolong(request, min(now_ms + wait_ms, request.last_ms))
        return None

    def refusal(self, request: Request, now_ms: int) -> RollmeshError:
        """Returns why a request got no slot."""
        fitting, pool = request.choice.fitting, request.stream.pool
        if not fitting:
            why = self._fleet.why_none(request.stream.hello)
            return NoEngineError(why, retry_delay_ms=_NO_ENGINE_MS)
        return EnginesBusyError(
            f"all {fitting} engines are full", retry_delay_ms=self.delay_ms(pool, now_ms)
        )

    def add_for(self, request: Request, awaited: Engine | None, now_ms: int) -> None:
        """Adds a request; it waits for one engine to register if that is given.

        Raises:
            EnginesBusyError: The queue is full.
        """
        if self.is_full:
            raise EnginesBusyError(
                f"{len(self)} requests wait for an engine already",
                retry_delay_ms=self.delay_ms(request.stream.pool, now_ms),
            )
        self.add(request, request.choice if awaited is None else AwaitedSlots(awaited))

    def delay_ms(self, pool: Pool, now_ms: int) -> int:
        """Estimates how long one more request for engines of a pool would wait, milliseconds."""
        ahead = sum(len(line) for choice, line in self._choices() if choice.pool is pool)
        return pool.delay_ms(ahead, now_ms)

    def no_longer_for(self, awaited: Engine) -> None:
        """Lets the requests go on that waited for an engine to register."""
        for slots, line in self.lines():
            if slots == AwaitedSlots(awaited):
                self._move(tuple(line))

    def trust_changed(self, stream: Stream) -> None:
        """Lets the requests of a stream wait for the engines that its gateway trusts now."""
        for request in stream.waiting.values():
            request.choice = Choice(stream.pool, request.choice.excluded, stream.distrusted)
            if isinstance(self._slots[request], Choice):
                self._move([request])

    def retry(self, now_ms: int) -> None:
        """Lets requests return to engines that failed their turn, if no others have come."""
        for line in self._in_vain():
            due: list[Request] = []
            for request in line:  # oldest first
                if request.asked_ms + _PATIENCE_MS > now_ms:
                    break
                request.choice = request.choice.with_excluded()
                due.append(request)
            self._move(due)

    def retry_ms(self) -> int | None:
        """Returns when `retry` has something to do; None if nobody waits for that."""
        return min((line.oldest_ms + _PATIENCE_MS for line in self._in_vain()), default=None)

    def _move(self, requests: tuple[Request, ...] | list[Request]) -> None:
        """Moves requests to the lines of their choices."""
        for request in requests:
            self.remove(request)
            self.add(request, request.choice)

    def _choices(self) -> list[tuple[Choice, Line[Request]]]:
        return [(one, line) for one, line in self.lines() if isinstance(one, Choice)]

    def _in_vain(self) -> list[Line[Request]]:
        """Returns the requests whose exclusions leave no engine."""
        lines = self._choices()
        return [line for choice, line in lines if choice.excluded and not choice.fitting]
