"""Kills the commands of a runner when the runner's process dies.

Each process that runs commands starts one small process with its first command. That process reads
the running process groups from a pipe. The end of the pipe, or a new parent, means that the runner
died. As a script it needs only the standard library.
"""

import os
import select
import signal
import sys
import threading
from contextlib import suppress

_LOOK_S = 1.0
_NOBODY = -1


class Reaper:
    """The runner's side: tells the process which groups run."""

    def __init__(self) -> None:
        """Starts no process yet."""
        self._lock = threading.Lock()
        self._groups: set[int] = set()
        self._owner = _NOBODY
        self._pipe = -1

    def watch(self, group: int) -> None:
        """Has a process group killed when this process dies."""
        with self._lock:
            self._disown()
            self._groups.add(group)
            self._tell(b"+%d\n" % group)

    def forget(self, group: int) -> None:
        """Removes a group that has ended. Its number may be reused."""
        with self._lock:
            self._disown()
            self._groups.discard(group)
            if self._owner != _NOBODY:
                self._tell(b"-%d\n" % group)

    def _disown(self) -> None:
        """Drops the parent's groups and pipe in a forked process."""
        if self._owner not in {_NOBODY, os.getpid()}:
            self._owner = _NOBODY
            self._groups.clear()
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
                [sys.executable, "-I", "-S", __file__, str(self._owner)],
                {},
                file_actions=[(os.POSIX_SPAWN_DUP2, reading, 0)]
                + [(os.POSIX_SPAWN_DUP2, null, number) for number in (1, 2)],
                setsid=True,
            )
        finally:
            os.close(reading)
            os.close(null)
        os.write(self._pipe, b"".join(b"+%d\n" % group for group in self._groups))


def serve(runner: int) -> None:
    """Reads the pipe until the runner is gone. Kills the remaining groups."""
    groups: set[int] = set()
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
            (groups.add if line[:1] == b"+" else groups.discard)(int(line[1:]))
    for group in groups:
        with suppress(OSError):  # it has ended
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    serve(int(sys.argv[1]))
