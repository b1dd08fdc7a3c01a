"""Arrays of tokens: packed little-endian bytes, checked on receipt.

Ids, log-probabilities and the loss mask have one value per token. Typed values of single tokens
that have no array of their own are in columns. A column is a list of pieces, `TokenColumn`: the
rows of consecutive tokens, of one engine. The rows of a kind have one shape, or different lengths.
"""

from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rollmesh.runtime.errors import InvalidFieldError
from rollmesh.v1 import sampling_pb2, trajectory_pb2
from rollmesh.v1.sampling_pb2 import TokenColumn

TokenIds: TypeAlias = NDArray[np.uint32]
"""Token ids, dtype uint32, shape [N]."""
Logprobs: TypeAlias = NDArray[np.float32]
"""Log-probabilities in nats, dtype float32, shape [N]."""
Mask: TypeAlias = NDArray[np.bool_]
"""One flag per token, dtype bool, shape [N]."""

MOST_LOGPROB = 1e-4
"""Rounding error may lift a log-probability this far above 0."""
_U32 = np.dtype("<u4")
_F32 = np.dtype("<f4")
_U8 = np.dtype("u1")


def pack_ids(ids: TokenIds) -> bytes:
    """Packs ids [N] into 4 N bytes."""
    return np.ascontiguousarray(ids, dtype=_U32).tobytes()


def pack_logprobs(logprobs: Logprobs) -> bytes:
    """Packs log-probabilities [N] into 4 N bytes."""
    return np.ascontiguousarray(logprobs, dtype=_F32).tobytes()


def unpack_ids(data: bytes, field: str) -> TokenIds:
    """Reads ids [N] from 4 N bytes, without a copy and read-only.

    Raises:
        InvalidFieldError: The length is not a multiple of 4. Names `field`.
    """
    if len(data) % 4:
        raise _not_whole(data, field)
    return np.frombuffer(data, dtype=_U32)


def unpack_logprobs(data: bytes, field: str) -> Logprobs:
    """Reads log-probabilities [N] from 4 N bytes, without a copy and read-only.

    Raises:
        InvalidFieldError: The length is not a multiple of 4. Names `field`.
    """
    if len(data) % 4:
        raise _not_whole(data, field)
    return np.frombuffer(data, dtype=_F32)


def unpack_mask(data: bytes, field: str) -> Mask:
    """Reads flags [N] from N bytes, without a copy and read-only.

    Raises:
        InvalidFieldError: A byte is neither 0 nor 1. Names `field`.
    """
    flags = np.frombuffer(data, dtype=_U8)
    if flags.size and int(flags.max()) > 1:
        raise InvalidFieldError(field, "has a byte other than 0 and 1; send one byte per token")
    return flags.view(np.bool_)


def unpack_tokens(
    tokens: trajectory_pb2.TokenArrays, field: str
) -> tuple[TokenIds, Logprobs, Mask]:
    """Reads the ids, the log-probabilities and the loss mask [N] of the same tokens, read-only.

    Raises:
        InvalidFieldError: They differ in length, or the mask has a byte other than 0 and 1. Names
            `field`.
    """
    loss_mask = unpack_mask(tokens.loss_mask_u8, f"{field}.loss_mask_u8")
    count = len(loss_mask)
    for name in ("token_ids_u32le", "logprobs_f32le"):
        size = len(getattr(tokens, name))
        if size != 4 * count:
            raise InvalidFieldError(
                f"{field}.{name}", f"has {size} bytes; {count} tokens by the mask need {4 * count}"
            )
    ids, logprobs = tokens.token_ids_u32le, tokens.logprobs_f32le
    return np.frombuffer(ids, dtype=_U32), np.frombuffer(logprobs, dtype=_F32), loss_mask


def _not_whole(data: bytes, field: str) -> InvalidFieldError:
    text = f"has {len(data)} bytes, not a multiple of 4; send 4 little-endian bytes each"
    return InvalidFieldError(field, text)


# Columns.

Kind: TypeAlias = sampling_pb2.ColumnKind.ValueType
SUPPORT = sampling_pb2.COLUMN_KIND_SAMPLING_SUPPORT
EXPERTS = sampling_pb2.COLUMN_KIND_ROUTED_EXPERTS
KINDS = {"sampling_support": SUPPORT, "routed_experts": EXPERTS}
"""The kinds by their names."""

_LENGTH = np.dtype("<u4")
_VALUES = {size: np.dtype(f"<u{size}") for size in (1, 2, 4)}
_MOST_ROW_VALUES = 2**16
_same = attrgetter("kind", "value_bytes", "row_shape", "engine_id", "numerics_id")


