"""Messages as agents send them: read, refused by the field's name, or read in part."""

from typing import Any

import orjson
import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from anthropic.types.beta import message_create_params as beta_params

from rollmesh.sidecar import seal
from rollmesh.v1 import chat_pb2, gateway_pb2, trajectory_pb2
from tests.sidecar import reading
from tests.sidecar.parameters import fields_of_sdk
from tests.sidecar.reading import KEY, counted, refused_field, told, user

TEXT = {"type": "text", "text": "Hi"}
CACHED = {"cache_control": {"type": "ephemeral"}}
BILLING = "x-anthropic-billing-header: cc_version=2.1.197.abc; cc_entrypoint=sdk-cli;"
USE = {"type": "tool_use", "id": "abc", "name": "f", "input": {"a": 1}}
SCHEMA = {"type": "object", "properties": {"title": {"type": "string"}}}
FORM = {"type": "json_schema", "schema": SCHEMA}
SEARCH = {"name": "ToolSearch", "input_schema": {"type": "object"}}
EDIT = {"name": "Edit", "description": "Edits.", "input_schema": {"type": "object"}}
FUNCTION = {
    "type": "function",
    "function": {"name": "Edit", "description": "Edits.", "parameters": {"type": "object"}},
}
DEFERRED = {**EDIT, "defer_loading": True}
REFERENCE = {"type": "tool_reference", "tool_name": "Edit"}
NAMED = {"type": "tool_reference", "name": "Edit"}
DEFINED = {"type": "tool_definition", "definition": EDIT}


def read(*messages: Any, **more: Any) -> gateway_pb2.ChatRequest:
    return reading.read("messages", **({"messages": list(messages)} if messages else {}), **more)


