"""Exports stored sessions to a file, one row per trajectory or tree.

Rows name images by hash. Their files are in a directory beside it, each once.
"""

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from rollmesh.collector.delivery import records
from rollmesh.runtime.codec.enums import name_of
from rollmesh.runtime.codec.token_arrays import unpack_tokens
from rollmesh.runtime.config import ConfigError
from rollmesh.v1 import session_pb2, trajectory_pb2

_PARQUET_ROWS = 256
_SUFFIXES = {
    "image/png": ".png", "image/jpeg": ".jpg", "image/webp": ".webp", "image/gif": ".gif",
}  # fmt: skip


class _Writer(Protocol):
    def write(self, row: dict[str, Any]) -> None: ...


def rows_of(session: session_pb2.SessionRecord) -> Iterator[dict[str, Any]]:
    """Yields a row for each trajectory of a session, or a single row for its tree.

    Array columns are lists of equal length. A tree has `nodes` and no trajectory columns.
    """
    for one in session.trajectories:
        yield _row(session, one) | {
            "trajectory_id": one.trajectory_id,
            "lineage": name_of(trajectory_pb2.Lineage.DESCRIPTOR, one.lineage),
            "prompt_tokens": one.prompt_tokens,
            "trajectory_reward": one.reward if one.HasField("reward") else None,
            "nodes": None,
        }
    if session.HasField("tree"):
        nothing = dict.fromkeys(("trajectory_id", "lineage", "prompt_tokens", "trajectory_reward"))
        yield (
            _row(session, session.tree)
            | nothing
            | {
                "nodes": [
                    {
                        "node_id": node.node_id,
                        "parent_index": node.parent_index
                        if node.HasField("parent_index")
                        else None,
                        "start": node.start,
                        "end": node.end,
                        "scaffold_tokens": node.scaffold_tokens,
                    }
                    for node in session.tree.nodes
                ]
            }
        )


def _row(session: session_pb2.SessionRecord, one: records.Row) -> dict[str, Any]:
    token_ids, logprobs, loss_mask = unpack_tokens(one.tokens, "tokens")
    return {
        "session_id": session.session_id,
        "group_id": session.group_id,
        "sample_index": session.sample_index,
        "group_size": session.group_size,
        "outcome": name_of(session_pb2.SessionOutcome.DESCRIPTOR, session.outcome),
        "reasons": [
            name_of(trajectory_pb2.FidelityReason.DESCRIPTOR, reason) for reason in one.reasons
        ],
        "turns": records.turns_of(one),
        "token_ids": token_ids.tolist(),
        "logprobs": logprobs.tolist(),
        "loss_mask": loss_mask.tolist(),
        "policy_versions": _versions(one, len(token_ids)),
        "session_reward": session.reward if session.HasField("reward") else None,
        "turn_rewards": [
            {"node_id": run.node_id, "end": run.end, "reward": run.reward}
            for run in records.runs_of(one)
            if run.HasField("reward")
        ],
        "images": [
            {"sha256": image.sha256, "start": image.start, "tokens": image.tokens}
            for image in one.images
        ],
        "metadata": json.dumps(dict(session.metadata), sort_keys=True),
        "opened_unix_ms": session.opened_unix_ms,
        "closed_unix_ms": session.closed_unix_ms,
    }


async def export(sessions: AsyncIterator[session_pb2.SessionRecord], path: Path) -> tuple[int, int]:
    """Writes sessions to a file, which appears only once it is complete.

    Args:
        sessions: Sessions with their arrays.
        path: Target file, ending in .jsonl or .parquet. Images go to the directory PATH.images, in
            files named by their hash.

    Returns:
        The number of sessions and rows.

    Raises:
        ConfigError: The suffix is unknown, pyarrow is missing, or the file cannot be written.
    """
    part = path.with_name(path.name + ".part")
    count = rows = 0
    try:
        with _writer(path, part) as writer:
            async for session in sessions:
                count += 1
                _write_images(session, path.with_name(path.name + ".images"))
                for row in rows_of(session):
                    rows += 1
                    writer.write(row)
        part.replace(path)
    except OSError as error:
        raise ConfigError(f"to: {path}: {error}") from error
    finally:
        with suppress(OSError):  # an incomplete file is removed
            part.unlink()
    return count, rows


