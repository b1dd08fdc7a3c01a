"""Pure decisions about deliveries: units, groups, filters and consumers' settings. No I/O.

A *unit* is the content of one delivery: a session, or a group. Logs list units in the order of
their completion: one log of sessions, one of groups with all their samples, and one for each
consumer with a group policy of its own, which is filled when the consumer's units are fetched. The
members of a unit are fixed when it enters a log. A consumer has *settled* a unit once it
acknowledged it or its filter dropped it.

A session has two stored forms here: the *head*, which is its `SessionRecord` without arrays, and
the *arrays*, the bytes that only a delivery reads. Everything in this module reads heads.
"""

import hashlib
import logging
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias
from urllib.parse import quote, unquote

from google.protobuf.message import DecodeError

from rollmesh.runtime import is_stale, version_of
from rollmesh.runtime.errors import SessionDamagedError
from rollmesh.runtime.telemetry import fields
from rollmesh.v1 import collector_pb2 as pb, sampling_pb2, session_pb2, trajectory_pb2

_log = logging.getLogger(__name__)
SESSION = int(pb.DELIVERY_UNIT_SESSION)
GROUP = int(pb.DELIVERY_UNIT_GROUP)
SESSION_LOG, GROUP_LOG = "s", "g"
SHARED_POLICY = pb.Consumer(unit=pb.DELIVERY_UNIT_GROUP)
"""The settings by which `GROUP_LOG` is filled: a group is complete with all its samples."""
ABANDONED = "abandoned-"
"""Prefix of the ids of records that stand for abandoned seats. Session ids are hexadecimal."""
_SUPERSEDED, _ALONE, _OF_RUN, _PLAIN = _MARKS = ("superseded:", "session:", "run:", "group:")
"""Prefixes of group keys. A group without a run has its group_id as key, if that has none."""
Reason: TypeAlias = "pb.FilterReason.ValueType"


class Unit(NamedTuple):
    """A unit of delivery."""

    seq: int
    """Position in the log."""
    unit_id: str
    """Session id or group key. Also the delivery id."""
    session_ids: tuple[str, ...]
    """Ids of its sessions, in order of delivery."""
    partial: bool = False
    """Whether the group has fewer samples than announced."""


class Page(NamedTuple):
    """A page of units that a consumer has not settled."""

    units: list[Unit]
    """The units, in order."""
    cursor: int
    """Start of the next page."""
    more: bool
    """Whether there may be another page now."""


class Settlement(NamedTuple):
    """A unit that a consumer acknowledged or that its filter dropped."""

    unit_id: str
    reason: Reason = pb.FILTER_REASON_UNSPECIFIED
    """Why it was dropped. UNSPECIFIED: it was acknowledged."""
    removed: Sequence[pb.RemovedTrajectories] = ()
    """With a reason: the trajectories removed by the filter."""


@dataclass(slots=True)
class Arrival:
    """A session to be stored."""

    record: session_pb2.SessionRecord
    """Without its arrays from `Store.pack` on."""
    hold_ms: int | None = None
    """How long it waits for rewards unless its record says so. None: it does not wait."""
    head: bytes = b""
    """Set by `Store.pack`."""
    arrays: bytes | None = None
    """Set by `Store.pack`. None if they are not in the table."""
    columns: tuple[Any, ...] = ()
    """Set by `Store.pack`: the values of the store's own columns."""

    def due_ms(self, now_ms: int) -> int | None:
        """Returns until when it waits for rewards, or None if it does not wait."""
        if self.record.HasField("reward_timeout_ms"):
            return now_ms + self.record.reward_timeout_ms
        return None if self.hold_ms is None else now_ms + self.hold_ms

    def group(self) -> tuple[str, int | None]:
        """Returns the key of its group, and the announced size.

        A superseded session has a key of its own and no size: it belongs to no group.
        """
        record = self.record
        if record.superseded:
            return f"{_SUPERSEDED}{record.session_id}", None
        if not record.group_id:
            return f"{_ALONE}{record.session_id}", 1
        return key_of(record.run_id, record.group_id), max(record.group_size, 1)


def key_of(run_id: str, group_id: str) -> str:
    """Returns the key of a group: its id, unless it has a run or begins like another key."""
    if run_id:
        return f"{_OF_RUN}{quote(run_id, safe='')}/{group_id}"
    return f"{_PLAIN}{group_id}" if group_id.startswith(_MARKS) else group_id


