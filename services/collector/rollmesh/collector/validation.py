"""Checks of what comes in; each error names the field."""

import math
from collections.abc import Sequence
from typing import TypeAlias

from rollmesh.runtime.arrays import unpack_mask
from rollmesh.runtime.errors import InvalidFieldError
from rollmesh.v1 import collector_pb2 as pb, types_pb2

_Rewarded: TypeAlias = (
    types_pb2.SessionRecord
    | types_pb2.Trajectory
    | types_pb2.TrajectorySegment
    | types_pb2.TrajectoryNode
)
_MAX_ID_CHARS = 128
_MAX_CREDITS = 65_536
MAX_SESSIONS, MAX_ACKNOWLEDGED = 4096, 4096
"""Of one message."""
_MAX_PAGE, _DEFAULT_PAGE = 1000, 100


def check_sessions(records: Sequence[types_pb2.SessionRecord]) -> None:
    """Checks sessions.

    Raises:
        InvalidFieldError: Names the field and what is wrong.
    """
    if not records:
        raise InvalidFieldError("sessions", "is empty; send at least one")
    for at, record in enumerate(records):
        _check_session(record, f"sessions[{at}]")


def _check_session(record: types_pb2.SessionRecord, path: str) -> None:
    check_name(f"{path}.session_id", record.session_id)
    if record.outcome == types_pb2.SESSION_OUTCOME_UNSPECIFIED:
        raise InvalidFieldError(f"{path}.outcome", "is not set; say how the session ended")
    if record.sample_index >= max(record.group_size, 1):
        raise InvalidFieldError(
            f"{path}.sample_index",
            f"is {record.sample_index}; give one below group_size, {record.group_size}",
        )
    _check_finite(record, path)
    seen: set[str] = set()
    for at, trajectory in enumerate(record.trajectories):
        field = f"{path}.trajectories[{at}]"
        if not trajectory.trajectory_id or trajectory.trajectory_id in seen:
            raise InvalidFieldError(f"{field}.trajectory_id", "is empty or not unique")
        if trajectory.session_id != record.session_id:
            raise InvalidFieldError(f"{field}.session_id", "is another session's")
        seen.add(trajectory.trajectory_id)
        _check_trajectory(trajectory, field)
    if record.HasField("tree"):
        if record.trajectories:
            raise InvalidFieldError(f"{path}.tree", "is given beside trajectories; give one form")
        _check_tree(record.tree, f"{path}.tree")


def _check_trajectory(trajectory: types_pb2.Trajectory, field: str) -> None:
    _check_finite(trajectory, field)
    count = _check_arrays(trajectory, field)
    if not count or trajectory.prompt_tokens > count:
        raise InvalidFieldError(f"{field}.prompt_tokens", f"does not fit {count} tokens")
    _check_runs(trajectory.version_spans, count, f"{field}.version_spans")
    end = _check_runs(trajectory.segments, count, f"{field}.segments")
    if end != count or sum(s.end - s.start for s in trajectory.segments) != count:
        raise InvalidFieldError(f"{field}.segments", f"do not cover the {count} tokens")
    for at, segment in enumerate(trajectory.segments):
        _check_reward(segment, f"{field}.segments[{at}]")


def _check_tree(tree: types_pb2.TrajectoryTree, field: str) -> None:
    count = _check_arrays(tree, field)
    _check_runs(tree.version_spans, count, f"{field}.version_spans")
    end = 0
    for at, node in enumerate(tree.nodes):
        if node.start != end or not end <= node.end <= count:
            raise InvalidFieldError(f"{field}.nodes[{at}]", "does not begin where the last ended")
        if node.glue_tokens > node.end - node.start:
            raise InvalidFieldError(f"{field}.nodes[{at}].glue_tokens", "are more than its tokens")
        if node.HasField("parent_index") and node.parent_index >= at:
            raise InvalidFieldError(f"{field}.nodes[{at}].parent_index", "is no earlier node")
        _check_reward(node, f"{field}.nodes[{at}]")
        end = node.end
    if end != count:
        raise InvalidFieldError(f"{field}.nodes", f"do not cover the {count} tokens")


def _check_reward(turn: types_pb2.TrajectorySegment | types_pb2.TrajectoryNode, field: str) -> None:
    if not turn.HasField("reward"):
        return
    if not turn.sampled:
        raise InvalidFieldError(f"{field}.reward", "is of what was not sampled")
    _check_finite(turn, field)


def _check_finite(rewarded: _Rewarded, field: str) -> None:
    if rewarded.HasField("reward") and not math.isfinite(rewarded.reward):
        raise InvalidFieldError(f"{field}.reward", f"{rewarded.reward} is not a finite number")


def _check_arrays(holder: types_pb2.Trajectory | types_pb2.TrajectoryTree, field: str) -> int:
    """Checks that the arrays agree; returns the number of tokens."""
    count = len(holder.loss_mask_u8)
    unpack_mask(holder.loss_mask_u8, f"{field}.loss_mask_u8")
    for name in ("token_ids_u32le", "logprobs_f32le"):
        size = len(getattr(holder, name))
        if size != 4 * count:
            raise InvalidFieldError(
                f"{field}.{name}", f"has {size} bytes; {count} tokens by the mask need {4 * count}"
            )
    return count


