"""The rows of a session in the record, and the session again from its rows. No I/O.

A node of the conversation tree is one row, with each of its tokens once, however many trajectories
share it. A trajectory is a row that names the nodes of its path.
"""

import json
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from google.protobuf import json_format
from google.protobuf.descriptor import EnumDescriptor
from google.protobuf.message import Message
from numpy.typing import NDArray

from rollmesh.runtime import number_of, run_of, version_of
from rollmesh.runtime.codec import name_of, pack_ids, pack_logprobs, plain, unpack_tokens
from rollmesh.runtime.errors import InvalidFieldError
from rollmesh.v1 import chat_pb2, collector_pb2, sampling_pb2, session_pb2, trajectory_pb2
from rollmesh.v1.sampling_pb2 import TokenColumn

TREE, TRAJECTORIES = "TREE", "TRAJECTORIES"
"""The layouts in which a session was exported."""
_Row: TypeAlias = dict[str, Any]
_Sequence: TypeAlias = trajectory_pb2.Trajectory | trajectory_pb2.TrajectoryTree
_PLAIN = ("session_id", "run_id", "group_id", "sample_index", "group_size")
_TIMES = ("opened_unix_ms", "closed_unix_ms", "turns", "superseded", "abandoned")
_MODEL = ("model", "tokenizer_sha256", "template_sha256")
_OUTCOME = session_pb2.SessionOutcome.DESCRIPTOR
_PURPOSE = session_pb2.SessionPurpose.DESCRIPTOR
_CAPTURE = session_pb2.Capture.DESCRIPTOR
_BUDGET = session_pb2.BudgetKind.DESCRIPTOR
_LINEAGE = trajectory_pb2.Lineage.DESCRIPTOR
_SOURCE = trajectory_pb2.LineageSource.DESCRIPTOR
_RULE = trajectory_pb2.LineageRule.DESCRIPTOR
_REASON = trajectory_pb2.FidelityReason.DESCRIPTOR
_FINISH = sampling_pb2.FinishReason.DESCRIPTOR
_ROLE = chat_pb2.Role.DESCRIPTOR
_ORIGIN = session_pb2.OriginKind.DESCRIPTOR
_KIND = sampling_pb2.ColumnKind.DESCRIPTOR
_LOGPROBS = sampling_pb2.LogprobsMode.DESCRIPTOR
_LABELS = ("lineage", "lineage_source", "lineage_rule")
_SPAN = ("engine_id", "numerics_id", "adapter")
_COLUMN = ("start", "rows", "value_bytes", "data", "engine_id", "numerics_id")


_LAST_MS = 253_402_300_799_000  # the end of the year 9999


def moment(unix_ms: int) -> datetime:
    """Returns a time in UTC, or the nearest that a calendar has: clients may send any number."""
    return datetime.fromtimestamp(min(max(unix_ms, 0), _LAST_MS) / 1000, UTC)


class Stored(NamedTuple):
    """A session with its late values."""

    session: session_pb2.SessionRecord
    annotations: Sequence[collector_pb2.Annotation]
    scores: Sequence[collector_pb2.TrajectoryScores]


class Tables(NamedTuple):
    """The rows of one session."""

    session: _Row
    trajectories: list[_Row]
    nodes: list[_Row]