def run_and_group(key: str) -> tuple[str, str]:
    """Returns the run and the group of a key. For an ungrouped session, its id as the group."""
    if key.startswith(_OF_RUN):
        run_id, _, group_id = key.removeprefix(_OF_RUN).partition("/")
        return unquote(run_id), group_id
    return "", key.removeprefix(_ALONE if key.startswith(_ALONE) else _PLAIN)


def abandoned_seat(request: pb.AbandonSeatRequest, now_ms: int) -> session_pb2.SessionRecord:
    """Returns the record of an abandoned seat. The same seat has the same id."""
    seat = f"{request.sample_index}/{key_of(request.run_id, request.group_id)}".encode()
    return session_pb2.SessionRecord(
        session_id=ABANDONED + hashlib.sha256(seat).hexdigest()[:32],
        group_id=request.group_id,
        sample_index=request.sample_index,
        group_size=request.group_size,
        outcome=session_pb2.SESSION_OUTCOME_LOST,
        metadata=request.metadata,
        opened_unix_ms=now_ms,
        closed_unix_ms=now_ms,
        model=request.model,
        purpose=request.purpose,
        abandoned=request.reason,
        run_id=request.run_id,
    )


def log_of(consumer: pb.Consumer) -> str:
    """Returns the log that a consumer reads."""
    if consumer.unit == SESSION:
        return SESSION_LOG
    return own_log(consumer.name) if consumer.HasField("groups") else GROUP_LOG


def own_log(consumer: str) -> str:
    """Returns the log of a consumer with its own group policy.

    The consumer's filtered entries are listed under this name, whichever log it reads. Entries
    listed under a shared log belong to all its readers.
    """
    return f"c:{consumer}"


# Stored sessions: heads and arrays.

Row: TypeAlias = trajectory_pb2.Trajectory | trajectory_pb2.TrajectoryTree
"""The unit of filtering: a trajectory, or the complete tree of a session."""
Run: TypeAlias = trajectory_pb2.TrajectorySegment | trajectory_pb2.TrajectoryNode
RowKey: TypeAlias = tuple[str, int]
"""A row by the id of its session and its index there."""
_OTHER_POLICY = trajectory_pb2.FIDELITY_REASON_MIXED_POLICIES
_BYTES_PER_TOKEN = 9  # in storage order: 4 for the id, 4 for the log-probability, 1 for the mask


def rows_of(record: session_pb2.SessionRecord) -> Sequence[Row]:
    """Returns a session's trajectories, or its tree as the only row."""
    return [record.tree] if record.HasField("tree") else record.trajectories


def runs_of(row: Row) -> Sequence[Run]:
    """Returns the token runs of a row, in order."""
    return row.segments if isinstance(row, trajectory_pb2.Trajectory) else row.nodes


def tokens_of(row: Row) -> int:
    """Returns the number of tokens in a row, with or without its arrays."""
    runs = runs_of(row)
    return runs[-1].end if runs else 0


def turns_of(row: Row) -> int:
    """Returns the number of sampled turns of a row."""
    if isinstance(row, trajectory_pb2.Trajectory):
        return row.turns
    return sum(node.sampled for node in row.nodes)


def split(record: session_pb2.SessionRecord) -> tuple[bytes, list[bytes]]:
    """Removes the arrays, the bytes of images and the messages from a record.

    Returns:
        The serialized head, and arrays of all rows, then columns, images and messages. Their
        lengths follow from the runs and the sizes, which stay in the head.
    """
    arrays: list[bytes] = []
    for row in rows_of(record):
        arrays += row.tokens.token_ids_u32le, row.tokens.logprobs_f32le, row.tokens.loss_mask_u8
        row.ClearField("tokens")
    for one in _files(record):
        arrays.append(one.data)
        one.ClearField("data")
    return record.SerializeToString(), arrays


def read_head(session_id: str, data: bytes) -> session_pb2.SessionRecord:
    """Parses the head of a session, as returned by `split`.

    Raises:
        SessionDamagedError: The data is not a head of this session.
    """
    try:
        head = session_pb2.SessionRecord.FromString(data)
    except DecodeError as error:
        raise damaged(session_id, f"its head is not a valid message: {error}") from error
    if head.session_id != session_id:
        raise damaged(session_id, f"its head is that of {head.session_id!r}")
    return head


