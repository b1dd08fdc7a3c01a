"""Sessions as rows of one file: one per trajectory or tree, or data for supervised fine-tuning.

Rows name images by hash. Their files are in a directory beside it, each once.
"""

import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import util
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from rollmesh.client import of_spans, reason_names
from rollmesh.record import beside
from rollmesh.record.tables import leaves_of
from rollmesh.runtime import run_of, version_of
from rollmesh.runtime.codec import (
    Columns,
    arguments_of,
    conversation_of,
    name_of,
    plain,
    summary_of,
    unpack_tokens,
)
from rollmesh.runtime.config import ConfigError
from rollmesh.v1 import session_pb2, trajectory_pb2

_PARQUET_ROWS = 256
_NOT_IN_ROWS = {"trajectories", "abandoned", "reward", "metadata"}
"""Of a session's summary. An abandoned seat has no rows. A row has its rewards by other names."""
_NODE = ("node_id", "parent_index", "start", "end", "scaffold_tokens")
_OF_A_TRAJECTORY = (
    *("trajectory_id", "lineage", "lineage_source", "lineage_rule"),
    *("prompt_tokens", "trajectory_reward"),
)
_RULE = trajectory_pb2.LineageRule.DESCRIPTOR
_Write: TypeAlias = Callable[[dict[str, Any]], object]
"""Writes a row to the file."""
_Sequence: TypeAlias = trajectory_pb2.Trajectory | trajectory_pb2.TrajectoryTree
_Run: TypeAlias = trajectory_pb2.TrajectorySegment | trajectory_pb2.TrajectoryNode


def rows_of(
    session: session_pb2.SessionRecord, decode: "Decoder | None" = None
) -> Iterator[dict[str, Any]]:
    """Yields a row for each trajectory of a session, or a single row for its tree.

    Array columns are lists of equal length. A tree has `nodes` and no trajectory columns. `text`
    and `sampled_texts` are set if `decode` is given.
    """
    for one in session.trajectories:
        yield _row(session, one, decode) | {
            "trajectory_id": one.trajectory_id,
            "lineage": name_of(trajectory_pb2.Lineage.DESCRIPTOR, one.lineage),
            "lineage_source": name_of(trajectory_pb2.LineageSource.DESCRIPTOR, one.lineage_source),
            "lineage_rule": name_of(_RULE, one.lineage_rule) if one.lineage_rule else None,
            "prompt_tokens": one.prompt_tokens,
            "trajectory_reward": one.reward if one.HasField("reward") else None,
            "nodes": None,
        }
    if session.HasField("tree"):
        nothing = dict.fromkeys(_OF_A_TRAJECTORY)
        nodes = [
            {
                **{name: getattr(one, name) for name in _NODE},
                "parent_index": one.parent_index if one.HasField("parent_index") else None,
            }
            for one in session.tree.nodes
        ]
        yield _row(session, session.tree, decode) | nothing | {"nodes": nodes}


Decoder: TypeAlias = Callable[[list[int]], str]


def decoder(model: Path | None) -> Decoder | None:
    """Returns a function from ids to text with special tokens, or None without a model.

    Raises:
        ConfigError: The package tokenizers or the model's tokenizer is missing.
    """
    if model is None:
        return None
    file = model / "tokenizer.json"
    if util.find_spec("tokenizers") is None:
        raise ConfigError("tokenizer: needs the package tokenizers; run: pip install tokenizers")
    if not file.is_file():
        raise ConfigError(f"tokenizer: there is no {file}; give the folder of the model")
    from tokenizers import Tokenizer  # only for texts

    tokenizer = Tokenizer.from_file(str(file))
    return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False))


def _runs(one: _Sequence) -> Sequence[_Run]:
    return one.nodes if isinstance(one, trajectory_pb2.TrajectoryTree) else one.segments


