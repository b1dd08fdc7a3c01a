"""Which bodies are read, refused, or read in part."""

from typing import Any

import orjson
import pytest
from prometheus_client import REGISTRY

from rollmesh.runtime.codec.content import text_of
from rollmesh.runtime.errors import InvalidFieldError
from rollmesh.sidecar.fields.values import parse_body
from rollmesh.sidecar.openai_chat.requests import (
    read_request,
    read_shown,
    wants_stream,
    wants_usage,
)
from rollmesh.v1 import chat_pb2, gateway_pb2, sampling_pb2

ASK: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
ARGUMENTS = '{"a": 6,  "b":7.0, "note": "caf\\u00e9 "}'
CALL: dict[str, Any] = {
    "id": "call_00Ab",
    "function": {"arguments": ARGUMENTS, "name": "calculator"},
    "type": "function",
}


def read(**more: Any) -> gateway_pb2.ChatRequest:
    body = parse_body(orjson.dumps(ASK | more))
    read_shown(body)
    wants_stream(body)
    wants_usage(body)
    return read_request(body)


def read_message(message: dict[str, Any]) -> chat_pb2.ChatMessage:
    return read(messages=[message]).messages[0]


def ignored(name: str) -> float:
    """Returns how often a parameter was ignored so far."""
    return (
        REGISTRY.get_sample_value("rollmesh_sidecar_ignored_parameters_total", {"name": name})
        or 0.0
    )


@pytest.mark.parametrize(
    ("field", "more"),
    [
        pytest.param("messages", {"messages": []}, id="no messages"),
        pytest.param("messages", {"messages": "Hi"}, id="messages not a list"),
        pytest.param("messages[0]", {"messages": ["Hi"]}, id="message not an object"),
        pytest.param("messages[0].role", {"messages": [{"role": "bot"}]}, id="role"),
        pytest.param("messages[0].role", {"messages": [{"role": ["user"]}]}, id="role a list"),
        pytest.param(
            "messages[0].content", {"messages": [{"role": "user", "content": 5}]}, id="content"
        ),
        pytest.param(
            "messages[0].content[1].image_url.url",
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "text", "text": "Look"},
                            {"type": "image_url", "image_url": {"url": "file:///x"}},
                        ],
                    }
                ]
            },
            id="image",
        ),
        pytest.param(
            "messages[0].tool_calls[0].function.arguments",
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}],
                    }
                ]
            },
            id="arguments not text",
        ),
        pytest.param(
            "messages[0].function_call",
            {"messages": [{"role": "assistant", "function_call": {"name": "f"}}]},
            id="old function call",
        ),
        pytest.param("temperature", {"temperature": 2.5}, id="temperature"),
        pytest.param("temperature", {"temperature": "hot"}, id="temperature not a number"),
        pytest.param("temperature", {"temperature": True}, id="temperature boolean"),
        pytest.param("top_p", {"top_p": 0}, id="top_p zero"),
        pytest.param("max_tokens", {"max_tokens": 0}, id="max_tokens"),
        pytest.param("max_completion_tokens", {"max_completion_tokens": 1.5}, id="not an integer"),
        pytest.param("seed", {"seed": 2**63}, id="seed"),
        pytest.param("stop_token_ids[1]", {"stop_token_ids": [1, -1]}, id="stop token"),
        pytest.param("n", {"n": 2.0}, id="n"),
        pytest.param("n", {"n": 0}, id="n zero"),
        pytest.param("stop", {"stop": ["a"] * 17}, id="too many stops"),
        pytest.param("stop", {"stop": [""]}, id="empty stop"),
        pytest.param("stream", {"stream": "yes"}, id="stream"),
        pytest.param("tools", {"tools": {}}, id="tools"),
        pytest.param("tools[0].function.name", {"tools": [{"type": "web_search"}]}, id="tool type"),
        pytest.param("tools[0].function.name", {"tools": [{"type": "function"}]}, id="tool name"),
        pytest.param("tool_choice", {"tool_choice": "any"}, id="tool choice"),
        pytest.param("tool_choice", {"tool_choice": 5}, id="tool choice a number"),
        pytest.param("tool_choice", {"tool_choice": {"type": "allowed_tools"}}, id="tools allowed"),
        pytest.param(
            "tool_choice.function", {"tool_choice": {"type": "function"}}, id="no tool named"
        ),
        pytest.param(
            "tool_choice.function.name",
            {"tool_choice": {"type": "function", "function": {}}},
            id="tool named nothing",
        ),
        pytest.param("parallel_tool_calls", {"parallel_tool_calls": 0}, id="parallel a number"),
        pytest.param("response_format", {"response_format": "json"}, id="format a string"),
        pytest.param("response_format.type", {"response_format": {"type": "xml"}}, id="format"),
        pytest.param("response_format.type", {"response_format": {}}, id="format without type"),
        pytest.param(
            "response_format.json_schema",
            {"response_format": {"type": "json_schema"}},
            id="no schema",
        ),
        pytest.param(
            "response_format.json_schema.name",
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
            id="schema without name",
        ),
        pytest.param(
            "response_format.json_schema.schema",
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": 1}}},
            id="schema a number",
        ),
        pytest.param(
            "response_format.json_schema.schema",
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "a", "schema": {"enum": ["x" * 70_000]}},
                }
            },
            id="schema too large",
        ),
        pytest.param(
            "response_format.json_schema.strict",
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "strict": 1}}},
            id="strict a number",
        ),
        pytest.param("logprobs", {"logprobs": 5}, id="logprobs"),
        pytest.param("top_logprobs", {"top_logprobs": 2}, id="most likely without logprobs"),
        pytest.param("top_logprobs", {"logprobs": True, "top_logprobs": 21}, id="most likely"),
        pytest.param("logit_bias", {"logit_bias": {"a": 1}}, id="bias of a word"),
        pytest.param("logit_bias", {"logit_bias": {"-1": 1}}, id="bias of no id"),
        pytest.param("logit_bias.5", {"logit_bias": {"5": "1"}}, id="bias not a number"),
        pytest.param("allowed_token_ids", {"allowed_token_ids": []}, id="nothing allowed"),
        pytest.param("allowed_token_ids[1]", {"allowed_token_ids": [1, -2]}, id="allowed ids"),
        pytest.param("bad_words", {"bad_words": ["a", ""]}, id="bad words"),
        pytest.param("skip_special_tokens", {"skip_special_tokens": 0}, id="special tokens"),
        pytest.param("return_token_ids", {"return_token_ids": "yes"}, id="token ids"),
        pytest.param("functions", {"functions": [{"name": "f"}]}, id="functions"),
        pytest.param("continue_final_message", {"continue_final_message": True}, id="prefill"),
        pytest.param("audio", {"audio": {"voice": "x"}}, id="audio"),
        pytest.param("chat_template_kwargs", {"chat_template_kwargs": 1}, id="template options"),
        pytest.param("structured_outputs", {"structured_outputs": {"json": {}}}, id="grammar"),
        pytest.param("ignore_eos", {"ignore_eos": "yes"}, id="not a boolean"),
    ],
)  # fmt: skip
def test_a_bad_body_is_refused_by_the_name_of_the_field(field: str, more: dict[str, Any]) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        read(**more)
    assert caught.value.field == field


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"5", b"\xff"])
def test_a_body_that_is_not_a_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        parse_body(body)
    assert caught.value.field == "body"


