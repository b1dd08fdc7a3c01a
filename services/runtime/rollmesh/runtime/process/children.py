"""Child processes that a service talks to through their standard input and output."""

import asyncio
import ctypes
import multiprocessing
import os
import signal
import socket
import subprocess
from contextlib import suppress

_LIMIT_BYTES = 64 * 1024


class Child:
    """A running program in its own session, connected by one socket."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        stdout: asyncio.StreamReader,
        stdin: asyncio.StreamWriter,
    ) -> None:
        """Wraps a process. `start_child` starts one."""
        self._process = process
        self.stdout = stdout
        """Standard output of the program."""
        self.stdin = stdin
        """Standard input of the program."""

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Exit code, below 0 for a signal, or None while the program runs."""
        return self._process.poll()

    async def send(self, data: bytes) -> None:
        """Writes to its standard input. Waits while the program reads slowly.

        Raises:
            ConnectionError: The program has closed it, or has ended.
        """
        if self.stdin.is_closing():  # uvloop raises RuntimeError then, which asyncio does not
            raise BrokenPipeError(f"process {self.pid} does not read")
        self.stdin.write(data)
        await self.stdin.drain()

    def kill(self) -> None:
        """Kills the program and the processes that it started."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def wait(self) -> int:
        """Waits for the end of the program, closes the socket and returns the exit code."""
        code = await asyncio.to_thread(self._process.wait)
        self.stdin.close()
        return code


async def start_child(*command: str, limit: int = _LIMIT_BYTES) -> Child:
    """Starts a program, which inherits standard error.

    Under uvloop, asyncio's own subprocesses run Python code between fork and exec. In a process
    that uses gRPC, one in some hundred of them dies there of SIGSEGV. `subprocess` runs none.

    Raises:
        OSError: The program cannot be started.
    """
    ours, theirs = socket.socketpair()
    process: subprocess.Popen[bytes] | None = None
    try:
        with theirs:
            process = _start(command, theirs)  # milliseconds, and a thread could not be cancelled
        stdout, stdin = await asyncio.open_connection(sock=ours, limit=limit)
    except BaseException:
        ours.close()
        if process is not None:
            process.kill()
            process.wait()
        raise
    return Child(process, stdout, stdin)


def _start(command: tuple[str, ...], theirs: socket.socket) -> subprocess.Popen[bytes]:
    fd = theirs.fileno()
    return subprocess.Popen(command, stdin=fd, stdout=fd, start_new_session=True)  # noqa: S603 - ours


# The end of a process with its parent, whichever way the parent ends.

_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Has Linux kill this process of `multiprocessing` when its parent ends.

    A parent that is killed closes nothing in order, and a child that waits for work would never
    release an accelerator's memory. The parent is the thread that started this process.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")
    if os.getppid() != parent.pid:  # it ended before this call
        os._exit(1)
