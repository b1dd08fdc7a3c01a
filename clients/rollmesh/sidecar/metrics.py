"""Metrics of the sidecar."""

import time

from prometheus_client import Counter, Histogram
from starlette.types import Message, Receive, Send

CHATS = Counter(
    "rollmesh_sidecar_chats_total",
    "Chat completions, by HTTP status; 499 if the client left before the answer.",
    ["status"],
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


class Watch:
    """The measurements of one request."""

    def __init__(self) -> None:
        """Starts the clock."""
        self._started = time.perf_counter()
        self._status = 499
        self.received_bytes = 0
        """Received bytes of the request's body."""

    def answered(self, status: int) -> None:
        """Notes the first byte of the answer."""
        self._status = status
        FIRST_BYTE_SECONDS.observe(time.perf_counter() - self._started)

    def ended(self) -> None:
        """Counts the request."""
        CHATS.labels(str(self._status)).inc()


def measured(receive: Receive, send: Send) -> tuple[Receive, Send, Watch]:
    """Returns a measured ASGI channel and its measurements."""
    watch = Watch()

    async def watched(message: Message) -> None:
        if message["type"] == "http.response.start":
            watch.answered(message["status"])
        await send(message)

    async def counted() -> Message:
        message = await receive()
        watch.received_bytes += len(message.get("body", b""))
        return message

    return counted, watched, watch
