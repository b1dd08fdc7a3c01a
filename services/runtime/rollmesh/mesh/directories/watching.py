"""Ends calls to gateways that stand still while another gateway serves their sessions.

A gateway whose process is stopped or whose host hangs leaves its connections open, and HTTP/2
keepalive needs half a minute to notice. Meanwhile another gateway may have taken its journal.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from rollmesh.runtime.errors import RemoteError, RollmeshError
from rollmesh.runtime.rpc.channels import ended_with

TICK_S = 0.5
"""Time between two ticks, seconds."""
_QUIET, _AGAIN = 3, 2
"""Ticks of silence after which the routers are asked about a gateway, and until the next time."""
_MOVED = "the gateway stands still, and has left the session to another one; try again"


class Call(Protocol):
    """A call that can be ended."""

    def cancel(self) -> bool:
        """Ends it; whoever waits for it is told that it was cancelled."""
        ...


class Route(NamedTuple):
    """Where a call is made, and what for."""

    address: str
    """Address of the gateway."""
    journal_id: str
    """The journal of the session; that in which the gateway opens a new one. May be empty."""
    is_new: bool
    """Whether the call opens a session."""


@dataclass(slots=True, eq=False)
class Peer:
    """One gateway, as its callers hear of it."""

    address: str
    heard: bool = False
    """Set by callers when the gateway said something; cleared by each tick."""
    quiet: int = 0
    """Number of ticks since it said something."""
    running: set["_Running"] = field(default_factory=set)

    def tick(self) -> bool:
        """Notes that a tick has passed; returns whether to ask the routers about the gateway.

        Ticks are counted and not time: when this process stalls, what the gateway said meanwhile is
        read before the next tick.
        """
        self.quiet = 0 if self.heard else self.quiet + 1
        self.heard = False
        return self.quiet >= _QUIET and not (self.quiet - _QUIET) % _AGAIN


@dataclass(slots=True, eq=False)
class _Running:
    """One running call."""

    call: Call
    route: Route
    error: RollmeshError | None = None
    """Why it was ended."""


class CallWatch:
    """The running calls to the gateways of a mesh.

    A gateway that says anything at all within a second and a half is not asked about. While one is
    silent, one question each second serves all calls.
    """

    def __init__(
        self, look: Callable[[], Awaitable[None]], leads_there: Callable[[Route], bool]
    ) -> None:
        """Starts without calls.

        Args:
            look: Asks the routers about the gateways.
            leads_there: Returns whether a call would take the same route now.
        """
        self._look = look
        self._leads_there = leads_there
        self._peers: dict[str, Peer] = {}
        self._ticking: asyncio.Task[None] | None = None

    @property
    def gateways(self) -> int:
        """Number of gateways that are watched."""
        return len(self._peers)

    @contextmanager
    def over(self, route: Route, call: Call) -> Iterator[Peer]:
        """Watches a call while the block runs; yields what to tell that the gateway was heard.

        Raises:
            RemoteError: The call was ended: its route leads elsewhere by now.
        """
        running = _Running(call, route)
        peer = self._peers.get(route.address)
        if peer is None:
            peer = self._peers[route.address] = Peer(route.address)
        peer.running.add(running)
        if self._ticking is None:
            self._ticking = asyncio.get_running_loop().create_task(self._tick())
        try:
            with ended_with(lambda: running.error):
                yield peer
            peer.heard = True
        finally:
            peer.running.discard(running)

    async def aclose(self) -> None:
        """Ends the watch."""
        if self._ticking is not None:
            self._ticking.cancel()
            with suppress(asyncio.CancelledError):
                await self._ticking

    async def _tick(self) -> None:
        """Ticks until no call is running."""
        try:
            while True:
                await asyncio.sleep(TICK_S)
                for address in [one.address for one in self._peers.values() if not one.running]:
                    del self._peers[address]
                if not self._peers:
                    return
                silent = [peer for peer in self._peers.values() if peer.tick()]
                if silent and await self._has_looked():
                    for peer in silent:
                        self._end_moved(peer)
        finally:
            self._ticking = None

    async def _has_looked(self) -> bool:
        try:
            await self._look()
        except RollmeshError:  # nobody knows better
            return False
        return True

    def _end_moved(self, peer: Peer) -> None:
        for running in list(peer.running):
            if not self._leads_there(running.route):
                running.error = RemoteError(_MOVED, "UNAVAILABLE")
                running.call.cancel()
