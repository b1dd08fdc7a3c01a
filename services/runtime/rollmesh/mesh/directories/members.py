"""The members of a mesh of which any one serves: collectors, and sidecars.

The router knows them, or the settings name them. A caller uses one until it is lost. A process that
dies is noticed at once, one that stands still or whose host is gone within ten seconds: its
connection does not answer a ping.
"""

import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

import grpc

from rollmesh.mesh.directories.choices import Choice
from rollmesh.mesh.directories.lookups import RETRY_MS, Channels, Lookups, Shared
from rollmesh.mesh.routers.preference import addresses_of
from rollmesh.runtime import clock
from rollmesh.runtime.access.identity import Identity
from rollmesh.runtime.errors import (
    ConsumerMovedError,
    InvalidFieldError,
    NoCollectorError,
    NoSidecarError,
    RemoteError,
    RollmeshError,
)
from rollmesh.runtime.rpc.options import SHORT_KEEPALIVE_MS
from rollmesh.v1 import router_pb2

_KEPT_MS = 3_600_000
"""Time after which the channel to a collector is closed that no router names and nobody uses."""
_LOST_CODES = {"UNAVAILABLE", "DEADLINE_EXCEEDED"}
_TRANSPORT_CODES = {"UNKNOWN", "INTERNAL", "CANCELLED"}
"""Of calls that were cut off; a collector's own errors have a reason."""
_Result = TypeVar("_Result")


class CollectorDirectory:
    """The collectors of a mesh. They have one store, so any of them serves any request."""

    def __init__(self, router: str, collectors: str = "", identity: Identity | None = None) -> None:
        """Connects when first used.

        Args:
            router: `host:port` of the router, or several separated by commas.
            collectors: `host:port`, or several, separated by commas; the router is then not asked.
            identity: What the calls show of the caller; None means what the process shows.
        """
        self._fixed = addresses_of(collectors)
        self._choice = Choice(self._fixed)
        self._channels = Channels(SHORT_KEEPALIVE_MS, identity)
        self._lookups = Lookups(router, identity) if router else None
        self._list = Shared(self._read)

    @property
    def channels(self) -> int:
        """Number of open channels to collectors."""
        return self._channels.count

    @property
    def is_fixed(self) -> bool:
        """Whether there is only one collector, at a known address."""
        return len(self._fixed) == 1

    @asynccontextmanager
    async def one(self) -> AsyncIterator[grpc.aio.Channel]:
        """Yields the collector in use. If the block fails because it is away, it is lost.

        Raises:
            NoCollectorError: The router knows none.
            InvalidFieldError: Neither a router nor a collector is given.
            RollmeshError: The router did not answer, and no collector was known before.
        """
        address = await self._address()
        try:
            yield self._channels.of(address)
        except RollmeshError as error:
            if _is_loss(error):
                self._choice.lose(address)
            raise

    async def call(self, call: Callable[[grpc.aio.Channel], Awaitable[_Result]]) -> _Result:
        """Makes a repeatable call at the collector in use, and at each other one if it is away.

        Args:
            call: Makes the call once, and raises typed errors.

        Raises:
            RollmeshError: As `one` says; a collector refuses the call; or all of them are away.
        """
        tried: dict[str, RollmeshError] = {}
        while (address := await self._address()) not in tried:
            try:
                return await call(self._channels.of(address))
            except RollmeshError as error:
                if not _is_loss(error):
                    raise
                self._choice.lose(address)
                tried[address] = error
        raise tried[address]

    async def aclose(self) -> None:
        """Closes the channels."""
        await self._channels.aclose()
        if self._lookups is not None:
            await self._lookups.aclose()

    async def _address(self) -> str:
        if not self._choice.current and not self._fixed:
            await self._look()
        return self._choice.choose()

    async def _look(self) -> None:
        try:
            await self._list()
        except RollmeshError:
            if not self._choice.known:
                raise

    async def _read(self) -> None:
        if self._lookups is None:
            raise InvalidFieldError("addresses.collector", "is empty, and so is router; give one")
        none = NoCollectorError(
            "no collector is registered with the router; try again", retry_delay_ms=RETRY_MS
        )
        kind = router_pb2.REPLICA_KIND_COLLECTOR
        self._choice.know(await self._lookups.members(kind, none))
        before_ms = clock.monotonic_ms() - _KEPT_MS
        await self._channels.close_unused(before_ms, self._choice.known)


class SidecarDirectory:
    """The sidecars of a mesh. Any of them serves any session."""

    def __init__(self, router: str, sidecar: str = "", identity: Identity | None = None) -> None:
        """Connects when first used.

        Args:
            router: `host:port` of the router, or several separated by commas.
            sidecar: `host:port` or URL of the sidecar; the router is then not asked.
            identity: What the calls show of the caller; None means what the process shows.
        """
        self._asks = bool(router and not sidecar)
        url = sidecar.rstrip("/") if "://" in sidecar else f"http://{sidecar}"
        self._found: Sequence[str] = (url,)
        self._lookups = Lookups(router, identity)
        self._list = Shared(self._read)

    async def any(self) -> str:
        """Returns the URL of a sidecar, which the router knew a moment ago.

        It has no host if neither a router nor a sidecar is given.

        Raises:
            NoSidecarError: The router knows none.
            RollmeshError: The router did not answer.
        """
        if self._asks:
            await self._list()
        return random.choice(self._found)  # noqa: S311 - no secret

    async def aclose(self) -> None:
        """Closes the channels."""
        await self._lookups.aclose()

    async def _read(self) -> None:
        none = NoSidecarError(
            "no sidecar is registered with the router; try again", retry_delay_ms=RETRY_MS
        )
        kind = router_pb2.REPLICA_KIND_SIDECAR
        self._found = await self._lookups.members(kind, none)


def _is_loss(error: RollmeshError) -> bool:
    """Returns whether an error means that a server is away, so that another one may serve."""
    if isinstance(error, ConsumerMovedError):
        return False
    cut = isinstance(error, RemoteError) and error.code in _TRANSPORT_CODES
    return cut or error.code in _LOST_CODES
