"""Bodies that no program should send, each refused by name, through a whole mesh."""

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from tests.meshes import Mesh

pytestmark = pytest.mark.asyncio(loop_scope="module")

ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
NUMBERS = [
    "temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
]  # fmt: skip
INTEGERS = ["top_k", "min_tokens", "seed", "max_tokens", "max_completion_tokens", "n"]
FLAGS = ["stream", "ignore_eos", "parallel_tool_calls"]


class Raw(str):
    """JSON that Python's own writer refuses, or would write otherwise."""

    __slots__ = ()


def deep(levels: int, *, of: str = "[") -> Raw:
    """A value that is nested so deeply, as JSON."""
    begin, end = ("[", "]") if of == "[" else ('{"a":', "}")
    return Raw(begin * levels + "1" + end * levels)


def json_of(pairs: dict[str, Any]) -> Raw:
    """An object as JSON."""
    fields = (
        f"{json.dumps(name)}: {value if isinstance(value, Raw) else json.dumps(value)}"
        for name, value in pairs.items()
    )
    return Raw("{" + ", ".join(fields) + "}")


def body(**more: Any) -> bytes:
    """A request with such parameters."""
    return json_of({**ASK, **more}).encode()


def tool_with(parameters: Raw) -> Raw:
    """A list of one tool."""
    function = json_of({"name": "f", "parameters": parameters})
    return Raw(f'[{{"type": "function", "function": {function}}}]')


def schema_format(form: Any) -> Raw:
    """A response format by a JSON schema."""
    return json_of({"type": "json_schema", "json_schema": form})


WRONG: dict[str, list[Any]] = {
    **{name: ["1", [], {}, True, 1e300, -1e300] for name in NUMBERS},
    **{
        name: ["1", [], {}, True, 0.5, 10**30, 2**64 - 1, 2**64, -(2**63) - 1] for name in INTEGERS
    },
    **{name: ["true", 1, 0, [], {}] for name in FLAGS},
    "model": [["m"], 5, {}, True, "m" * 100_000],
    "stop": ["", 5, True, {}, [5], [""], [[]], ["a"] * 17, ["a" * 5000], "a" * 5000],
    "stop_token_ids": [{}, "1", ["1"], [True], [-1], [2**40], [1.5], [1] * 65, deep(3)],
    "tools": [
        5, "x", {}, True, [5], [{}], [{"type": "function"}], [{"type": "function", "function": 5}],
        [{"type": "function", "function": {"name": 5}}],
        *(tool_with(deep(levels, of="{")) for levels in (300, 900)), [{}] * 2049,
    ],
    "response_format": [
        5, "json_object", [], True, {"type": "x"}, {"type": []}, {"type": "json_schema"},
        *map(schema_format, [5, [], {"name": ""}, {"name": 5}, {"name": "x", "schema": 5}]),
        *(schema_format(Raw(f'{{"name": "s", "schema": {deep(levels, of="{")}}}'))
          for levels in (100, 300, 900)),
    ],
    "tool_choice": [
        5, "x", True, [], {"type": "function"}, {"type": 5}, {"function": {"name": "f"}},
        {"type": "function", "function": {"name": ["f"]}},
    ],
    "chat_template_kwargs": [5, "x", [], True, deep(300, of="{"), deep(900, of="{")],
    "documents": [5, "x", {}, [5], [{"a": 5}], deep(900)],
    "reasoning_effort": [5, [], {}, True],
    "modalities": [5, "text", [["text"]], {}],
    "messages": [
        None, 5, "x", {}, [], True, [5], [None], [[]], deep(900), [*ASK["messages"] * 20_001],
    ],
}  # fmt: skip
WRONG_IN_MESSAGE: dict[str, list[Any]] = {
    "role": [None, 5, "", "x", [], {}, ["user"], "r" * 100_000],
    "content": [
        5, True, {}, [5], [{}], [{"type": []}], [{"type": "text"}], [{"type": "text", "text": 5}],
        [{"type": "image_url"}], deep(900),
    ],
    "name": [5, [1], {"a": 1}, True],
    "tool_call_id": [5, [1], {"a": 1}, True],
}  # fmt: skip
WRONG_IN_ANSWER: dict[str, list[Any]] = {
    "tool_calls": [
        5, {"a": 1}, [5], [{}], [{"function": 5}], [{"function": {}}], [{"function": {"name": 5}}],
        [{"id": 5, "function": {"name": "f"}}], [{"function": {"name": "f", "arguments": 5}}],
        [{"function": {"name": "f", "arguments": {"a": 1}}}], deep(900),
    ],
    "reasoning_content": [5, [1], {"a": 1}],
    "function_call": [{"a": 1}, 5],
    "audio": [{"a": 1}, 5],
}  # fmt: skip


