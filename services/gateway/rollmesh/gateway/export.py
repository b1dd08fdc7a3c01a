"""Writes the record of a closed session for the trainer.

A record is written in two steps. Its head (segments, lineages, reasons, rewards) is made of the
tree at the close and stored with it. Its arrays are joined from the journal's blobs when it is
handed over, without an object for each node.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np

from rollmesh.chat import Message, RenderContext, write_json, write_message
from rollmesh.gateway.lineage import Label, lineages, turns_by_request
from rollmesh.gateway.responses import ROLE_NUMBERS
from rollmesh.gateway.session import Session, SessionSpec
from rollmesh.gateway.tree import Fidelity, Node, Tree
from rollmesh.runtime.codec import (
    EXPERTS,
    apply_rewards,
    check_rewards,
    joined,
    name_of,
    pack_ids,
    pack_logprobs,
    rows_between,
    unpack_logprobs,
)
from rollmesh.runtime.errors import InvalidFieldError
from rollmesh.runtime.telemetry import fields
from rollmesh.v1 import (
    chat_pb2,
    collector_pb2,
    gateway_pb2,
    sampling_pb2,
    session_pb2,
    trajectory_pb2,
)
from rollmesh.v1.sampling_pb2 import TokenColumn

_log = logging.getLogger(__name__)

# Exports a tree for training: as one trajectory per leaf or per turn, or as a packed tree.
#
# In each form a sampled token is trained exactly once, or carries the reason why it is not trained.

_New: TypeAlias = Callable[[], trajectory_pb2.Trajectory]
_NONE: Mapping[int, Label] = {}
_EXACT = trajectory_pb2.FIDELITY_REASON_EXACT
_INCOMPLETE = trajectory_pb2.FIDELITY_REASON_COLUMNS_INCOMPLETE
_NOT_FINITE = trajectory_pb2.FIDELITY_REASON_LOGPROB_NOT_FINITE


def pack_tree(tree: Tree, packed: trajectory_pb2.TrajectoryTree) -> Iterator[None]:
    """Packs the complete tree. Auxiliary calls and orphans are not trained and carry a reason.

    Yields after each node. The arrays are left out, see `serialize`.

    Args:
        tree: The tree.
        packed: Takes it. It is long, and adding a message to another one would copy it.
    """
    index_of: dict[int, int] = {}
    found = lineages(tree, tree.nodes.values())
    end = 0
    for at, node in enumerate(tree.nodes.values()):
        assert node.parent is not None
        index_of[node.node_id] = at
        start, end = end, end + len(node.token_ids)
        one = packed.nodes.add(
            node_id=node.node_id,
            parent_index=index_of.get(node.parent.node_id),
            start=start,
            end=end,
            scaffold_tokens=node.scaffold_tokens,
            role=ROLE_NUMBERS[node.messages[0].role],
            lineage=found[node.node_id].lineage,
            lineage_source=found[node.node_id].source,
            lineage_rule=found[node.node_id].rule,
        )
        for image in node.images:
            packed.images.add(sha256=image.sha256, start=start + image.offset, tokens=image.length)
        if node.sample is None:
            one.reasons.extend(sorted(node.reasons))
        else:
            middle = start + node.scaffold_tokens
            _add_sample(one, packed.version_spans, node, found[node.node_id], middle)
        yield
    packed.reasons.extend(_overall(packed.nodes, packed.version_spans))


def export_tree(
    tree: Tree, session_id: str, new: _New = trajectory_pb2.Trajectory
) -> Iterator[trajectory_pb2.Trajectory]:
    """Yields the trajectories of all leaves, oldest leaf first, without arrays.

    `new` makes an empty one.

    A sampled node on several paths is trained in the first of them that has its lineage, or in the
    first that is not auxiliary. The others carry its tokens with mask 0 and the reason
    SHARED_PREFIX. Auxiliary calls are not trained and carry AUXILIARY. Answers that never reached
    the agent are not trained and carry ORPHANED.

    A trajectory has the lineage of the first turn that is trained in it. So a conversation that
    ends with a request for its summary is still the main one. A rejected compaction is not trained,
    carries COMPACTION_REJECTED, and trains of its path only turns that are on no other.
    """
    leaves = _exported(tree)
    found = lineages(tree, tree.nodes.values())
    owners = _owners(leaves, found) if len(leaves) > 1 else {}
    for leaf in leaves:
        elsewhere, first = set[int](), leaf
        for node in reversed(leaf.path()):
            if owners.get(node.node_id, leaf.node_id) != leaf.node_id:
                elsewhere.add(node.node_id)
            elif node.sample is not None:
                first = node
        yield _export(new(), session_id, leaf, found[first.node_id], elsewhere, found)


def _exported(tree: Tree) -> list[Node]:
    """Returns the leaves of paths that have a turn: all but a context that no turn continues."""
    leaves: list[Node] = []
    for leaf in tree.leaves():
        node = leaf
        while node.parent is not None and node.sample is None:
            node = node.parent
        if node.sample is not None:
            leaves.append(leaf)
    return leaves


def _owners(leaves: Iterable[Node], found: Mapping[int, Label]) -> dict[int, int]:
    """Returns the leaf in whose trajectory each node is trained, by node id."""
    paths = {leaf.node_id: leaf.path() for leaf in leaves}
    on = Counter(node.node_id for path in paths.values() for node in path)
    works: dict[int, Label] = {}
    """Label of the first turn that is on one path only, by leaf."""
    for leaf_id, path in paths.items():
        alone = [n.node_id for n in path if n.sample is not None and on[n.node_id] == 1]
        works[leaf_id] = found[alone[0] if alone else leaf_id]
    owners: dict[int, int] = {}
    for leaf_id, path in paths.items():
        for node in path:
            is_alike = found[node.node_id].lineage == works[leaf_id].lineage
            if is_alike and not works[leaf_id].is_rejected:
                owners.setdefault(node.node_id, leaf_id)
    auxiliary = trajectory_pb2.LINEAGE_AUXILIARY  # and rejected compactions come last
    order = sorted(paths, key=lambda one: (works[one].is_rejected, works[one].lineage == auxiliary))
    for leaf_id in order:
        for node in paths[leaf_id]:
            owners.setdefault(node.node_id, leaf_id)
    return owners


def export_turns(
    tree: Tree, session_id: str, new: _New = trajectory_pb2.Trajectory
) -> Iterator[trajectory_pb2.Trajectory]:
    """Yields one trajectory per sampled turn, oldest first. It trains only that turn.

    Earlier turns on its path have their own trajectories and carry the reason SHARED_PREFIX here.
    """
    turns = [node for node in tree.nodes.values() if node.sample is not None]
    found = lineages(tree, turns)
    for turn in turns:
        elsewhere = {node.node_id for node in turn.path() if node.sample is not None}
        elsewhere.remove(turn.node_id)
        yield _export(new(), session_id, turn, found[turn.node_id], elsewhere)


def trajectory_id(session_id: str, leaf_node_id: int) -> str:
    """Returns the id of the trajectory that ends at a node."""
    return f"{session_id}-{leaf_node_id}"


def _export(
    trajectory: trajectory_pb2.Trajectory,
    session_id: str,
    leaf: Node,
    label: Label,
    elsewhere: set[int],
    found: Mapping[int, Label] = _NONE,
) -> trajectory_pb2.Trajectory:
    """Returns the trajectory of a leaf.

    Args:
        trajectory: The message to fill. Empty, and without arrays afterwards.
        session_id: Id of the session.
        leaf: The last node of the trajectory.
        label: Its lineage.
        elsewhere: Ids of nodes that are trained in another trajectory.
        found: Lineages of its nodes, by node id, where they may differ from its own.
    """
    trajectory.trajectory_id = trajectory_id(session_id, leaf.node_id)
    trajectory.session_id, trajectory.leaf_node_id = session_id, leaf.node_id
    trajectory.lineage, trajectory.lineage_source = label.lineage, label.source
    trajectory.lineage_rule = label.rule
    trajectory.prompt_tokens = leaf.end
    end = 0
    for node in leaf.path():
        start, end = end, end + len(node.token_ids)
        middle = start + node.scaffold_tokens
        if middle > start:
            trajectory.segments.add(
                start=start,
                end=middle,
                node_id=node.node_id,
                role=ROLE_NUMBERS[node.messages[0].role],
                reasons=sorted(node.reasons) if node.sample is None and node.reasons else (),
            )
        for image in node.images:
            at = start + image.offset
            trajectory.images.add(sha256=image.sha256, start=at, tokens=image.length)
        if node.sample is None:
            continue
        segment = trajectory.segments.add(
            start=middle, end=end, node_id=node.node_id, role=chat_pb2.ROLE_ASSISTANT
        )
        own, is_shared = found.get(node.node_id, label), node.node_id in elsewhere
        _add_sample(segment, trajectory.version_spans, node, own, middle, is_shared=is_shared)
        trajectory.prompt_tokens = min(trajectory.prompt_tokens, middle)
        trajectory.turns += 1
    trajectory.reasons.extend(_overall(trajectory.segments, trajectory.version_spans))
    return trajectory


def _add_sample(
    message: trajectory_pb2.TrajectorySegment | trajectory_pb2.TrajectoryNode,
    spans: Any,
    node: Node,
    label: Label,
    start: int,
    *,
    is_shared: bool = False,
) -> None:
    """Writes how a node was sampled, and whether and why it is not trained.

    Args:
        message: Takes it.
        spans: Takes the spans of its ids. An adjacent one of the same kind is extended.
        node: The node.
        label: Its lineage.
        start: Index of its first sampled id.
        is_shared: Whether it is trained in another trajectory.
    """
    sample, reasons = node.sample, set(node.reasons)
    assert sample is not None
    untrained: Fidelity | None = None
    if is_shared:
        untrained = trajectory_pb2.FIDELITY_REASON_SHARED_PREFIX
    elif label.is_rejected:
        untrained = trajectory_pb2.FIDELITY_REASON_COMPACTION_REJECTED
    elif label.lineage == trajectory_pb2.LINEAGE_AUXILIARY:
        untrained = trajectory_pb2.FIDELITY_REASON_AUXILIARY
    elif trajectory_pb2.FIDELITY_REASON_ORPHANED in reasons:
        untrained = trajectory_pb2.FIDELITY_REASON_ORPHANED
    if untrained is not None:
        reasons.add(untrained)
    if sample.finish == sampling_pb2.FINISH_REASON_LENGTH:
        reasons.add(trajectory_pb2.FIDELITY_REASON_LENGTH_CUT)
    message.sampled, message.trained = True, untrained is None
    message.reasons.extend(sorted(reasons | _mixed(sample.spans)))
    message.finish_reason = sample.finish
    message.engine_id = sample.spans[-1].engine_id
    message.prompt_crc32 = sample.prompt_crc32
    message.begun_unix_ms, message.ended_unix_ms = sample.begun_unix_ms, sample.ended_unix_ms
    message.sampling.CopyFrom(sample.sampling)
    message.model_request_ids.extend(sample.request_ids)
    for span in sample.spans:
        if span.start == span.end:  # its ids are not known
            continue
        last = spans[-1] if spans else None
        if (
            last is not None
            and last.end == start + span.start
            and last.policy_version == span.policy_version
            and last.engine_id == span.engine_id
            and last.numerics_id == span.numerics_id
            and last.adapter == span.adapter
        ):
            last.end = start + span.end
        else:
            added = spans.add()
            added.CopyFrom(span)
            added.start, added.end = start + span.start, start + span.end


def _overall(
    parts: Iterable[trajectory_pb2.TrajectorySegment] | Iterable[trajectory_pb2.TrajectoryNode],
    spans: Iterable[sampling_pb2.VersionSpan],
) -> list[Fidelity]:
    """Returns the reasons of all parts, sorted. Exactly EXACT if there is none."""
    reasons = _mixed(spans)
    for part in parts:
        reasons.update(part.reasons)
    return sorted(reasons) or [trajectory_pb2.FIDELITY_REASON_EXACT]


def _mixed(spans: Iterable[sampling_pb2.VersionSpan]) -> set[Fidelity]:
    versions, policies = set[tuple[str, int]](), set[str]()
    for span in spans:
        versions.add((span.adapter, span.policy_version))
        policies.add(span.adapter)
    reasons = set[Fidelity]()
    if len(policies) > 1:
        reasons.add(trajectory_pb2.FIDELITY_REASON_MIXED_POLICIES)
    if len(versions) > len(policies):
        reasons.add(trajectory_pb2.FIDELITY_REASON_MIXED_VERSIONS)
    return reasons


# The arrays of a record: the bytes of its nodes, joined.

Blobs: TypeAlias = Mapping[int, tuple[bytes, bytes, bytes]]
"""Of each node: 4 bytes for each id, 4 for the log-probability of each sampled one, and its columns
as `columns_between` returns them."""


def blobs_of(tree: Tree) -> Blobs:
    """Returns the bytes of the nodes of a tree, as the journal has them."""
    return {
        id_: (
            pack_ids(node.token_ids),
            pack_logprobs(node.sample.logprobs) if node.sample else b"",
            node.columns,
        )
        for id_, node in tree.nodes.items()
    }


def serialize(record: session_pb2.SessionRecord, blobs: Blobs) -> bytes:
    """Returns a serialised `IngestRequest` with one record, whose head is given and emptied.

    The arrays are joined from the blobs of its nodes, and copied once. A native call holds the
    interpreter's lock, so no call serialises more than one row without its arrays, or one image.

    Raises:
        InvalidFieldError: The nodes do not have the tokens that the head says.
    """
    parts: list[bytes] = []
    alike = _Alike(record.session_id) if any(columns for *_, columns in blobs.values()) else None
    for row in record.trajectories:
        tokens = _field(row.TOKENS_FIELD_NUMBER, _tokens(row.segments, blobs))
        if alike is not None:
            for one in joined(_path_columns(row, blobs, alike)):
                tokens += _field(row.COLUMNS_FIELD_NUMBER, [one.SerializeToString()])
            alike.explain(row, row.segments)
        parts += _field(record.TRAJECTORIES_FIELD_NUMBER, [row.SerializeToString(), *tokens])
    if record.HasField("tree"):
        tree = record.tree
        tokens = _field(tree.TOKENS_FIELD_NUMBER, _tokens(tree.nodes, blobs))
        if alike is not None:
            for one in joined(_tree_columns(tree, blobs, alike)):
                tokens += _field(tree.COLUMNS_FIELD_NUMBER, [one.SerializeToString()])
            alike.explain(tree, tree.nodes)
        parts += _field(record.TREE_FIELD_NUMBER, [tree.SerializeToString(), *tokens])
    for image in record.images:
        parts += _field(record.IMAGES_FIELD_NUMBER, [image.SerializeToString()])
    for node in record.messages:
        parts += _field(record.MESSAGES_FIELD_NUMBER, [node.SerializeToString()])
    for name in ("trajectories", "tree", "images", "messages"):
        record.ClearField(name)
    number = collector_pb2.IngestRequest.SESSIONS_FIELD_NUMBER
    return b"".join(_field(number, [record.SerializeToString(), *parts]))


def _tokens(
    runs: Iterable[trajectory_pb2.TrajectorySegment] | Iterable[trajectory_pb2.TrajectoryNode],
    blobs: Blobs,
) -> list[bytes]:
    """Returns the parts of a serialised `TokenArrays`."""
    ids, logprobs, mask, end, last = list[bytes](), list[bytes](), list[bytes](), 0, 0
    for run in runs:
        (token_ids, sampled, _), size = blobs[run.node_id], run.end - run.start
        if run.node_id != last:  # a node may be two segments
            ids.append(token_ids)
        if isinstance(run, trajectory_pb2.TrajectoryNode):
            scaffold = run.scaffold_tokens
        else:
            scaffold = 0 if run.sampled else size
        trained = bytes([run.trained]) * (size - scaffold)
        if run.sampled and _NOT_FINITE in run.reasons:  # tokens without a finite one: untrained
            values = unpack_logprobs(sampled, "logprobs")
            finite = np.isfinite(values)
            sampled = pack_logprobs(np.where(finite, values, np.float32(0)))
            trained = (np.frombuffer(trained, np.uint8) * finite).tobytes()
        logprobs += bytes(4 * scaffold), sampled if run.sampled else b""
        mask += bytes(scaffold), trained
        end, last = run.end, run.node_id
    arrays = (ids, logprobs, mask)  # in the order of the fields
    sizes = [sum(map(len, parts)) for parts in arrays]
    if sizes != [4 * end, 4 * end, end]:
        problem = f"have {sizes} bytes in the journal, which do not fit {end} tokens"
        raise InvalidFieldError("tokens", problem)
    return [part for number, parts in enumerate(arrays, 1) for part in _field(number, parts)]


class _Alike:
    """The shape that rows of each kind have in one record: that of the first rows."""

    def __init__(self, session_id: str) -> None:
        self._session_id = session_id
        self._shapes: dict[int, list[int]] = {}
        self._left_out: set[int] = set()  # ids of nodes

    def of_node(self, node_id: int, blobs: Blobs) -> Iterator[TokenColumn]:
        """Yields the columns of a node whose rows have that shape."""
        for one in sampling_pb2.TokenColumns.FromString(blobs[node_id][2]).columns:
            shape = [*one.row_shape]
            if (first := self._shapes.setdefault(one.kind, shape)) == shape:
                yield one
                continue
            if not self._left_out:
                kind = name_of(sampling_pb2.ColumnKind.DESCRIPTOR, one.kind)
                of = {"engine": one.engine_id, "column": kind, "shape": shape, "expected": first}
                _log.warning("rows left out", extra=fields(session_id=self._session_id, **of))
            self._left_out.add(node_id)

    def explain(
        self,
        row: trajectory_pb2.Trajectory | trajectory_pb2.TrajectoryTree,
        parts: Iterable[trajectory_pb2.TrajectorySegment] | Iterable[trajectory_pb2.TrajectoryNode],
    ) -> None:
        """Adds the reason to the parts of a row that lack rows, and to the row."""
        last = {part.node_id: part for part in parts}  # a node may be two segments
        for node_id in self._left_out & last.keys():
            _add_reason(last[node_id], _INCOMPLETE)
            _add_reason(row, _INCOMPLETE)


def _add_reason(
    message: trajectory_pb2.Trajectory
    | trajectory_pb2.TrajectoryTree
    | trajectory_pb2.TrajectorySegment
    | trajectory_pb2.TrajectoryNode,
    reason: Fidelity,
) -> None:
    message.reasons[:] = sorted({*message.reasons, reason} - {_EXACT})


def _path_columns(
    row: trajectory_pb2.Trajectory, blobs: Blobs, alike: _Alike
) -> Iterator[TokenColumn]:
    """Yields the columns of the nodes on a path, by index into its tokens."""
    last = 0
    for run in row.segments:
        if run.node_id != last:
            last = run.node_id
            for one in alike.of_node(run.node_id, blobs):
                one.start += run.start - (one.kind == EXPERTS)
                yield one


def _tree_columns(
    tree: trajectory_pb2.TrajectoryTree, blobs: Blobs, alike: _Alike
) -> Iterator[TokenColumn]:
    """Yields the columns of the nodes of a tree, by index into its tokens."""
    parents: set[int] = set()  # whose last token has its experts
    for node in tree.nodes:
        for one in alike.of_node(node.node_id, blobs):
            if one.kind == EXPERTS:
                for before in rows_between([one], 0, 1):
                    if node.HasField("parent_index") and node.parent_index not in parents:
                        parents.add(node.parent_index)
                        before.start = tree.nodes[node.parent_index].end - 1
                        yield before
                for own in rows_between([one], 1, node.end - node.start):
                    own.start += node.start - 1
                    yield own
            else:
                one.start += node.start
                yield one


def _field(number: int, parts: list[bytes]) -> list[bytes]:
    """Returns the parts of a field with a length, which its tag and its length precede."""
    head = bytearray()
    for value in (number << 3 | 2, sum(map(len, parts))):
        left = value
        while left > 127:  # seven bits in each byte, the lowest first
            head.append(left & 127 | 128)
            left >>= 7
        head.append(left)
    return [bytes(head), *parts]


class SlowRecordError(Exception):
    """The record of a session is not written in its time."""


class TimeLimit:
    """The time in which a record must be written. Whatever writes it checks it between its steps.

    A thread cannot be ended from outside. Its processor time counts, so that a busy host makes no
    dead letters.
    """

    def __init__(self, limit_s: float) -> None:
        """Starts the time of this thread."""
        self._limit_s = limit_s
        self._end_s = time.thread_time() + limit_s

    def check(self) -> None:
        """Checks that there is time left.

        Raises:
            SlowRecordError: There is none.
        """
        if time.thread_time() >= self._end_s:
            raise SlowRecordError(
                f"its record was not written in {self._limit_s:g} s of a processor"
            )


_UNLIMITED = TimeLimit(float("inf"))


def write_head(
    spec: SessionSpec,
    tree: Tree,
    request: gateway_pb2.CloseSessionRequest,
    closed_unix_ms: int,
    limit: TimeLimit = _UNLIMITED,
) -> session_pb2.SessionRecord:
    """Returns the record of a session closed by `request`, with its rewards, without arrays.

    Runs in a worker thread.

    Raises:
        SlowRecordError: The time is over.
        InvalidFieldError: A reward refers to something the record does not have.
    """
    record = session_pb2.SessionRecord(
        session_id=spec.session_id,
        group_id=spec.group_id,
        sample_index=spec.sample_index,
        group_size=spec.group_size,
        outcome=request.outcome,
        metadata={**spec.metadata, **request.metadata},
        opened_unix_ms=spec.opened_unix_ms,
        closed_unix_ms=closed_unix_ms,
        turns=tree.turns,
        superseded=request.superseded,
        reward_timeout_ms=(
            request.reward_timeout_ms if request.HasField("reward_timeout_ms") else None
        ),
        model=spec.model,
        purpose=session_pb2.SessionPurpose.ValueType(spec.purpose),
        run_id=spec.run_id,
        capture=session_pb2.Capture.ValueType(spec.capture),
        tokenizer_sha256=spec.tokenizer_sha256,
        template_sha256=spec.template_sha256,
        origin=spec.started_from,
    )
    if record.origin.kind == session_pb2.ORIGIN_KIND_TOKENS:
        record.origin.continued = bool(tree.nodes[record.origin.nodes[0].node_id].children)
    used: dict[str, sampling_pb2.Numerics] = {}
    spent, cut = {*tree.spent}, trajectory_pb2.FIDELITY_REASON_BUDGET
    for node in tree.nodes.values():
        if cut in node.reasons:
            spent.add(session_pb2.BUDGET_KIND_SAMPLED_TOKENS)
        if node.sample is None:
            continue
        for one in node.sample.numerics:
            used[one.id] = one
        if record.capture == session_pb2.CAPTURE_LOGPROBS and not (
            node.sample.told and node.sample.told.logprobs
        ):
            record.capture = session_pb2.CAPTURE_TEXT  # not all turns have more
    record.numerics.extend(used.values())
    record.budgets_spent.extend(sorted(spent))
    trajectories: Iterable[trajectory_pb2.Trajectory] = ()
    match spec.export_mode:
        case gateway_pb2.EXPORT_MODE_TREE:
            record.tree.SetInParent()  # also if it is empty
            for _ in pack_tree(tree, record.tree):
                limit.check()
        case gateway_pb2.EXPORT_MODE_TURNS:
            trajectories = export_turns(tree, spec.session_id, record.trajectories.add)
        case gateway_pb2.EXPORT_MODE_LEAVES:
            trajectories = export_tree(tree, spec.session_id, record.trajectories.add)
    for _ in trajectories:  # each is written into the record
        limit.check()
    if tree.spent:
        for trajectory in record.trajectories:
            _add_reason(trajectory, cut)
        if record.HasField("tree"):
            _add_reason(record.tree, cut)
    turns = turns_by_request(tree) if tree.edges else {}
    for edge in tree.edges:
        record.edges.add(
            edge=trajectory_pb2.LineageEdge(
                source_request_id=edge.source, target_request_id=edge.target, type=edge.kind
            ),
            source_node_ids=[node.node_id for node in turns.get(edge.source, ())],
            target_node_ids=[node.node_id for node in turns.get(edge.target, ())],
        )
    if spec.message_bytes:
        for _ in _add_messages(record, tree, spec.message_bytes):
            limit.check()
    apply_rewards(record, request.rewards)
    return record


def _add_messages(record: session_pb2.SessionRecord, tree: Tree, room: int) -> Iterator[None]:
    """Adds the messages of nodes, parents first, as long as they have room. Yields after each."""
    indices: dict[bytes, int] = {}
    for node in tree.nodes.values():
        assert node.parent is not None
        context, shared = node.render_context, b""
        messages = [_openai(message) for message in node.messages]
        if record.capture == session_pb2.CAPTURE_LOGPROBS and node.sample and node.sample.told:
            messages[0]["logprobs"] = {"content": node.sample.told.logprobs}
        data = write_json(messages).encode()
        if context.key not in indices:
            shared = _openai_context(context)
        room -= len(data) + len(shared)
        if room < 0:
            record.messages_left_out = len(tree.nodes) - len(record.messages)
            return
        if shared:
            indices[context.key] = len(record.contexts)
            record.contexts.add(data=shared, data_bytes=len(shared))
        record.messages.add(
            node_id=node.node_id,
            parent_node_id=node.parent.node_id,
            context_index=indices.get(context.key),
            data=data,
            data_bytes=len(data),
        )
        yield


def _openai(message: Message) -> dict[str, Any]:
    """Returns a message in OpenAI's form, with its images by their hashes."""
    written = write_message(message)
    if message.images:
        written["content"] = [
            {"type": "text", "text": part}
            if isinstance(part, str)
            else {"type": "image_url", "image_url": {"url": f"sha256:{part.sha256}"}}
            for part in message.parts
        ]
    return written