def tables_of(record: session_pb2.SessionRecord) -> Tables:
    """Returns the rows of a session, by the names of the schema.

    Raises:
        InvalidFieldError: Its trajectories do not agree about a node, which no gateway writes.
    """
    is_tree = record.HasField("tree")
    row = {name: getattr(record, name) for name in (*_PLAIN, *_TIMES, *_MODEL)}
    row |= {
        "layout": TREE if is_tree else TRAJECTORIES,
        "outcome": name_of(_OUTCOME, record.outcome),
        "purpose": name_of(_PURPOSE, record.purpose or session_pb2.SESSION_PURPOSE_TRAIN),
        "capture": name_of(_CAPTURE, record.capture or session_pb2.CAPTURE_TOKENS),
        "reward": _optional(record, "reward"),
        "reward_timeout_ms": _optional(record, "reward_timeout_ms"),
        "metadata": json.dumps(dict(sorted(record.metadata.items())), ensure_ascii=False),
        "reasons": _names(_REASON, record.tree.reasons),
        "numerics": [_plain_with(one, logprobs=_LOGPROBS) for one in record.numerics],
        "origin": None,
        "edges": [
            {
                "source_request_id": one.edge.source_request_id,
                "target_request_id": one.edge.target_request_id,
                "type": one.edge.type,
                "source_node_ids": list(one.source_node_ids),
                "target_node_ids": list(one.target_node_ids),
            }
            for one in record.edges
        ],
        "budgets_spent": _names(_BUDGET, record.budgets_spent),
        "images": [{"sha256": one.sha256, "media_type": one.media_type} for one in record.images],
        "contexts": [_text(one.data, "contexts") for one in record.contexts],
        "messages_left_out": record.messages_left_out,
        "columns": _columns(record.tree),
    }
    if record.HasField("origin"):
        row["origin"] = _plain_with(record.origin, kind=_ORIGIN)
        row["origin"]["nodes"] = [_plain_with(node) for node in record.origin.nodes]
    nodes = _tree_nodes(record.tree) if is_tree else _path_nodes(record)
    for said in record.messages:
        node = nodes.setdefault(said.node_id, _empty(said.node_id))
        node["parent_node_id"] = said.parent_node_id or None
        node["messages"] = _text(said.data, "messages")
        node["context_index"] = _optional(said, "context_index")
    order = {said.node_id: at for at, said in enumerate(record.messages)}
    in_order = sorted(nodes.values(), key=lambda node: order.get(node["node_id"], len(order)))
    return Tables(
        row,
        [_trajectory(one) for one in leaves_of(record)],
        [{"session_id": record.session_id, **node} for node in in_order],
    )


def _trajectory(one: trajectory_pb2.Trajectory) -> _Row:
    return {
        "trajectory_id": one.trajectory_id,
        "session_id": one.session_id,
        "leaf_node_id": one.leaf_node_id,
        **_labels(one),
        "reasons": _names(_REASON, one.reasons),
        "turns": one.turns,
        "prompt_tokens": one.prompt_tokens,
        "reward": _optional(one, "reward"),
        "path": [
            {
                "node_id": part.node_id,
                "trained": part.last.trained,
                "reasons": _names(_REASON, part.last.reasons),
            }
            for part in parts_of(one)
        ],
        "columns": _columns(one),
    }


def with_versions(node: _Row) -> _Row:
    """Returns a node with `policy_versions` and `policy_runs`, int64 [N], of its spans."""
    versions = np.full(len(node["token_ids"]), -1, np.int64)
    runs = versions.copy()
    for span in node["spans"]:
        where = slice(span["start"], span["end"])
        versions[where], runs[where] = span["policy_version"], span["policy_run"]
    return {**node, "policy_versions": versions, "policy_runs": runs}


class Part(NamedTuple):
    """A node on the path of a trajectory: tokens of the template, then sampled tokens."""

    node_id: int
    segments: list[trajectory_pb2.TrajectorySegment]
    """One, or two of which the second was sampled."""

    @property
    def last(self) -> trajectory_pb2.TrajectorySegment:
        """The segment that was sampled, if one was."""
        return self.segments[-1]

    @property
    def scaffold(self) -> int:
        """Number of tokens that were not sampled."""
        end = self.last.start if self.last.sampled else self.last.end
        return int(end - self.segments[0].start)


def parts_of(trajectory: trajectory_pb2.Trajectory) -> Iterator[Part]:
    """Yields the nodes of a path, in order."""
    for node_id, segments in groupby(trajectory.segments, attrgetter("node_id")):
        yield Part(node_id, list(segments))


def spans_in(
    trajectory: trajectory_pb2.Trajectory, turn: trajectory_pb2.TrajectorySegment
) -> Sequence[sampling_pb2.VersionSpan]:
    """Returns the spans of a turn. Those of a trajectory ascend."""
    spans = trajectory.version_spans
    first = bisect_right(spans, turn.start, key=attrgetter("end"))
    return spans[first : bisect_left(spans, turn.end, key=attrgetter("start"))]


