"""A `Dispatch` stream as its gateway writes it, and how a router that fell silent is noticed."""

import asyncio
import enum
from collections.abc import AsyncIterator
from contextlib import suppress

from rollmesh.mesh.leasing.holdings import Restating
from rollmesh.v1 import router_pb2

TICK_S = 0.125
"""Time between two ticks of `Silence`, seconds."""
PATIENCE, LONG_PATIENCE = 4, 80
"""Ticks for which a ping may stay unanswered: at first, and at most."""
_WAITING, _IDLE = 2, 8
_MAX_OUTGOING = 65_536
_RELEASE_S = 0.002  # how long a release waits to share a message with the next acquire


class Heard(enum.Enum):
    """What to do after a tick."""

    ENOUGH = enum.auto()
    """Nothing."""
    TOO_LITTLE = enum.auto()
    """Ping the router."""
    NOTHING = enum.auto()
    """Leave the router: it is silent."""


class Silence:
    """Notices that a router says nothing, though its connection is open.

    Its host may have lost its power, or its process may be stopped. While a request is unanswered
    the router is pinged after 250 ms of silence, otherwise after a second, and it has 500 ms to
    answer. So a busy gateway sends no pings, and a silent router is left within a second of the
    first request that it does not answer. Ticks are counted and not time: when this process stalls,
    what the router said meanwhile is read before the next tick.
    """

    def __init__(self, patience: int) -> None:
        """Starts with a router that spoke just now; a ping is answered within `patience` ticks."""
        self._patience = patience
        self._quiet = 0
        self._pinged = False

    def heard(self) -> None:
        """Notes that the router said something."""
        self._quiet, self._pinged = 0, False

    def tick(self, *, is_waiting: bool) -> Heard:
        """Notes that a tick has passed; a request may be waiting for its answer."""
        self._quiet += 1
        if self._pinged:
            return Heard.NOTHING if self._quiet >= self._patience else Heard.ENOUGH
        if self._quiet < (_WAITING if is_waiting else _IDLE):
            return Heard.ENOUGH
        self._quiet, self._pinged = 0, True
        return Heard.TOO_LITTLE


class Line:
    """One stream's outgoing messages; when the stream ends, the router frees its leases.

    Releases are batched with the next acquire for up to 2 ms, so a turn costs one message.
    """

    def __init__(self, max_outgoing: int = _MAX_OUTGOING) -> None:
        """Starts without messages; at most `max_outgoing` wait for the router to read them."""
        self.messages: asyncio.Queue[router_pb2.DispatchRequest | None]
        self.messages = asyncio.Queue(max_outgoing)
        self._releases: list[router_pb2.ReleaseLease] = []
        self._restating: Restating | None = None

    def begin(self, restating: Restating) -> None:
        """Begins to use the stream: first of all, it states what is held already."""
        self._restating = restating
        self.ping()  # wakes `requests`

    @property
    def is_restating(self) -> bool:
        """Whether something remains to be stated."""
        return self._restating is not None

    def acquire(self, acquire: router_pb2.AcquireLease) -> None:
        """Requests a lease.

        Raises:
            asyncio.QueueFull: The router reads too slowly.
        """
        self._send(router_pb2.DispatchRequest(acquire=acquire))

    def release(self, release: router_pb2.ReleaseLease) -> None:
        """Releases a lease."""
        if not self._releases:
            asyncio.get_running_loop().call_later(_RELEASE_S, self._flush)
        self._releases.append(release)
        if release.engine_fault:
            self._flush()  # at once, so that no other session gets that engine

    def forget(self, session_id: str) -> None:
        """Tells the router that a session has ended."""
        forget = router_pb2.ForgetSession(session_id=session_id)
        with suppress(asyncio.QueueFull):  # the router forgets it when the stream ends
            self._send(router_pb2.DispatchRequest(forget=forget))

    def ping(self) -> None:
        """Asks the router to say something."""
        with suppress(asyncio.QueueFull):
            self._send(router_pb2.DispatchRequest(ping=router_pb2.DispatchPing()))

    def end(self) -> None:
        """Ends the request stream, so that the call's task can finish."""
        with suppress(asyncio.QueueFull):
            self.messages.put_nowait(None)

    async def requests(
        self, hello: router_pb2.DispatchHello
    ) -> AsyncIterator[router_pb2.DispatchRequest]:
        """Yields the messages of the stream.

        What is restated is made as the router reads it, with other messages in between: they do not
        wait for 100,000 sessions. A request for a lease comes after the statement of its session.
        """
        yield router_pb2.DispatchRequest(hello=hello)
        while True:
            if self._restating is not None:
                stated = self._restating.next()
                if stated is None:
                    self._restating = None
                else:
                    yield router_pb2.DispatchRequest(restate=stated)
                    if self.messages.empty():
                        continue
            message = await self.messages.get()
            if message is None:
                return
            if self._restating is not None and message.HasField("acquire"):
                stated = self._restating.before(message.acquire.session_id)
                if stated is not None:
                    yield router_pb2.DispatchRequest(restate=stated)
            yield message

    def _flush(self) -> None:
        if not self._releases:  # they were sent with another message
            return
        try:
            self._send(router_pb2.DispatchRequest())
        except asyncio.QueueFull:
            asyncio.get_running_loop().call_later(_RELEASE_S, self._flush)

    def _send(self, message: router_pb2.DispatchRequest) -> None:
        message.releases.extend(self._releases)
        self.messages.put_nowait(message)
        self._releases.clear()
