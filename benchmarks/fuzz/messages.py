"""Messages of any type: filled at random, or changed from ones that are valid."""

import copy
import random
from collections.abc import Sequence
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from benchmarks.fuzz import values

_DEPTH = 5
_BELIEVED = frozenset(("rollmesh.internal.v1.ReleaseLease.engine_fault",))
"""Fields by which a gateway, which is believed, takes an engine out of service until it registers
again: with two such words the agents beside would have no engine."""
_KINDS = {
    FieldDescriptor.TYPE_INT32: "int32",
    FieldDescriptor.TYPE_UINT32: "uint32",
    FieldDescriptor.TYPE_INT64: "int64",
    FieldDescriptor.TYPE_UINT64: "uint64",
    FieldDescriptor.TYPE_FIXED32: "uint32",
    FieldDescriptor.TYPE_FIXED64: "uint64",
}


class Messages:
    """Makes and changes messages. The same seed and pool give the same ones."""

    def __init__(self, rng: random.Random, pool: Sequence[str], forbidden: frozenset[str]) -> None:
        """Takes the source of choices.

        Args:
            rng: The source of choices.
            pool: Texts of this run, such as ids of its own sessions. It may grow.
            forbidden: Texts that are never sent, such as the name of the trainer beside.
        """
        self._rng = rng
        self._pool = pool
        self._forbidden = forbidden

    def made(self, descriptor: Descriptor, depth: int = 0) -> Message:
        """Returns a message with random fields."""
        message = GetMessageClass(descriptor)()
        chance = self._rng.choice((0.0, 0.2, 0.5, 0.9))
        for field in descriptor.fields:
            if self._rng.random() < chance:
                self._set(message, field, depth)
        return message

    def changed(self, message: Message) -> Message:
        """Returns a copy in which a few fields, at any depth, have other values."""
        made = copy.deepcopy(message)
        for _ in range(self._rng.choice((1, 1, 2, 5))):
            self._change(made)
        return made

    def _change(self, message: Message) -> None:
        inner = [value for _, field in message.ListFields() for value in _messages(field)]
        if inner and self._rng.random() < 0.6:
            self._change(self._rng.choice(inner))
            return
        if not message.DESCRIPTOR.fields:
            return
        field: Any = self._rng.choice(message.DESCRIPTOR.fields)
        if self._rng.random() < 0.25:
            message.ClearField(field.name)
        else:
            self._set(message, field, _DEPTH - 2)

    def _set(self, message: Message, field: Any, depth: int) -> None:
        if field.full_name in _BELIEVED:
            return
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            self._set_map(getattr(message, field.name), field.message_type, depth)
        elif field.is_repeated:
            values_of = getattr(message, field.name)
            most = 300 if self._rng.random() < 0.02 else 4
            for _ in range(self._rng.randrange(most)):
                if field.message_type is None:
                    values_of.append(self._scalar(field))
                elif depth < _DEPTH:
                    values_of.add().CopyFrom(self.made(field.message_type, depth + 1))
        elif field.message_type is None:
            setattr(message, field.name, self._scalar(field))
        elif depth < _DEPTH:
            getattr(message, field.name).CopyFrom(self.made(field.message_type, depth + 1))

    def _set_map(self, entries: Any, entry: Descriptor, depth: int) -> None:
        key, value = entry.fields_by_name["key"], entry.fields_by_name["value"]
        for _ in range(self._rng.randrange(4)):
            if value.message_type is None:
                entries[self._scalar(key)] = self._scalar(value)
            elif depth < _DEPTH:
                entries[self._scalar(key)].CopyFrom(self.made(value.message_type, depth + 1))

    def _scalar(self, field: Any) -> Any:
        rng = self._rng
        match field.type:
            case FieldDescriptor.TYPE_STRING:
                given = values.text(rng, self._pool)
                return "" if given in self._forbidden else given
            case FieldDescriptor.TYPE_BYTES:
                return rng.randbytes(rng.choice((0, 1, 3, 4, 8, 32, 400)))
            case FieldDescriptor.TYPE_BOOL:
                return rng.random() < 0.5
            case FieldDescriptor.TYPE_ENUM:
                return rng.choice((*field.enum_type.values_by_number, -1, 99, 2**31 - 1))
            case FieldDescriptor.TYPE_FLOAT | FieldDescriptor.TYPE_DOUBLE:
                return rng.choice(values.FLOATS)
            case _:
                return rng.choice(values.INTEGERS[_KINDS[field.type]])


def _messages(value: Any) -> list[Message]:
    """Returns the messages that the value of a field consists of."""
    if isinstance(value, Message):
        return [value]
    if hasattr(value, "values"):
        return [one for one in value.values() if isinstance(one, Message)]
    if isinstance(value, str | bytes | int | float):
        return []
    return [one for one in value if isinstance(one, Message)]