def arrays_size(head: session_pb2.SessionRecord) -> int:
    """Returns the size of arrays, images and messages that belong to a head, bytes."""
    size = _BYTES_PER_TOKEN * sum(map(tokens_of, rows_of(head)))
    for one in _files(head):
        size += one.data_bytes
    return size


def _files(record: session_pb2.SessionRecord) -> list[Any]:
    """Returns columns of all rows, images, messages, contexts. All have `data` of `data_bytes`."""
    found: list[Any] = []
    for row in rows_of(record):
        found += row.columns
    return [*found, *record.images, *record.messages, *record.contexts]


def join(
    head: session_pb2.SessionRecord, arrays: bytes, kept: Sequence[int] | None = None
) -> session_pb2.SessionRecord:
    """Restores the arrays from `split` into the head, which is modified in place and returned.

    Args:
        head: The head.
        arrays: Its arrays.
        kept: Ascending indices of the rows to keep. The others are removed, with the images that
            only they show. None keeps all.

    Raises:
        SessionDamagedError: The arrays do not match the head.
    """
    rows = rows_of(head)
    if len(arrays) != arrays_size(head):
        tokens = sum(map(tokens_of, rows))
        problem = f"its arrays have {len(arrays)} bytes, which do not fit {tokens} tokens"
        if head.images:
            problem += f" and {len(head.images)} images"
        raise damaged(head.session_id, problem)
    start = 0
    for row in rows:
        count, tokens_into = tokens_of(row), row.tokens
        tokens_into.token_ids_u32le = arrays[start : start + 4 * count]
        tokens_into.logprobs_f32le = arrays[start + 4 * count : start + 8 * count]
        mask = bytearray(arrays[start + 8 * count : start + 9 * count])
        for run in runs_of(row):
            if _OTHER_POLICY in run.reasons:
                mask[run.start : run.end] = bytes(run.end - run.start)
        tokens_into.loss_mask_u8 = bytes(mask)
        start += _BYTES_PER_TOKEN * count
    for one in _files(head):
        one.data = arrays[start : start + one.data_bytes]
        start += one.data_bytes
    if kept is None or len(kept) == len(rows):
        return head
    if head.HasField("tree"):
        head.ClearField("tree")
    for at in reversed(range(len(head.trajectories))):
        if at not in kept:
            del head.trajectories[at]
    shown = {image.sha256 for row in rows_of(head) for image in row.images}
    for at in reversed(range(len(head.images))):
        if head.images[at].sha256 not in shown:
            del head.images[at]
    return head


def train_policies(row: Row, adapters: Collection[str]) -> None:
    """Has a consumer train only the turns that policies of it sampled. `join` clears their mask.

    Args:
        row: The row.
        adapters: Names of the adapters, an empty one for the base model.
    """
    spans = iter(row.version_spans)
    span = next(spans, None)
    for run in runs_of(row):
        while span is not None and span.end <= run.start:
            span = next(spans, None)
        is_other = span is not None and span.start < run.end and span.adapter not in adapters
        if is_other and run.trained:  # one policy samples all of a turn
            run.trained = False
            run.reasons.append(_OTHER_POLICY)


def damaged(session_id: str, problem: str) -> SessionDamagedError:
    """Logs that a session cannot be read and returns the error for it."""
    _log.error("session damaged", extra=fields(session_id=session_id, problem=problem))
    return SessionDamagedError(
        f"session_id: the stored data of {session_id!r} is damaged: {problem}; restore the store "
        "from a copy",
        session_id=session_id,
    )


# Groups: when one is complete, and which of its sessions it contains.


class Member(NamedTuple):
    """A session that has joined its group."""

    session_id: str
    sample_index: int
    usable: bool = True
    """Whether the consumer's filter leaves it at least one trajectory."""
    lost: bool = False
    """Whether the infrastructure failed it."""

    @property
    def is_sample(self) -> bool:
        """Whether it is neither lost nor an abandoned seat."""
        return not self.lost and not self.session_id.startswith(ABANDONED)