class Ragged(NamedTuple):
    """Rows of different lengths. Row i is `values[offsets[i] : offsets[i + 1]]`."""

    values: NDArray[np.unsignedinteger[Any]]
    """uint8, uint16 or uint32 [V]."""
    offsets: NDArray[np.int64]
    """int64 [N + 1]."""


class Experts(NamedTuple):
    """The experts that each of L layers took for N tokens."""

    rows: NDArray[np.unsignedinteger[Any]]
    """uint8, uint16 or uint32 [N, L, K]. 0 for tokens without a row."""
    has_row: NDArray[np.bool_]
    """bool [N]."""


def check_columns(columns: Iterable[TokenColumn], field: str, count: int) -> None:
    """Checks the columns of N tokens: shapes, sizes, order.

    Raises:
        InvalidFieldError: A column is wrong. Names `field`.
    """
    ends: dict[int, int] = {}
    shapes: dict[int, tuple[int, ...]] = {}
    for at, one in enumerate(columns):
        name = f"{field}[{at}]"
        check_column(one, name)
        if not ends.get(one.kind, 0) <= one.start < one.start + one.rows <= count:
            raise InvalidFieldError(name, f"overlaps, or is not within the {count} tokens")
        ends[one.kind] = one.start + one.rows
        if shapes.setdefault(one.kind, tuple(one.row_shape)) != tuple(one.row_shape):
            raise InvalidFieldError(name, "has rows of another shape than those before")


def check_column(one: TokenColumn, field: str) -> None:
    """Checks the kind of a column, and that its data has the size of its rows.

    Raises:
        InvalidFieldError: It is wrong. Names `field`.
    """
    if one.kind not in {SUPPORT, EXPERTS} or one.value_bytes not in _VALUES or not one.rows:
        raise InvalidFieldError(
            field, "has no rows, or an unknown kind or size of values; give a ColumnKind, and 1, 2 "
            "or 4 bytes for each value"
        )  # fmt: skip
    if (one.kind == EXPERTS) != bool(one.row_shape):
        raise InvalidFieldError(
            f"{field}.row_shape", "is for ROUTED_EXPERTS, and for nothing else; set it there"
        )
    row = np.prod(one.row_shape, dtype=np.float64)
    if not 1 <= row <= _MOST_ROW_VALUES:
        raise InvalidFieldError(
            f"{field}.row_shape", f"is that of {row:.0f} values; give 1 to {_MOST_ROW_VALUES}"
        )
    data = one.data
    if one.row_shape:
        size = one.rows * int(row) * one.value_bytes
    elif len(data) < 4 * one.rows:
        size = 4 * one.rows
    else:
        lengths = np.frombuffer(data, _LENGTH, one.rows)
        size = 4 * one.rows + one.value_bytes * int(lengths.sum(dtype=np.uint64))
    if not len(data) == one.data_bytes == size:
        raise InvalidFieldError(
            f"{field}.data", f"has {len(data)} bytes and data_bytes {one.data_bytes}; the rows "
            f"need {size}"
        )  # fmt: skip


def experts_column(start: int, rows: NDArray[np.unsignedinteger[Any]]) -> TokenColumn:
    """Returns the routed experts of consecutive tokens.

    Args:
        start: Index of the first token.
        rows: uint8, uint16 or uint32 [N, L, K]: the K experts that each of L layers took.
    """
    data = np.ascontiguousarray(rows, rows.dtype.newbyteorder("<")).tobytes()
    return TokenColumn(
        kind=EXPERTS,
        start=start,
        rows=len(rows),
        row_shape=rows.shape[1:],
        value_bytes=rows.itemsize,
        data=data,
        data_bytes=len(data),
    )


def support_column(start: int, rows: Sequence[NDArray[np.unsignedinteger[Any]]]) -> TokenColumn:
    """Returns the sampling support of consecutive tokens.

    Args:
        start: Index of the first token.
        rows: uint32 [K] for each token: the ids from which it was sampled. An empty row means all.
    """
    lengths = np.array([len(row) for row in rows], _LENGTH)
    data = b"".join([lengths.tobytes(), *(row.astype("<u4").tobytes() for row in rows)])
    return _piece(TokenColumn(kind=SUPPORT, value_bytes=4), start, len(rows), data)


def _piece(like: TokenColumn, start: int, rows: int, data: bytes) -> TokenColumn:
    """Returns rows of a column of the same kind, shape and engine."""
    return TokenColumn(
        kind=like.kind,
        start=start,
        rows=rows,
        row_shape=like.row_shape,
        value_bytes=like.value_bytes,
        engine_id=like.engine_id,
        numerics_id=like.numerics_id,
        data=data,
        data_bytes=len(data),
    )


