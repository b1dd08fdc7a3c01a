"""Chat completions as agents send them: read, refused by the field's name, or read in part."""

from typing import Any

import orjson
import pytest
from openai.types.chat import completion_create_params

from rollmesh.runtime.codec import text_of
from rollmesh.runtime.errors import InvalidFieldError
from rollmesh.v1 import chat_pb2, gateway_pb2, sampling_pb2
from tests.sidecar import reading
from tests.sidecar.parameters import fields_of_sdk
from tests.sidecar.reading import assistant, ignored, refused_field, user

ARGUMENTS = '{"a": 6,  "b":7.0, "note": "caf\\u00e9 "}'
CALL: dict[str, Any] = {
    "id": "call_00Ab",
    "function": {"arguments": ARGUMENTS, "name": "calculator"},
    "type": "function",
}
TOOL = {"type": "function", "function": {"name": "f"}}
CUSTOM = {"type": "custom", "custom": {"name": "patch"}}
CUSTOM_CALL = {"id": "1", "type": "custom", "custom": {"name": "f", "input": "x"}}


def read(**more: Any) -> gateway_pb2.ChatRequest:
    return reading.read("chat/completions", **more)


def read_message(message: dict[str, Any]) -> chat_pb2.ChatMessage:
    return read(messages=[message]).messages[0]


def image(**url: Any) -> list[Any]:
    return [user([{"type": "text", "text": "Look"}, {"type": "image_url", **url}])]


