"""Bodies that are made to cost much: each is served, or refused with what is wrong with it."""

import json
import threading
from collections.abc import Iterable
from typing import Any

import httpx2
import orjson
import pytest

from rollmesh.runtime.codec import text_of
from rollmesh.runtime.errors import InvalidFieldError
from rollmesh.sidecar import SidecarConfig
from tests.sidecar.reading import counted, read, read_bytes, told, user
from tests.sidecar.scripted_gateway import KEY, ScriptedGateway, serving, sidecar_of

PATHS = ("chat/completions", "responses", "responses/input_tokens", "messages",
         "messages/count_tokens")  # fmt: skip
SAID = {"role": "user", "content": "Hi"}
TOOL = {"name": "f", "parameters": {"type": "object"}}
BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": {
        "messages": [SAID, {"role": "assistant", "content": "x"}, SAID],
        "tools": [{"type": "function", "function": TOOL}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}},
        "chat_template_kwargs": {"x": 1}, "metadata": {"a": "b"}, "logit_bias": {"1": 2},
        "stop": ["x"], "seed": 1, "temperature": 1, "max_tokens": 5, "n": 1, "top_logprobs": 1,
        "tool_choice": {"type": "function", "function": {"name": "f"}}, "unknown": {},
    },
    "responses": {
        "input": [SAID], "tools": [{"type": "function", **TOOL}], "metadata": {"a": "b"},
        "text": {"format": {"type": "text"}}, "reasoning": {"effort": "low"}, "temperature": 1,
        "instructions": "x", "include": [], "previous_response_id": None, "tool_choice": "auto",
        "max_output_tokens": 5, "unknown": {},
    },
    "messages": {
        "messages": [SAID, {"role": "assistant", "content": "x"}, SAID], "max_tokens": 5,
        "tools": [{"name": "f", "input_schema": {"type": "object"}}], "system": "x",
        "tool_choice": {"type": "auto"}, "metadata": {"user_id": "x"}, "temperature": 1,
        "stop_sequences": ["x"], "thinking": {"type": "disabled"}, "unknown": {},
    },
}  # fmt: skip
BODIES["responses/input_tokens"] = BODIES["responses"]
BODIES["messages/count_tokens"] = BODIES["messages"]


def nested(depth: int, opening: bytes = b"[", closing: bytes = b"]") -> bytes:
    return opening * depth + closing * depth


DEEP = "objects, 1,000 deep"
HOSTILE = {
    "lists, 300 deep": nested(300),
    "lists, 1,000 deep": nested(1000),
    DEEP: nested(1000, b'{"a":', b"}").replace(b":}", b":0}"),
    "lists, 500,000 deep": nested(500_000),
    "objects, 100,000 deep": nested(100_000, b'{"a":', b"}"),
    "a number of 100,000 digits": b"1" * 100_000,
    "a number over any double": b"1e999",
    "a number over 64 bits": b"123456789012345678901234567890",
    "half a surrogate": b'"\\ud800"',
    "a NUL": b'"\\u0000"',
    "lists without end": b"[" + b"[]," * 600_000 + b"[]]",
    "names without end": b"{" + b'"":0,' * 400_000 + b'"":0}',
    "a very long name": b'{"' + b"n" * 1_000_000 + b'":0}',
}


def places(value: Any) -> list[list[Any]]:
    """Returns the way to every value within a body."""
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
    return [[], *([key, *rest] for key, one in items for rest in places(one))]


def with_at(body: Any, way: list[Any], mark: str) -> Any:
    """Returns a copy of a body with a mark at one place."""
    if not way:
        return mark
    copy: Any = dict(body) if isinstance(body, dict) else list(body)
    copy[way[0]] = with_at(body[way[0]], way[1:], mark)
    return copy


@pytest.mark.parametrize("path", PATHS)
async def test_a_hostile_value_anywhere_is_served_or_refused_by_its_name(
    path: str, gateway: ScriptedGateway, big_url: str
) -> None:
    ways = places(BODIES[path])
    assert len(ways) > 20
    async with httpx2.AsyncClient(base_url=big_url, timeout=60) as http:
        for name, hostile in HOSTILE.items():
            everywhere = ways if name == DEEP else ways[1 :: len(ways) // 2]
            for way in everywhere:
                body = orjson.dumps(with_at(BODIES[path], way, "MARK"))
                answer = await http.post(
                    f"/sessions/{KEY}/v1/{path}", content=body.replace(b'"MARK"', hostile, 1)
                )
                assert answer.status_code in {200, 400}, (name, way, answer.text[:300])
                if answer.status_code == 400:
                    assert answer.json()["error"]["type"] == "invalid_request_error"
                    assert len(answer.content) < 3000, (name, way)


async def test_the_last_of_two_equal_names_counts_as_in_every_json_library(
    gateway: ScriptedGateway, big_url: str
) -> None:
    twice = b'{"messages": 7, "messages": [{"role": "user", "content": "a", "content": "b"}]}'
    async with httpx2.AsyncClient(base_url=big_url) as http:
        answer = await http.post(f"/sessions/{KEY}/v1/chat/completions", content=twice)
    assert answer.status_code == 200
    assert [text_of(one.messages[0]) for one in gateway.requests] == ["b"]


@pytest.mark.parametrize(
    ("sent", "text"),
    [
        pytest.param(rb"a \ud83d", "a \ufffd", id="first half"),
        pytest.param(rb"\uDE00 b", "\ufffd b", id="second half"),
        pytest.param(rb"\ud83d\ud83d\ude00\ude00", "\ufffd\U0001f600\ufffd", id="around a pair"),
        pytest.param(rb"\\ud83d \ud83d", "\\ud83d \ufffd", id="beside a backslash"),
        pytest.param(rb"\\\ud83d", "\\\ufffd", id="after a backslash"),
        pytest.param(b"\xed\xa0\xbd", "\ufffd", id="encoded"),
    ],
)
def test_half_an_emoji_is_read_as_the_replacement_character(sent: bytes, text: str) -> None:
    before = counted("replaced_surrogates")
    body = b'{"messages": [{"role": "user", "content": "%s"}]}' % sent
    assert told(read_bytes("chat/completions", body)) == [("user", text)]
    assert counted("replaced_surrogates") == before + 1


HALF = {
    "chat/completions": [
        {"role": "system", "content": "a \ud83d"},
        {"role": "user", "name": "\ud83d", "content": [{"type": "text", "text": "b \ude00"}]},
        {
            "role": "assistant",
            "reasoning_content": "c \ud83d",
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "f", "arguments": "\ud83d"}}
            ],
        },
        {"role": "tool", "tool_call_id": "1", "content": "\ud83d"},
    ],
    "responses": [
        {"role": "user", "content": "a \ud83d"},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "\ud83d"},
        {"type": "function_call_output", "call_id": "1", "output": "\ud83d"},
    ],
    "messages": [
        {"role": "user", "content": "a \ud83d"},
        {
            "role": "assistant",
            "content": [
                {"type": "tool_use", "id": "1", "name": "f", "input": {"\ud83d": "\ud83d"}}
            ],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "1", "content": "\ud83d"}],
        },
    ],
}


