"""Metrics of the sidecar."""

import time

from prometheus_client import Counter, Histogram
from starlette.types import Message, Receive, Send

TURNS = Counter(
    "rollmesh_sidecar_turns_total",
    "Requests for an answer, by protocol and HTTP status; 499 if the client left before it.",
    ["protocol", "status"],
)
REFUSED = Counter(
    "rollmesh_sidecar_refused_total",
    "Requests refused before they reached an endpoint, by reason.",
    ["reason"],
)
FIRST_BYTE_SECONDS = Histogram(
    "rollmesh_sidecar_first_byte_seconds",
    "Time from a request's arrival to the first byte of its answer.",
    buckets=(0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 300),
)
_LEFT = 499


class Watch:
    """The measurements of one request."""

    def __init__(self, protocol: str) -> None:
        """Starts the clock of a request in the named protocol."""
        self._protocol = protocol
        self._started = time.perf_counter()
        self._status = _LEFT
        self.received_bytes = 0
        """Received bytes of the request's body."""
        self.streams = False
        """Whether a part of the answer's body was sent, and more follows."""

    @property
    def has_begun(self) -> bool:
        """Whether a byte of the answer was sent."""
        return self._status != _LEFT

    def answered(self, status: int) -> None:
        """Notes the first byte of the answer."""
        self._status = status
        FIRST_BYTE_SECONDS.observe(time.perf_counter() - self._started)

    def ended(self) -> None:
        """Counts the request."""
        TURNS.labels(self._protocol, str(self._status)).inc()


def measured(receive: Receive, send: Send, protocol: str) -> tuple[Receive, Send, Watch]:
    """Returns a measured ASGI channel and its measurements.

    Args:
        receive: Receives from the client.
        send: Sends to the client.
        protocol: Name of the protocol, a label of the metrics.
    """
    watch = Watch(protocol)

    async def watched(message: Message) -> None:
        if message["type"] == "http.response.start":
            watch.answered(message["status"])
        else:
            watch.streams = message.get("more_body", False)
        await send(message)

    async def counted() -> Message:
        message = await receive()
        watch.received_bytes += len(message.get("body", b""))
        return message

    return counted, watched, watch
