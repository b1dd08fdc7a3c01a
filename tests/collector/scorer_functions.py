"""Scorers by import path, for tests: good ones and bad ones."""

import os
import time

from rollmesh.v1 import session_pb2


def behaves(record: session_pb2.SessionRecord) -> session_pb2.SessionRewards:
    """As the session's metadata says."""
    print("a scorer may print")  # noqa: T201
    match record.metadata["behave"]:
        case "crash":
            os._exit(1)
        case "hang":
            time.sleep(600)
        case "raise":
            raise ValueError("no")
        case "wrong":
            return session_pb2.SessionRewards(trajectory_rewards={"x": 1.0})
    return session_pb2.SessionRewards(reward=float(len(record.trajectories[0].loss_mask_u8)))
