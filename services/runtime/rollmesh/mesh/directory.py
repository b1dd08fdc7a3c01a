"""Finds the other members of a mesh by asking its routers.

The id of a session begins with the id of the journal that holds it, and the router knows which
gateway serves which journal. So every sidecar and client finds every session without state of its
own, also when its gateway returns elsewhere or another gateway takes over the journal.
"""

import asyncio
import random
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import grpc

from rollmesh.mesh.routers import Routers
from rollmesh.runtime import clock
from rollmesh.runtime.access import Identity
from rollmesh.runtime.errors import NoSidecarError, RollmeshError
from rollmesh.runtime.rpc import KEEPALIVE_MS, open_channel
from rollmesh.v1 import router_pb2

if TYPE_CHECKING:
    from rollmesh.v1.router_pb2_grpc import RouterServiceAsyncStub as Stub

LIST_TIMEOUT_S = 5.0
"""Time for a router to list members, seconds."""
RETRY_MS = 1000
"""Retry delay while the router does not know the wanted member, milliseconds."""
_LIST_AGE_MS = 250
KEPT_MS = 3_600_000
"""Time after which a member is forgotten that no router lists and no caller uses, milliseconds."""


class Directory(ABC):
    """Asks the routers where members are, and keeps channels to them. Connects when first used."""

    def __init__(self, router: str, keepalive_ms: int, identity: Identity | None) -> None:
        """Starts without channels.

        Args:
            router: `host:port` of the router, or several separated by commas.
            keepalive_ms: Idle time after which members are pinged, milliseconds.
            identity: The identity that calls present. None means the identity of the process.
        """
        self._routers = Routers(router, identity)
        self._keepalive_ms = keepalive_ms
        self._identity = identity
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._used_ms: dict[str, int] = {}
        self._listing = asyncio.Lock()
        self._listed_ms: int | None = None

    @property
    def channels(self) -> int:
        """Number of open channels to members."""
        return len(self._channels)

    async def aclose(self) -> None:
        """Closes the channels."""
        await self._routers.aclose()
        await self._close(list(self._channels))

    def channel(self, address: str) -> grpc.aio.Channel:
        """Returns the channel to an address, `host:port`."""
        self._used_ms[address] = clock.monotonic_ms()
        if address not in self._channels:
            self._channels[address] = open_channel(
                address, self._keepalive_ms, identity=self._identity
            )
        return self._channels[address]

    async def _close_unused(self, before_ms: int, kept: Collection[str]) -> None:
        """Closes the channels that were last used before a time, except those to `kept`.

        A running call is cancelled, so the time must be longer ago than any call takes.
        """
        unused = self._channels.keys() - set(kept)
        await self._close([one for one in unused if self._used_ms[one] < before_ms])

    async def _close(self, addresses: Sequence[str]) -> None:
        """Closes channels. All are forgotten before the first wait, in which others may be used."""
        channels = [self._channels.pop(address) for address in addresses]
        for address in addresses:
            del self._used_ms[address]
        for channel in channels:
            await channel.close()

    async def _list(self) -> None:
        """Has the members listed, once for all callers within a quarter of a second."""
        async with self._listing:
            now_ms = clock.monotonic_ms()
            if self._listed_ms is None or now_ms - self._listed_ms >= _LIST_AGE_MS:
                await self._read()
                self._listed_ms = clock.monotonic_ms()

    @abstractmethod
    async def _read(self) -> None:
        """Asks the routers for the members."""

    async def _members(
        self, kind: router_pb2.ReplicaKind.ValueType, none: RollmeshError
    ) -> Sequence[str]:
        """Returns the `host:port` of the members of a kind, or the URLs of sidecars.

        A router that knows none, as after a restart, is passed over.

        Raises:
            RollmeshError: `none`, if no router knows one. Or no router answers.
        """

        async def list_them(stub: "Stub", limit_s: float) -> Sequence[str]:
            request = router_pb2.ListReplicasRequest(kind=kind)
            response = await stub.ListReplicas(request, timeout=limit_s)
            found = [_where(one.hello) for one in response.replicas if one.hello.kind == kind]
            if not found:
                raise none
            return found

        return await self._routers.ask(list_them, LIST_TIMEOUT_S)


def _where(hello: router_pb2.ReplicaHello) -> str:
    if hello.kind != router_pb2.REPLICA_KIND_SIDECAR:
        return hello.address
    return f"{'https' if hello.https else 'http'}://{hello.address}{hello.path_prefix}"


class SidecarDirectory(Directory):
    """The sidecars of a mesh. Any of them serves any session."""

    def __init__(self, router: str, sidecar: str = "", identity: Identity | None = None) -> None:
        """Takes the `host:port` or URL of a sidecar too. The router is not asked then."""
        super().__init__(router, KEEPALIVE_MS, identity)
        self._asks = bool(router and not sidecar)
        url = sidecar.rstrip("/") if "://" in sidecar else f"http://{sidecar}"
        self._found: Sequence[str] = (url,)

    async def any(self) -> str:
        """Returns the URL of a sidecar that the router knew a moment ago.

        It has no host if neither a router nor a sidecar is given.

        Raises:
            NoSidecarError: The router knows none.
            RollmeshError: The router did not answer.
        """
        if self._asks:
            await self._list()
        return random.choice(self._found)  # noqa: S311 - no secret

    async def _read(self) -> None:
        none = NoSidecarError(
            "no sidecar is registered with the router; try again", retry_delay_ms=RETRY_MS
        )
        self._found = await self._members(router_pb2.REPLICA_KIND_SIDECAR, none)


# Journals.

JOURNAL_ID_CHARS = 8
"""Characters of a journal's id."""


def journal_of(session_id: str) -> str:
    """Returns the id of the journal that holds a session."""
    return session_id[:JOURNAL_ID_CHARS]