def rows_between(columns: Iterable[TokenColumn], start: int, end: int) -> Iterator[TokenColumn]:
    """Yields the rows of the tokens from `start` to `end`, which may be none."""
    for one in columns:
        first, last = max(start - one.start, 0), min(end - one.start, one.rows)
        if first >= last:
            continue
        if (first, last) == (0, one.rows):
            yield one
            continue
        if one.row_shape:
            row = len(one.data) // one.rows
            data = one.data[first * row : last * row]
        else:
            values, offsets = ragged_of(one)
            kept = values[offsets[first] : offsets[last]]
            data = one.data[4 * first : 4 * last] + kept.tobytes()
        yield _piece(one, one.start + first, last - first, data)


def joined(columns: Iterable[TokenColumn]) -> list[TokenColumn]:
    """Returns columns in order of kind and start, adjacent rows of one engine in one piece."""
    runs: list[list[TokenColumn]] = []
    for one in sorted(columns, key=lambda one: (one.kind, one.start)):
        last = runs[-1][-1] if runs else None
        is_next = last is not None and last.start + last.rows == one.start
        if last is not None and is_next and _same(last) == _same(one):
            runs[-1].append(one)
        else:
            runs.append([one])
    for at, run in enumerate(runs):
        if len(run) == 1:
            continue
        first, parts = run[0], [one.data for one in run]
        if not first.row_shape:
            parts = [one.data[: 4 * one.rows] for one in run]
            parts += [one.data[4 * one.rows :] for one in run]
        rows = sum(one.rows for one in run)
        runs[at] = [_piece(first, first.start, rows, b"".join(parts))]
    return [run[0] for run in runs]


def bounded(columns: Iterable[TokenColumn], size: int) -> Iterator[TokenColumn]:
    """Yields columns in pieces of at most `size` bytes, or of one row if that is larger."""
    for one in columns:
        whole = -(-len(one.data) // size)
        rows = max(one.rows // max(whole, 1), 1)
        for at in range(one.start, one.start + one.rows, rows):
            yield from rows_between([one], at, at + rows)


def support_of(columns: Iterable[TokenColumn], count: int) -> Ragged | None:
    """Returns the sampling support of N tokens, uint32. None if no token has one."""
    found = [one for one in columns if one.kind == SUPPORT]
    if not found:
        return None
    lengths = np.zeros(count + 1, np.int64)
    values: list[NDArray[np.unsignedinteger[Any]]] = []
    for one in found:
        own, offsets = ragged_of(one)
        lengths[one.start + 1 : one.start + one.rows + 1] = np.diff(offsets)
        values.append(own)
    return Ragged(np.concatenate(values), np.cumsum(lengths))


def experts_of(columns: Iterable[TokenColumn], count: int) -> Experts | None:
    """Returns the routed experts of N tokens. None if no token has them."""
    found = [one for one in columns if one.kind == EXPERTS]
    if not found:
        return None
    widest = _VALUES[max(one.value_bytes for one in found)]
    rows = np.zeros((count, *found[0].row_shape), widest)
    has_row = np.zeros(count, np.bool_)
    for one in found:
        own = np.frombuffer(one.data, _VALUES[one.value_bytes])
        part = slice(one.start, one.start + one.rows)
        rows[part] = own.reshape(one.rows, *one.row_shape)
        has_row[part] = True
    return Experts(rows, has_row)


def ragged_of(one: TokenColumn) -> Ragged:
    """Returns the rows of a checked column without a shape."""
    lengths = np.frombuffer(one.data, _LENGTH, one.rows)
    offsets = np.zeros(one.rows + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return Ragged(np.frombuffer(one.data[4 * one.rows :], _VALUES[one.value_bytes]), offsets)


class Columns(NamedTuple):
    """The columns of N tokens."""

    pieces: tuple[TokenColumn, ...] = ()
    """Rows of consecutive tokens, each with the engine that gave them."""
    tokens: int = 0
    """N."""

    @classmethod
    def read(cls, row: trajectory_pb2.Trajectory | trajectory_pb2.TrajectoryTree) -> "Columns":
        """Reads the columns of a trajectory or a tree.

        Raises:
            InvalidFieldError: They overlap, are not within the tokens, or have another size.
        """
        count = len(row.tokens.loss_mask_u8)
        check_columns(row.columns, "columns", count)
        return cls(tuple(row.columns), count)

    def sampling_support(self) -> Ragged | None:
        """Returns the ids from which each token was sampled, uint32. None without this column.

        A row without ids means that nothing was cut off, or that the token was not sampled.
        """
        return support_of(self.pieces, self.tokens)

    def routed_experts(self) -> Experts | None:
        """Returns the experts of each token. None without this column.

        The last token of a sequence has no row, because no model was run on it.
        """
        return experts_of(self.pieces, self.tokens)
