"""Nested messages as bytes: long values are embedded without being parsed or copied."""

from collections.abc import Iterator, Sequence

_LENGTH_DELIMITED = 2
_MORE, _BITS, _TAG_BITS = 0x80, 7, 3


def nested(number: int, pieces: Sequence[bytes | memoryview]) -> list[bytes | memoryview]:
    """Returns the serialised field whose value is the concatenation of the given pieces.

    Args:
        number: Number of the field, which holds a message, bytes or a string.
        pieces: The serialised value, in pieces.
    """
    head = _varint(number << _TAG_BITS | _LENGTH_DELIMITED)
    return [head + _varint(sum(map(len, pieces))), *pieces]


def values(data: bytes) -> Iterator[memoryview]:
    """Yields the field values of a message whose fields are all messages, bytes or strings."""
    view, at = memoryview(data), 0
    while at < len(view):
        _, at = _read_varint(view, at)
        size, at = _read_varint(view, at)
        yield view[at : at + size]
        at += size


def _varint(value: int) -> bytes:
    parts = bytearray()
    while value >= _MORE:
        parts.append(value & (_MORE - 1) | _MORE)
        value >>= _BITS
    parts.append(value)
    return bytes(parts)


def _read_varint(view: memoryview, at: int) -> tuple[int, int]:
    """Returns a number and the offset after it."""
    value = shift = 0
    while view[at] & _MORE:
        value |= (view[at] & (_MORE - 1)) << shift
        at, shift = at + 1, shift + _BITS
    return value | view[at] << shift, at + 1
