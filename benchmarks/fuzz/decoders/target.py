"""A decoder under fuzz, and the changes of its inputs."""

import json
import random
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import DecodeError, Message

from benchmarks.fuzz import values
from benchmarks.fuzz.bodies import Bodies
from benchmarks.fuzz.messages import Messages
from rollmesh.runtime.errors import RollmeshError

Change = Callable[[random.Random, bytes], bytes]
_POOL = ("policy", "resp_s-2", "rmk-s-k", "fuzz", "g")


class BrokenPropertyError(Exception):
    """A decoder took an input, and what it made of it is wrong."""


@dataclass(frozen=True, slots=True)
class Target:
    """A decoder under fuzz."""

    name: str
    run: Callable[[bytes], object]
    """Feeds it. Raises one of `errors` if it refuses the input."""
    seeds: Callable[[], Sequence[bytes]]
    """Returns inputs that it takes."""
    change: Change
    """Returns an input with a change that keeps most of its form."""
    errors: tuple[type[Exception], ...] = (RollmeshError,)


def any_bytes(rng: random.Random, data: bytes) -> bytes:
    """Changes bytes."""
    return values.changed_bytes(rng, data, data)


def json_value(rng: random.Random, data: bytes) -> bytes:
    """Changes a JSON text in one value."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return any_bytes(rng, data)
    return Bodies(rng, _POOL).changed(value)


def message_of(kind: type[Message]) -> Change:
    """Returns what changes a message of a type in a few fields."""
    descriptor: Any = kind.DESCRIPTOR

    def change(rng: random.Random, data: bytes) -> bytes:
        try:
            message: Any = kind.FromString(data)
        except DecodeError:
            return any_bytes(rng, data)
        messages = Messages(rng, _POOL, frozenset())
        made = messages.changed(message) if rng.random() < 0.9 else messages.made(descriptor)
        return made.SerializeToString()

    return change


def text_with(parts: Sequence[str]) -> Change:
    """Returns what changes a text: parts are put in, taken out, repeated and spoilt."""

    def change(rng: random.Random, data: bytes) -> bytes:
        text = data.decode("utf-8", "surrogateescape")
        at, part = rng.randrange(len(text) + 1), rng.choice(parts)
        match rng.randrange(6):
            case 0 | 1 | 2:
                text = text[:at] + part + text[at:]
            case 3:
                text = text[:at] + text[at + rng.randrange(1, 12) :]
            case 4:
                text = text[:at] + values.changed_text(rng, part) + text[at:]
            case _:
                text = values.changed_text(rng, text)
        return text.encode("utf-8", "surrogatepass")

    return change


def framed(parts: Sequence[bytes]) -> bytes:
    """Returns several inputs as one."""
    return b"".join(struct.pack("<H", len(part)) + part for part in parts)


def frames(data: bytes) -> list[bytes]:
    """Returns the inputs that one consists of. The last may be cut."""
    parts, at = list[bytes](), 0
    while at + 2 <= len(data):
        (size,) = struct.unpack_from("<H", data, at)
        parts.append(data[at + 2 : at + 2 + size])
        at += 2 + size
    return parts


def one_frame(*changes: Change) -> Change:
    """Returns what changes one of several inputs, or their order.

    Args:
        changes: Of each input. The last one is that of all further ones.
    """

    def change(rng: random.Random, data: bytes) -> bytes:
        parts = frames(data)
        if not parts or rng.random() < 0.05:
            return any_bytes(rng, data)
        at = rng.randrange(len(parts))
        match rng.randrange(10):
            case 0:
                parts.insert(at, rng.choice(parts))
            case 1:
                parts.pop(at)
            case _:
                parts[at] = changes[min(at, len(changes) - 1)](rng, parts[at])
        return framed([part[:65_535] for part in parts])

    return change


def expect(right: bool, what: str) -> None:  # like assert
    """Raises unless a property holds.

    Raises:
        BrokenPropertyError: It does not.
    """
    if not right:
        raise BrokenPropertyError(what)
