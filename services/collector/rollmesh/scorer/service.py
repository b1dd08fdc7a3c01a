"""The scorer as a service: its RPC, and the worker processes that run the function.

A worker that dies, exceeds its timeout, or whose caller leaves is killed together with the
processes that it started. The next call that gets it starts its replacement.
"""

import asyncio
import logging
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc

from rollmesh.runtime.config import ConfigError
from rollmesh.runtime.errors import ScorerBusyError, ScorerFailedError
from rollmesh.runtime.process import Child, start_child
from rollmesh.runtime.rpc import Context
from rollmesh.runtime.telemetry import fields
from rollmesh.scorer.config import ScorerConfig
from rollmesh.v1 import scorer_pb2, scorer_pb2_grpc, server_pb2, session_pb2

_log = logging.getLogger(__name__)
_RETRY_MS = 1_000


class Workers:
    """A fixed number of workers. Each scores one session at a time."""

    def __init__(self, config: ScorerConfig) -> None:
        self._workers = [_Worker(config) for _ in range(config.workers)]
        self._idle: asyncio.Queue[_Worker] = asyncio.Queue()
        self._waiting = 0
        self._max_waiting = config.max_waiting

    async def start(self) -> None:
        """Starts all workers. Calls wait until then.

        Raises:
            ScorerFailedError: A worker cannot import the function.
        """
        failure: BaseException | None = None
        try:
            async with asyncio.TaskGroup() as group:
                for worker in self._workers:
                    group.create_task(worker.start())
        except* ScorerFailedError as errors:
            failure = errors.exceptions[0]
        if failure is not None:
            raise failure
        for worker in self._workers:
            self._idle.put_nowait(worker)

    async def score(self, record: session_pb2.SessionRecord) -> session_pb2.SessionRewards:
        """Returns the rewards of a session.

        Raises:
            ScorerBusyError: Too many calls wait already.
            ScorerFailedError: The function raised or took too long, or its process died.
        """
        if self._idle.empty() and self._waiting >= self._max_waiting:
            raise ScorerBusyError(
                f"{self._waiting} sessions wait for a worker; try again later, or start the scorer "
                "with more --workers",
                retry_delay_ms=_RETRY_MS,
            )
        self._waiting += 1
        try:
            worker = await self._idle.get()
        finally:
            self._waiting -= 1
        try:
            return await worker.score(record)
        finally:
            self._idle.put_nowait(worker)

    async def close(self) -> None:
        """Kills all workers."""
        for worker in self._workers:
            await worker.kill()


class _Worker:
    """One worker process, which is started when it is needed and replaced after it was killed."""

    def __init__(self, config: ScorerConfig) -> None:
        self._function = config.function
        self._timeout_s = config.timeout_ms / 1000
        self._start_timeout_s = config.start_timeout_ms / 1000
        self._process: Child | None = None

    async def start(self) -> None:
        """Starts the process. Returns once it has imported the function.

        Raises:
            ScorerFailedError: The function cannot be imported, or not in time.
        """
        async with self._killed_on_failure(self._start_timeout_s, "--start-timeout-ms"):
            self._process = await start_child(
                sys.executable, "-m", "rollmesh.scorer.worker", self._function
            )
            imported, data = await _read(self._process)
        if not imported:
            await self.kill()
            raise ScorerFailedError(f"{self._function}: {data.decode(errors='replace')}")

    async def score(self, record: session_pb2.SessionRecord) -> session_pb2.SessionRewards:
        """Returns the rewards of a session. See `Workers.score`."""
        if self._process is None:
            await self.start()
        assert self._process is not None
        async with self._killed_on_failure(self._timeout_s, "--timeout-ms"):
            data = record.SerializeToString()
            await self._process.send(len(data).to_bytes(4, "little") + data)
            scored, data = await _read(self._process)
        if not scored:
            raise ScorerFailedError(f"{self._function}: {data.decode(errors='replace')}")
        return session_pb2.SessionRewards.FromString(data)

    async def kill(self) -> int | None:
        """Kills the process with all that it started. Returns its exit code, if it had begun."""
        process, self._process = self._process, None
        if process is None:
            return None
        process.kill()
        return await process.wait()

    @asynccontextmanager
    async def _killed_on_failure(self, timeout_s: float, setting: str) -> AsyncIterator[None]:
        """Kills the process unless the block ends in time and without an error."""
        try:
            async with asyncio.timeout(timeout_s):
                yield
        except TimeoutError:
            await self.kill()
            _log.warning("worker killed", extra=fields(timeout_s=timeout_s))
            raise ScorerFailedError(
                f"{self._function}: not done after {timeout_s:g} s; its process was killed. Make "
                f"it faster, or raise the scorer's {setting}"
            ) from None
        except (asyncio.IncompleteReadError, OSError) as error:
            code = await self.kill()
            _log.warning("worker died", extra=fields(code=code))
            raise ScorerFailedError(
                f"{self._function}: its process died with exit code {code}; see the scorer's log"
            ) from error
        except BaseException:  # the caller left: the answer would be taken for the next call's
            await self.kill()
            raise


async def _read(process: Child) -> tuple[bool, bytes]:
    """Returns the next frame of a worker: whether it succeeded, and rewards or the error."""
    length = int.from_bytes(await process.stdout.readexactly(4), "little")
    frame = await process.stdout.readexactly(length)
    return frame[:1] == b"\1", frame[1:]


class ScorerService(scorer_pb2_grpc.ScorerServiceServicer):
    """One scorer process, which gives each session to a worker. It keeps no state."""

    names = ("rollmesh.v1.ScorerService",)

    def __init__(self, config: ScorerConfig) -> None:
        """Takes the settings. `ready` starts the workers.

        Raises:
            ConfigError: No function is given.
        """
        if not config.function:
            raise ConfigError("function: is empty; run rollmesh scorer package.module:function")
        self._workers = Workers(config)

    @property
    def capabilities(self) -> frozenset[server_pb2.Capability.ValueType]:
        """Returns no capabilities: all scorers offer the same."""
        return frozenset()

    def register(self, server: grpc.aio.Server) -> None:
        """Registers the RPC."""
        scorer_pb2_grpc.add_ScorerServiceServicer_to_server(self, server)

    async def Score(
        self, request: scorer_pb2.ScoreRequest, context: Context
    ) -> scorer_pb2.ScoreResponse:
        return scorer_pb2.ScoreResponse(rewards=await self._workers.score(request.session))

    @asynccontextmanager
    async def running(self, address: str) -> AsyncIterator[None]:
        """Kills the workers on exit."""
        try:
            yield
        finally:
            await self._workers.close()

    async def ready(self) -> None:
        """Returns once all workers have imported the function.

        Raises:
            ScorerFailedError: A worker cannot import the function.
        """
        await self._workers.start()

    async def drain(self) -> None:
        """Does nothing: running calls finish within the grace period."""

    async def failed(self) -> str:
        """Waits forever: workers that die are replaced."""
        await asyncio.Event().wait()
        return ""