def _openai_context(context: RenderContext) -> bytes:
    """Returns tools and template options as `ConversationContext` has them. Empty if none."""
    given = {b'"tools": ': context.tools_json, b'"chat_template_kwargs": ': context.options_json}
    found = b", ".join([name + value for name, value in given.items() if value])
    return b"{%b}" % found if found else b""


def check_close(session: Session, rewards: session_pb2.SessionRewards) -> list[int]:
    """Checks that a close's rewards refer to turns of the session's record.

    Returns:
        The id of the last node of each trajectory that the close exports, oldest first.

    Raises:
        InvalidFieldError: A reward is invalid. The error names the first one.
    """
    tree, ends = session.tree, list[int]()
    turns = [node.node_id for node in tree.nodes.values() if node.sample is not None]
    match session.spec.export_mode:
        case gateway_pb2.EXPORT_MODE_TURNS:
            ends = turns
        case gateway_pb2.EXPORT_MODE_LEAVES:
            ends = [leaf.node_id for leaf in _exported(tree)]
    ids = {trajectory_id(session.spec.session_id, end) for end in ends}
    check_rewards(rewards, ids, set(turns))
    return ends


def exported_lineages(record: session_pb2.SessionRecord) -> list[str]:
    """Returns the lineage of each trajectory of a record, or of each leaf of its tree."""
    found = list[trajectory_pb2.Lineage.ValueType]()
    for trajectory in record.trajectories:
        found.append(trajectory.lineage)
    if record.HasField("tree"):
        nodes = record.tree.nodes
        inner = {node.parent_index for node in nodes if node.HasField("parent_index")}
        found += [node.lineage for at, node in enumerate(nodes) if at not in inner]
    return [name_of(trajectory_pb2.Lineage.DESCRIPTOR, one).lower() for one in found]