def test_a_bare_request_leaves_sampling_to_the_session() -> None:
    request = read()
    assert request.sampling == sampling_pb2.SamplingParams()
    assert request.tool_choice == gateway_pb2.TOOL_CHOICE_UNSPECIFIED
    assert not wants_stream(ASK)
    assert (request.choices, wants_usage(ASK)) == (1, False)
    assert not request.HasField("returns")


def test_null_is_the_same_as_absent() -> None:
    names = ["temperature", "n", "stop", "stream", "tools", "tool_choice", "logprobs", "user"]
    assert read(**dict.fromkeys(names)) == read()


def test_every_sampling_parameter_arrives() -> None:
    given = {
        "temperature": 0.5, "top_p": 0.25, "top_k": -1, "min_p": 0.125, "seed": -4,
        "max_tokens": 9, "max_completion_tokens": 8, "min_tokens": 2, "presence_penalty": 1,
        "frequency_penalty": -1.5, "repetition_penalty": 1.25, "stop_token_ids": [3, 4],
        "ignore_eos": True, "allowed_token_ids": [7, 8], "logit_bias": {"5": -1, "6": 1e9},
    }  # fmt: skip
    expected = sampling_pb2.SamplingParams(
        temperature=0.5, top_p=0.25, top_k=0, min_p=0.125, seed=-4, max_tokens=8, min_tokens=2,
        presence_penalty=1, frequency_penalty=-1.5, repetition_penalty=1.25, stop_token_ids=[3, 4],
        ignore_eos=True, allowed_token_ids=[7, 8], logit_bias={5: -1, 6: 100},
    )  # fmt: skip
    assert read(**given).sampling == expected


def test_what_is_wanted_beside_the_answer_arrives() -> None:
    request = read(
        n=40, bad_words=["no"], include_stop_str_in_output=True, skip_special_tokens=False,
        logprobs=True, top_logprobs=3, return_token_ids=True,
    )  # fmt: skip
    assert (request.choices, list(request.bad_words)) == (40, ["no"])
    assert request.include_stop
    assert request.show_special_tokens
    assert request.returns == gateway_pb2.ReturnOptions(
        token_ids=True, logprobs=True, top_logprobs=3
    )
    assert not read(seed=-1).sampling.HasField("seed")  # as in vLLM


