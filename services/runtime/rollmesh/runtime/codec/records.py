"""Validates session records, both where they are created and where they are received."""

import hashlib
import math
from collections.abc import Collection, Container, Sequence

from rollmesh.runtime.codec.arrays import unpack_tokens, wrong_logprob
from rollmesh.runtime.codec.columns import check_columns
from rollmesh.runtime.errors import InvalidFieldError, check_name
from rollmesh.v1 import sampling_pb2, session_pb2, trajectory_pb2


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
    seen: set[str] = set()
    for at, trajectory in enumerate(record.trajectories):
        field = f"{path}.trajectories[{at}]"
        if not trajectory.trajectory_id or trajectory.trajectory_id in seen:
            raise InvalidFieldError(f"{field}.trajectory_id", "is empty or not unique")
        if trajectory.session_id != record.session_id:
            raise InvalidFieldError(f"{field}.session_id", "is another session's")
        seen.add(trajectory.trajectory_id)
        _check_finite(f"{field}.reward", trajectory.reward)
        count = _check_tokens(trajectory.tokens, f"{field}.tokens")
        if record.capture in {session_pb2.CAPTURE_LOGPROBS, session_pb2.CAPTURE_TEXT}:
            if count:
                raise InvalidFieldError(
                    f"{field}.tokens", "are given, and the session captures none"
                )
            for nth, segment in enumerate(trajectory.segments):
                if segment.end:
                    raise InvalidFieldError(f"{field}.segments[{nth}]", "has tokens")
        else:
            if not count or trajectory.prompt_tokens > count:
                raise InvalidFieldError(f"{field}.prompt_tokens", f"does not fit {count} tokens")
            _check_versions(trajectory.version_spans, count, f"{field}.version_spans")
            covered = _check_runs(trajectory.segments, count, f"{field}.segments")
            check_columns(trajectory.columns, f"{field}.columns", count)
            if covered != count:
                raise InvalidFieldError(f"{field}.segments", f"do not cover the {count} tokens")
        for nth, segment in enumerate(trajectory.segments):
            _check_reward(segment, f"{field}.segments[{nth}]")
    known = _check_images(record.images, f"{path}.images")
    for at, trajectory in enumerate(record.trajectories):
        _check_shown(trajectory, known, f"{path}.trajectories[{at}]")
    _check_messages(record, path)
    if record.HasField("tree"):
        _check_shown(record.tree, known, f"{path}.tree")
        if record.trajectories:
            raise InvalidFieldError(f"{path}.tree", "is given beside trajectories; give one form")
        _check_tree(record.tree, f"{path}.tree")


def _check_messages(record: session_pb2.SessionRecord, path: str) -> None:
    """Checks that each node's parent comes before it, and that sizes and contexts fit."""
    seen = {0}
    sizes = {"messages": [(one.data_bytes, len(one.data)) for one in record.messages]}
    sizes["contexts"] = [(one.data_bytes, len(one.data)) for one in record.contexts]
    for name, found in sizes.items():
        for at, (said, size) in enumerate(found):
            if said != size:
                problem = f"is {said} for {size} bytes"
                raise InvalidFieldError(f"{path}.{name}[{at}].data_bytes", problem)
    for at, node in enumerate(record.messages):
        field = f"{path}.messages[{at}]"
        if node.node_id in seen:
            raise InvalidFieldError(f"{field}.node_id", "is 0 or there twice")
        if node.parent_node_id not in seen:
            raise InvalidFieldError(f"{field}.parent_node_id", "is not an earlier node")
        if node.HasField("context_index") and node.context_index >= len(record.contexts):
            raise InvalidFieldError(f"{field}.context_index", "is beyond the contexts")
        seen.add(node.node_id)


