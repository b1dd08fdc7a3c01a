"""Messages of today as clients of the last release read them, and the other way round."""

from collections.abc import Iterator
from typing import Any

import pytest
from google.protobuf import descriptor_pool, message_factory
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from rollmesh.v1 import (  # noqa: F401 - their messages are found by name
    collector_pb2,
    engine_pb2,
    errors_pb2,
    gateway_pb2,
    router_pb2,
    scorer_pb2,
    server_pb2,
)
from tests.contract.former import former

TODAY: Any = descriptor_pool.Default()
_UNKNOWN_ENUM = 9_999
_NUMBERS = {
    FieldDescriptor.CPPTYPE_INT32: 7,
    FieldDescriptor.CPPTYPE_INT64: 2**40,
    FieldDescriptor.CPPTYPE_UINT32: 7,
    FieldDescriptor.CPPTYPE_UINT64: 2**40,
    FieldDescriptor.CPPTYPE_DOUBLE: 0.5,
    FieldDescriptor.CPPTYPE_FLOAT: 0.5,
    FieldDescriptor.CPPTYPE_BOOL: True,
    FieldDescriptor.CPPTYPE_ENUM: _UNKNOWN_ENUM,
}


def filled(message_class: type[Any], *, last: bool, depth: int = 4) -> Any:
    """Returns a message with every field set, enums to values that nobody knows.

    Of a oneof, the first or the last field is set.
    """
    message = message_class()
    fields = list(message_class.DESCRIPTOR.fields)
    for field in fields if last else reversed(fields):
        if field.message_type is None:
            value: Any = _scalar(field)
        elif depth:
            inner = message_factory.GetMessageClass(field.message_type)
            value = filled(inner, last=last, depth=depth - 1)
        else:
            continue
        _set(message, field, value)
    return message


def _set(message: Any, field: Any, value: Any) -> None:
    target = getattr(message, field.name)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        if isinstance(value.value, Message):
            target[value.key].CopyFrom(value.value)
        else:
            target[value.key] = value.value
    elif field.is_repeated:
        target.append(value)
    elif field.message_type is not None:
        target.CopyFrom(value)
    else:
        setattr(message, field.name, value)


def _scalar(field: Any) -> Any:
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        return b"\x00\xff" if field.type == FieldDescriptor.TYPE_BYTES else f"a {field.name}"
    return _NUMBERS[field.cpp_type]


def today(full_name: str) -> type[Any]:
    return message_factory.GetMessageClass(TODAY.FindMessageTypeByName(full_name))


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("name", former().messages)
def test_a_message_survives_a_program_of_the_last_release(name: str, *, last: bool) -> None:
    message = filled(today(name), last=last)
    passed = former().class_of(name).FromString(message.SerializeToString())
    assert today(name).FromString(passed.SerializeToString()) == message


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("name", former().messages)
def test_a_message_of_the_last_release_says_the_same_today(name: str, *, last: bool) -> None:
    message = filled(former().class_of(name), last=last)
    passed = today(name).FromString(message.SerializeToString())
    assert not list(unknown(passed))
    assert former().class_of(name).FromString(passed.SerializeToString()) == message


def unknown(message: Any) -> Iterator[str]:
    """Yields where a message has fields that its class does not know."""
    emptied = type(message).FromString(message.SerializeToString())
    emptied.DiscardUnknownFields()
    if emptied.SerializeToString(deterministic=True) != message.SerializeToString(
        deterministic=True
    ):
        yield message.DESCRIPTOR.full_name


@pytest.mark.parametrize("name", former().services)
def test_every_method_of_the_last_release_is_there(name: str) -> None:
    found = TODAY.FindServiceByName(name).methods_by_name
    for method in former().service(name).methods:
        now = found[method.name]
        assert (now.client_streaming, now.server_streaming) == (
            method.client_streaming,
            method.server_streaming,
        )
        assert now.input_type.full_name == method.input_type.full_name
        assert now.output_type.full_name == method.output_type.full_name


@pytest.mark.parametrize("name", former().enums)
def test_every_value_of_the_last_release_has_its_number(name: str) -> None:
    found = {one.name: one.number for one in TODAY.FindEnumTypeByName(name).values}
    before = {one.name: one.number for one in former().enum(name).values}
    assert before.items() <= found.items()
