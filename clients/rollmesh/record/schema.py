"""The schema of the record: the columns of each table, with types and meanings."""

from collections.abc import Collection
from typing import Any, NamedTuple

import pyarrow as arrow

VERSION = 1
"""Raised when a column changes its meaning or goes. A new column does not raise it."""
VERSION_KEY = b"rollmesh.record"
"""Key of the version in the metadata of each file."""

_TEXT, _WHOLE, _LONG, _REAL = arrow.string(), arrow.uint32(), arrow.int64(), arrow.float64()
_FLAG = arrow.bool_()
_TEXTS = arrow.list_(_TEXT)


def _records(**fields: Any) -> Any:
    return arrow.list_(arrow.struct(fields.items()))


_COLUMNS = _records(
    kind=_TEXT,
    start=_WHOLE,
    rows=_WHOLE,
    row_shape=arrow.list_(_WHOLE),
    value_bytes=_WHOLE,
    data=arrow.binary(),
    engine_id=_TEXT,
    numerics_id=_TEXT,
)
_SPANS = _records(
    start=_WHOLE,
    end=_WHOLE,
    policy_version=_LONG,
    policy_run=_LONG,
    adapter=_TEXT,
    engine_id=_TEXT,
    numerics_id=_TEXT,
)
_EDGES = _records(
    source_request_id=_TEXT,
    target_request_id=_TEXT,
    type=_TEXT,
    source_node_ids=arrow.list_(_WHOLE),
    target_node_ids=arrow.list_(_WHOLE),
)
_NUMERICS = _records(
    **dict.fromkeys(("id", "backend", "release", "dtype", "kv_cache_dtype", "quantization"), _TEXT),
    **dict.fromkeys(("tensor_parallel", "pipeline_parallel", "data_parallel"), _WHOLE),
    expert_parallel=_FLAG,
    attention=_TEXT,
    batch_invariant=_FLAG,
    **dict.fromkeys(("speculation", "logprobs", "platform"), _TEXT),
)


_ORIGIN = arrow.struct(
    {
        "kind": _TEXT,
        "nodes": _records(session_id=_TEXT, node_id=_WHOLE, tokens=_WHOLE),
        "document_id": _TEXT,
        "template_unix_ms": _LONG,
        "continued": _FLAG,
    }.items()
)


class Column(NamedTuple):
    """A column of a table."""

    name: str
    type: Any
    """Its Arrow type."""
    meaning: str


