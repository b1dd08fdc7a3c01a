"""TLS channels that take new certificates when the files of the old ones change.

gRPC gives a channel its certificates once. Here a call after a change goes through a new channel,
and calls that run keep the one they began on.
"""

import weakref
from collections.abc import Callable
from typing import Any

import grpc


class _Current:
    """The channel with the certificates of now."""

    def __init__(self, make: Callable[[], grpc.aio.Channel], revision: Callable[[], int]) -> None:
        self._make = make
        self._revision = revision
        self._made_at = revision()
        self._channel = make()
        self.all: weakref.WeakSet[grpc.aio.Channel] = weakref.WeakSet([self._channel])
        """It, and earlier ones on which calls still run."""

    def channel(self) -> grpc.aio.Channel:
        revision = self._revision()
        if revision != self._made_at:
            self._made_at = revision
            self._channel = self._make()
            self.all.add(self._channel)
        return self._channel


class _Method:
    """Makes the calls of one method."""

    def __init__(self, current: _Current, kind: str, given: tuple[Any, ...], options: Any) -> None:
        self._current = current
        self._kind = kind
        self._given = given
        self._options = options
        self._channel: grpc.aio.Channel | None = None
        self._made: Any = None

    def __call__(self, *request: Any, **options: Any) -> Any:
        channel = self._current.channel()
        if channel is not self._channel:
            self._made = getattr(channel, self._kind)(*self._given, **self._options)
            self._channel = channel
        call = self._made(*request, **options)
        call.channel = channel  # gRPC ends the calls of a channel that nobody holds
        return call


class RenewedChannel(grpc.aio.Channel):
    """A channel whose calls go through the newest of several."""

    def __init__(self, make: Callable[[], grpc.aio.Channel], revision: Callable[[], int]) -> None:
        """Makes the first channel.

        Args:
            make: Makes a channel with the certificates of now.
            revision: Returns a number that is another one when the certificates have changed.
        """
        self._current = _Current(make, revision)

    def unary_unary(self, *given: Any, **options: Any) -> Any:
        """Returns a multicallable; see gRPC."""
        return _Method(self._current, "unary_unary", given, options)

    def unary_stream(self, *given: Any, **options: Any) -> Any:
        """Returns a multicallable; see gRPC."""
        return _Method(self._current, "unary_stream", given, options)

    def stream_unary(self, *given: Any, **options: Any) -> Any:
        """Returns a multicallable; see gRPC."""
        return _Method(self._current, "stream_unary", given, options)

    def stream_stream(self, *given: Any, **options: Any) -> Any:
        """Returns a multicallable; see gRPC."""
        return _Method(self._current, "stream_stream", given, options)

    async def __aenter__(self) -> "RenewedChannel":
        """Returns itself."""
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Closes the channels."""
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        """Closes the channels, and ends their calls after a grace, in seconds."""
        for channel in list(self._current.all):
            await channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:  # noqa: FBT001, FBT002 - gRPC's signature
        """Returns the state of the newest channel."""
        return self._current.channel().get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """Waits until the newest channel has another state."""
        await self._current.channel().wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """Waits until the newest channel is connected."""
        await self._current.channel().channel_ready()