def schema(**members: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": members}}


@pytest.mark.parametrize("key", ["hello", "-1", str(2**31), "9" * 5_000])
def test_a_bias_of_no_token_id_is_refused(key: str) -> None:
    with pytest.raises(InvalidFieldError, match="is not a token id") as caught:
        read(logit_bias={key: 1})
    assert caught.value.field == "logit_bias"
    assert len(caught.value.message) < 200


def test_every_parameter_of_the_openai_sdk_is_in_the_table() -> None:
    fields = fields_of_sdk(completion_create_params, "CompletionCreateParams")
    assert len(fields) > 30
    assert fields <= reading.table("chat/completions")


@pytest.mark.parametrize(
    ("field", "more"),
    [
        ("messages", {"messages": []}),
        ("messages", {"messages": "Hi"}),
        ("messages[0]", {"messages": ["Hi"]}),
        ("messages[0].role", {"messages": [{"role": "bot"}]}),
        ("messages[0].role", {"messages": [{"role": ["user"]}]}),
        ("messages[0].content", {"messages": [user(5)]}),
        (
            "messages[0].content[1].image_url.url",
            {"messages": image(image_url={"url": "file:///x"})},
        ),
        (
            "messages[0].content[1].image_url.url",
            {"messages": image(image_url={"url": "https://x/y.png"})},
        ),
        ("messages[0].content[1].image_url", {"messages": image(image_url=["data:"])}),
        ("messages[0].tool_calls[0].type", {"messages": [assistant(tool_calls=[CUSTOM_CALL])]}),
        (
            "messages[0].tool_calls[0].function.arguments",
            {
                "messages": [
                    assistant(tool_calls=[{"function": {"name": "f", "arguments": {"a": 1}}}])
                ]
            },
        ),
        ("messages[0].function_call", {"messages": [assistant(function_call={"name": "f"})]}),
        ("temperature", {"temperature": 2.5}),
        ("temperature", {"temperature": "hot"}),
        ("temperature", {"temperature": True}),
        ("top_p", {"top_p": 0}),
        ("max_tokens", {"max_tokens": 0}),
        ("max_completion_tokens", {"max_completion_tokens": 1.5}),
        ("seed", {"seed": 2**63}),
        ("stop_token_ids[1]", {"stop_token_ids": [1, -1]}),
        ("n", {"n": 2.0}),
        ("n", {"n": 0}),
        ("stop", {"stop": ["a"] * 17}),
        ("stop", {"stop": [""]}),
        ("stream", {"stream": "yes"}),
        ("stream_options", {"stream": True, "stream_options": 1}),
        ("stream_options", {"stream_options": {"include_usage": True}}),
        (
            "stream_options.include_usage",
            {"stream": True, "stream_options": {"include_usage": "yes"}},
        ),
        (
            "stream_options.continuous_usage_stats",
            {"stream": True, "stream_options": {"continuous_usage_stats": True}},
        ),
        ("tools", {"tools": {}}),
        ("tools", {"tools": [TOOL] * 2049}),
        ("tools[0].type", {"tools": [CUSTOM]}),
        ("tools[0].function.name", {"tools": [{"type": "web_search"}]}),
        ("tools[0].function.name", {"tools": [{"type": "function"}]}),
        ("tool_choice", {"tool_choice": "any"}),
        ("tool_choice", {"tool_choice": 5}),
        ("tool_choice.type", {"tool_choice": CUSTOM}),
        ("tool_choice.type", {"tool_choice": {"type": "allowed_tools"}}),
        ("tool_choice.function", {"tool_choice": {"type": "function"}}),
        ("tool_choice.function.name", {"tool_choice": {"type": "function", "function": {}}}),
        ("parallel_tool_calls", {"parallel_tool_calls": 0}),
        ("response_format", {"response_format": "json"}),
        ("response_format.type", {"response_format": {"type": "xml"}}),
        ("response_format.type", {"response_format": {}}),
        ("response_format.json_schema", {"response_format": {"type": "json_schema"}}),
        ("response_format.json_schema.name", schema(schema={})),
        ("response_format.json_schema.schema", schema(name="a", schema=1)),
        ("response_format.json_schema.schema", schema(name="a", schema={"enum": ["x" * 70_000]})),
        ("response_format.json_schema.strict", schema(name="a", strict=1)),
        ("logprobs", {"logprobs": 5}),
        ("top_logprobs", {"top_logprobs": 2}),
        ("top_logprobs", {"logprobs": True, "top_logprobs": 21}),
        ("logit_bias", {"logit_bias": {"a": 1}}),
        ("logit_bias", {"logit_bias": {"-1": 1}}),
        ("logit_bias.5", {"logit_bias": {"5": "1"}}),
        ("allowed_token_ids", {"allowed_token_ids": []}),
        ("allowed_token_ids[1]", {"allowed_token_ids": [1, -2]}),
        ("bad_words", {"bad_words": ["a", ""]}),
        ("skip_special_tokens", {"skip_special_tokens": 0}),
        ("return_token_ids", {"return_token_ids": "yes"}),
        ("chat_template_kwargs", {"chat_template_kwargs": 1}),
        ("chat_template_kwargs.tools", {"chat_template_kwargs": {"tools": []}}),
        ("documents", {"documents": {}}),
        ("documents[1]", {"documents": [{}, {"text": 5}]}),
        ("ignore_eos", {"ignore_eos": "yes"}),
        ("modalities", {"modalities": ["audio"]}),
    ],
)
def test_a_bad_body_is_refused_by_the_name_of_the_field(field: str, more: dict[str, Any]) -> None:
    assert refused_field("chat/completions", **more) == field


def test_a_bare_request_leaves_sampling_to_the_session() -> None:
    request = read()
    assert request.sampling == sampling_pb2.SamplingParams()
    assert request.tool_choice == gateway_pb2.TOOL_CHOICE_UNSPECIFIED
    assert request.choices == 1
    assert not request.HasField("returns")
    assert not request.HasField("parallel_tool_calls")


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
    assert not read(seed=-1).sampling.HasField("seed")  # as in vLLM


def test_the_other_parameters_arrive() -> None:
    request = read(
        n=40, bad_words=["no"], include_stop_str_in_output=True, skip_special_tokens=False,
        logprobs=True, top_logprobs=3, return_token_ids=True, stop="END", tools=[TOOL],
        chat_template_kwargs={"x": 1}, reasoning_effort="low", documents=[{"title": "a"}],
        parallel_tool_calls=False,
    )  # fmt: skip
    assert (request.choices, list(request.bad_words), list(request.stop)) == (40, ["no"], ["END"])
    assert request.include_stop
    assert request.show_special_tokens
    assert request.returns == gateway_pb2.ReturnOptions(
        token_ids=True, logprobs=True, top_logprobs=3
    )
    assert orjson.loads(request.tools_json) == [TOOL]
    assert orjson.loads(request.template_options_json) == {
        "x": 1, "reasoning_effort": "low", "enable_thinking": True, "documents": [{"title": "a"}],
    }  # fmt: skip
    assert request.HasField("parallel_tool_calls")
    assert not request.parallel_tool_calls


def test_unknown_names_are_accepted_and_counted_under_few_labels() -> None:
    before = ignored("store"), ignored("other")
    read(store=False, response_format={"type": "text"}, made_up_1=1, made_up_2=2)
    read_message({**user("Hi"), "made_up_3": 3})
    assert (ignored("store"), ignored("other")) == (before[0] + 1, before[1] + 3)


def test_parts_that_vllm_reads_as_text_and_images_are_read_so() -> None:
    parts = [
        {"type": "thinking", "thinking": "Hm. ", "signature": "x"},
        {"type": "output_text", "text": "It is ", "annotations": []},
        {"type": "input_text", "text": "red"},
        {"type": "input_image", "image_url": "data:image/png;base64,UE5H", "detail": "auto"},
    ]
    content = read_message(user(parts)).content
    assert [part.text for part in content] == ["Hm. It is red", ""]
    assert content[1].image.data == b"PNG"
    assert content[1].image.field == "messages[0].content[3].image_url"


def test_texts_are_joined_empty_text_is_none_and_a_developer_is_a_system() -> None:
    parts = [{"type": "text", "text": " a"}, {"type": "text", "text": "b "}]
    message = read_message({"role": "developer", "content": parts})
    assert (message.role, text_of(message)) == (chat_pb2.ROLE_SYSTEM, " ab ")
    absent = read_message(user(None))
    assert not absent.content
    assert read_message(user("")) == absent


@pytest.mark.parametrize("content", ["42", [{"type": "text", "text": one} for one in "42"]])
def test_a_tool_result_keeps_the_id_of_its_call(content: Any) -> None:
    message = read_message({"role": "tool", "tool_call_id": "call_00Ab", "content": content})
    assert (message.role, message.tool_call_id) == (chat_pb2.ROLE_TOOL, "call_00Ab")
    assert text_of(message) == "42"


@pytest.mark.parametrize(
    "echo",
    [
        pytest.param({"content": None, "refusal": None, "annotations": []}, id="itself"),
        pytest.param(
            {"content": None, "annotations": [], "audio": None, "function_call": None},
            id="model_dump",
        ),
        pytest.param(
            {"content": None, "annotations": None, "parsed": None, "tool_calls": [
                {**CALL, "index": 0, "function": {**CALL["function"], "parsed_arguments": None}},
            ]},
            id="stream helper",
        ),
        pytest.param({"provider_specific_fields": {"refusal": None}}, id="content key missing"),
        pytest.param({"content": ""}, id="content empty"),
        pytest.param({"content": []}, id="content of no parts"),
    ],
)  # fmt: skip
def test_an_echoed_call_is_the_same_however_it_was_kept(echo: dict[str, Any]) -> None:
    assert read_message(assistant(**{"tool_calls": [CALL], **echo})) == chat_pb2.ChatMessage(
        role=chat_pb2.ROLE_ASSISTANT,
        tool_calls=[chat_pb2.ToolCall(id="call_00Ab", name="calculator", arguments_json=ARGUMENTS)],
    )


@pytest.mark.parametrize(
    "echo",
    [
        pytest.param({"reasoning_content": "\n Let me think. \n", "tool_calls": []}, id="itself"),
        pytest.param(
            {"reasoning": "\n Let me think. \n", "tool_calls": None, "audio": None},
            id="reasoning under its other name",
        ),
        pytest.param(
            {
                "content": [
                    {"type": "text", "text": "  It"},
                    {"type": "text", "text": " is 42. \n", "cache_control": {"type": "x"}},
                ],
                "reasoning_content": "\n Let me think. \n",
                "cache_control": {},
            },
            id="in parts with marks of a cache",
        ),
    ],
)
def test_echoed_text_and_reasoning_keep_their_white_space(echo: dict[str, Any]) -> None:
    message = read_message(assistant(**{"content": "  It is 42. \n", **echo}))
    assert text_of(message) == "  It is 42. \n"
    assert message.reasoning_content == "\n Let me think. \n"


@pytest.mark.parametrize(
    ("choice", "expected", "name"),
    [
        (None, gateway_pb2.TOOL_CHOICE_UNSPECIFIED, ""),
        ("none", gateway_pb2.TOOL_CHOICE_NONE, ""),
        ("auto", gateway_pb2.TOOL_CHOICE_AUTO, ""),
        ("required", gateway_pb2.TOOL_CHOICE_REQUIRED, ""),
        (TOOL, gateway_pb2.TOOL_CHOICE_NAMED, "f"),
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
    form = {"type": "object", "properties": {"b": {}, "a": {}}}
    found = read(**schema(name="x", schema=form, strict=True)).json_format
    assert found.schema_json == orjson.dumps(form).decode()  # keys keep their order
    assert found.strict
