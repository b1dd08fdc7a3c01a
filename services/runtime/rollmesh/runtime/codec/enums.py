"""Enums on the wire: numbers that only a newer peer has a name for."""

from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from google.protobuf.descriptor import Descriptor, EnumDescriptor
from google.protobuf.message import Message

from rollmesh.runtime.errors import InvalidFieldError

_UNSPECIFIED = "UNSPECIFIED"


def name_of(enum: EnumDescriptor, number: int) -> str:
    """Returns the name of a number without the enum's prefix, such as `MAIN` for a lineage.

    A number without a name here came from a newer peer; the name is then `UNKNOWN_` and the number.
    """
    value = enum.values_by_number.get(number)
    if value is None:
        return f"UNKNOWN_{number}"
    return value.name.removeprefix(_prefix(enum))


@cache
def _prefix(enum: EnumDescriptor) -> str:
    """Returns what all names begin with: what the name of 0 has before UNSPECIFIED."""
    return str(enum.values_by_number[0].name.removesuffix(_UNSPECIFIED))


class _Enum(NamedTuple):
    """A field that holds numbers of an enum."""

    field: str
    repeated: bool
    enum: str
    numbers: frozenset[int]


@dataclass(frozen=True, slots=True)
class _Plan:
    """Where a kind of message holds enums; messages that hold none are not looked at."""

    enums: tuple[_Enum, ...]
    inner: "tuple[tuple[str, bool, _Plan], ...]"
    """Fields of messages: the name, whether it is repeated, and the plan of those messages."""


class _UnknownNumberError(Exception):
    """A number of an enum has no name; `path` grows from the field outwards."""

    def __init__(self, field: str, number: int, enum: str) -> None:
        super().__init__(field)
        self.path = field
        self.problem = f"{number} is no {enum} that this service knows; is the sender newer?"


def check_enums(message: Message) -> None:
    """Checks that every number of an enum in a message has a name here.

    The parser keeps any number, and what is kept is stored and handed on. The work grows with the
    number of messages inside the message that hold enums, never with its bytes.

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
                for at, part in enumerate(getattr(message, field)):  # noqa: B007 - says where
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