TABLES: dict[str, tuple[Column, ...]] = {
    "sessions": (
        Column("session_id", _TEXT, "its id"),
        Column("run_id", _TEXT, "id of the run of its group"),
        Column("group_id", _TEXT, "id of its group, empty without one"),
        Column("sample_index", _WHOLE, "its seat in the group"),
        Column("group_size", _WHOLE, "seats of the group"),
        Column("outcome", _TEXT, "COMPLETED, FAILED, ABORTED or LOST"),
        Column("purpose", _TEXT, "TRAIN, EVAL or OTHER"),
        Column("model", _TEXT, "name of the model that answered"),
        Column("capture", _TEXT, "TOKENS, or LOGPROBS or TEXT for a session without tokens"),
        Column("layout", _TEXT, "the form it was exported in: TRAJECTORIES or TREE"),
        Column("superseded", _FLAG, "whether a later attempt has its seat"),
        Column("abandoned", _TEXT, "why no session took the seat"),
        Column("reward", _REAL, "of the whole session, as it was delivered"),
        Column("reward_timeout_ms", _WHOLE, "how long the collector waited for rewards"),
        Column("turns", _WHOLE, "turns that the agent got"),
        Column("opened_unix_ms", _LONG, "when it was opened"),
        Column("closed_unix_ms", _LONG, "when it was closed. `date` is the day of it, in UTC"),
        Column("metadata", _TEXT, "a JSON object"),
        Column("reasons", _TEXTS, "fidelity reasons of a tree"),
        Column("budgets_spent", _TEXTS, "CALLS, SAMPLED_TOKENS, TIME"),
        Column("numerics", _NUMERICS, "fingerprints of the engines, which spans name by `id`"),
        Column("tokenizer_sha256", _TEXT, "SHA-256 of its tokenizer"),
        Column("template_sha256", _TEXT, "SHA-256 of its chat template"),
        Column("origin", _ORIGIN, "the node or document that it started from. Null without one"),
        Column("edges", _EDGES, "the lineage that the agent declared"),
        Column("images", _records(sha256=_TEXT, media_type=_TEXT), "images that were shown"),
        Column("contexts", _TEXTS, "tools and template options, JSON objects"),
        Column("messages_left_out", _WHOLE, "nodes whose messages were too many"),
        Column("columns", _COLUMNS, "further values of the tokens of a tree"),
    ),
    "trajectories": (
        Column("trajectory_id", _TEXT, "its id, which names a leaf of the tree"),
        Column("session_id", _TEXT, "its session"),
        Column("leaf_node_id", _WHOLE, "its last node"),
        Column("lineage", _TEXT, "MAIN, SUB_AGENT, COMPACTION, ..."),
        Column("lineage_source", _TEXT, "who said so: DECLARED, HEADER or RULE"),
        Column("lineage_rule", _TEXT, "which rule did. Null for others and for earlier releases"),
        Column("reasons", _TEXTS, "fidelity reasons"),
        Column("turns", _WHOLE, "sampled turns on the path"),
        Column("prompt_tokens", _WHOLE, "tokens before the first sampled one"),
        Column("reward", _REAL, "of this trajectory. Null: the reward of the session applies"),
        Column(
            "path",
            _records(node_id=_WHOLE, trained=_FLAG, reasons=_TEXTS),
            "its nodes, whether each is trained here, and the reasons here",
        ),
        Column("columns", _COLUMNS, "further values of its tokens: support, experts"),
    ),
    "nodes": (
        Column("session_id", _TEXT, "its session"),
        Column("node_id", _WHOLE, "its id in the session. Rows of parents come first"),
        Column("parent_node_id", _WHOLE, "its parent. Null for a root"),
        Column("role", _TEXT, "author: SYSTEM, USER, ASSISTANT or TOOL"),
        Column("sampled", _FLAG, "whether the model sampled it"),
        Column("trained", _FLAG, "whether a trajectory trains it"),
        Column("lineage", _TEXT, "of the branch, or of the trajectory with its training"),
        Column("lineage_source", _TEXT, "who said so"),
        Column("lineage_rule", _TEXT, "which rule did"),
        Column("reasons", _TEXTS, "fidelity reasons, where it is trained"),
        Column("scaffold_tokens", _WHOLE, "its leading tokens that were not sampled"),
        Column("token_ids", arrow.list_(_WHOLE), "the tokens that it adds to its parent's"),
        Column("logprobs", arrow.list_(arrow.float32()), "of each token. 0.0 if not sampled"),
        Column("loss_mask", arrow.list_(_FLAG), "of each token, where the node is trained"),
        Column("policy_versions", arrow.list_(_LONG), "of each token. -1 if not sampled"),
        Column("policy_runs", arrow.list_(_LONG), "the trainer's run of each token, or -1"),
        Column("spans", _SPANS, "which engine, policy, adapter and numerics sampled which tokens"),
        Column("finish_reason", _TEXT, "STOP or LENGTH"),
        Column("engine_id", _TEXT, "the engine that sampled it, or its end"),
        Column("begun_unix_ms", _LONG, "when its request came. 0 is unknown"),
        Column("ended_unix_ms", _LONG, "when its last token was sampled. 0 is unknown"),
        Column("prompt_crc32", _WHOLE, "CRC-32 of all ids before the first sampled one"),
        Column("reward", _REAL, "of this turn alone"),
        Column("sampling", _TEXT, "sampling parameters, a JSON object"),
        Column("model_request_ids", _TEXTS, "the agent's ids of the request"),
        Column(
            "images",
            _records(sha256=_TEXT, start=_WHOLE, tokens=_WHOLE),
            "the tokens of the node that stand for images",
        ),
        Column("messages", _TEXT, "its messages, a JSON array. Null if none were recorded"),
        Column("context_index", _WHOLE, "index into the session's `contexts`"),
    ),
    "rewards": (
        Column("session_id", _TEXT, "the session"),
        Column("recorded_unix_ms", _LONG, "when it was written. The last row counts"),
        Column("reward", _REAL, "of the session"),
        Column(
            "trajectory_rewards",
            _records(trajectory_id=_TEXT, reward=_REAL),
            "of trajectories that have one",
        ),
        Column("turn_rewards", _records(node_id=_WHOLE, reward=_REAL), "of turns that have one"),
    ),
    "annotations": (
        Column("session_id", _TEXT, "the session"),
        Column("recorded_unix_ms", _LONG, "when it was written. The last row of a name counts"),
        Column("trajectory_id", _TEXT, "the trajectory. Empty for a tree"),
        Column("name", _TEXT, "name of the numbers"),
        Column("values", arrow.list_(arrow.float32()), "one for each of its tokens. NaN is none"),
    ),
    "scores": (
        Column("session_id", _TEXT, "the session"),
        Column("recorded_unix_ms", _LONG, "when it was written. The last row of a teacher counts"),
        Column("trajectory_id", _TEXT, "the trajectory"),
        Column("model", _TEXT, "name of the teacher"),
        Column("policy_version", _LONG, "version of its weights"),
        Column("policy_run", _LONG, "run of its weights"),
        Column("start", _WHOLE, "index of the first token with a score"),
        Column("logprobs", arrow.list_(arrow.float32()), "of each token from there on, nats"),
        Column("top_k", _WHOLE, "number of most likely ids at each position"),
        Column("top_ids", arrow.list_(_WHOLE), "those ids, position by position"),
        Column("top_logprobs", arrow.list_(arrow.float32()), "of those ids, nats"),
    ),
}
"""The columns of each table."""


