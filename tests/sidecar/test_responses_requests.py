"""Responses as agents send them: a sampled turn is one message, however its items come back."""

from typing import Any

import orjson
import pytest
from openai.types.responses import response_create_params

from rollmesh.runtime.codec import text_of
from rollmesh.sidecar import seal
from rollmesh.v1 import chat_pb2, gateway_pb2
from tests.sidecar import reading
from tests.sidecar.parameters import fields_of_sdk
from tests.sidecar.reading import KEY, ignored, refused_field, told, user

ANSWER = "5e55-3"
FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}
CUSTOM = {
    "type": "custom",
    "name": "patch",
    "description": "Patches.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: X"},
}
SPACE = {"type": "namespace", "name": "crew", "description": "Others.", "tools": [FUNCTION, CUSTOM]}
TURN = ("assistant", "Text.", "Hm.", ["c0 f {}", "c1 g {}"])


def read(*items: Any, **more: Any) -> gateway_pb2.ChatRequest:
    return reading.read("responses", **({"input": list(items)} if items else {}), **more)


def messages(*items: Any) -> list[tuple[str, str, str, list[str]]]:
    """Role, text, reasoning and calls of each message."""
    request = read(*items)
    return [
        (
            role,
            text,
            one.reasoning_content,
            [f"{call.id} {call.name} {call.arguments_json}" for call in one.tool_calls],
        )
        for one, (role, text) in zip(request.messages, told(request), strict=True)
    ]


def printed(*tools: Any, **more: Any) -> list[Any]:
    """The functions that the template prints."""
    found = read(**more, tools=list(tools)).tools_json
    return [one["function"] for one in orjson.loads(found)] if found else []


def said(text: str, answer: str = "") -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": []}
    item = {"type": "message", "role": "assistant", "content": [part], "status": "completed"}
    return {**item, "id": f"msg_{answer}"} if answer else item


def thought(text: str, answer: str = "", **fields: Any) -> dict[str, Any]:
    part = {"type": "reasoning_text", "text": text}
    item = {"type": "reasoning", "summary": [], "content": [part], **fields}
    return {**item, "id": f"rs_{answer}"} if answer else item


def called(name: str, at: int = 0, answer: str = "", **fields: Any) -> dict[str, Any]:
    item = {"type": "function_call", "call_id": f"c{at}", "name": name, "arguments": "{}", **fields}
    return {**item, "id": f"fc_{answer}_{at}"} if answer else item


def output(at: int, given: Any) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": f"c{at}", "output": given}


def added(tools: Any) -> dict[str, Any]:
    return {"type": "additional_tools", "role": "developer", "tools": tools}


def test_every_parameter_of_the_openai_sdk_is_in_the_table() -> None:
    fields = fields_of_sdk(response_create_params, "ResponseCreateParams")
    assert len(fields) > 25
    assert fields <= reading.table("responses")


