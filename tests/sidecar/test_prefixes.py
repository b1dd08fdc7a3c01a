"""A body that continues the last one of its session is read as if it came alone."""

import itertools
import json
from typing import Any

import pytest

from rollmesh.runtime.errors import InvalidFieldError
from tests.sidecar.reading import assistant, read_bytes, user

TRAP = 'text "],"messages":[{"role":"user"}],"n":[' + '\\"]}' * 20
BEGUN: list[Any] = [
    user("x" * 9_000 + TRAP),
    assistant(content=TRAP),
    user([{"type": "text", "text": TRAP}]),
]
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1]}'}}
MORE: list[Any] = [
    assistant(content="ö \ud83d", tool_calls=[CALL]),
    {"role": "tool", "tool_call_id": "1", "content": "]"},
]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"enum": [[1], []]}}}
keys = map("rmk-5e55-{}".format, itertools.count())


def sent(messages: list[Any], **more: Any) -> bytes:
    """A body as Python's client writes it."""
    return json.dumps({"model": "m", "messages": messages, "tools": [TOOL], **more}).encode()


def compact(messages: list[Any]) -> bytes:
    """A body as JavaScript's client writes it, its messages last."""
    value = {"tools": [TOOL], "model": "m", "messages": messages}
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode(
        "utf-8", "surrogatepass"
    )


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param(sent(BEGUN), sent(BEGUN + MORE), id="continued"),
        pytest.param(compact(BEGUN), compact(BEGUN + MORE), id="continued, messages last"),
        pytest.param(sent(BEGUN), compact(BEGUN + MORE), id="written differently"),
        pytest.param(sent(BEGUN, user="messages"), sent(BEGUN + MORE, user="messages"), id="name"),
        pytest.param(sent(BEGUN), sent(BEGUN + MORE, n=2, stop=["]"]), id="other parameters"),
        pytest.param(sent(BEGUN, n=2), sent(BEGUN + MORE), id="fewer parameters"),
        pytest.param(sent(BEGUN), sent(BEGUN), id="repeated"),
        pytest.param(sent(BEGUN + MORE), sent(BEGUN), id="cut"),
        pytest.param(sent(BEGUN), sent([*BEGUN[:-1], user("other"), *MORE]), id="changed"),
        pytest.param(sent(BEGUN), sent([user("x"), *BEGUN, *MORE]), id="begun differently"),
        pytest.param(
            sent(BEGUN),
            sent(BEGUN + MORE)[:-1] + b', "messages": [{"role": "user", "content": "y"}]}',
            id="messages twice",
        ),
        pytest.param(
            sent(BEGUN),
            sent(BEGUN + MORE)[:-1] + rb', "mess\u0061ges": [{"role": "user", "content": "y"}]}',
            id="messages twice, once in escapes",
        ),
        pytest.param(
            b'{"metadata": {"messages": [1]}, ' + sent(BEGUN)[1:],
            b'{"metadata": {"messages": [1]}, ' + sent(BEGUN + MORE)[1:],
            id="another list of that name",
        ),
    ],
)
def test_a_body_after_another_is_read_as_it_is_alone(first: bytes, second: bytes) -> None:
    key, alone = next(keys), next(keys)
    read_bytes("chat/completions", first, key)
    found = read_bytes("chat/completions", second, key)
    assert found == read_bytes("chat/completions", second, alone)
    third = sent([*BEGUN, *MORE, user("and now?")])
    again = read_bytes("chat/completions", third, key)
    assert again == read_bytes("chat/completions", third, next(keys))


@pytest.mark.parametrize(
    ("added", "field"),
    [
        ([assistant(content="a"), {"role": "robot"}], "messages[4].role"),
        ([user("a")] * 20_000, "messages"),
    ],
)
def test_a_fault_in_the_rest_is_named_as_in_the_complete_body(added: Any, field: str) -> None:
    key = next(keys)
    read_bytes("chat/completions", sent(BEGUN), key)
    with pytest.raises(InvalidFieldError) as caught:
        read_bytes("chat/completions", sent(BEGUN + added), key)
    assert caught.value.field == field
    read_bytes("chat/completions", sent(BEGUN + MORE), key)


def test_sessions_do_not_share_bodies() -> None:
    one, other = next(keys), next(keys)
    read_bytes("chat/completions", sent([user("secret" * 2_000)]), one)
    found = read_bytes("chat/completions", sent([user("mine" * 3_000), *MORE]), other)
    assert "secret" not in str(found)