def _check_runs(runs: object, count: int, field: str) -> int:
    """Checks that runs ascend within `count` tokens; returns where the last ends."""
    end = 0
    for run in runs:  # type: ignore[attr-defined]  # spans and segments alike
        if not end <= run.start < run.end <= count:
            raise InvalidFieldError(field, f"{run.start} to {run.end} overlaps or is out of range")
        end = run.end
    return end


def check_name(field: str, name: str) -> str:
    """Returns a name of 1 to 128 characters."""
    if not 0 < len(name) <= _MAX_ID_CHARS:
        raise InvalidFieldError(field, f"give 1 to {_MAX_ID_CHARS} characters")
    return name


def check_count(field: str, values: Sequence[object], most: int) -> None:
    """Checks how many entries a message has: what they cost is paid by everybody else.

    Raises:
        InvalidFieldError: They are too many.
    """
    if len(values) > most:
        raise InvalidFieldError(field, f"has {len(values)} entries; send at most {most} at once")


def check_consumer(name: str) -> None:
    """Checks the name of a consumer.

    Raises:
        InvalidFieldError: It is empty, too long, or not printable.
    """
    check_name("consumer", name)
    if not name.isprintable():
        raise InvalidFieldError("consumer", f"is {name!r}; give printable characters")


def check_hello(first: pb.SubscribeRequest | None) -> pb.SubscribeHello:
    """Returns the hello of a stream's first message.

    Raises:
        InvalidFieldError: It is missing, or names what is wrong with it.
    """
    if first is None or not first.HasField("hello"):
        raise InvalidFieldError("hello", "is missing; send it in the first message")
    hello = first.hello
    check_consumer(hello.consumer)
    if hello.unit == pb.DELIVERY_UNIT_UNSPECIFIED:
        raise InvalidFieldError("unit", "is not set; say what one delivery holds")
    if hello.HasField("lease_ms") and hello.lease_ms < 1:
        raise InvalidFieldError("lease_ms", "is 0; give at least 1")
    if hello.HasField("start"):
        check_position("start", hello.start)
    if hello.HasField("policy_version"):
        check_version(hello.policy_version)
    _check_groups(hello)
    _check_filter(hello)
    return hello


def check_position(field: str, position: pb.Position) -> None:
    """Checks that a position says where."""
    place = position.WhichOneof("place")
    if place is None or (place == "end" and position.end == pb.LOG_END_UNSPECIFIED):
        raise InvalidFieldError(field, "is not set; give an end, a time or a delivery id")


def check_version(version: int) -> int:
    """Returns a policy version."""
    if version < 0:
        raise InvalidFieldError("policy_version", f"is {version}; give at least 0")
    return version


def check_credits(grant: pb.GrantCredits) -> int:
    """Returns how many credits are granted."""
    if not 0 < grant.credits <= _MAX_CREDITS:
        raise InvalidFieldError("grant.credits", f"give 1 to {_MAX_CREDITS}")
    return grant.credits


def check_page_size(request: pb.ListFilteredRequest | pb.ListOpenGroupsRequest) -> int:
    """Returns how many entries a page may hold."""
    size = request.page_size if request.HasField("page_size") else _DEFAULT_PAGE
    if not 0 < size <= _MAX_PAGE:
        raise InvalidFieldError("page_size", f"is {size}; give 1 to {_MAX_PAGE}")
    return size


def _check_groups(hello: pb.SubscribeHello) -> None:
    policy = hello.groups
    if policy.ListFields() and hello.unit != pb.DELIVERY_UNIT_GROUP:
        raise InvalidFieldError("groups", "is for consumers of groups; set unit, or leave it out")
    for name in ("deadline_ms", "min_samples", "samples"):
        _check_positive(policy, "groups", name)


def _check_filter(hello: pb.SubscribeHello) -> None:
    rules = hello.filter
    for name in ("max_tokens", "max_turns"):
        _check_positive(rules, "filter", name)
    if rules.HasField("max_policy_lag") and not hello.HasField("policy_version"):
        raise InvalidFieldError("policy_version", "is missing; filter.max_policy_lag needs it")
    if types_pb2.FIDELITY_REASON_UNSPECIFIED in rules.allowed_reasons:
        raise InvalidFieldError("filter.allowed_reasons", "holds UNSPECIFIED; name the reasons")
    if types_pb2.LINEAGE_UNSPECIFIED in rules.lineages:
        raise InvalidFieldError("filter.lineages", "holds UNSPECIFIED; name the lineages")


def _check_positive(message: pb.GroupPolicy | pb.DeliveryFilter, field: str, name: str) -> None:
    if message.HasField(name) and getattr(message, name) < 1:  # type: ignore[arg-type]
        raise InvalidFieldError(f"{field}.{name}", "is 0; give at least 1")
