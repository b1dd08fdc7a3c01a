"""Parses answers with one of vLLM's tool parsers in a worker process.

The worker starts with the first question and restarts after it died. Questions are asked one at a
time, each with a deadline that includes waiting and starting. A failure is logged and reported to
the owner, and the result is None: the answer is text then. A ready worker that takes a quarter of
that time for one answer is killed, so that those who wait behind it are still answered.
"""

import asyncio
import itertools
import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rollmesh.chat.parsing import Reading
from rollmesh.runtime import clock
from rollmesh.runtime.process import Child, start_child
from rollmesh.runtime.telemetry import fields

_log = logging.getLogger(__name__)
_LINE_BYTES = 64 * 1024 * 1024
_START_MS = 120_000  # longest start
_REST_MS = 30_000  # after a start that failed
_DEATHS = (ConnectionError, ValueError)
"""Errors of a worker that ended, or that says something else than an answer."""


class _WorkerFailedError(Exception):
    """The worker, or vLLM's parser, named an error."""


class VllmParser:
    """Owns the worker process."""

    def __init__(
        self,
        name: str,
        model_path: Path,
        *,
        timeout_ms: int,
        max_waiting: int = 256,
        on_failure: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Starts nothing yet.

        Args:
            name: The parser's name in vLLM.
            model_path: Folder with the model's tokenizer.
            timeout_ms: Longest wait for one answer.
            max_waiting: Most questions that may wait.
            on_failure: Called with "busy", "timeout", "died" or "error" for each question without
                an answer.
        """
        self._on_failure = on_failure
        self._name = name
        self._model_path = model_path
        self._timeout_s = timeout_ms / 1000
        self._max_waiting = max_waiting
        self._waiting = 0
        self._turn = asyncio.Lock()
        self._ids = itertools.count()
        self._process: Child | None = None
        self._ready = False
        self._started_ms = 0
        self._rest_until_ms = 0
        self._why = ""

    @property
    def pid(self) -> int | None:
        """Process id of the worker. None if there is none."""
        return self._process.pid if self._process is not None else None

    async def read(self, text: str, tools_json: bytes) -> Reading | None:
        """Returns the contents of an answer. None if that cannot be known."""
        if self._waiting >= self._max_waiting:
            self._report("busy", f"{self._waiting} answers wait")
            return None
        self._waiting += 1
        try:
            async with asyncio.timeout(self._timeout_s), self._turn:
                question = {"text": text, "tools": json.loads(tools_json)}
                try:
                    return await self._ask(question)
                except _DEATHS:
                    return await self._ask(question)  # of a new worker
        except TimeoutError:
            self._report("timeout", f"no answer in time, of {self._timeout_s:.0f} s in all")
        except _DEATHS as error:
            self._report("died", f"the worker died: {error}")
        except (_WorkerFailedError, OSError) as error:
            self._report("error", str(error))
        finally:
            self._waiting -= 1
        return None

    def _report(self, reason: str, why: str) -> None:
        self._on_failure(reason)
        _log.warning("vLLM's tool parser failed", extra=fields(reason=reason, error=why))

    async def close(self) -> None:
        """Ends the worker. The next question starts another one."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            await process.wait()

    async def _ask(self, question: dict[str, Any]) -> Reading:
        process = await self._started()
        asked_ms = clock.monotonic_ms()
        try:
            async with asyncio.timeout(self._timeout_s / 4):
                answer = await self._exchange(process, {"id": next(self._ids), **question})
        except (TimeoutError, *_DEATHS):
            await self.close()
            raise
        except asyncio.CancelledError:
            if clock.monotonic_ms() - asked_ms > self._timeout_s * 125:
                process.kill()  # stuck. Otherwise the next caller skips its answer
            raise
        if "error" in answer:
            raise _WorkerFailedError(answer["error"])
        return Reading(answer["content"], tuple((name, given) for name, given in answer["calls"]))

    async def _exchange(self, process: Child, question: dict[str, Any]) -> dict[str, Any]:
        """Writes a question and reads its answer.

        Raises:
            ConnectionError: The worker ended.
            ValueError: It said something else.
        """
        await process.send(json.dumps(question).encode() + b"\n")
        while True:
            answer = await _line(process)
            if answer.get("id") == question["id"]:
                return answer  # others belong to askers that left

    async def _started(self) -> Child:
        """Returns a worker that is ready.

        Raises:
            _WorkerFailedError: It cannot start. It is not tried again for a while.
            ConnectionError: It ended while it started.
            ValueError: It said something else.
        """
        late = not self._ready and clock.monotonic_ms() > self._started_ms + _START_MS
        if self._process is not None and (late or self._process.exit_code is not None):
            await self.close()
        if self._process is None:
            if clock.monotonic_ms() < self._rest_until_ms:
                raise _WorkerFailedError(f"the worker did not start: {self._why}")
            self._ready, self._started_ms = False, clock.monotonic_ms()
            self._process = await start_child(
                *(sys.executable, "-m", "rollmesh.gateway.vllm_worker"),
                *(self._name, str(self._model_path)),
                limit=_LINE_BYTES,
            )
        if not self._ready:
            # An asker that leaves does not end a start: the next one waits on.
            try:
                hello = await _line(self._process)
            except _DEATHS:
                await self.close()
                raise
            if "error" in hello:
                await self.close()
                self._why = hello["error"]
                self._rest_until_ms = clock.monotonic_ms() + _REST_MS
                raise _WorkerFailedError(f"the worker did not start: {self._why}")
            self._ready = True
        return self._process


async def _line(process: Child) -> dict[str, Any]:
    """Returns the next line of a worker's output.

    Raises:
        ConnectionError: It ended.
        ValueError: The line is not a JSON object, or too long.
    """
    line = await process.stdout.readline()
    if not line:
        raise BrokenPipeError(f"exit code {await process.wait()}")
    message = json.loads(line)
    if not isinstance(message, dict):
        raise ValueError("its answer is not a JSON object")  # noqa: TRY004 - as for other bad lines
    return message