class Formed(NamedTuple):
    """A group that is decided: the unit that it becomes in a log."""

    members: tuple[str, ...]
    """Session ids by sample_index, one for each seat. Of a dropped group all, in order of arrival
    within a seat."""
    partial: bool
    """Whether it has fewer samples than announced."""
    dropped: bool = False
    """Whether the log's consumer does not receive it. Such a unit is settled at once."""


def form(
    policy: pb.GroupPolicy, group_size: int, members: Sequence[Member], waited_ms: int
) -> Formed | None:
    """Decides about a group that is not yet a unit of a log.

    Args:
        policy: The group policy of the log's consumer.
        group_size: Number of samples announced.
        members: Its sessions that do not wait for a reward, in order of arrival.
        waited_ms: Time since the first of its sessions arrived.

    Returns:
        The unit, or None if the group keeps waiting.
    """
    chosen = _seated(members)
    is_complete = len(chosen) >= group_size
    some = policy.whole or policy.HasField("min_samples")
    if policy.HasField("samples") and policy.samples < group_size:
        chosen = _seated([one for one in members if one.is_sample and one.usable])
        if len(chosen) >= policy.samples:
            return _formed(chosen[: policy.samples], group_size)
    elif is_complete and (not some or _samples(chosen) >= group_size):
        return _formed(chosen, group_size)
    late = policy.HasField("deadline_ms") and waited_ms >= policy.deadline_ms
    if not members or not (late or is_complete):
        return None
    if policy.HasField("min_samples") and _samples(chosen) >= policy.min_samples:
        if policy.HasField("samples"):
            chosen = [one for one in chosen if one.is_sample]
        return _formed(chosen, group_size)
    return _formed(members, group_size)._replace(dropped=True)


def _samples(members: Iterable[Member]) -> int:
    """Returns the number of seats with a sample."""
    return len({one.sample_index for one in members if one.is_sample})


def _seated(members: Sequence[Member]) -> list[Member]:
    """Returns the session that has each seat: the first to arrive of the most useful ones."""
    seated: dict[int, Member] = {}
    for one in members:
        held = seated.get(one.sample_index)
        if held is None or _uselessness(one) < _uselessness(held):
            seated[one.sample_index] = one
    return list(seated.values())


def _uselessness(member: Member) -> tuple[bool, bool, bool]:
    return member.session_id.startswith(ABANDONED), member.lost, not member.usable


def _formed(members: Iterable[Member], group_size: int) -> Formed:
    ordered = sorted(members, key=attrgetter("sample_index"))
    ids = tuple([one.session_id for one in ordered])
    return Formed(ids, partial=_samples(ordered) < group_size)