def test_served_parameters_arrive() -> None:
    request = read(
        max_output_tokens=7,
        temperature=0.5,
        truncation="disabled",
        parallel_tool_calls=False,
        reasoning={"effort": "none", "summary": "auto"},
        text={"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}},
        instructions="Be.",
    )
    assert (request.sampling.max_tokens, request.sampling.temperature) == (7, 0.5)
    assert request.parallel_tool_calls is False
    assert request.template_options_json == '{"enable_thinking":false,"reasoning_effort":"none"}'
    assert request.json_format.schema_json == '{"type":"object"}'
    assert told(request) == [("system", "Be."), ("user", "Hi")]


@pytest.mark.parametrize(
    ("sealed", "answer"),
    [
        pytest.param(seal(KEY, "chatcmpl-5e55-7", "Hm."), "chatcmpl-5e55-7", id="as sampled"),
        pytest.param(seal(KEY, "chatcmpl-5e55-7", "Oh."), "", id="another text"),
        pytest.param(seal("rmk-5e56-secret", "chatcmpl-5e55-7", "Hm."), "", id="another session"),
        pytest.param("AAAA", "", id="another server"),
    ],
)
def test_a_seal_names_the_answer_where_items_have_no_ids(sealed: str, answer: str) -> None:
    request = read(thought("Hm.", encrypted_content=sealed), said("Text."))
    assert [one.answer_id for one in request.messages] == [answer]


@pytest.mark.parametrize(
    "items",
    [
        [thought("Hm.", ANSWER), said("Text.", ANSWER), called("f", 0, ANSWER),
         called("g", 1, ANSWER)],
        [thought("Hm."), said("Text."), called("f"), called("g", 1)],
        [thought("Hm.", ANSWER), called("f", 0, ANSWER), called("g", 1, ANSWER),
         {**said("Text.", ANSWER), "id": f"msg_{ANSWER}_1"}],
        [{**thought("Hm."), "id": "rs_68af"}, {**said("Text."), "id": "msg_68b0"},
         {**called("f"), "id": "fc_call_1"}, {**called("g", 1), "id": "fc_call_2"}],
    ],
    ids=["with ids", "without ids", "text after the calls", "ids of another server"],
)  # fmt: skip
def test_the_items_of_a_turn_are_one_message(items: list[Any]) -> None:
    assert messages(*items) == [TURN]
    (message,) = read(*items).messages
    assert message.answer_id == (f"chatcmpl-{ANSWER}" if ANSWER in str(items) else "")


def test_ids_tell_turns_apart_and_without_ids_reasoning_and_a_second_text_do() -> None:
    first, second = read(said("A", "5e55-3"), said("A", "5e55-4")).messages
    assert (first.answer_id, second.answer_id) == ("chatcmpl-5e55-3", "chatcmpl-5e55-4")
    items = [said("A"), thought("Hm."), said("B"), said("C")]
    found = [(text, reasoning) for _, text, reasoning, _ in messages(*items)]
    assert found == [("A", ""), ("B", "Hm."), ("C", "")]


def test_a_text_is_the_same_as_a_string_and_as_a_list() -> None:
    parts = [{"type": "input_text", "text": "Hel"}, {"type": "input_text", "text": "lo"}]
    assert read(user(parts)) == read(user("Hello")) == read(input="Hello")
    assert told(read(user(parts))) == [("user", "Hello")]
    assert read(output(0, parts)) == read(output(0, "Hello"))


def test_items_of_codex_are_one_turn_after_another() -> None:
    # Reasoning without content, calls first and then all outputs with ids of Codex's own.
    encrypted = {"type": "encrypted_content", "encrypted_content": "Do."}
    items = [
        {"role": "developer", "content": [{"type": "input_text", "text": "Be."}]},
        user([{"type": "input_text", "text": "Do."}]),
        {"type": "reasoning", "id": f"rs_{ANSWER}", "summary": [], "content": None},
        called("spawn_agent", 0, ANSWER, namespace="multi_agent_v1"),
        called("exec_command", 1, ANSWER),
        {**output(0, "a"), "id": "fco_1"},
        {**output(1, "b"), "id": "fco_2"},
        {
            "type": "agent_message", "author": "/root", "recipient": "/root/a",
            "content": [{"type": "input_text", "text": "Payload:\n"}, encrypted],
        },
    ]  # fmt: skip
    calls = ["c0 multi_agent_v1__spawn_agent {}", "c1 exec_command {}"]
    assert messages(*items) == [
        ("system", "Be.", "", []),
        ("user", "Do.", "", []),
        ("assistant", "", "", calls),
        ("tool", "a", "", []),
        ("tool", "b", "", []),
        ("user", "Payload:\nDo.", "", []),
    ]


def test_reasoning_may_come_back_as_its_summary() -> None:
    item = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]}
    assert messages(item) == [("assistant", "", "Hm.", [])]


def test_the_input_of_a_custom_tool_becomes_its_arguments_again() -> None:
    item = {"type": "custom_tool_call", "call_id": "c0", "name": "patch", "input": 'a"\n'}
    assert messages(item)[0][3] == [r'c0 patch {"input":"a\"\n"}']
    raw = {**item, "id": f"ctr_{ANSWER}_0", "input": '{"other": 1}'}
    assert messages(raw)[0][3] == ['c0 patch {"other": 1}']


def test_references_name_their_answers_once() -> None:
    items = [{"type": "item_reference", "id": f"{kind}_{ANSWER}"} for kind in ("rs", "msg")]
    request = read(user("Hi"), *items, {"id": f"fc_{ANSWER}_0"})
    assert [one.answer_id for one in request.messages] == ["", f"chatcmpl-{ANSWER}"]


def test_images_are_parts_of_messages_and_outputs() -> None:
    image = {"type": "input_image", "image_url": "data:image/png;base64,UE5H", "detail": "auto"}
    texts = [{"type": "input_text", "text": one} for one in "ab"]
    first, second = read(user([*texts, image]), output(0, [image])).messages
    assert text_of(first) == "ab"
    for part, field in (
        (first.content[1], "input[0].content[2].image_url"),
        (second.content[0], "input[1].output[0].image_url"),
    ):
        assert part.image == chat_pb2.Media(media_type="image/png", data=b"PNG", field=field)


# Tools


def test_tools_are_shown_as_functions_with_names_that_the_model_tells_apart() -> None:
    plain = {"name": "f", "parameters": {"type": "object"}, "strict": True}
    crew_f, custom, function = printed(SPACE, FUNCTION)
    assert (crew_f, function) == ({**plain, "name": "crew__f"}, plain)
    assert (custom["name"], custom["description"]) == ("crew__patch", "Patches.")
    assert custom["parameters"]["required"] == ["input"]
    assert "lark grammar:\nstart: X" in custom["parameters"]["properties"]["input"]["description"]


