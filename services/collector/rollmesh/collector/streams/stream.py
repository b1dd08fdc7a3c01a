"""One open stream: the state that its reader and its writer share."""

import asyncio
from collections import deque

from rollmesh.collector.delivery.consumer import Consumer
from rollmesh.collector.delivery.units import Unit
from rollmesh.runtime.errors import RollmeshError
from rollmesh.v1 import collector_pb2 as pb

_MOST_UNTOLD = 4096
"""Durable acknowledgements that may wait for the consumer to read their confirmation."""


class Known:
    """A consumer, with the lock that keeps its pages in order."""

    def __init__(self, consumer: Consumer) -> None:
        self.consumer = consumer
        self.paging = asyncio.Lock()


class Stream:
    """One `Subscribe` call: the state its reader shares with its writer."""

    def __init__(self, known: Known) -> None:
        """Opens a stream of a consumer."""
        self.known = known
        self.consumer = known.consumer
        self.id = known.consumer.open_stream()
        self.wake = asyncio.Event()
        self.taken: list[Unit] = []
        """Leased units that are not loaded yet."""
        self.loaded: deque[pb.SubscribeResponse] = deque()
        """Responses to send: at most `LOAD_BYTES` and one more unit, however slow the reader."""
        self.acknowledged: list[str] = []
        self.told = asyncio.Event()
        self.ended = False
        self.error: Exception | None = None

    def end(self, error: RollmeshError | None = None) -> None:
        """Makes the writer stop, with an error if one is given."""
        self.error = self.error or error
        self.ended = True
        self.wake.set()
        self.told.set()

    def tell(self) -> pb.SubscribeResponse:
        """Returns the confirmation of durable acknowledgements."""
        ids, self.acknowledged = self.acknowledged, []
        self.told.set()
        return pb.SubscribeResponse(acknowledged=pb.Acknowledged(delivery_ids=ids))

    async def room(self) -> None:
        """Applies back-pressure to a consumer that acknowledges without reading."""
        while len(self.acknowledged) > _MOST_UNTOLD and not self.ended:
            self.told.clear()
            await self.told.wait()