@pytest.mark.parametrize("path", HALF)
async def test_a_conversation_with_half_an_emoji_reaches_the_gateway(
    path: str, gateway: ScriptedGateway, big_url: str
) -> None:
    name = "input" if path == "responses" else "messages"
    tool = {"name": "f", "description": "\ud83d", "parameters": {"type": "object"}}
    tools: dict[str, Any] = {
        "chat/completions": {"type": "function", "function": tool},
        "responses": {"type": "function", **tool},
        "messages": {"name": "f", "description": "\ud83d", "input_schema": {"type": "object"}},
    }
    body = {name: HALF[path], "tools": [tools[path]], "max_tokens": 5}
    async with httpx2.AsyncClient(base_url=big_url) as http:
        answer = await http.post(f"/sessions/{KEY}/v1/{path}", content=json.dumps(body).encode())
    assert answer.status_code == 200, answer.text
    (request,) = gateway.requests
    assert "a \ufffd" in [text_of(one) for one in request.messages]
    assert "\ufffd" in [text_of(one) for one in request.messages if one.tool_call_id]
    assert "\ufffd" in request.tools_json
    calls = [call for one in request.messages for call in one.tool_calls]
    assert ["\ufffd" in call.arguments_json for call in calls] == [True]


MANY, BROKEN = "has more than 1,000,000 parts", "is not JSON"


@pytest.mark.parametrize(
    ("begin", "part", "problem"),
    [
        pytest.param(b'{"a": [', b"[],", MANY, id="lists"),
        pytest.param(b'{"a": [', b"1,", MANY, id="numbers"),
        pytest.param(b'{"a": [', b'"",', MANY, id="texts"),
        pytest.param(b"{", b'"a\\\\":{},', MANY, id="names that end with a backslash"),
        pytest.param(b"", b'"', MANY, id="quotes"),
        pytest.param(b'{"', b'\\"', BROKEN, id="a text that does not end"),
        pytest.param(b'{"a": "', b"\\", BROKEN, id="backslashes"),
        pytest.param(b"", b" ", BROKEN, id="blanks"),
        pytest.param(b'{"a": "', rb"\ud83d", BROKEN, id="halves of emojis"),
    ],
)
def test_a_body_with_too_many_parts_is_not_parsed(begin: bytes, part: bytes, problem: str) -> None:
    with pytest.raises(InvalidFieldError, match=problem):
        read_bytes("chat/completions", begin + part * (4_000_000 // len(part)))


def test_a_long_text_has_few_parts_whatever_it_says() -> None:
    text = 'f([{"a": 1}], "\\") ' * 200_000
    assert told(read("chat/completions", messages=[user(text)])) == [("user", text)]


@pytest.mark.parametrize(
    ("key", "bodies", "large_ones"),
    [
        pytest.param("rmk-5e55aaa1-secret", ["x"], set(), id="a small one"),
        pytest.param("rmk-5e55aaa2-secret", ["xx"], {"elsewhere"}, id="a large one"),
        pytest.param("rmk-5e55aaa3-secret", ["xx", "xxy"], set(), id="little that is new"),
        pytest.param("rmk-5e55aaa4-secret", ["xx", "xxyy"], {"elsewhere"}, id="much that is new"),
    ],
)
async def test_much_new_json_is_parsed_off_the_loop(
    monkeypatch: pytest.MonkeyPatch,
    gateway: ScriptedGateway,
    key: str,
    bodies: list[str],
    large_ones: set[str],
) -> None:
    found, here, loads = set[str](), threading.get_ident(), orjson.loads

    def noted(data: bytes) -> Any:
        if len(data) >= 65_536:
            found.add("here" if threading.get_ident() == here else "elsewhere")
        return loads(data)

    monkeypatch.setattr(orjson, "loads", noted)
    async with serving(gateway) as address, sidecar_of(SidecarConfig(gateway=address)) as url:
        async with httpx2.AsyncClient(base_url=url, timeout=60) as http:
            for texts in bodies:
                found.clear()
                body = {"messages": [user(one * 40_000) for one in texts]}
                answer = await http.post(f"/sessions/{key}/v1/chat/completions", json=body)
                assert answer.status_code == 200
    assert found == large_ones
    assert [len(one.messages) for one in gateway.requests] == list(map(len, bodies))