def answered(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def result(content: Any, **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "abc", "content": content, **more}


def image(**source: Any) -> dict[str, Any]:
    return {"type": "image", "source": source}


PNG = image(type="base64", media_type="image/png", data="UE5H")


def test_every_parameter_of_the_anthropic_sdk_is_in_the_table() -> None:
    fields: set[str] = set(message_count_tokens_params.MessageCountTokensParams.__annotations__)
    for module in (message_create_params, beta_params):
        fields |= fields_of_sdk(module, "MessageCreateParams")
    assert len(fields) > 20
    assert fields <= reading.table("messages")


@pytest.mark.parametrize(
    ("content", "same"),
    [
        ([TEXT], "Hi"),
        ([TEXT | CACHED], "Hi"),
        ([TEXT, {"type": "text", "text": ""}], "Hi"),
        ([result([{"type": "text", "text": "42"}])], [result("42")]),
        ([result("42", is_error=False)], [result("42")]),
        ([result("42", **CACHED)], [result("42")]),
    ],
)
def test_forms_of_one_message_are_read_alike(content: Any, same: Any) -> None:
    assert read(user(content)) == read(user(same))


def test_results_and_the_users_words_become_messages_in_order() -> None:
    blocks = [result("1"), result("2"), TEXT, {"type": "text", "text": " there"}]
    request = read(user("q"), answered(USE), user(blocks))
    assert told(request)[2:] == [("tool", "1"), ("tool", "2"), ("user", "Hi there")]
    assert request.messages[2].tool_call_id == "abc"


def test_a_failed_result_without_text_says_that_it_failed() -> None:
    request = read(user("q"), user([result(None, is_error=True), result("no", is_error=True)]))
    assert told(request)[1:] == [("tool", "Error"), ("tool", "no")]


def test_an_answer_comes_back_as_one_message() -> None:
    thinking = {"type": "thinking", "thinking": "I think.", "signature": "x"}
    redacted = {"type": "redacted_thinking", "data": "AAAA"}
    cut = USE | {"input": {"INVALID_JSON": '{"a": '}}
    request = read(user("q"), answered(thinking, redacted, TEXT, USE, cut), user("go on"))
    message = request.messages[1]
    assert message.reasoning_content == "I think."
    assert [call.arguments_json for call in message.tool_calls] == ['{"a":1}', '{"a": ']
    assert told(request)[1] == ("assistant", "Hi")


@pytest.mark.parametrize(
    ("signature", "thinking", "answer"),
    [
        pytest.param(seal(KEY, "a-1", "I think."), "I think.", "yes", id="as sampled"),
        pytest.param(seal(KEY, "a-1", "I think."), "", "yes", id="omitted"),
        pytest.param(seal(KEY, "a-1", "I think."), "I thought.", "no", id="another text"),
        pytest.param(seal("rmk-6-x", "a-1", "I think."), "I think.", "no", id="another session"),
        pytest.param("EqQBCgIYAhIM.1.2", "I think.", "no", id="another server"),
        pytest.param("ü", "I think.", "no", id="not ASCII"),
        pytest.param("", "I think.", "no", id="none"),
        pytest.param(None, "I think.", "no", id="null"),
    ],
)
def test_a_signature_tells_sampled_thinking_from_other_thinking(
    signature: str | None, thinking: str, answer: str
) -> None:
    before = counted("echoed_reasoning", sealed=answer)
    block = {"type": "thinking", "thinking": thinking, "signature": signature}
    request = read(user("q"), answered(block, TEXT), user("go on"))
    assert counted("echoed_reasoning", sealed=answer) == before + 1
    assert request.messages[1].answer_id == ("a-1" if answer == "yes" else "")
    assert request.messages[1].reasoning_content == thinking  # carried in any case


def test_a_system_prompt_is_its_texts_without_the_note_for_billing() -> None:
    blocks = [{"type": "text", "text": text} for text in (BILLING, "You are ", "Claude.")]
    assert read(user("q"), system=blocks) == read(user("q"), system="You are Claude.")
    assert told(read(user("q"), system=[blocks[0]])) == [("user", "q")]
    request = read(user("q"), {"role": "system", "content": [TEXT]}, system="You are Claude.")
    assert told(request) == [("system", "You are Claude."), ("user", "q"), ("system", "Hi")]


def test_images_are_parts_of_messages_and_results() -> None:
    linked = image(type="url", url="data:image/png;base64,UE5H")
    request = read(user([TEXT, PNG, linked]), user([result([PNG])]))
    first = request.messages[0].content
    assert [part.WhichOneof("part") for part in first] == ["text", "image", "image"]
    field = "messages[0].content[1].source.data"
    assert first[1].image == chat_pb2.Media(media_type="image/png", data=b"PNG", field=field)
    assert first[2].image.data == b"PNG"
    shown = request.messages[1].content[0].image
    assert (shown.data, shown.field) == (b"PNG", "messages[1].content[0].content[0].source.data")


@pytest.mark.parametrize(
    ("system", "last", "lineage"),
    [
        (None, "q", "UNSPECIFIED"),
        ([{"type": "text", "text": f"{BILLING} cc_is_subagent=true;"}], "q", "SUB_AGENT"),
        ([{"type": "text", "text": f"{BILLING} cc_is_subagent=false;"}], "q", "UNSPECIFIED"),
        ("Ask with cc_is_subagent=true", "q", "UNSPECIFIED"),
        (
            None,
            [result("1"), {"type": "text", "text": "CRITICAL: Respond with TEXT ONLY. Do NOT call "
                                                   "any tools.\n\n- Do"}],
            "COMPACTION",
        ),
    ],
)  # fmt: skip
def test_the_texts_of_claude_code_state_the_lineage(system: Any, last: Any, lineage: str) -> None:
    found = read(user("q"), user(last), system=system).lineage
    assert trajectory_pb2.Lineage.Name(found) == f"LINEAGE_{lineage}"


@pytest.mark.parametrize(
    ("more", "options"),
    [
        ({}, None),
        ({"thinking": {"type": "adaptive"}}, {"enable_thinking": True}),
        (
            {"thinking": {"type": "adaptive"}, "output_config": {"effort": "high"}},
            {"enable_thinking": True, "reasoning_effort": "high"},
        ),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, {"enable_thinking": True}),
        (
            {"thinking": {"type": "disabled"}, "output_config": {"effort": "high"}},
            {"enable_thinking": False, "reasoning_effort": "none"},
        ),
        (  # the template's own option wins
            {"thinking": {"type": "adaptive"}, "chat_template_kwargs": {"enable_thinking": False}},
            {"enable_thinking": False},
        ),
    ],
)
def test_thinking_and_effort_are_options_of_the_template(
    more: dict[str, Any], options: dict[str, Any] | None
) -> None:
    found = read(**more).template_options_json
    assert (orjson.loads(found) if found else None) == options


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, ("AUTO", "", None)),
        ({"type": "any"}, ("REQUIRED", "", None)),
        ({"type": "none"}, ("NONE", "", None)),
        ({"type": "tool", "name": "t"}, ("NAMED", "t", None)),
        ({"type": "auto", "disable_parallel_tool_use": True}, ("AUTO", "", False)),
    ],
)
def test_each_tool_choice_is_passed_on(choice: dict[str, Any], expected: object) -> None:
    request = read(tool_choice=choice)
    name = gateway_pb2.ToolChoice.Name(request.tool_choice).removeprefix("TOOL_CHOICE_")
    parallel = request.parallel_tool_calls if request.HasField("parallel_tool_calls") else None
    assert (name, request.tool_name, parallel) == expected


