"""Functions that a scorer serves in tests: good ones and bad ones."""

import os
import subprocess
import sys
import time
from pathlib import Path

from rollmesh.v1 import session_pb2


def behaves(record: session_pb2.SessionRecord) -> session_pb2.SessionRewards:
    """As the session's metadata says."""
    print("a scorer may print")  # noqa: T201
    assert sys.stdin.read() == ""  # a scorer may read
    match record.metadata["behave"]:
        case "crash":
            os._exit(3)
        case "hang":
            time.sleep(600)
        case "raise":
            raise ValueError("no")
        case "rubbish":
            return 0.5  # type: ignore[return-value]
        case "wrong":
            return session_pb2.SessionRewards(trajectory_rewards={"x": 1.0})
        case "hang-once" if Path(record.metadata["pipe"]).exists():
            _hang_with_child(Path(record.metadata["pipe"]))
    return session_pb2.SessionRewards(reward=float(len(record.trajectories[0].tokens.loss_mask_u8)))


def _hang_with_child(path: Path) -> None:
    """Says through a named pipe that it began. The pipe ends when it and its child are gone."""
    with path.open("w") as pipe:
        path.unlink()
        with subprocess.Popen(["sleep", "600"], pass_fds=[pipe.fileno()]):
            pipe.write("began\n")
            pipe.flush()
            time.sleep(600)
