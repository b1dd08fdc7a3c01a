"""A process that runs a scorer function, whose import path is its only argument.

Frames consist of a 4-byte little-endian length and a message. Standard input carries one
`SessionRecord` per frame. Standard output carries a byte 1 and `SessionRewards`, or a byte 0 and
the error text. Output printed by the function goes to standard error. The first frame on standard
output says that the function has been imported.
"""

import importlib
import os
import sys
from typing import BinaryIO

from rollmesh.v1 import session_pb2


def _send(out: BinaryIO, ok: bytes, data: bytes) -> None:
    out.write((len(data) + 1).to_bytes(4, "little") + ok + data)
    out.flush()


def _main(path: str) -> int:
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    try:
        module, _, name = path.partition(":")
        function = getattr(importlib.import_module(module), name)
    except Exception as error:  # noqa: BLE001 - an import may raise anything
        _send(out, b"\0", f"{path}: {error!r}".encode())
        return 1
    _send(out, b"\1", b"")
    while header := sys.stdin.buffer.read(4):
        data = sys.stdin.buffer.read(int.from_bytes(header, "little"))
        try:
            rewards: session_pb2.SessionRewards = function(
                session_pb2.SessionRecord.FromString(data)
            )
            _send(out, b"\1", rewards.SerializeToString())
        except Exception as error:  # noqa: BLE001 - a scorer may raise anything
            _send(out, b"\0", repr(error).encode())
    return 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1]))