def _row(
    session: session_pb2.SessionRecord, one: _Sequence, decode: Decoder | None
) -> dict[str, Any]:
    token_ids, logprobs, loss_mask = unpack_tokens(one.tokens, "tokens")
    summary = summary_of(session)
    numerics = {one.id: json.dumps(plain(one)) for one in session.numerics}
    row = {
        **{name: value for name, value in summary.items() if name not in _NOT_IN_ROWS},
        "session_reward": summary["reward"],
        "metadata": json.dumps(summary["metadata"]),
        "reasons": list(reason_names(one.reasons)),
        "turns": sum(run.sampled for run in _runs(one)),
        "token_ids": token_ids.tolist(),
        "logprobs": logprobs.tolist(),
        "loss_mask": loss_mask.tolist(),
        "policy_versions": of_spans(one, len(token_ids), version_of).tolist(),
        "policy_runs": of_spans(one, len(token_ids), run_of).tolist(),
        "numerics": [
            {"end": span.end, "numerics": numerics.get(span.numerics_id, "")}
            for span in one.version_spans
        ],
        "adapters": [{"end": span.end, "adapter": span.adapter} for span in one.version_spans],
        "turn_rewards": [
            {"node_id": run.node_id, "end": run.end, "reward": run.reward}
            for run in _runs(one)
            if run.HasField("reward")
        ],
        "turn_sampling": [
            {"node_id": run.node_id, "end": run.end, "sampling": json.dumps(plain(run.sampling))}
            for run in _runs(one)
            if run.HasField("sampling")
        ],
        "images": [
            {"sha256": image.sha256, "start": image.start, "tokens": image.tokens}
            for image in one.images
        ],
    }
    row |= _columns(one, len(token_ids)) | {"text": None, "sampled_texts": None}
    if decode is not None:
        ids, sampled = row["token_ids"], [run for run in _runs(one) if run.sampled]
        row["text"] = decode(ids)
        row["sampled_texts"] = [decode(ids[run.start : run.end]) for run in sampled]
    return row


def _columns(one: _Sequence, count: int) -> dict[str, Any]:
    columns = Columns.read(one)
    support, experts = columns.sampling_support(), columns.routed_experts()
    row: dict[str, Any] = dict.fromkeys(
        ("sampling_support", "routed_experts", "routed_experts_shape")
    )
    if support is not None:
        parts = np.split(support.values, support.offsets[1:-1])
        row["sampling_support"] = [part.tolist() for part in parts]
    if experts is not None:
        flat = experts.rows.reshape(count, -1).tolist()
        row["routed_experts"] = [
            values if has_row else None
            for values, has_row in zip(flat, experts.has_row.tolist(), strict=True)
        ]
        row["routed_experts_shape"] = list(experts.rows.shape[1:])
    return row


# Rows for supervised fine-tuning, by the names that TRL reads.


def sft_rows_of(session: session_pb2.SessionRecord) -> Iterator[dict[str, Any]]:
    """Yields a row for each trajectory, or each leaf of a tree, whose messages it has."""
    summary = summary_of(session)
    for one in leaves_of(session):
        found = conversation_of(session, one.leaf_node_id)
        if found is None:
            continue
        token_ids, _, loss_mask = unpack_tokens(one.tokens, "tokens")
        masks = loss_mask.astype(int).tolist()
        tokens = {"input_ids": token_ids.tolist(), "assistant_masks": masks} if masks else {}
        trained = {segment.node_id for segment in one.segments if segment.trained}
        versions = of_spans(one, len(masks), version_of)[loss_mask]
        yield {
            "messages": [_with_arguments(message) for message in found.messages],
            "tools": found.tools,
            "chat_template_kwargs": found.template_options,
            "trained_messages": [node_id in trained for node_id in found.node_ids],
            **tokens,
            "reward": one.reward if one.HasField("reward") else summary["reward"],
            "policy_versions": np.unique(versions).tolist(),
            "trajectory_id": one.trajectory_id,
            "lineage": name_of(trajectory_pb2.Lineage.DESCRIPTOR, one.lineage),
            "reasons": list(reason_names(one.reasons)),
            **{name: value for name, value in summary.items() if name not in _NOT_IN_ROWS},
            "metadata": json.dumps(summary["metadata"]),
        }


def _with_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """Returns a message whose calls have their arguments as objects, which templates print.

    Arguments that are no JSON object stay text.
    """
    message.pop("logprobs", None)
    for call in message.get("tool_calls", ()):
        if (arguments := arguments_of(call["function"]["arguments"])) is not None:
            call["function"]["arguments"] = arguments
    return message


class Exported(NamedTuple):
    """The numbers of an export."""

    sessions: int
    rows: int
    left_out: int = 0
    """Number of trajectories that have no row because they have no messages."""


NO_MESSAGES = (
    "trajectories have no messages: open sessions with record_messages=True, or start the gateways "
    "with --record-messages, and raise their max_session_message_bytes if sessions have more"
)