# Filters, evaluated on the heads of a unit's sessions.


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a filter for one unit."""

    reason: Reason = pb.FILTER_REASON_UNSPECIFIED
    """Why the unit is dropped. UNSPECIFIED: it is delivered."""
    kept: list[list[int]] = field(default_factory=list)
    """Per session: indices of the trajectories kept. A tree is judged as one row, 0."""
    removed: list[pb.RemovedTrajectories] = field(default_factory=list)
    """The trajectories removed from each session, with reasons."""


def judge(
    consumer: pb.Consumer,
    heads: Sequence[session_pb2.SessionRecord],
    unscorable: Collection[RowKey] = (),
) -> Verdict:
    """Evaluates a consumer's filter on the sessions of one unit.

    The policy lag counts from the consumer's policy version. Without one it is ignored. A consumer
    with a run gets nothing that abandoned runs sampled, unless it keeps that. Then such tokens have
    no lag.
    """
    rules = consumer.filter
    grouped = consumer.unit == GROUP and not rules.ungrouped
    if grouped and not any(head.group_id for head in heads):
        return Verdict(pb.FILTER_REASON_UNGROUPED)
    version = consumer.policy_version if consumer.HasField("policy_version") else None
    kept: list[list[int]] = []
    removed: list[pb.RemovedTrajectories] = []
    refused: list[Reason] = []
    for head in heads:
        refusal, reasons = _reasons(consumer, head, version)
        if consumer.HasField("teacher"):
            for at, row in enumerate(rows_of(head)):
                # No teacher can score a tree, tokens of images, or no tokens.
                is_tree = isinstance(row, trajectory_pb2.TrajectoryTree)
                has_none = is_tree or bool(row.images) or not tokens_of(row)
                if has_none or (head.session_id, at) in unscorable:
                    reasons[at] = reasons[at] or pb.FILTER_REASON_TEACHER
        refused.append(refusal)
        kept.append([at for at, reason in enumerate(reasons) if not reason])
        for why, count in sorted(Counter(filter(None, reasons)).items()):
            removed.append(
                pb.RemovedTrajectories(session_id=head.session_id, reason=why, count=count)
            )
    reason: Reason = pb.FILTER_REASON_UNSPECIFIED
    if pb.FILTER_REASON_CAPTURE in refused:
        reason = pb.FILTER_REASON_CAPTURE
    elif heads and all(refused):
        reason = refused[0]
    elif removed and not any(kept):
        reason = pb.FILTER_REASON_NOTHING_LEFT
    elif rules.drop_zero_variance and _all_equal(heads, kept):
        reason = pb.FILTER_REASON_ZERO_VARIANCE
    return Verdict(reason, kept, removed)


def usable(consumer: pb.Consumer, head: session_pb2.SessionRecord) -> bool:
    """Returns whether the filter leaves a session at least one trajectory. Ignores policy lag."""
    refusal, reasons = _reasons(consumer, head, None)
    return not refusal and not all(reasons)


def trained_spans(row: Row) -> Iterator[sampling_pb2.VersionSpan]:
    """Yields the version spans with trained tokens."""
    trained = iter([run for run in runs_of(row) if run.trained])  # they ascend, as spans do
    run = next(trained, None)
    for span in row.version_spans:
        while run is not None and run.end <= span.start:
            run = next(trained, None)
        if run is not None and run.start < span.end:
            yield span


def _reasons(
    consumer: pb.Consumer, head: session_pb2.SessionRecord, version: int | None
) -> tuple[Reason, list[Reason]]:
    """Returns why a whole session is removed, and why each of its rows is, or UNSPECIFIED."""
    rules, train = consumer.filter, session_pb2.SESSION_PURPOSE_TRAIN
    captures = rules.captures or [session_pb2.CAPTURE_TOKENS]
    refusal: Reason = pb.FILTER_REASON_UNSPECIFIED
    if not head.abandoned and (head.capture or session_pb2.CAPTURE_TOKENS) not in captures:
        refusal = pb.FILTER_REASON_CAPTURE
    elif rules.model not in {"", head.model}:
        refusal = pb.FILTER_REASON_MODEL
    elif (head.purpose or train) not in (rules.purposes or [train]):
        refusal = pb.FILTER_REASON_PURPOSE
    elif rules.metadata and not rules.metadata.items() <= head.metadata.items():
        refusal = pb.FILTER_REASON_METADATA
    run = consumer.policy_run if consumer.HasField("policy_run") else None
    if run is not None and run.model not in {"", head.model}:
        run = None  # it is of another model
    return refusal, [refusal or _reason(rules, version, row, run) for row in rows_of(head)]


def _reason(
    rules: pb.DeliveryFilter,
    version: int | None,
    row: Row,
    run: sampling_pb2.PolicyRun | None,
) -> Reason:
    """Returns the first rule that removes a row, or UNSPECIFIED if the row is kept."""
    is_kept = run is None or rules.stale_runs == pb.STALE_RUNS_KEEP
    if not is_kept and any(is_stale(run, span) for span in row.version_spans):
        return pb.FILTER_REASON_STALE_RUN
    allowed = {trajectory_pb2.FIDELITY_REASON_EXACT, *rules.allowed_reasons}
    if rules.lineages:  # one of those in a tree must match
        of = [row] if isinstance(row, trajectory_pb2.Trajectory) else row.nodes
        if not any(one.lineage in rules.lineages for one in of):
            return pb.FILTER_REASON_LINEAGE
    if rules.allowed_reasons and not allowed.issuperset(row.reasons):
        return pb.FILTER_REASON_FIDELITY
    if rules.HasField("max_tokens") and tokens_of(row) > rules.max_tokens:
        return pb.FILTER_REASON_TOKENS
    if rules.HasField("max_turns") and turns_of(row) > rules.max_turns:
        return pb.FILTER_REASON_TURNS
    if rules.HasField("max_policy_lag") and version is not None:
        spans = [one for one in trained_spans(row) if not is_stale(run, one)]
        oldest = min((version_of(one.policy_version) for one in spans), default=None)
        if oldest is not None and version_of(version) - oldest > rules.max_policy_lag:
            return pb.FILTER_REASON_POLICY_LAG
    if rules.adapters and not any(one.adapter in rules.adapters for one in trained_spans(row)):
        return pb.FILTER_REASON_ADAPTER
    if rules.numerics_ids and not {span.numerics_id for span in trained_spans(row)}.issubset(
        rules.numerics_ids
    ):
        return pb.FILTER_REASON_NUMERICS
    return pb.FILTER_REASON_UNSPECIFIED


def _all_equal(heads: Sequence[session_pb2.SessionRecord], kept: list[list[int]]) -> bool:
    """Returns whether at least two sessions remain and all their rewards are known and equal."""
    seen: set[tuple[float, ...]] = set()
    sessions = 0
    for head, indices in zip(heads, kept, strict=True):
        sessions += bool(indices)
        rows = rows_of(head)
        for row in (rows[at] for at in indices):
            reward = head.reward if head.HasField("reward") else None
            if isinstance(row, trajectory_pb2.Trajectory) and row.HasField("reward"):
                reward = row.reward
            turns = [run.reward for run in runs_of(row) if run.HasField("reward")]
            if reward is None and not turns:
                return False
            seen.add((reward or 0.0, *turns))
    return sessions > 1 and len(seen) == 1


@dataclass(slots=True)
class Loaded:
    """A stored unit, and whether it is delivered."""

    unit: Unit
    verdict: Verdict
    messages: bool = False
    """Whether the consumer wants the messages of sessions."""
    heads: list[session_pb2.SessionRecord] = field(default_factory=list)
    """Its sessions, without arrays."""
    arrays: list[bytes] = field(default_factory=list)
    """The arrays of each session, as `split` returned them, or empty if it is not delivered."""
    attempt: int = 0
    """Delivery attempt number, or 0 if it is not delivered."""
    scores: Mapping[RowKey, bytes] = field(default_factory=dict)
    """The scores of its trajectories by the consumer's teacher."""
    unscored: tuple[RowKey, ...] = ()
    """The trajectories that are delivered once the teacher has scored them."""

    @property
    def delivers(self) -> bool:
        """Whether it is delivered now."""
        return not self.verdict.reason and not self.unscored

    def drop_damaged(self, error: SessionDamagedError) -> None:
        """Drops the unit because one of its sessions is damaged."""
        reason = pb.FILTER_REASON_DAMAGED
        part = pb.RemovedTrajectories(session_id=error.metadata["session_id"], reason=reason)
        self.verdict = Verdict(reason, removed=[part])

    def response(self) -> pb.SubscribeResponse | None:
        """Returns the delivery with the trajectories that the filter keeps.

        Sessions are assembled inside the response: adding a message copies it, and a session can
        take megabytes. None if the unit is not delivered, or is dropped now because arrays do not
        match their heads.
        """
        if not self.delivers:
            return None
        response = pb.SubscribeResponse()
        delivery = response.delivery
        delivery.delivery_id, delivery.attempt = self.unit.unit_id, self.attempt
        delivery.removed.extend(self.verdict.removed)
        delivery.partial = self.unit.partial
        try:
            for head, arrays, kept in zip(self.heads, self.arrays, self.verdict.kept, strict=True):
                delivery.partial |= head.outcome == session_pb2.SESSION_OUTCOME_LOST
                session = delivery.sessions.add()
                session.CopyFrom(head)
                if self.scores:
                    for at in kept:
                        scores = self.scores[session.session_id, at]
                        session.trajectories[at].teacher.MergeFromString(scores)
                join(session, arrays, kept)
                if not self.messages:
                    session.ClearField("messages")
                    session.ClearField("contexts")
        except SessionDamagedError as error:
            self.drop_damaged(error)
            return None
        return response


