"""Real service processes for tests: started with READY, stopped, or killed."""

import asyncio
import json
import os
import re
import signal
import socket
import sys
import urllib.request
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    suppress,
)
from pathlib import Path

from tests.forks import Forked

_START_S = 400.0  # vLLM on a machine that does other work
_STOP_S = 90.0


class ServiceProcess:
    """One running `python -m rollmesh.X`."""

    def __init__(self, process: asyncio.subprocess.Process | Forked, log: Path) -> None:
        self._process = process
        self._log = log
        self.port = 0
        self.metrics_port: int | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self._process.returncode is None

    async def wait_line(self, prefix: str) -> str:
        """Returns the next line of output that begins with `prefix`, the prefix cut off."""
        assert self._process.stdout is not None
        async with asyncio.timeout(_START_S):
            async for line in self._process.stdout:
                text = line.decode().rstrip()
                if text.startswith(prefix):
                    return text.removeprefix(prefix).strip()
        raise AssertionError(f"ended without {prefix!r}:\n{self._log.read_text()}")

    async def wait_ready(self) -> None:
        """Waits until the service says that it serves, and where."""
        ready = json.loads(await self.wait_line("READY"))
        self.port, self.metrics_port = ready["port"], ready.get("metrics_port", 0)

    async def metrics(self) -> set[str]:
        """Names of its metrics, those without a sample included. Likewise."""
        text = await asyncio.to_thread(self._exposed)
        return set(re.findall(r"^# TYPE (rollmesh_\w+)", text, re.MULTILINE))

    def _exposed(self) -> str:
        url = f"http://127.0.0.1:{self.metrics_port}/metrics"
        with urllib.request.urlopen(url, timeout=60) as answer:
            return str(answer.read().decode())

    async def samples(self, prefix: str = "rollmesh_") -> dict[str, float]:
        """What it counts, as Prometheus reads it. It was started with `metrics_port`."""
        lines = (await asyncio.to_thread(self._exposed)).splitlines()
        pairs = (line.rpartition(" ") for line in lines if line.startswith(prefix))
        return {name: float(value) for name, _, value in pairs}

    async def exit_code(self) -> int:
        async with asyncio.timeout(_STOP_S):
            return await self._process.wait()

    async def kill(self) -> None:
        """Sends SIGKILL to the process and its children."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self.exit_code()

    def freeze(self) -> None:
        """Stops the process and its children where they are. Their connections stay open."""
        os.killpg(self._process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """Lets a frozen process go on."""
        os.killpg(self._process.pid, signal.SIGCONT)

    async def terminate(self) -> int:
        """SIGTERM. Returns the exit code."""
        with suppress(ProcessLookupError):
            self._process.terminate()
        return await self.exit_code()


async def run_to_end(
    *command: str | Path, cwd: Path, env: dict[str, str] | None, limit_s: float
) -> tuple[str, str]:
    """Runs a program and its children. Returns its standard output and standard error.

    Raises:
        AssertionError: It failed.
        TimeoutError: It took too long. It is killed.
    """
    code, output, errors = await run_to_its_code(*command, cwd=cwd, env=env, limit_s=limit_s)
    assert code == 0, f"{command} failed:\n{output}\n{errors}"
    return output, errors


async def run_refused(service: str, **flags: object) -> tuple[int, str]:
    """Runs a service that does not start. Returns its exit code and what it wrote to stderr."""
    command = (sys.executable, "-m", f"rollmesh.{service}", *_as_arguments(flags))
    code, _, errors = await run_to_its_code(*command, cwd=None, env=None, limit_s=_START_S)
    return code, errors


async def run_to_its_code(
    *command: str | Path, cwd: Path | None, env: dict[str, str] | None, limit_s: float
) -> tuple[int, str, str]:
    """Runs a program and its children. Returns its code, standard output and standard error."""
    process = await asyncio.create_subprocess_exec(
        *command, cwd=cwd, env=env, start_new_session=True,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        async with asyncio.timeout(limit_s):
            output, errors = await process.communicate()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        code = await process.wait()
    return code, output.decode(), errors.decode()


def _as_arguments(flags: Mapping[str, object]) -> list[str]:
    return [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]


def reserved_port() -> socket.socket:
    """Holds a free port of this machine until it is closed.

    Who sets SO_REUSEADDR, as servers do, may listen there. Nobody else is given it meanwhile, and
    a client that asks there between two servers is refused and does not meet itself.
    """
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    return holder


def running(
    service: str, folder: Path, **flags: object
) -> AbstractAsyncContextManager[ServiceProcess]:
    """Runs a service until the block ends. Flags by their Python names.

    It takes a free port, and an engine or a collector serves alone, unless a flag says otherwise.
    """
    alone = {"router": ""} if service in ("engine", "collector") else {}
    return running_by_default(service, folder, **{"port": 0, **alone, **flags})


@asynccontextmanager
async def running_by_default(
    service: str, folder: Path, **flags: object
) -> AsyncIterator[ServiceProcess]:
    """Runs a service until the block ends. What no flag says is as its settings have it."""
    async with started(service, folder, **flags) as process:
        await process.wait_ready()
        yield process


@asynccontextmanager
async def started(service: str, folder: Path, **flags: object) -> AsyncIterator[ServiceProcess]:
    """Runs a service until the block ends. Whether it is ever ready is for the block to see."""
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / f"{service}.log"
    arguments = _as_arguments(flags)
    async with AsyncExitStack() as stack:
        process: asyncio.subprocess.Process | Forked
        if service == "engine" and flags.get("backend") != "scripted":  # vLLM is not to be forked
            process = await _executed(f"rollmesh.{service}", arguments, log)
        else:
            process = forked = await Forked.start(f"rollmesh.{service}", arguments, log)
            stack.callback(forked.close)
        result = ServiceProcess(process, log)
        stack.push_async_callback(result.kill)
        yield result


async def _executed(module: str, arguments: Sequence[str], log: Path) -> asyncio.subprocess.Process:
    with log.open("ab") as stderr:
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", module, *arguments),
            stdout=asyncio.subprocess.PIPE, stderr=stderr, start_new_session=True,
        )  # fmt: skip