def _path_nodes(record: session_pb2.SessionRecord) -> dict[int, _Row]:
    """Returns the nodes of all paths by id. A trained node has its mask and reasons from there."""
    nodes: dict[int, _Row] = {}
    for one in record.trajectories:
        placed = _Placed(one)
        parent: int | None = None
        for part in parts_of(one):
            last, shape = part.last, [segment.sampled for segment in part.segments]
            whole = slice(part.segments[0].start, last.end)
            known = nodes.get(part.node_id)
            node = _empty(part.node_id) | {
                "parent_node_id": parent,
                "role": name_of(_ROLE, last.role),
                **_labels(one),
                "scaffold_tokens": part.scaffold,
            }
            _describe(node, last)
            placed.fill(node, whole)
            parent = part.node_id
            fits = shape in ([True], [False], [False, True])
            if not fits or (known and not _is_alike(known, node)):
                raise InvalidFieldError(
                    "trajectories",
                    f"session {record.session_id}: node {part.node_id} of trajectory "
                    f"{one.trajectory_id} differs from that of another trajectory",
                )
            if known is None or node["trained"]:
                nodes[part.node_id] = node
    return nodes


def _is_alike(known: _Row, node: _Row) -> bool:
    """Says whether two trajectories have the same node, trained in at most one of them."""
    arrays = ("token_ids", "logprobs")
    return (
        known["spans"] == node["spans"]
        and known["scaffold_tokens"] == node["scaffold_tokens"]
        and known["prompt_crc32"] == node["prompt_crc32"]
        and all(np.array_equal(known[name], node[name]) for name in arrays)
        and (
            not (known["trained"] and node["trained"])
            or np.array_equal(known["loss_mask"], node["loss_mask"])
        )
    )


def _tree_nodes(tree: trajectory_pb2.TrajectoryTree) -> dict[int, _Row]:
    placed = _Placed(tree)
    nodes: dict[int, _Row] = {}
    for one in tree.nodes:
        parent = tree.nodes[one.parent_index].node_id if one.HasField("parent_index") else None
        node = nodes[one.node_id] = _empty(one.node_id) | {
            "parent_node_id": parent,
            "role": name_of(_ROLE, one.role),
            **_labels(one),
            "scaffold_tokens": one.scaffold_tokens,
        }
        _describe(node, one)
        placed.fill(node, slice(one.start, one.end))
    return nodes


def _empty(node_id: int) -> _Row:
    """Returns a node without tokens."""
    none = np.empty(0, np.uint32)
    unset = (
        *("parent_node_id", "role", *_LABELS, "messages", "context_index"),
        *("finish_reason", "prompt_crc32", "reward", "sampling"),
    )
    return {
        "node_id": node_id,
        **dict.fromkeys(unset),
        "sampled": False,
        "trained": False,
        "scaffold_tokens": 0,
        "engine_id": "",
        "begun_unix_ms": 0,
        "ended_unix_ms": 0,
        "reasons": [],
        "model_request_ids": [],
        "spans": [],
        "images": [],
        "token_ids": none,
        "logprobs": none.astype(np.float32),
        "loss_mask": none.astype(np.bool_),
    }


def _describe(
    node: _Row, one: trajectory_pb2.TrajectorySegment | trajectory_pb2.TrajectoryNode
) -> None:
    finish = _optional(one, "finish_reason")
    node |= {
        "sampled": one.sampled,
        "trained": one.trained,
        "reasons": _names(_REASON, one.reasons),
        "finish_reason": None if finish is None else name_of(_FINISH, finish),
        "engine_id": one.engine_id,
        "begun_unix_ms": one.begun_unix_ms,
        "ended_unix_ms": one.ended_unix_ms,
        "prompt_crc32": _optional(one, "prompt_crc32"),
        "reward": _optional(one, "reward"),
        "sampling": json.dumps(plain(one.sampling)) if one.HasField("sampling") else None,
        "model_request_ids": list(one.model_request_ids),
    }


class _Placed:
    """The tokens, spans and images of a trajectory or a tree, to be cut into nodes."""

    def __init__(self, one: _Sequence) -> None:
        """Reads them once. Both lists ascend."""
        self._arrays = unpack_tokens(one.tokens, "tokens")
        self._spans, self._images = list(one.version_spans), list(one.images)
        self._ends = [span.end for span in self._spans]
        self._starts = [image.start for image in self._images]

    def fill(self, node: _Row, where: slice) -> None:
        """Adds the tokens of a node, with spans and images by their index in the node."""
        arrays = (array[where] for array in self._arrays)
        node["token_ids"], node["logprobs"], node["loss_mask"] = arrays
        for span in self._spans[bisect_right(self._ends, where.start) :]:
            start, end = max(span.start, where.start), min(span.end, where.stop)
            if start >= end:
                break
            node["spans"].append(
                {
                    "start": start - where.start,
                    "end": end - where.start,
                    "policy_version": version_of(span.policy_version),
                    "policy_run": run_of(span.policy_version),
                    **{name: getattr(span, name) for name in _SPAN},
                }
            )
        first, last = (bisect_left(self._starts, at) for at in (where.start, where.stop))
        node["images"] = [
            {"sha256": image.sha256, "start": image.start - where.start, "tokens": image.tokens}
            for image in self._images[first:last]
        ]