_NO_SCORES: Mapping[RowKey, bytes] = {}


def judge_unit(
    unit: Unit,
    heads: Sequence[bytes | None],
    consumer: pb.Consumer,
    scores: Mapping[RowKey, bytes] = _NO_SCORES,
) -> Loaded | None:
    """Decides whether a unit is delivered.

    Args:
        unit: The unit.
        heads: The stored head of each of its sessions, or None for one that was removed.
        consumer: The settings of its consumer.
        scores: Stored scores of the consumer's teacher. Empty bytes are a refusal.

    Returns:
        The unit without arrays, or None if one of its sessions was removed, because the consumer
        settled the unit while it was held here.
    """
    loaded = Loaded(unit, Verdict(), consumer.messages)
    try:
        for session_id, head in zip(unit.session_ids, heads, strict=True):
            if head is None:
                return None
            loaded.heads.append(read_head(session_id, head))
    except SessionDamagedError as error:
        loaded.drop_damaged(error)
    else:
        if consumer.filter.adapters:
            for row in (row for head in loaded.heads for row in rows_of(head)):
                train_policies(row, consumer.filter.adapters)
        refused = {key for key, data in scores.items() if not data} if scores else ()
        loaded.verdict = judge(consumer, loaded.heads, refused)
        if consumer.HasField("teacher") and not loaded.verdict.reason:
            loaded.scores = scores
            kept = zip(loaded.heads, loaded.verdict.kept, strict=True)
            wanted = [(head.session_id, at) for head, rows in kept for at in rows]
            loaded.unscored = tuple([key for key in wanted if key not in scores])
    return loaded