def test_tools_have_the_form_of_chat_completions() -> None:
    more = {"cache_control": {"type": "ephemeral"}, "eager_input_streaming": True}
    request = read(tools=[EDIT | more, {"type": "custom", **EDIT, "strict": True}])
    strict = {**FUNCTION, "function": {**FUNCTION["function"], "strict": True}}  # type: ignore[dict-item]
    assert orjson.loads(request.tools_json) == [FUNCTION, strict]


def test_a_format_constrains_the_answer_strictly() -> None:
    request = read(output_config={"format": FORM})
    assert orjson.loads(request.json_format.schema_json) == SCHEMA
    assert request.json_format.strict
    assert read(output_format=FORM) == request


# Tools that Claude Code defers are told to the model where they are named.


def searched(*tools: Any, results: Any = (), system: Any = ()) -> gateway_pb2.ChatRequest:
    """A conversation with the result of a search, and a system message after it."""
    messages = [user("Hi"), answered(USE), user([result(list(results))])]
    messages += [{"role": "system", "content": list(system)}] if system else []
    return read(*messages, tools=list(tools))


def test_the_template_does_not_print_a_deferred_tool() -> None:
    assert searched(SEARCH, DEFERRED).tools_json == searched(SEARCH).tools_json
    assert searched(DEFERRED).tools_json == ""
    assert orjson.loads(searched(SEARCH, DEFERRED).deferred_tools_json) == [FUNCTION]
    assert searched(SEARCH).deferred_tools_json == ""
    assert "Edit" in searched({**EDIT, "defer_loading": False}).tools_json


def test_a_reference_in_a_result_is_the_definition_of_its_tool() -> None:
    _, said = told(searched(SEARCH, DEFERRED, results=[REFERENCE, REFERENCE]))[-1]
    assert [orjson.loads(line) for line in said.splitlines()] == [FUNCTION, FUNCTION]
    assert told(searched(SEARCH, results=[REFERENCE]))[-1] == ("tool", "Edit\n")


def test_system_messages_add_and_remove_tools() -> None:
    for tool in (NAMED, DEFINED):
        added = searched(SEARCH, DEFERRED, system=[{"type": "tool_addition", "tool": tool}])
        assert orjson.loads(told(added)[-1][1]) == FUNCTION
        assert orjson.loads(added.deferred_tools_json) == [FUNCTION]
    removed = searched(SEARCH, system=[{"type": "tool_removal", "tool": NAMED}])
    assert told(removed)[-1] == ("system", "Edit is no longer available.\n")


