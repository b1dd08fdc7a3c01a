"""Child processes that a service talks to through their standard input and output."""

import asyncio
import os
import signal
import socket
import subprocess
from contextlib import suppress

_LIMIT_BYTES = 64 * 1024


class Child:
    """A running program in a session of its own, connected by one socket."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        stdout: asyncio.StreamReader,
        stdin: asyncio.StreamWriter,
    ) -> None:
        """Wraps a process; `start_child` starts one."""
        self._process = process
        self.stdout = stdout
        """What the program prints; ends when it does."""
        self.stdin = stdin
        """What the program reads."""

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Exit code, below 0 for a signal; None while the program runs."""
        return self._process.poll()

    def kill(self) -> None:
        """Kills the program and the processes that it started."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def wait(self) -> int:
        """Waits for the end of the program and closes the socket; returns the exit code."""
        code = await asyncio.to_thread(self._process.wait)
        self.stdin.close()
        return code


async def start_child(*command: str, limit: int = _LIMIT_BYTES) -> Child:
    """Starts a program, whose standard error is that of this process.

    Under uvloop, asyncio's own subprocesses run Python code between fork and exec. In a process
    that uses gRPC, one in some hundred of them dies there of SIGSEGV. `subprocess` runs none.

    Args:
        command: The program and its arguments.
        limit: Longest line that `stdout.readline` returns, bytes.

    Raises:
        OSError: The program cannot be started.
    """
    ours, theirs = socket.socketpair()
    try:
        with theirs:
            process = await asyncio.to_thread(_start, command, theirs)
        stdout, stdin = await asyncio.open_connection(sock=ours, limit=limit)
    except BaseException:
        ours.close()  # a program that was started reads the end of its input
        raise
    return Child(process, stdout, stdin)


def _start(command: tuple[str, ...], theirs: socket.socket) -> subprocess.Popen[bytes]:
    fd = theirs.fileno()
    return subprocess.Popen(command, stdin=fd, stdout=fd, start_new_session=True)  # noqa: S603 - ours