def kept_of(
    consumer: pb.Consumer | None, session: session_pb2.SessionRecord
) -> session_pb2.SessionRecord | None:
    """Returns a session as a consumer's filter leaves it. None if it is removed.

    The session is judged alone, so rules about groups have no effect. Scores of a teacher are left
    out. Without a consumer all is kept.
    """
    if consumer is None:
        return session
    head, arrays = split(session)
    unit = Unit(0, session.session_id, (session.session_id,))
    loaded = judge_unit(unit, [head], consumer)
    if loaded is None or loaded.verdict.reason:
        return None
    return join(loaded.heads[0], b"".join(arrays), loaded.verdict.kept[0])


# Entries and counts of what consumers do not receive.


def left_out(
    key: str, session_id: str, now_ms: int, *, is_repeat: bool = False
) -> pb.FilteredEntry:
    """Returns the entry of a session that its group was delivered without."""
    return pb.FilteredEntry(
        delivery_id=key,
        reason=pb.FILTER_REASON_DUPLICATE_SEAT if is_repeat else pb.FILTER_REASON_SURPLUS,
        unix_ms=now_ms,
        session_id=session_id,
    )


def entries_of(
    key: str, unit: Formed, members: Sequence[Member], now_ms: int
) -> list[pb.FilteredEntry]:
    """Returns the entries of a group that becomes a unit: its drop, or the sessions left out."""
    if unit.dropped:
        reason = pb.FILTER_REASON_INCOMPLETE_GROUP
        return [pb.FilteredEntry(delivery_id=key, reason=reason, unix_ms=now_ms)]
    if len(unit.members) == len(members):
        return []
    index = {one.session_id: one.sample_index for one in members}
    seats = {index[session_id] for session_id in unit.members}
    late = sorted(index.keys() - set(unit.members))
    return [left_out(key, one, now_ms, is_repeat=index[one] in seats) for one in late]


def read_entry(unit_id: str, data: bytes, *, is_group: bool) -> pb.FilteredEntry:
    """Returns a stored entry. An unreadable one is reported as a damaged unit."""
    try:
        entry = pb.FilteredEntry.FromString(data)
    except DecodeError:
        entry = pb.FilteredEntry(delivery_id=unit_id, reason=pb.FILTER_REASON_DAMAGED)
    if is_group and not unit_id.startswith(_ALONE):
        entry.run_id, entry.group_id = run_and_group(unit_id)
    return entry


def counts_of(entries: Iterable[pb.FilteredEntry]) -> dict[int, tuple[int, int]]:
    """Returns what entries add to the counts: units and trajectories by reason."""
    units: Counter[int] = Counter()
    trajectories: Counter[int] = Counter()
    for entry in entries:
        for part in entry.removed:
            trajectories[part.reason] += part.count
        if entry.reason:
            units[entry.reason] += 1
    reasons = sorted(units.keys() | trajectories.keys())
    return {reason: (units[reason], trajectories[reason]) for reason in reasons}
