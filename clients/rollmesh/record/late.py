"""Late values: rewards, annotations and scores that come after their session. No I/O.

A row of them belongs to a key of its session. The last row of a key counts.
"""

import json
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from rollmesh.runtime import number_of, run_of, version_of
from rollmesh.v1 import collector_pb2, session_pb2, trajectory_pb2

_Row: TypeAlias = dict[str, Any]
LATE_TABLES = ("rewards", "annotations", "scores")
_VALUES = {
    "rewards": ("reward", "trajectory_rewards", "turn_rewards"),
    "annotations": ("values",),
    "scores": ("policy_version", "policy_run", "start", "logprobs", "top_ids", "top_logprobs"),
}
"""The columns by whose values rows of a key differ."""
_KEYS = {
    "annotations": ("trajectory_id", "name"),
    "scores": ("trajectory_id", "model", "top_k"),
}
_ARRAYS = ("values", "logprobs", "top_ids", "top_logprobs")


class Last(NamedTuple):
    """The last values that the record has of a key."""

    digest: bytes
    was_read: bool
    """Whether they were read from the store, after which a delivery may be older."""


def key_of(table: str, row: Mapping[str, Any]) -> str:
    """Returns the key of a row in its session."""
    return "/".join([table, *(str(row[name]) for name in _KEYS.get(table, ()))])


def digest_of(table: str, row: Mapping[str, Any]) -> bytes:
    """Returns a digest of a row's values, as they are written or read."""
    digest = blake2b(digest_size=16)
    for name in _VALUES[table]:
        value = row[name]
        if name in _ARRAYS:
            values = np.asarray(value, "<u4" if name == "top_ids" else "<f4")
            digest.update(np.where(np.isnan(values), np.float32(np.nan), values).tobytes())
        else:
            parts = sorted(map(json.dumps, value)) if isinstance(value, list) else value
            digest.update(json.dumps(parts).encode())
    return digest.digest()


NO_REWARDS = digest_of("rewards", {"reward": None, "trajectory_rewards": [], "turn_rewards": []})


def last_of(table: str, rows: Iterable[_Row]) -> dict[tuple[str, str], _Row]:
    """Returns the last row of each key, by session and key."""
    last: dict[tuple[str, str], _Row] = {}
    for row in rows:
        key = row["session_id"], key_of(table, row)
        if last.setdefault(key, row)["recorded_unix_ms"] <= row["recorded_unix_ms"]:
            last[key] = row
    return last


# Rows of messages. The writer adds `recorded_unix_ms`.


def rewards_of(record: session_pb2.SessionRecord) -> _Row:
    """Returns the row of a session's rewards."""
    found = {
        run.node_id: run.reward
        for one in record.trajectories
        for run in one.segments
        if run.HasField("reward")
    }
    found |= {node.node_id: node.reward for node in record.tree.nodes if node.HasField("reward")}
    return {
        "session_id": record.session_id,
        "reward": record.reward if record.HasField("reward") else None,
        "trajectory_rewards": [
            {"trajectory_id": one.trajectory_id, "reward": one.reward}
            for one in record.trajectories
            if one.HasField("reward")
        ],
        "turn_rewards": [{"node_id": id_, "reward": reward} for id_, reward in found.items()],
    }


def annotation_of(session_id: str, one: collector_pb2.Annotation) -> _Row:
    """Returns the row of an annotation."""
    return {
        "session_id": session_id,
        "trajectory_id": one.trajectory_id,
        "name": one.name,
        "values": np.frombuffer(one.values_f32le, "<f4"),
    }


def scores_of(session_id: str, one: collector_pb2.TrajectoryScores) -> _Row:
    """Returns the row of a teacher's scores."""
    found = one.scores
    logprobs = np.frombuffer(found.logprobs_f32le, "<f4")
    top_ids = np.frombuffer(found.top_ids_u32le, "<u4")
    return {
        "session_id": session_id,
        "trajectory_id": one.trajectory_id,
        "model": found.model,
        "policy_version": version_of(found.policy_version),
        "policy_run": run_of(found.policy_version),
        "start": found.start,
        "logprobs": logprobs,
        "top_k": len(top_ids) // max(len(logprobs), 1),
        "top_ids": top_ids,
        "top_logprobs": np.frombuffer(found.top_logprobs_f32le, "<f4"),
    }


# Messages of rows.


def rewards_in(row: Mapping[str, Any]) -> session_pb2.SessionRewards:
    """Returns the rewards of a row."""
    trajectories = {one["trajectory_id"]: one["reward"] for one in row["trajectory_rewards"]}
    turns = {one["node_id"]: one["reward"] for one in row["turn_rewards"]}
    return session_pb2.SessionRewards(
        reward=row["reward"], trajectory_rewards=trajectories, turn_rewards=turns
    )


def annotation_in(row: Mapping[str, Any]) -> collector_pb2.Annotation:
    """Returns the annotation of a row."""
    return collector_pb2.Annotation(
        name=row["name"],
        trajectory_id=row["trajectory_id"],
        values_f32le=np.asarray(row["values"], "<f4").tobytes(),
    )


def scores_in(row: Mapping[str, Any]) -> collector_pb2.TrajectoryScores:
    """Returns the scores of a row."""
    found = trajectory_pb2.TeacherScores(
        model=row["model"],
        policy_version=number_of(row["policy_run"], row["policy_version"]),
        start=row["start"],
        logprobs_f32le=np.asarray(row["logprobs"], "<f4").tobytes(),
        top_ids_u32le=np.asarray(row["top_ids"], "<u4").tobytes(),
        top_logprobs_f32le=np.asarray(row["top_logprobs"], "<f4").tobytes(),
    )
    return collector_pb2.TrajectoryScores(trajectory_id=row["trajectory_id"], scores=found)