def test_web_search_is_dropped_and_counted_because_codex_always_offers_it() -> None:
    before = ignored("tools.web_search")
    assert read(tools=[{"type": "web_search", "external_web_access": True}]) == read()
    assert ignored("tools.web_search") == before + 1
    assert refused_field("responses", tool_choice={"type": "web_search"}) == "tool_choice"


def test_tools_of_items_follow_or_replace_the_tools_of_the_body() -> None:
    newer = {**FUNCTION, "description": "Newer."}
    items = [added([SPACE]), user("Do."), called("f", 0, ANSWER), added([newer]), added(None)]
    functions = printed(FUNCTION, CUSTOM, input=items)
    assert [one["name"] for one in functions] == ["f", "patch", "crew__f", "crew__patch"]
    assert functions[0]["description"] == "Newer."
    assert len(read(*items).messages) == 2


def test_many_items_that_add_tools_cost_time_in_proportion_to_their_number() -> None:
    """Each item copied all tools that were known before it: a million items took hours."""
    many = [{**FUNCTION, "name": f"g{at}"} for at in range(2000)]
    assert len(printed(*many, input=[added([FUNCTION])] * 25_000)) == len(many) + 1


@pytest.mark.parametrize(
    ("choice", "found"),
    [
        (None, (gateway_pb2.TOOL_CHOICE_UNSPECIFIED, "")),
        ("required", (gateway_pb2.TOOL_CHOICE_REQUIRED, "")),
        ({"type": "function", "name": "g"}, (gateway_pb2.TOOL_CHOICE_NAMED, "g")),
        ({"type": "custom", "name": "patch"}, (gateway_pb2.TOOL_CHOICE_NAMED, "crew__patch")),
    ],
)
def test_a_choice_names_the_tool_as_the_model_knows_it(choice: Any, found: Any) -> None:
    request = read(tools=[SPACE], tool_choice=choice)
    assert (request.tool_choice, request.tool_name) == found


@pytest.mark.parametrize(
    ("field", "more"),
    [
        ("input", {"input": None}),
        ("input[0]", {"input": ["text"]}),
        ("input[0].role", {"input": [{"role": "robot", "content": "x"}]}),
        ("input[0].type", {"input": [{"type": "web_search_call", "id": "ws_1"}]}),
        (
            "input[0].content[0].image_url",
            {"input": [user([{"type": "input_image", "image_url": "data:"}])]},
        ),
        (
            "input[0].content[0].image_url",
            {"input": [user([{"type": "input_image", "image_url": "http://[::1]/x"}])]},
        ),
        (
            "input[0].content[0].file_id",
            {"input": [user([{"type": "input_image", "file_id": "f"}])]},
        ),
        ("input[0].content[0]", {"input": [user([{"type": "input_file"}])]}),
        ("input[0].content", {"input": [user(7)]}),
        ("input[0].call_id", {"input": [{**called("f"), "call_id": None}]}),
        ("input[0].name", {"input": [{"type": "function_call", "call_id": "c"}]}),
        ("input[0].id", {"input": [{"type": "item_reference", "id": "other"}]}),
        ("input[0].encrypted_content", {"input": [{"type": "reasoning", "encrypted_content": 7}]}),
        ("input[0].tools", {"input": [added("f")]}),
        ("input[0].tools[0].type", {"input": [added([{"type": "shell"}])]}),
        ("truncation", {"truncation": "auto"}),
        ("include", {"include": ["message.output_text.logprobs"]}),
        ("include", {"include": "reasoning.encrypted_content"}),
        ("metadata", {"metadata": {"a": 1}}),
        ("reasoning", {"reasoning": "high"}),
        ("reasoning.effort", {"reasoning": {"effort": 1}}),
        ("text.format.type", {"text": {"format": {"type": "grammar"}}}),
        ("text.format.name", {"text": {"format": {"type": "json_schema", "name": ""}}}),
        ("instructions", {"instructions": ["Be."]}),
        ("previous_response_id", {"previous_response_id": 1}),
        ("tools", {"tools": {}}),
        ("tools[1]", {"tools": [SPACE, {**FUNCTION, "name": "crew__f"}]}),
        ("tools[0].tools[0].type", {"tools": [{**SPACE, "tools": [SPACE]}]}),
        *[
            ("tools[1].type", {"tools": [FUNCTION, {"type": kind}]})
            for kind in ("file_search", "code_interpreter", "image_generation", "mcp", "shell")
        ],
        (
            "tools",
            {
                "tools": [{**FUNCTION, "name": f"f{at}"} for at in range(1500)],
                "input": [added([{**FUNCTION, "name": f"g{at}"} for at in range(1500)])],
            },
        ),
    ],
)
def test_a_bad_body_is_refused_by_the_name_of_the_field(field: str, more: dict[str, Any]) -> None:
    assert refused_field("responses", **more) == field
