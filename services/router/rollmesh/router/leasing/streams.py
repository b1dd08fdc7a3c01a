"""The `Dispatch` streams of gateways: their leases, and the requests that wait for one."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from rollmesh.router.leasing.engines import Engine, Lease
from rollmesh.router.leasing.pools import NO_ENGINES, Choice, Pool
from rollmesh.router.leasing.queue import Waiting
from rollmesh.runtime.errors import InvalidLeaseError, RollmeshError, SupersededError
from rollmesh.v1 import router_pb2

_MOST_EXCLUDED, _MOST_PREFIXES = 256, 32


@dataclass(slots=True, eq=False)
class Request(Waiting):
    """A request for a lease."""

    stream: "Stream"
    lease_id: str
    choice: Choice
    """The engines that can serve it."""
    prefixes: Sequence[int]
    """Digests of the beginnings of its prompt, the shortest first."""
    last_ms: int
    """End of its wait if no engine samples until then."""


@dataclass(slots=True, eq=False)
class Stream:
    """The leases of one gateway."""

    stream_id: str
    hello: router_pb2.DispatchHello
    pool: Pool
    distrusted: frozenset[Engine] = NO_ENGINES
    """Engines that the gateway reported for an impossible answer."""
    leases: dict[str, Lease] = field(default_factory=dict)
    waiting: dict[str, Request] = field(default_factory=dict)

    def check_new(
        self, lease_id: str, session_id: str, excluded: Sequence[str], prefixes: Sequence[int]
    ) -> None:
        """Checks the arguments of a request for a lease.

        Raises:
            InvalidLeaseError: An id is missing or in use, or there are too many of something.
        """
        if lease_id in self.leases or lease_id in self.waiting or not lease_id or not session_id:
            raise InvalidLeaseError(
                "acquire",
                "lease_id and session_id must be set, and no lease may have this lease_id",
            )
        if len(prefixes) > _MOST_PREFIXES:
            raise InvalidLeaseError("acquire", f"prefix_crc32s: give at most {_MOST_PREFIXES}")
        if len(excluded) > _MOST_EXCLUDED:
            raise InvalidLeaseError(
                "acquire", f"excluded_engine_ids: give at most {_MOST_EXCLUDED}, those of this turn"
            )

    def book(self, lease: Lease) -> None:
        """Takes a slot of the lease's engine."""
        self.leases[lease.lease_id] = lease
        lease.engine.book(lease)


class EndedWait(NamedTuple):
    """The end of a wait."""

    stream_id: str
    lease_id: str
    waited_ms: int
    result: router_pb2.LeaseGrant | RollmeshError


class Streams(dict[str, Stream]):
    """The open streams by id.

    Invariant: of the streams of one process only the one with the highest number is kept. The
    others may be half open.
    """

    def __init__(self) -> None:
        """Starts empty."""
        super().__init__()
        self._latest: dict[tuple[str, str], Stream] = {}

    def of_gateway(self, gateway_id: str) -> list[str]:
        """Returns the ids of a gateway's streams."""
        return [id_ for id_, stream in self.items() if stream.hello.gateway_id == gateway_id]

    @property
    def gateways(self) -> set[str]:
        """Ids of the gateways that have a stream."""
        return {stream.hello.gateway_id for stream in self.values()}

    def of_model(self, model: str) -> list[str]:
        """Returns the ids of the streams that may lease engines of a model."""
        return [id_ for id_, stream in self.items() if stream.hello.model in {"", model}]

    def former(self, hello: router_pb2.DispatchHello) -> str | None:
        """Returns the id of the stream that a new one replaces; None if there is none.

        Raises:
            SupersededError: A later stream of the process is open.
        """
        stream = self._latest.get((hello.gateway_id, hello.instance_id))
        if stream is None:
            return None
        if stream.hello.stream_number > hello.stream_number:
            raise SupersededError(
                f"hello.stream_number: is {hello.stream_number}, and stream "
                f"{stream.hello.stream_number} of this process is open; count up"
            )
        return stream.stream_id

    def open(self, stream: Stream) -> None:
        """Adds a stream; one without an instance id replaces no other."""
        self[stream.stream_id] = stream
        if stream.hello.instance_id:
            self._latest[stream.hello.gateway_id, stream.hello.instance_id] = stream

    def close(self, stream_id: str) -> Stream | None:
        """Removes and returns a stream; returns None if it is not open."""
        stream = self.pop(stream_id, None)
        if stream is not None:
            key = stream.hello.gateway_id, stream.hello.instance_id
            if self._latest.get(key) is stream:
                del self._latest[key]
        return stream
