"""The program of a worker process, which runs the function named by its only argument.

Frames consist of a 4-byte little-endian length and a message. Standard input carries one
`SessionRecord` per frame. Standard output carries a byte 1 and `SessionRewards`, or a byte 0 and
the error text. The first frame on standard output says whether the function was imported. The
function itself reads an empty standard input, and its output goes to standard error.

The process kills itself and everything it started when its standard input ends, because then the
scorer is gone.
"""

import importlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any, BinaryIO

from rollmesh.v1 import session_pb2

_MOST_ERROR_CHARS = 1_000


def _main(path: str) -> int:
    source, out = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    frames: SimpleQueue[bytes] = SimpleQueue()
    threading.Thread(target=_read_frames, args=(source, frames), daemon=True).start()
    try:
        module, _, name = path.partition(":")
        function = getattr(importlib.import_module(module), name)
    except Exception as error:  # an import may raise anything
        _send(out, _failed(error))
        return 1
    _send(out, b"\1")
    while True:
        try:
            answer = b"\1" + _score(function, frames.get()).SerializeToString()
        except Exception as error:  # a scorer may raise anything
            answer = _failed(error)
        _send(out, answer)


def _read_frames(source: BinaryIO, frames: SimpleQueue[bytes]) -> None:
    while header := source.read(4):
        frames.put(source.read(int.from_bytes(header, "little")))
    os.killpg(os.getpid(), signal.SIGKILL)


def _score(function: Callable[[Any], Any], data: bytes) -> session_pb2.SessionRewards:
    rewards = function(session_pb2.SessionRecord.FromString(data))
    if not isinstance(rewards, session_pb2.SessionRewards):
        raise TypeError(f"it returned {type(rewards).__name__}; return SessionRewards")
    return rewards


def _failed(error: Exception) -> bytes:
    traceback.print_exc()
    return b"\0" + repr(error)[:_MOST_ERROR_CHARS].encode(errors="replace")


def _send(out: BinaryIO, frame: bytes) -> None:
    out.write(len(frame).to_bytes(4, "little") + frame)
    out.flush()


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1]))