def _columns(one: _Sequence) -> list[_Row]:
    return [
        {
            "kind": name_of(_KIND, column.kind),
            "row_shape": list(column.row_shape),
            **{name: getattr(column, name) for name in _COLUMN},
        }
        for column in one.columns
    ]


def _optional(message: Message, name: str) -> Any:
    return getattr(message, name) if message.HasField(name) else None


def _names(enum: EnumDescriptor, numbers: Iterable[int]) -> list[str]:
    return [name_of(enum, number) for number in numbers]


def _labels(one: trajectory_pb2.Trajectory | trajectory_pb2.TrajectoryNode) -> _Row:
    source = one.lineage_source or trajectory_pb2.LINEAGE_SOURCE_RULE
    names = (
        name_of(_LINEAGE, one.lineage),
        name_of(_SOURCE, source),
        name_of(_RULE, one.lineage_rule) if one.lineage_rule else None,
    )
    return dict(zip(_LABELS, names, strict=True))


def _fill_labels(one: trajectory_pb2.Trajectory | trajectory_pb2.TrajectoryNode, row: _Row) -> None:
    one.lineage = number_in(_LINEAGE, row["lineage"])
    one.lineage_source = number_in(_SOURCE, row["lineage_source"])
    if (rule := row.get("lineage_rule")) is not None:  # files of an earlier release lack it
        one.lineage_rule = number_in(_RULE, rule)