@pytest.mark.parametrize(
    ("field", "more"),
    [
        ("max_tokens", {"max_tokens": None}),
        ("messages", {"messages": []}),
        ("messages[0]", {"messages": ["Hi"]}),
        ("messages[0].role", {"messages": [{"role": "tool"}]}),
        ("messages[0].role", {"messages": [{"role": "assistant", "content": "I"}]}),
        ("messages", {"messages": [{"role": "system", "content": BILLING}]}),
        ("messages[0].content[0].type", {"messages": [user([{"type": "server_tool_use"}])]}),
        ("messages[0].content[0].type", {"messages": [user(["x"])]}),
        ("messages[0].content", {"messages": [user(5)]}),
        ("messages[0].content", {"messages": [{"role": "user"}]}),
        ("messages[0].content[0].text", {"messages": [user([{"type": "text"}])]}),
        ("messages[0].content[0].tool_use_id", {"messages": [user([{"type": "tool_result"}])]}),
        ("messages[0].content[0].is_error", {"messages": [user([result("", is_error=1)])]}),
        (
            "messages[0].content[0].content[0].type",
            {"messages": [user([result([{"type": "document"}])])]},
        ),
        (
            "messages[0].content[0].content[0].tool_name",
            {"messages": [user([result([{"type": "tool_reference"}])])]},
        ),
        ("messages[0].content[0].input", {"messages": [answered(USE | {"input": "{}"})]}),
        ("messages[0].content[0].source", {"messages": [user([{"type": "image"}])]}),
        (
            "messages[0].content[0].source.media_type",
            {"messages": [user([image(type="base64", media_type="x/y")])]},
        ),
        (
            "messages[0].content[0].source.data",
            {"messages": [user([image(type="base64", media_type="image/png", data="!")])]},
        ),
        (
            "messages[0].content[0].source.url",
            {"messages": [user([image(type="url", url="https://x/y.png")])]},
        ),
        (
            "messages[0].content[0].content[0].source.url",
            {"messages": [user([result([image(type="url", url="HTTP://[::1]/y")])])]},
        ),
        (
            "messages[1].content[0].tool.type",
            {"messages": [user("Hi"), {"role": "system", "content": [{"type": "tool_addition"}]}]},
        ),
        ("system[0].type", {"system": [{"type": "image"}]}),
        ("tools[0].type", {"tools": [{"type": "bash_20250124"}]}),
        ("tools[0].input_schema", {"tools": [{"name": "t"}]}),
        ("tool_choice.type", {"tool_choice": {"type": "all"}}),
        ("tool_choice.name", {"tool_choice": {"type": "tool"}}),
        ("thinking.type", {"thinking": {"type": "deep"}}),
        ("output_config", {"output_config": 1}),
        ("output_config.format.type", {"output_config": {"format": {"type": "xml"}}}),
        ("stop_sequences", {"stop_sequences": [""]}),
        ("max_tokens", {"max_tokens": 0}),
        ("temperature", {"temperature": "1"}),
        (
            "context_management.edits[1]",
            {
                "context_management": {
                    "edits": [
                        {"type": "clear_thinking_20251015", "keep": "all"},
                        {"type": "clear_tool_uses_20250919"},
                    ]
                }
            },
        ),
    ],
)
def test_a_bad_body_is_refused_by_the_name_of_the_field(field: str, more: dict[str, Any]) -> None:
    assert refused_field("messages", **more) == field


@pytest.mark.parametrize(
    ("block", "field"),
    [
        ({"type": "tool_removal", "tool": DEFINED}, "tool.type"),
        ({"type": "tool_addition", "tool": {**DEFINED, "definition": 1}}, "tool.definition"),
    ],
)
def test_a_bad_change_of_tools_is_refused_by_name(block: Any, field: str) -> None:
    messages = [user("Hi"), {"role": "system", "content": [block]}]
    assert refused_field("messages", messages=messages) == f"messages[1].content[0].{field}"
