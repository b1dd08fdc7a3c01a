"""Calls to the scorer."""

import asyncio
import logging

import grpc

from rollmesh.runtime.rpc.channels import typed_errors
from rollmesh.runtime.telemetry.logs import fields
from rollmesh.v1 import scorer_pb2, scorer_pb2_grpc, session_pb2

_log = logging.getLogger(__name__)
_WARNING_S = 30.0


class RemoteScorer:
    """A `ScorerService` that may be away, and may be called concurrently."""

    def __init__(self, channel: grpc.aio.Channel, timeout_s: float) -> None:
        """Takes a channel, which the caller closes, and the timeout of one call."""
        self._channel = channel
        self._stub = scorer_pb2_grpc.ScorerServiceStub(channel)
        self._timeout_s = timeout_s

    async def score(self, record: session_pb2.SessionRecord) -> session_pb2.SessionRewards:
        """Returns the rewards of a session.

        Waits while the scorer cannot be reached: a scorer that restarts costs no session an
        attempt, except those that it was scoring.

        Raises:
            RollmeshError: The call failed or timed out.
        """
        await self._connected()
        request = scorer_pb2.ScoreRequest(session=record)
        with typed_errors():
            return (await self._stub.Score(request, timeout=self._timeout_s)).rewards

    async def _connected(self) -> None:
        while True:
            try:
                async with asyncio.timeout(_WARNING_S):
                    await self._channel.channel_ready()
            except TimeoutError:
                _log.warning("scorer unreachable", extra=fields(for_s=_WARNING_S))
            else:
                return