OF_SPANS = {"policy_versions", "policy_runs"}
"""Columns for other readers. A session is read by its spans."""
_NULLS = {
    *("reward", "reward_timeout_ms", "origin", "parent_node_id", "role", "messages"),
    *("lineage", "lineage_source", "lineage_rule", "context_index", "finish_reason"),
    *("prompt_crc32", "sampling"),
}
"""Columns in which null has a meaning."""


def conform(table: str, found: Any, only: Collection[str] = ()) -> Any:
    """Returns rows that another program or release wrote with the columns of this one.

    A missing or null value has the default of its type, if null has no meaning there. Other values
    become the type of the column. Other columns are dropped.

    Args:
        table: Name of the table.
        found: Its rows, an Arrow table.
        only: Names of the columns that are wanted. Empty: all that sessions are read by.

    Raises:
        arrow.ArrowInvalid: A value does not fit its column, or `session_id` is missing.
    """
    made = {}
    for name, type_, _ in TABLES[table]:
        if name not in (only or {name}) or name in OF_SPANS:
            continue
        if name == "session_id" and (name not in found.column_names or found[name].null_count):
            raise arrow.ArrowInvalid(f"{name}: is missing or null; give each row one")
        try:
            if name not in found.column_names:
                column = arrow.chunked_array([arrow.nulls(len(found), type_)])
            elif (column := found[name]).type != type_:
                column = _cast(column, type_)
            if any(_has_null(chunk, of_rows=name not in _NULLS) for chunk in column.chunks):
                values = [
                    None if row is None and name in _NULLS else _filled(row, type_)
                    for row in column.to_pylist()
                ]
                column = arrow.chunked_array([arrow.array(values, type_)])
        except (arrow.ArrowException, OverflowError, TypeError, ValueError) as error:
            raise arrow.ArrowInvalid(f"{name}: {error}; its type is {type_}") from error
        made[name] = column
    return arrow.table(made)


def _cast(column: Any, type_: Any) -> Any:
    try:
        return column.cast(type_)
    except arrow.ArrowException:  # as of records with other fields
        return arrow.chunked_array([arrow.array(column.to_pylist(), type_)])


def _has_null(values: Any, *, of_rows: bool = True) -> bool:
    """Says whether values or parts of them are null."""
    if of_rows and values.null_count:
        return True
    if arrow.types.is_struct(values.type):
        return any(map(_has_null, values.drop_null().flatten()))
    return arrow.types.is_list(values.type) and _has_null(values.flatten())


def _filled(value: Any, type_: Any) -> Any:
    """Returns a value with defaults for the nulls in it. A number that is no integer is NaN."""
    if arrow.types.is_struct(type_):
        return {one.name: _filled((value or {}).get(one.name), one.type) for one in type_}
    if arrow.types.is_list(type_):
        return [_filled(one, type_.value_type) for one in value or ()]
    if value is not None:
        return value
    if arrow.types.is_floating(type_):
        return float("nan")
    return {_TEXT: "", _FLAG: False, arrow.binary(): b""}.get(type_, 0)


def schema_of(table: str) -> Any:
    """Returns the Arrow schema of a table, with the version in its metadata."""
    columns = [
        arrow.field(one.name, one.type, metadata={"meaning": one.meaning}) for one in TABLES[table]
    ]
    return arrow.schema(columns, metadata={VERSION_KEY: str(VERSION)})