def _check_tree(tree: trajectory_pb2.TrajectoryTree, field: str) -> None:
    count = _check_tokens(tree.tokens, f"{field}.tokens")
    _check_versions(tree.version_spans, count, f"{field}.version_spans")
    end = 0
    for at, node in enumerate(tree.nodes):
        if node.start != end or not end <= node.end <= count:
            raise InvalidFieldError(f"{field}.nodes[{at}]", "does not begin where the last ended")
        if node.scaffold_tokens > node.end - node.start:
            raise InvalidFieldError(
                f"{field}.nodes[{at}].scaffold_tokens", "are more than its tokens"
            )
        if node.HasField("parent_index") and node.parent_index >= at:
            raise InvalidFieldError(f"{field}.nodes[{at}].parent_index", "is not an earlier node")
        _check_reward(node, f"{field}.nodes[{at}]")
        end = node.end
    check_columns(tree.columns, f"{field}.columns", count)
    if end != count:
        raise InvalidFieldError(f"{field}.nodes", f"do not cover the {count} tokens")


def _check_images(images: Sequence[session_pb2.SessionImage], field: str) -> set[str]:
    """Checks the images of a record and returns their hashes."""
    known: set[str] = set()
    for at, image in enumerate(images):
        if image.sha256 in known:
            raise InvalidFieldError(f"{field}[{at}].sha256", "is there twice")
        if image.data_bytes != len(image.data):
            raise InvalidFieldError(
                f"{field}[{at}].data_bytes", f"is {image.data_bytes} for {len(image.data)} bytes"
            )
        if hashlib.sha256(image.data).hexdigest() != image.sha256:
            raise InvalidFieldError(f"{field}[{at}].sha256", "is not the hash of its data")
        known.add(image.sha256)
    return known


def _check_shown(
    shown: trajectory_pb2.Trajectory | trajectory_pb2.TrajectoryTree, known: set[str], field: str
) -> None:
    """Checks where the images of a trajectory or a tree are in its tokens."""
    end, count = 0, len(shown.tokens.loss_mask_u8)
    for at, image in enumerate(shown.images):
        if not end <= image.start < image.start + image.tokens <= count:
            raise InvalidFieldError(
                f"{field}.images[{at}]", f"overlaps, or is not within the {count} tokens"
            )
        if image.sha256 not in known:
            raise InvalidFieldError(
                f"{field}.images[{at}].sha256", "is not the hash of an image of the record"
            )
        if any(shown.tokens.loss_mask_u8[image.start : image.start + image.tokens]):
            raise InvalidFieldError(f"{field}.images[{at}]", "has tokens that are trained")
        end = image.start + image.tokens


def _check_reward(
    turn: trajectory_pb2.TrajectorySegment | trajectory_pb2.TrajectoryNode, field: str
) -> None:
    if not turn.HasField("reward"):
        return
    if not turn.sampled:
        raise InvalidFieldError(f"{field}.reward", "is of what was not sampled")
    _check_finite(f"{field}.reward", turn.reward)


def _check_finite(field: str, reward: float) -> None:
    if not math.isfinite(reward):
        raise InvalidFieldError(field, f"{reward} is not a finite number")


def _check_tokens(tokens: trajectory_pb2.TokenArrays, field: str) -> int:
    """Checks the lengths and values of the arrays and returns the number of tokens."""
    _, logprobs, _ = unpack_tokens(tokens, field)
    if (wrong := wrong_logprob(logprobs)) is not None:
        raise InvalidFieldError(
            f"{field}.logprobs_f32le",
            f"has {logprobs[wrong]} at token {wrong}; send finite numbers that are not above 0",
        )
    return len(logprobs)


def _check_versions(spans: Sequence[sampling_pb2.VersionSpan], count: int, field: str) -> None:
    """Checks that policy versions count from 0 and that their runs ascend."""
    _check_runs(spans, count, field)
    for at, span in enumerate(spans):
        if span.policy_version < 0:
            raise InvalidFieldError(
                f"{field}[{at}].policy_version", f"is {span.policy_version}; give at least 0"
            )


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