def _text(data: bytes, field: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InvalidFieldError(field, f"is no UTF-8: {error}") from error


def _plain_with(message: Message, **enums: EnumDescriptor) -> _Row:
    """Returns a message with all its fields, the unset ones with their defaults."""
    row = {field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields}
    return row | {name: name_of(enum, row[name]) for name, enum in enums.items()}


# The leaves of a tree, as a session that is exported by its leaves has them.


def leaves_of(record: session_pb2.SessionRecord) -> Sequence[trajectory_pb2.Trajectory]:
    """Returns the trajectories of a session. A tree has one for each leaf.

    The tokens of a shared node are trained in the first of them, and in the others they carry
    SHARED_PREFIX. Columns of a tree are not part of them.
    """
    if not record.HasField("tree"):
        return record.trajectories
    tree = record.tree
    rows = _tree_nodes(tree)
    inner = {node.parent_index for node in tree.nodes if node.HasField("parent_index")}
    taken: set[int] = set()
    found = []
    for at, leaf in enumerate(tree.nodes):
        if at in inner:
            continue
        path, index = [leaf], at
        while tree.nodes[index].HasField("parent_index"):
            index = tree.nodes[index].parent_index
            path.append(tree.nodes[index])
        own = [rows[node.node_id] for node in reversed(path)]
        visits = []
        for node in own:
            is_elsewhere = node["trained"] and node["node_id"] in taken
            reasons = [*node["reasons"], "SHARED_PREFIX"] if is_elsewhere else node["reasons"]
            trained = node["trained"] and not is_elsewhere
            visits.append({"node_id": node["node_id"], "trained": trained, "reasons": reasons})
        if not any(node["sampled"] for node in own):
            continue
        first = next(
            (node for node in own if node["sampled"] and node["node_id"] not in taken), own[-1]
        )
        taken |= {int(node["node_id"]) for node in own}
        reasons = {reason for visit in visits for reason in visit["reasons"]}
        versions = {(s["adapter"], s["policy_version"]) for n in own for s in n["spans"]}
        adapters = {adapter for adapter, _ in versions}
        reasons |= {"MIXED_POLICIES"} if len(adapters) > 1 else set()
        reasons |= {"MIXED_VERSIONS"} if len(versions) > len(adapters) else set()
        prompt = 0
        for node in own:
            prompt += node["scaffold_tokens"]
            if node["sampled"]:
                break
        one = trajectory_pb2.Trajectory()
        row = {
            "trajectory_id": f"{record.session_id}-{leaf.node_id}",
            "session_id": record.session_id,
            "leaf_node_id": leaf.node_id,
            **{name: first[name] for name in _LABELS},
            "reasons": sorted(reasons, key=lambda name: number_in(_REASON, name)) or ["EXACT"],
            "turns": sum(bool(node["sampled"]) for node in own),
            "prompt_tokens": prompt,
            "reward": None,
            "path": visits,
            "columns": [],
        }
        _fill(one, row, rows)
        found.append(one)
    return found


# A session from its rows.


def record_of(tables: Tables, images: Mapping[str, bytes]) -> session_pb2.SessionRecord:
    """Returns a session from its rows: the same message of which `tables_of` made them.

    Raises:
        InvalidFieldError: They make no session. Names the column and the problem.
    """
    row = tables.session
    _check_rows(tables)
    try:
        metadata = json.loads(row["metadata"] or "{}")
    except (ValueError, RecursionError) as error:
        raise InvalidFieldError("metadata", f"is no JSON: {error}") from error
    if not isinstance(metadata, dict):
        raise InvalidFieldError("metadata", "is no JSON object")
    has_tokens = any(len(node["token_ids"]) for node in tables.nodes)
    is_text = tables.nodes and not has_tokens
    record = session_pb2.SessionRecord(
        **{name: row[name] for name in (*_PLAIN, *_TIMES, *_MODEL, "messages_left_out")},
        reward=row["reward"],
        reward_timeout_ms=row["reward_timeout_ms"],
        metadata={
            name: one if isinstance(one, str) else json.dumps(one) for name, one in metadata.items()
        },
        outcome=number_in(_OUTCOME, row["outcome"]),
        purpose=number_in(_PURPOSE, row["purpose"]),
        capture=number_in(_CAPTURE, row["capture"])
        or (session_pb2.CAPTURE_TEXT if is_text else session_pb2.CAPTURE_UNSPECIFIED),
        budgets_spent=_numbers(_BUDGET, row["budgets_spent"]),
        numerics=[
            sampling_pb2.Numerics(**{**one, "logprobs": number_in(_LOGPROBS, one["logprobs"])})
            for one in row["numerics"]
        ],
    )
    if (origin := row["origin"]) is not None:
        nodes = [session_pb2.RecordedNode(**node) for node in origin["nodes"]]
        kind = number_in(_ORIGIN, origin["kind"])
        record.origin.MergeFrom(
            session_pb2.SessionOrigin(**{**origin, "nodes": nodes, "kind": kind})
        )
    for edge in row["edges"]:
        names = ("source_request_id", "target_request_id", "type")
        record.edges.add(
            edge=trajectory_pb2.LineageEdge(**{name: edge[name] for name in names}),
            source_node_ids=edge["source_node_ids"],
            target_node_ids=edge["target_node_ids"],
        )
    for image in row["images"]:
        data = images[image["sha256"]]
        record.images.add(**image, data=data, data_bytes=len(data))
    for text in row["contexts"]:
        record.contexts.add(data=text.encode(), data_bytes=len(text.encode()))
    by_id = {int(node["node_id"]): node for node in tables.nodes}
    for node in tables.nodes:
        if node["messages"] is not None:
            data = node["messages"].encode()
            record.messages.add(
                node_id=node["node_id"],
                parent_node_id=node["parent_node_id"] or 0,
                context_index=node["context_index"],
                data=data,
                data_bytes=len(data),
            )
    if row["layout"] == TREE:
        _fill_tree(record.tree, row, tables.nodes)
        return record
    for one in tables.trajectories:
        _fill(record.trajectories.add(), one, by_id)
    return record


def has_parts(row: _Row) -> bool:
    """Says whether a session must have trajectories and nodes."""
    return bool(row["turns"] and row["outcome"] == "COMPLETED" and row["capture"] == "TOKENS")


def _check_rows(tables: Tables) -> None:
    """Checks what `record_of` relies on, because other programs write records, too."""
    if (layout := tables.session["layout"]) not in {TREE, TRAJECTORIES, ""}:
        raise InvalidFieldError("layout", f"is {layout!r}; give {TREE} or {TRAJECTORIES}")
    if has_parts(tables.session) and layout != TREE and not tables.trajectories:
        raise InvalidFieldError("trajectories", "has no row of it, and it has turns")
    nodes: dict[int, _Row] = {}
    for node in tables.nodes:
        id_, parent = node["node_id"], node["parent_node_id"]
        if id_ in nodes:
            raise InvalidFieldError("node_id", f"{id_} is there twice")
        if parent is not None and parent not in nodes:
            raise InvalidFieldError(
                "parent_node_id", f"of node {id_} is {parent}, which no earlier row has"
            )
        _check_node(node)
        nodes[id_] = node
    trained: set[int] = set()
    for one in tables.trajectories:
        _check_path(one, nodes, trained)


def _check_node(node: _Row) -> None:
    count = len(node["token_ids"])
    for name in ("logprobs", "loss_mask"):
        if len(node[name]) != count:
            problem = f"of node {node['node_id']} has {len(node[name])} values for {count} tokens"
            raise InvalidFieldError(name, problem)
    if node["scaffold_tokens"] > count:
        raise InvalidFieldError("scaffold_tokens", f"of node {node['node_id']} exceed its {count}")
    for span in node["spans"]:
        number = number_of(span["policy_run"], span["policy_version"])
        if not (0 <= span["start"] < span["end"] <= count and 0 <= number < 2**63):
            raise InvalidFieldError("spans", f"of node {node['node_id']} do not fit: {span}")
    for image in node["images"]:
        if image["start"] + image["tokens"] > count:
            raise InvalidFieldError("images", f"of node {node['node_id']} do not fit: {image}")


def _check_path(one: _Row, nodes: Mapping[int, _Row], trained: set[int]) -> None:
    """Checks that a path goes from parents to children. Nodes without tokens may be left out."""
    id_, before = one["trajectory_id"], None
    for visit in one["path"]:
        node = nodes.get(visit["node_id"])
        if node is None:
            raise InvalidFieldError(
                "path", f"of {id_} has node {visit['node_id']}, which is missing"
            )
        if not (node["sampled"] or len(node["token_ids"])):
            raise InvalidFieldError("token_ids", f"of node {node['node_id']} are none")
        parent = node["parent_node_id"]
        while parent not in {before, None} and not len(nodes[parent]["token_ids"]):
            parent = nodes[parent]["parent_node_id"]
        if parent != before:
            raise InvalidFieldError(
                "path", f"of {id_} has node {node['node_id']} after {before}, no parent of it"
            )
        before = node["node_id"]
        if visit["trained"]:
            if before in trained:
                raise InvalidFieldError("path", f"node {before} is trained in two of them")
            trained.add(before)


def _fill(one: trajectory_pb2.Trajectory, row: _Row, nodes: Mapping[int, _Row]) -> None:
    """Makes a trajectory of its row and the nodes of its path."""
    for name in ("trajectory_id", "session_id", "leaf_node_id", "turns", "prompt_tokens"):
        setattr(one, name, row[name])
    _fill_labels(one, row)
    one.reasons.extend(_numbers(_REASON, row["reasons"]))
    if row["reward"] is not None:
        one.reward = row["reward"]
    path = [(visit, nodes[visit["node_id"]]) for visit in row["path"]]
    end = 0
    for visit, node in path:
        start, end = end, end + len(node["token_ids"])
        middle = start + node["scaffold_tokens"] if node["sampled"] else end
        role = number_in(_ROLE, node["role"])
        if middle > start:
            one.segments.add(start=start, end=middle, node_id=node["node_id"], role=role)
        if node["sampled"]:
            segment = one.segments.add(start=middle, end=end, node_id=node["node_id"], role=role)
            _fill_sample(segment, node)
            segment.trained = visit["trained"]
        one.segments[-1].reasons.extend(_numbers(_REASON, visit["reasons"]))
        _fill_tokens(one, node, start)
    masks = [
        node["loss_mask"] if visit["trained"] else np.zeros(len(node["loss_mask"]), np.bool_)
        for visit, node in path
    ]
    _fill_arrays(one, [node for _, node in path], masks)
    _fill_columns(one, row["columns"])


def _fill_tree(tree: trajectory_pb2.TrajectoryTree, row: _Row, nodes: Sequence[_Row]) -> None:
    tree.SetInParent()
    tree.reasons.extend(_numbers(_REASON, row["reasons"]))
    index = {node["node_id"]: at for at, node in enumerate(nodes)}
    end = 0
    for node in nodes:
        start, end = end, end + len(node["token_ids"])
        one = tree.nodes.add(
            node_id=node["node_id"],
            parent_index=index.get(node["parent_node_id"]),
            start=start,
            end=end,
            scaffold_tokens=node["scaffold_tokens"],
            role=number_in(_ROLE, node["role"]),
        )
        _fill_labels(one, node)
        one.reasons.extend(_numbers(_REASON, node["reasons"]))
        if node["sampled"]:
            _fill_sample(one, node)
        one.trained = node["trained"]
        _fill_tokens(tree, node, start)
    _fill_arrays(tree, nodes, [node["loss_mask"] for node in nodes])
    _fill_columns(tree, row["columns"])


def _fill_sample(
    one: trajectory_pb2.TrajectorySegment | trajectory_pb2.TrajectoryNode, node: _Row
) -> None:
    one.sampled = True
    one.engine_id = node["engine_id"]
    one.begun_unix_ms = node.get("begun_unix_ms", 0)  # files of an earlier release lack them
    one.ended_unix_ms = node.get("ended_unix_ms", 0)
    one.model_request_ids.extend(node["model_request_ids"])
    if node["finish_reason"] is not None:
        one.finish_reason = number_in(_FINISH, node["finish_reason"])
    if node["prompt_crc32"] is not None:
        one.prompt_crc32 = node["prompt_crc32"]
    if node["reward"] is not None:
        one.reward = node["reward"]
    if node["sampling"] is not None:
        one.sampling.SetInParent()
        try:
            json_format.Parse(node["sampling"], one.sampling)
        except json_format.ParseError as error:
            problem = str(error).partition("\n")[0]
            raise InvalidFieldError("sampling", f"of node {node['node_id']}: {problem}") from error


def _fill_tokens(one: _Sequence, node: _Row, start: int) -> None:
    """Adds the images and the version spans of a node. Adjacent spans of one kind become one."""
    for image in node["images"]:
        one.images.add(sha256=image["sha256"], start=start + image["start"], tokens=image["tokens"])
    for span in node["spans"]:
        made = sampling_pb2.VersionSpan(
            policy_version=number_of(span["policy_run"], span["policy_version"]),
            start=start + span["start"],
            end=start + span["end"],
            **{name: span[name] for name in _SPAN},
        )
        last = one.version_spans[-1] if one.version_spans else None
        if (
            last is not None
            and last.end == made.start
            and last.policy_version == made.policy_version
            and all(getattr(last, name) == getattr(made, name) for name in _SPAN)
        ):
            last.end = made.end
        else:
            one.version_spans.append(made)


def _fill_arrays(one: _Sequence, nodes: Sequence[_Row], masks: Sequence[NDArray[Any]]) -> None:
    one.tokens.token_ids_u32le = b"".join(pack_ids(node["token_ids"]) for node in nodes)
    one.tokens.logprobs_f32le = b"".join(pack_logprobs(node["logprobs"]) for node in nodes)
    one.tokens.loss_mask_u8 = b"".join(mask.astype(np.uint8).tobytes() for mask in masks)


def _fill_columns(one: _Sequence, columns: Iterable[_Row]) -> None:
    for column in columns:
        one.columns.append(
            TokenColumn(
                **{name: column[name] for name in (*_COLUMN, "row_shape")},
                kind=number_in(_KIND, column["kind"]),
                data_bytes=len(column["data"]),
            )
        )


def number_in(enum: EnumDescriptor, name: str | None) -> Any:
    """Returns the number of a name that `name_of` gave. No name is the unspecified value.

    Raises:
        InvalidFieldError: This release does not know the name.
    """
    if not name:
        return 0
    number = name.removeprefix("UNKNOWN_")
    if number != name and number.isdecimal() and int(number) < 2**31:
        return int(number)
    prefix = enum.values_by_number[0].name.removesuffix("UNSPECIFIED")
    value = enum.values_by_name.get(prefix + name)
    if value is None:
        raise InvalidFieldError(enum.name, f"has no {name!r}; was a newer release the writer?")
    return value.number


def _numbers(enum: EnumDescriptor, names: Iterable[str]) -> list[Any]:
    return [number_in(enum, name) for name in names]
