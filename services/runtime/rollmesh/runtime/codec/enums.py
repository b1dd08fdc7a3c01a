"""Enum numbers on the wire, including numbers that only a newer peer knows."""

import base64
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor
from google.protobuf.message import Message

from rollmesh.runtime.errors import InvalidFieldError
from rollmesh.v1 import chat_pb2, session_pb2

_UNSPECIFIED = "UNSPECIFIED"


def name_of(enum: EnumDescriptor, number: int) -> str:
    """Returns the name of a number without the enum's prefix, such as `MAIN` for a lineage.

    A number that this release does not know becomes `UNKNOWN_<number>`.
    """
    value = enum.values_by_number.get(number)
    if value is None:
        return f"UNKNOWN_{number}"
    return value.name.removeprefix(_prefix(enum))


@cache
def _prefix(enum: EnumDescriptor) -> str:
    """Returns the common prefix of the names: the name of 0 without UNSPECIFIED."""
    return str(enum.values_by_number[0].name.removesuffix(_UNSPECIFIED))


class _Enum(NamedTuple):
    """An enum field."""

    field: str
    repeated: bool
    enum: str
    numbers: frozenset[int]


@dataclass(frozen=True, slots=True)
class _Plan:
    """The enum fields of a message type. Message fields without enums are skipped."""

    enums: tuple[_Enum, ...]
    inner: "tuple[tuple[str, bool, _Plan], ...]"
    """Message fields: name, whether repeated, and the plan of the message type."""


class _UnknownNumberError(Exception):
    """An enum number is unknown. `path` grows from the field outwards."""

    def __init__(self, field: str, number: int, enum: str) -> None:
        super().__init__(field)
        self.path = field
        self.problem = f"{number} is not a {enum} known to this release; is the sender newer?"


def check_enums(message: Message) -> None:
    """Checks that this release knows every enum number in a message.

    The parser keeps unknown numbers, and they would be stored and passed on. The cost grows with
    the number of nested messages that have enum fields, not with the size of the message.

    Raises:
        InvalidFieldError: Names the field and the number.
    """
    try:
        _check(message, _plan(message.DESCRIPTOR))
    except _UnknownNumberError as error:
        raise InvalidFieldError(error.path, error.problem) from None


def _check(message: Any, plan: _Plan) -> None:
    for field, repeated, enum, numbers in plan.enums:
        value = getattr(message, field)
        found = value if repeated else (value,)
        if found and not numbers.issuperset(found):
            number = next(number for number in found if number not in numbers)
            raise _UnknownNumberError(field, number, enum)
    for field, repeated, inner in plan.inner:
        at = 0
        try:
            if repeated:
                for at, part in enumerate(getattr(message, field)):  # noqa: B007 - used in the path
                    _check(part, inner)
            elif message.HasField(field):
                _check(getattr(message, field), inner)
        except _UnknownNumberError as error:
            error.path = f"{field}[{at}].{error.path}" if repeated else f"{field}.{error.path}"
            raise


@cache
def _plan(descriptor: Descriptor) -> _Plan:
    enums: list[_Enum] = []
    inner: list[tuple[str, bool, _Plan]] = []
    for field in descriptor.fields:
        if field.enum_type is not None:
            numbers = frozenset(value.number for value in field.enum_type.values)
            enums.append(_Enum(field.name, field.is_repeated, field.enum_type.name, numbers))
        elif field.message_type is not None:
            plan = _plan(field.message_type)
            if plan.enums or plan.inner:
                inner.append((field.name, field.is_repeated, plan))
    return _Plan(tuple(enums), tuple(inner))


# Messages as tools print them, and as text.


def plain(message: Message) -> dict[str, Any]:
    """Returns a message as plain values: numbers as numbers, enums by their short names."""
    found: dict[str, Any] = {}
    for field, value in message.ListFields():
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            found[field.name] = dict(value)
            continue
        shown = [_plain_value(field, one) for one in (value if field.is_repeated else (value,))]
        found[field.name] = shown if field.is_repeated else shown[0]
    return found


def _plain_value(field: FieldDescriptor, value: Any) -> Any:
    if field.message_type is not None:
        return plain(value)
    if field.enum_type is not None:
        return name_of(field.enum_type, value)
    return base64.b64encode(value).decode() if isinstance(value, bytes) else value


def text_of(message: chat_pb2.ChatMessage) -> str:
    """Returns the text of a message, joined from its text parts."""
    return "".join(part.text for part in message.content)


def summary_of(session: session_pb2.SessionRecord) -> dict[str, Any]:
    """Returns the identity of a session and its outcome, by the names of `SessionRecord`."""
    purpose = session.purpose or session_pb2.SESSION_PURPOSE_TRAIN
    return {
        "session_id": session.session_id,
        "run_id": session.run_id,
        "group_id": session.group_id,
        "sample_index": session.sample_index,
        "group_size": session.group_size,
        "outcome": name_of(session_pb2.SessionOutcome.DESCRIPTOR, session.outcome),
        "purpose": name_of(session_pb2.SessionPurpose.DESCRIPTOR, purpose),
        "model": session.model,
        "capture": name_of(
            session_pb2.Capture.DESCRIPTOR, session.capture or session_pb2.CAPTURE_TOKENS
        ),
        "superseded": session.superseded,
        "abandoned": session.abandoned,
        "reward": session.reward if session.HasField("reward") else None,
        "trajectories": len(session.trajectories),
        "metadata": dict(sorted(session.metadata.items())),
        "opened_unix_ms": session.opened_unix_ms,
        "closed_unix_ms": session.closed_unix_ms,
    }
