"""Validates session records, both where they are created and where they are received."""

import hashlib
import math
from collections.abc import Collection, Container

import numpy as np

from rollmesh.runtime.codec.arrays import MOST_LOGPROB, check_columns, unpack_tokens
from rollmesh.runtime.errors import InvalidFieldError, check_name
from rollmesh.v1 import session_pb2, trajectory_pb2


def check_session(record: session_pb2.SessionRecord, path: str) -> None:
    """Checks a session record. Errors refer to it as `path`.

    Raises:
        InvalidFieldError: Names the field and the problem.
    """
    check_name(f"{path}.session_id", record.session_id)
    if record.outcome == session_pb2.SESSION_OUTCOME_UNSPECIFIED:
        raise InvalidFieldError(f"{path}.outcome", "is not set; say how the session ended")
    if record.sample_index >= max(record.group_size, 1):
        raise InvalidFieldError(
            f"{path}.sample_index",
            f"is {record.sample_index}; give one below group_size, {record.group_size}",
        )
    _check_finite(f"{path}.reward", record.reward)
    images: set[str] = set()
    for at, image in enumerate(record.images):
        field = f"{path}.images[{at}]"
        if image.sha256 in images:
            raise InvalidFieldError(f"{field}.sha256", "is there twice")
        if image.data_bytes != len(image.data):
            raise InvalidFieldError(
                f"{field}.data_bytes", f"is {image.data_bytes} for {len(image.data)} bytes"
            )
        if hashlib.sha256(image.data).hexdigest() != image.sha256:
            raise InvalidFieldError(f"{field}.sha256", "is not the hash of its data")
        images.add(image.sha256)
    seen: set[str] = set()
    has_tokens = record.capture not in {session_pb2.CAPTURE_LOGPROBS, session_pb2.CAPTURE_TEXT}
    for at, trajectory in enumerate(record.trajectories):
        field = f"{path}.trajectories[{at}]"
        if not trajectory.trajectory_id or trajectory.trajectory_id in seen:
            raise InvalidFieldError(f"{field}.trajectory_id", "is empty or not unique")
        if trajectory.session_id != record.session_id:
            raise InvalidFieldError(f"{field}.session_id", "is another session's")
        seen.add(trajectory.trajectory_id)
        _check_finite(f"{field}.reward", trajectory.reward)
        count = _check_row(trajectory, field, images, has_tokens=has_tokens)
        if not has_tokens:
            for nth, segment in enumerate(trajectory.segments):
                if segment.end:
                    raise InvalidFieldError(f"{field}.segments[{nth}]", "has tokens")
            continue
        if not count or trajectory.prompt_tokens > count:
            raise InvalidFieldError(f"{field}.prompt_tokens", f"does not fit {count} tokens")
        if _check_runs(trajectory.segments, count, f"{field}.segments") != count:
            raise InvalidFieldError(f"{field}.segments", f"do not cover the {count} tokens")
    if record.HasField("tree"):
        if record.trajectories:
            raise InvalidFieldError(f"{path}.tree", "is given beside trajectories; give one form")
        _check_tree(record.tree, f"{path}.tree", images)
    _check_messages(record, path)


def _check_tree(tree: trajectory_pb2.TrajectoryTree, field: str, images: Container[str]) -> None:
    count = _check_row(tree, field, images)
    end, seen = 0, {0}
    for at, node in enumerate(tree.nodes):
        if node.node_id in seen:
            raise InvalidFieldError(f"{field}.nodes[{at}].node_id", "is 0 or there twice")
        seen.add(node.node_id)
        if node.start != end or not end <= node.end <= count:
            raise InvalidFieldError(f"{field}.nodes[{at}]", "does not begin where the last ended")
        if node.scaffold_tokens > node.end - node.start:
            raise InvalidFieldError(
                f"{field}.nodes[{at}].scaffold_tokens", "are more than its tokens"
            )
        if node.HasField("parent_index") and node.parent_index >= at:
            raise InvalidFieldError(f"{field}.nodes[{at}].parent_index", "is not an earlier node")
        end = node.end
    if end != count:
        raise InvalidFieldError(f"{field}.nodes", f"do not cover the {count} tokens")


def _check_row(
    row: trajectory_pb2.Trajectory | trajectory_pb2.TrajectoryTree,
    field: str,
    images: Container[str],
    *,
    has_tokens: bool = True,
) -> int:
    """Checks what trajectories and trees have in common, and returns the number of tokens.

    Args:
        row: The trajectory, or the tree.
        field: Its name in errors.
        images: Hashes of the images of the record.
        has_tokens: Whether its session captures tokens.
    """
    _, logprobs, loss_mask = unpack_tokens(row.tokens, f"{field}.tokens")
    count = len(loss_mask)
    with np.errstate(invalid="ignore"):  # a signalling NaN is treated as a NaN
        possible = (logprobs > -np.inf) & (logprobs <= MOST_LOGPROB)
    if not possible.all():
        wrong = int(possible.argmin())
        raise InvalidFieldError(
            f"{field}.tokens.logprobs_f32le",
            f"has {logprobs[wrong]} at token {wrong}; send finite numbers that are not above 0",
        )
    if has_tokens:
        _check_runs(row.version_spans, count, f"{field}.version_spans")
        for at, span in enumerate(row.version_spans):
            if span.policy_version < 0:
                raise InvalidFieldError(
                    f"{field}.version_spans[{at}].policy_version",
                    f"is {span.policy_version}; give at least 0",
                )
        check_columns(row.columns, f"{field}.columns", count)
    elif count:
        raise InvalidFieldError(f"{field}.tokens", "are given, and the session captures none")
    end = 0
    for at, image in enumerate(row.images):
        if not end <= image.start < image.start + image.tokens <= count:
            raise InvalidFieldError(
                f"{field}.images[{at}]", f"overlaps, or is not within the {count} tokens"
            )
        end = image.start + image.tokens
        if image.sha256 not in images:
            raise InvalidFieldError(
                f"{field}.images[{at}].sha256", "is not the hash of an image of the record"
            )
        if loss_mask[image.start : end].any():
            raise InvalidFieldError(f"{field}.images[{at}]", "has tokens that are trained")
    part = "nodes" if isinstance(row, trajectory_pb2.TrajectoryTree) else "segments"
    for at, run in enumerate(getattr(row, part)):
        if run.HasField("reward"):
            if not run.sampled:
                raise InvalidFieldError(
                    f"{field}.{part}[{at}].reward", "is of what was not sampled"
                )
            _check_finite(f"{field}.{part}[{at}].reward", run.reward)
    return count


