"""Ends the work of a runner when the runner's process dies: kills its commands, by default.

Each process that runs commands starts one small process with its first command. That process reads
the running process groups from a pipe. The end of the pipe, or a new parent, means that the runner
died. As a script it needs only the standard library. Another script may end other work.
"""

import os
import runpy
import select
import signal
import sys
import threading
from contextlib import suppress

_LOOK_S = 1.0
_NOBODY = -1


class Reaper:
    """The runner's side: tells the process of running work."""

    def __init__(self, script: str = __file__) -> None:
        """Starts no process yet.

        Args:
            script: Path of a Python file whose `end` gets the lines of the work that was left.
        """
        self._script = script
        self._lock = threading.Lock()
        self._left: set[int | str] = set()
        self._owner = _NOBODY
        self._pipe = -1

    def watch(self, work: int | str) -> None:
        """Has work ended when this process dies: a process group, or a line for the script."""
        with self._lock:
            self._disown()
            self._left.add(work)
            self._tell(f"+{work}\n".encode())

    def forget(self, work: int | str) -> None:
        """Removes work that has ended. The number of a group may be reused."""
        with self._lock:
            self._disown()
            self._left.discard(work)
            if self._owner != _NOBODY:
                self._tell(f"-{work}\n".encode())

    def _disown(self) -> None:
        """Drops the parent's groups and pipe in a forked process."""
        if self._owner not in {_NOBODY, os.getpid()}:
            self._owner = _NOBODY
            self._left.clear()
            os.close(self._pipe)

    def _tell(self, line: bytes) -> None:
        if self._owner == _NOBODY:
            self._start()
            return
        try:
            os.write(self._pipe, line)
        except BrokenPipeError:
            os.close(self._pipe)
            self._start()

    def _start(self) -> None:
        self._owner = os.getpid()
        reading, self._pipe = os.pipe()
        null = os.open(os.devnull, os.O_WRONLY)
        try:
            os.posix_spawn(
                sys.executable,
                [sys.executable, "-I", "-S", __file__, str(self._owner), self._script],
                {},
                file_actions=[(os.POSIX_SPAWN_DUP2, reading, 0)]
                + [(os.POSIX_SPAWN_DUP2, null, number) for number in (1, 2)],
                setsid=True,
            )
        finally:
            os.close(reading)
            os.close(null)
        os.write(self._pipe, "".join(f"+{work}\n" for work in self._left).encode())


def left_by(runner: int) -> set[str]:
    """Reads the pipe until the runner is gone. Returns the work that it left."""
    left: set[str] = set()
    text = b""
    while True:
        if not select.select([0], [], [], _LOOK_S)[0]:
            if os.getppid() != runner:  # another process has a copy of the pipe's end
                break
            continue
        if not (data := os.read(0, 65_536)):
            break
        *lines, text = (text + data).split(b"\n")
        for line in lines:
            (left.add if line[:1] == b"+" else left.discard)(line[1:].decode())
    return left


def end(groups: set[str]) -> None:
    """Kills process groups."""
    for group in groups:
        with suppress(OSError):  # it has ended
            os.killpg(int(group), signal.SIGKILL)


if __name__ == "__main__":
    work = left_by(int(sys.argv[1]))
    runpy.run_path(sys.argv[2])["end"](work)