def _write_images(session: session_pb2.SessionRecord, folder: Path) -> None:
    """Writes the images of a session that are not there yet."""
    for image in session.images:
        path = folder / f"{image.sha256}{_SUFFIXES.get(image.media_type, '')}"
        if path.exists():
            continue
        folder.mkdir(exist_ok=True)
        part = path.with_name(path.name + ".part")
        part.write_bytes(image.data)
        part.replace(path)


def _versions(one: records.Row, count: int) -> list[int]:
    """Returns the policy version that sampled each token; -1 if it was not sampled."""
    versions = [-1] * count
    for span in one.version_spans:
        versions[span.start : span.end] = [span.policy_version] * (span.end - span.start)
    return versions


@contextmanager
def _writer(path: Path, part: Path) -> Iterator[_Writer]:
    match path.suffix:
        case ".jsonl":
            with part.open("w", encoding="utf-8") as file:
                yield _Lines(file)
        case ".parquet":
            with _parquet(part) as writer:
                yield writer
        case other:
            raise ConfigError(f"to: {other!r} has an unknown extension; give .jsonl or .parquet")


class _Lines:
    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, row: dict[str, Any]) -> None:
        self._file.write(json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n")


class _Parquet:
    def __init__(self, arrow: Any, writer: Any, schema: Any) -> None:
        self._arrow, self._writer, self._schema = arrow, writer, schema
        self._rows: list[dict[str, Any]] = []

    def write(self, row: dict[str, Any]) -> None:
        self._rows.append(row)
        if len(self._rows) == _PARQUET_ROWS:
            self.flush()

    def flush(self) -> None:
        if self._rows:
            self._writer.write_table(self._arrow.Table.from_pylist(self._rows, self._schema))
            self._rows.clear()


@contextmanager
def _parquet(part: Path) -> Iterator[_Parquet]:
    try:
        import pyarrow as arrow  # noqa: PLC0415 - large, and needed only here
        from pyarrow import parquet  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError(
            "to: .parquet needs the pyarrow package; install it, or give .jsonl"
        ) from error
    turn = arrow.struct(
        [("node_id", arrow.uint32()), ("end", arrow.uint32()), ("reward", arrow.float64())]
    )
    text, whole, real = arrow.string(), arrow.uint32(), arrow.float64()
    parts = ("node_id", "parent_index", "start", "end", "scaffold_tokens")
    node = arrow.struct([(name, whole) for name in parts])
    schema = arrow.schema(
        {
            **dict.fromkeys(("session_id", "group_id"), text),
            **dict.fromkeys(("sample_index", "group_size"), whole),
            **dict.fromkeys(("outcome", "trajectory_id", "lineage"), text),
            "reasons": arrow.list_(text),
            **dict.fromkeys(("turns", "prompt_tokens"), whole),
            "token_ids": arrow.list_(whole),
            "logprobs": arrow.list_(arrow.float32()),
            "loss_mask": arrow.list_(arrow.bool_()),
            "policy_versions": arrow.list_(arrow.int64()),
            **dict.fromkeys(("session_reward", "trajectory_reward"), real),
            "turn_rewards": arrow.list_(turn),
            "nodes": arrow.list_(node),
            "images": arrow.list_(
                arrow.struct([("sha256", text), ("start", whole), ("tokens", whole)])
            ),
            "metadata": text,
            **dict.fromkeys(("opened_unix_ms", "closed_unix_ms"), arrow.int64()),
        }
    )
    with parquet.ParquetWriter(part, schema) as writer:
        found = _Parquet(arrow, writer, schema)
        yield found
        found.flush()