def _check_messages(record: session_pb2.SessionRecord, path: str) -> None:
    """Checks that each node's parent comes before it, and that sizes and contexts fit."""
    for name in ("messages", "contexts"):
        for at, one in enumerate(getattr(record, name)):
            if one.data_bytes != len(one.data):
                problem = f"is {one.data_bytes} for {len(one.data)} bytes"
                raise InvalidFieldError(f"{path}.{name}[{at}].data_bytes", problem)
    seen = {0}
    for at, node in enumerate(record.messages):
        field = f"{path}.messages[{at}]"
        if node.node_id in seen:
            raise InvalidFieldError(f"{field}.node_id", "is 0 or there twice")
        if node.parent_node_id not in seen:
            raise InvalidFieldError(f"{field}.parent_node_id", "is not an earlier node")
        if node.HasField("context_index") and node.context_index >= len(record.contexts):
            raise InvalidFieldError(f"{field}.context_index", "is beyond the contexts")
        seen.add(node.node_id)


def _check_finite(field: str, reward: float) -> None:
    if not math.isfinite(reward):
        raise InvalidFieldError(field, f"{reward} is not a finite number")


def _check_runs(runs: object, count: int, field: str) -> int:
    """Checks that runs ascend within `count` tokens and returns how many tokens they cover."""
    end = covered = 0
    for run in runs:  # type: ignore[attr-defined]  # spans and segments alike
        if not end <= run.start < run.end <= count:
            raise InvalidFieldError(field, f"{run.start} to {run.end} overlaps or is out of range")
        end = run.end
        covered += run.end - run.start
    return covered


# Session rewards: the same rules for closing a session, for later rewards and for scorers.

_MOST_NAMED = 8


def check_rewards(
    rewards: session_pb2.SessionRewards, trajectory_ids: Collection[str], turns: Container[int]
) -> None:
    """Checks that rewards are finite and refer to trajectories and turns that exist.

    Raises:
        InvalidFieldError: Names the first reward that is wrong.
    """
    if rewards.HasField("reward"):
        _check_finite("rewards.reward", rewards.reward)
    for trajectory_id, reward in rewards.trajectory_rewards.items():
        field = f"rewards.trajectory_rewards[{trajectory_id}]"
        if trajectory_id not in trajectory_ids:
            has = ", ".join(sorted(trajectory_ids)[:_MOST_NAMED]) or "none; reward its turns"
            raise InvalidFieldError(
                field,
                f"the session has no trajectory {trajectory_id!r}; it has {has}",
                trajectory_id=trajectory_id,
            )
        _check_finite(field, reward)
    for node_id, reward in rewards.turn_rewards.items():
        field = f"rewards.turn_rewards[{node_id}]"
        if node_id not in turns:
            raise InvalidFieldError(
                field,
                f"node {node_id} is not a turn of the session; give the number at the end of an "
                "answer's id",
                node_id=node_id,
            )
        _check_finite(field, reward)


def apply_rewards(record: session_pb2.SessionRecord, rewards: session_pb2.SessionRewards) -> None:
    """Sets rewards of a session. Absent rewards keep their values.

    A turn's reward is set wherever the turn occurs, because branches share their prefixes.

    Args:
        record: The session, with or without its arrays. Modified in place, all or nothing.
        rewards: The rewards to set.

    Raises:
        InvalidFieldError: See `check_rewards`. Or the session is LOST.
    """
    if record.outcome == session_pb2.SESSION_OUTCOME_LOST and rewards.ByteSize():
        said = "are given to a LOST session, which says nothing about the policy; leave them out"
        raise InvalidFieldError("rewards", said)
    trajectories = {one.trajectory_id: one for one in record.trajectories}
    runs: list[trajectory_pb2.TrajectorySegment | trajectory_pb2.TrajectoryNode] = [
        run for one in record.trajectories for run in one.segments if run.sampled
    ]
    runs += [node for node in record.tree.nodes if node.sampled]
    check_rewards(rewards, trajectories.keys(), {run.node_id for run in runs})
    if rewards.HasField("reward"):
        record.reward = rewards.reward
    for trajectory_id, reward in rewards.trajectory_rewards.items():
        trajectories[trajectory_id].reward = reward
    for run in runs:
        if run.node_id in rewards.turn_rewards:
            run.reward = rewards.turn_rewards[run.node_id]