async def write_rows(
    sessions: AsyncIterator[session_pb2.SessionRecord],
    path: Path,
    decode: Decoder | None = None,
    *,
    sft: bool = False,
) -> Exported:
    """Writes sessions to a file, which appears only once it is complete.

    Args:
        sessions: Sessions with their arrays.
        path: Target file, ending in .jsonl or .parquet. Images go to the directory PATH.images, in
            files named by their hash.
        decode: Decodes token ids. None writes no texts.
        sft: Whether to write rows for supervised fine-tuning, to a .jsonl file.

    Returns:
        The number of sessions and rows.

    Raises:
        ConfigError: The suffix is unknown, pyarrow is missing, the file cannot be written, or no
            session has messages.
    """
    if sft and path.suffix != ".jsonl":
        raise ConfigError(f"to: {path.name!r} is not written with --format sft; give .jsonl")
    part = path.with_name(path.name + ".part")
    count = rows = left_out = 0
    try:
        with _writer(path, part) as write:
            async for session in sessions:
                count += 1
                beside.write_images(session.images, path.with_name(path.name + ".images"))
                written = rows
                for row in sft_rows_of(session) if sft else rows_of(session, decode):
                    rows += 1
                    write(row)
                left_out += (len(leaves_of(session)) - (rows - written)) if sft else 0
        if left_out and not rows:
            raise ConfigError(f"format: {left_out} {NO_MESSAGES}")
        part.replace(path)
    except OSError as error:
        raise ConfigError(f"to: {path}: {error}") from error
    finally:
        with suppress(OSError):  # an incomplete file is removed
            part.unlink()
    return Exported(count, rows, left_out)


@contextmanager
def _writer(path: Path, part: Path) -> Iterator[_Write]:
    match path.suffix:
        case ".jsonl":
            with part.open("w", encoding="utf-8", errors="replace") as file:
                yield lambda row: file.write(
                    json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n"
                )
        case ".parquet":
            with _parquet(part) as write:
                yield write
        case other:
            raise ConfigError(f"to: {other!r} has an unknown extension; give .jsonl or .parquet")


@contextmanager
def _parquet(part: Path) -> Iterator[_Write]:
    try:
        import pyarrow as arrow  # large, and needed only here
        from pyarrow import parquet
    except ImportError as error:
        raise ConfigError(
            "to: .parquet needs the pyarrow package; install it, or give .jsonl"
        ) from error
    turn = arrow.struct(
        [("node_id", arrow.uint32()), ("end", arrow.uint32()), ("reward", arrow.float64())]
    )
    text, whole, real = arrow.string(), arrow.uint32(), arrow.float64()
    sampled = arrow.struct([("node_id", whole), ("end", whole), ("sampling", text)])
    engine = arrow.struct([("end", whole), ("numerics", text)])
    policy = arrow.struct([("end", whole), ("adapter", text)])
    node = arrow.struct([(name, whole) for name in _NODE])
    schema = arrow.schema(
        {
            **dict.fromkeys(("session_id", "run_id", "group_id"), text),
            **dict.fromkeys(("sample_index", "group_size"), whole),
            **dict.fromkeys(("outcome", "purpose", "model", "capture"), text),
            "superseded": arrow.bool_(),
            **dict.fromkeys(("trajectory_id", "lineage", "lineage_source"), text),
            **dict.fromkeys(("lineage_rule", "text"), text),
            "sampled_texts": arrow.list_(text),
            "reasons": arrow.list_(text),
            **dict.fromkeys(("turns", "prompt_tokens"), whole),
            "token_ids": arrow.list_(whole),
            "logprobs": arrow.list_(arrow.float32()),
            "loss_mask": arrow.list_(arrow.bool_()),
            **dict.fromkeys(("policy_versions", "policy_runs"), arrow.list_(arrow.int64())),
            **dict.fromkeys(
                ("sampling_support", "routed_experts"), arrow.list_(arrow.list_(whole))
            ),
            "routed_experts_shape": arrow.list_(whole),
            "numerics": arrow.list_(engine),
            "adapters": arrow.list_(policy),
            **dict.fromkeys(("session_reward", "trajectory_reward"), real),
            "turn_rewards": arrow.list_(turn),
            "turn_sampling": arrow.list_(sampled),
            "nodes": arrow.list_(node),
            "images": arrow.list_(
                arrow.struct([("sha256", text), ("start", whole), ("tokens", whole)])
            ),
            "metadata": text,
            **dict.fromkeys(("opened_unix_ms", "closed_unix_ms"), arrow.int64()),
        }
    )
    with parquet.ParquetWriter(part, schema) as writer:
        rows: list[dict[str, Any]] = []

        def flush() -> None:
            if rows:
                writer.write_table(arrow.Table.from_pylist(rows, schema))
                rows.clear()

        def write(row: dict[str, Any]) -> None:
            rows.append(row)
            if len(rows) == _PARQUET_ROWS:
                flush()

        yield write
        flush()