def test_stops_tools_and_template_options_arrive() -> None:
    tools = [{"type": "function", "function": {"name": "f", "strict": True}}]
    request = read(
        stop="END",
        tools=tools,
        tool_choice="none",
        chat_template_kwargs={"enable_thinking": False},
        reasoning_effort="low",
    )
    assert list(request.stop) == ["END"]
    assert orjson.loads(request.tools_json) == tools
    assert request.tool_choice == gateway_pb2.TOOL_CHOICE_NONE
    assert orjson.loads(request.template_options_json) == {
        "reasoning_effort": "low",
        "enable_thinking": False,
    }


def test_unknown_keys_are_accepted_and_counted_under_few_names() -> None:
    before = ignored("store"), ignored("other")
    read(store=False, response_format={"type": "text"}, made_up_1=1, made_up_2=2)
    read_message({"role": "user", "content": "Hi", "made_up_3": 3})
    assert (ignored("store"), ignored("other")) == (before[0] + 1, before[1] + 3)


def test_parts_of_text_are_joined_and_a_developer_is_a_system() -> None:
    message = read_message(
        {
            "role": "developer",
            "content": [{"type": "text", "text": " a"}, {"type": "text", "text": "b "}],
        }
    )
    assert (message.role, text_of(message)) == (chat_pb2.ROLE_SYSTEM, " ab ")


def test_empty_text_is_the_same_as_none() -> None:
    absent = read_message({"role": "user", "content": None})
    assert not absent.content
    assert read_message({"role": "user", "content": ""}) == absent


def test_a_tool_result_keeps_the_id_of_its_call() -> None:
    message = read_message({"role": "tool", "tool_call_id": "call_00Ab", "content": "42"})
    assert (message.role, message.tool_call_id, text_of(message)) == (
        chat_pb2.ROLE_TOOL,
        "call_00Ab",
        "42",
    )


@pytest.mark.parametrize(
    "echo",
    [
        pytest.param(
            {"content": None, "refusal": None, "role": "assistant", "annotations": [],
             "tool_calls": [CALL]},
            id="the message itself",
        ),
        pytest.param(
            {"content": None, "refusal": None, "role": "assistant", "annotations": [],
             "audio": None, "function_call": None, "tool_calls": [CALL]},
            id="model_dump",
        ),
        pytest.param(
            {"content": None, "refusal": None, "role": "assistant", "annotations": None,
             "audio": None, "function_call": None, "parsed": None,
             "tool_calls": [{**CALL, "index": 0,
                             "function": {**CALL["function"], "parsed_arguments": None}}]},
            id="stream helper",
        ),
        pytest.param(
            {"role": "assistant", "content": None, "tool_calls": [CALL]}, id="own accumulator"
        ),
        pytest.param(
            {"role": "assistant", "tool_calls": [CALL], "annotations": [],
             "provider_specific_fields": {"refusal": None}},
            id="content key missing",
        ),
    ],
)  # fmt: skip
def test_an_echoed_call_is_the_same_however_it_was_kept(echo: dict[str, Any]) -> None:
    message = read_message(echo)
    assert message == chat_pb2.ChatMessage(
        role=chat_pb2.ROLE_ASSISTANT,
        tool_calls=[chat_pb2.ToolCall(id="call_00Ab", name="calculator", arguments_json=ARGUMENTS)],
    )


def test_echoed_text_and_reasoning_keep_their_white_space() -> None:
    message = read_message(
        {
            "role": "assistant",
            "content": "  The answer is 42. \n",
            "reasoning_content": "\n Let me think. \n",
            "tool_calls": [],
            "annotations": [],
        }
    )
    assert text_of(message) == "  The answer is 42. \n"
    assert message.reasoning_content == "\n Let me think. \n"


TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("choice", "expected", "name"),
    [
        pytest.param(None, gateway_pb2.TOOL_CHOICE_UNSPECIFIED, "", id="absent"),
        pytest.param("none", gateway_pb2.TOOL_CHOICE_NONE, "", id="none"),
        pytest.param("auto", gateway_pb2.TOOL_CHOICE_AUTO, "", id="auto"),
        pytest.param("required", gateway_pb2.TOOL_CHOICE_REQUIRED, "", id="required"),
        pytest.param(TOOL, gateway_pb2.TOOL_CHOICE_NAMED, "f", id="named"),
    ],
)
def test_each_tool_choice_is_passed_on(choice: Any, expected: Any, name: str) -> None:
    request = read(tools=[TOOL], tool_choice=choice)
    assert (request.tool_choice, request.tool_name) == (expected, name)


def test_response_formats_are_passed_on() -> None:
    assert not read(response_format={"type": "text"}).HasField("json_format")
    plain = read(response_format={"type": "json_object"})
    assert plain.HasField("json_format")
    assert plain.json_format == gateway_pb2.JsonFormat()
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    found = read(response_format=form).json_format
    assert found.schema_json == orjson.dumps(schema).decode()  # keys keep their order
    assert found.strict


def test_whether_calls_may_be_parallel_is_passed_on() -> None:
    assert not read().HasField("parallel_tool_calls")
    assert read(parallel_tool_calls=True).parallel_tool_calls
    once = read(parallel_tool_calls=False)
    assert once.HasField("parallel_tool_calls")
    assert not once.parallel_tool_calls
