"""Scorer implementations: a function in its own process, or a gRPC service."""

import asyncio
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Protocol

import grpc

from rollmesh.runtime.errors import RollmeshError
from rollmesh.runtime.rpc.channels import open_channel, typed_errors
from rollmesh.v1 import scorer_pb2, scorer_pb2_grpc, session_pb2

_START_S = 60.0


class ScorerError(RollmeshError):
    """A scorer failed, crashed, or timed out."""

    reason = "SCORER_FAILED"


class Scorer(Protocol):
    """Scores one session at a time."""

    async def score(self, record: session_pb2.SessionRecord) -> session_pb2.SessionRewards:
        """Returns the rewards of a session.

        Raises:
            RollmeshError: Scoring failed or timed out.
        """
        ...


class WorkerScorer:
    """Runs a function by import path in a process, which is killed on timeout and replaced."""

    def __init__(self, path: str, timeout_s: float) -> None:
        """Takes `package.module:function`; the process starts on first use."""
        self._path = path
        self._timeout_s = timeout_s
        self._process: Process | None = None

    async def score(self, record: session_pb2.SessionRecord) -> session_pb2.SessionRewards:
        """Returns the rewards; see `Scorer`."""
        try:
            if self._process is None:
                async with asyncio.timeout(_START_S):
                    await self._start()
            async with asyncio.timeout(self._timeout_s):
                return session_pb2.SessionRewards.FromString(
                    await self._exchange(record.SerializeToString())
                )
        except TimeoutError:
            await self.close()
            raise ScorerError(f"scorer: not done after {self._timeout_s:g} s") from None
        except (asyncio.IncompleteReadError, OSError) as error:
            await self.close()
            raise ScorerError("scorer: its process died") from error
        except BaseException as error:
            if not isinstance(error, ScorerError):
                await self.close()  # a response may still be in flight
            raise

    async def close(self) -> None:
        """Kills the process."""
        process, self._process = self._process, None
        if process is not None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "rollmesh.collector.scoring.worker", self._path),
            stdin=PIPE,
            stdout=PIPE,
        )
        try:
            await self._read()
        except ScorerError:
            await self.close()
            raise

    async def _exchange(self, data: bytes) -> bytes:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(len(data).to_bytes(4, "little") + data)
        await self._process.stdin.drain()
        return await self._read()

    async def _read(self) -> bytes:
        assert self._process is not None
        assert self._process.stdout is not None
        length = int.from_bytes(await self._process.stdout.readexactly(4), "little")
        data = await self._process.stdout.readexactly(length)
        if data[:1] != b"\1":
            raise ScorerError(f"scorer: {data[1:].decode(errors='replace')}")
        return data[1:]


class GrpcScorer:
    """Calls a `ScorerService`."""

    def __init__(self, channel: grpc.aio.Channel, timeout_s: float) -> None:
        """Takes a channel, which the caller closes."""
        self._stub = scorer_pb2_grpc.ScorerServiceStub(channel)
        self._timeout_s = timeout_s

    async def score(self, record: session_pb2.SessionRecord) -> session_pb2.SessionRewards:
        """Returns the rewards; see `Scorer`."""
        request = scorer_pb2.ScoreRequest(session=record)
        with typed_errors():
            return (await self._stub.Score(request, timeout=self._timeout_s)).rewards


@asynccontextmanager
async def open_scorers(scorer: str, count: int, timeout_s: float) -> AsyncIterator[list[Scorer]]:
    """Yields scorers that run concurrently.

    Args:
        scorer: `package.module:function`, or grpc://host:port.
        count: Number of scorers.
        timeout_s: Timeout for one session, seconds.
    """
    if scorer.startswith("grpc://"):
        async with open_channel(scorer.removeprefix("grpc://")) as channel:
            yield [GrpcScorer(channel, timeout_s) for _ in range(count)]
        return
    workers = [WorkerScorer(scorer, timeout_s) for _ in range(count)]
    try:
        yield list(workers)
    finally:
        for worker in workers:
            await worker.close()
