"""Enum numbers on the wire, including numbers that only a newer peer knows."""

import base64
from functools import cache
from typing import Any, NamedTuple

from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor
from google.protobuf.message import Message

from rollmesh.runtime.errors import InvalidFieldError
from rollmesh.v1 import chat_pb2, session_pb2


def name_of(enum: EnumDescriptor, number: int) -> str:
    """Returns the name of a number without the enum's prefix, such as `MAIN` for a lineage.

    A number that this release does not know becomes `UNKNOWN_<number>`.
    """
    value = enum.values_by_number.get(number)
    if value is None:
        return f"UNKNOWN_{number}"
    prefix = enum.values_by_number[0].name.removesuffix("UNSPECIFIED")
    return str(value.name.removeprefix(prefix))


class _Field(NamedTuple):
    """A field that is an enum, or a message with enums inside."""

    name: str
    repeated: bool
    enum: str
    """Name of the enum. Empty for a message."""
    numbers: frozenset[int]
    inner: "tuple[_Field, ...]"


def check_enums(message: Message) -> None:
    """Checks that this release knows every enum number in a message.

    The parser keeps unknown numbers, and they would be stored and passed on. The cost grows with
    the number of nested messages that have enum fields, not with the size of the message.

    Raises:
        InvalidFieldError: Names the field and the number.
    """
    if (found := _unknown(message, _fields(message.DESCRIPTOR))) is not None:
        raise InvalidFieldError(*found)


def _unknown(message: Any, fields: tuple[_Field, ...]) -> tuple[str, str] | None:
    """Returns the path of the first number that is unknown, and the problem."""
    for name, repeated, enum, numbers, inner in fields:
        if enum:
            value = getattr(message, name)
            found = value if repeated else (value,)
            if found and not numbers.issuperset(found):
                number = next(number for number in found if number not in numbers)
                return name, f"{number} is not a {enum} known to this release; is the sender newer?"
        elif repeated:
            for at, part in enumerate(getattr(message, name)):
                if (wrong := _unknown(part, inner)) is not None:
                    return f"{name}[{at}].{wrong[0]}", wrong[1]
        elif message.HasField(name) and (wrong := _unknown(getattr(message, name), inner)):
            return f"{name}.{wrong[0]}", wrong[1]
    return None


@cache
def _fields(descriptor: Descriptor) -> tuple[_Field, ...]:
    """Returns the fields of a message type that are looked at, enums first."""
    enums: list[_Field] = []
    messages: list[_Field] = []
    for field in descriptor.fields:
        name, repeated, enum = field.name, field.is_repeated, field.enum_type
        if enum is not None:
            enums.append(_Field(name, repeated, enum.name, frozenset(enum.values_by_number), ()))
        elif field.message_type is not None and (inner := _fields(field.message_type)):
            messages.append(_Field(name, repeated, "", frozenset(), inner))
    return (*enums, *messages)


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