def parameters() -> Iterator[tuple[bytes, str]]:
    """Bodies, and the parameter that the refusal begins with."""
    for name, values in WRONG.items():
        for value in values:
            yield body(**{name: value}), name
    for name in NUMBERS + INTEGERS:
        for literal in ("NaN", "Infinity", "-Infinity", "1e999", "01", "1."):
            yield body(**{name: Raw(literal)}), "body"
    for value in (5, "x", [], {"include_usage": 5}):
        yield body(stream=True, stream_options=value), "stream_options"
    yield body(tool_choice="required"), "tool"
    yield body(junk=deep(1100)), "body"


def messages() -> Iterator[tuple[bytes, str]]:
    """The same for messages."""
    for role, table in (("user", WRONG_IN_MESSAGE), ("assistant", WRONG_IN_ANSWER)):
        for name, values in table.items():
            for value in values:
                wrong = json_of({"role": role, "content": "Hi", name: value})
                yield body(messages=Raw(f"[{wrong}]")), f"messages[0].{name}"


def whole_bodies() -> Iterator[tuple[bytes, str]]:
    """Bodies that are not a JSON object."""
    for wrong in (b"", b" ", b"{", b"[]", b"5", b"null", b'"x"', b"{}}", b"\x00", b"[" * 900):
        yield wrong, "body"
    yield b"[" * 5_000_000, "body"
    yield b'{"a":' * 500_000, "body"
    yield b'{"messages": [{"role": "user", "content": "\xff"}]}', "body"
    yield '{"messages": []}'.encode("utf-16"), "body"
    yield b'\xef\xbb\xbf{"messages": 5}', "body"


async def test_every_malformed_body_is_refused_with_the_name_of_the_field(shared: Mesh) -> None:
    rows = [*whole_bodies(), *messages(), *parameters()]
    assert len(rows) > 200
    wrong: list[str] = []
    async with shared.client() as client, client.session() as session:
        async with httpx2.AsyncClient(timeout=60) as http:
            for sent, name in rows:
                answer = await http.post(f"{session.base_url}/chat/completions", content=sent)
                error = answer.json().get("error", {})
                named = str(error.get("param")).startswith(name)
                if answer.status_code != 400 or not named or not error["message"]:
                    wrong.append(f"{sent[:120]!r} {name}: {answer.status_code} {error}")
                assert len(answer.content) < 2500
        assert not wrong, "\n".join(wrong)
        after = await shared.openai(session).chat.completions.create(
            model="policy", messages=ASK["messages"]
        )
        assert after.choices[0].message.content is not None


async def test_odd_but_allowed_bodies_are_answered(shared: Mesh) -> None:
    odd = [
        body(seed=2**63 - 1, n=4),
        body(seed=-(2**63), n=2),
        body(tools=tool_with(deep(100, of="{"))),
        body(response_format=schema_format(json_of({"name": "x", "schema": deep(30, of="{")}))),
        body(chat_template_kwargs=deep(100, of="{")),
        body(messages=[{"role": "user", "content": "a\x00b\ufffe\U0010ffff\u202e"}]),
        body(metadata=deep(100), user="u" * 100_000),
        body(messages=Raw(f"[{json_of({'role': 'user', 'content': 'Hi', 'junk': deep(100)})}]")),
        body(max_tokens=2**31 - 1, temperature=0, top_p=1, top_k=-1),
        body(stop="\x00", model="\U0010ffff"),
    ]
    async with shared.client() as client, client.session() as session:
        async with httpx2.AsyncClient(timeout=60) as http:
            for sent in odd:
                answer = await http.post(f"{session.base_url}/chat/completions", content=sent)
                assert answer.status_code == 200, (sent[:100], answer.text[:300])
            url = f"{session.base_url}/chat/completions"
            for length, status in ((256, 200), (257, 400)):
                headers = {"Idempotency-Key": "k" * length}
                assert (await http.post(url, json=ASK, headers=headers)).status_code == status
