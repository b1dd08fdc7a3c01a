"""Requests for content as agents send them: read, refused by the field's name, or read in part."""

import base64
import re
from typing import Any

import orjson
import pytest
from google.genai import types

from rollmesh.runtime.errors import InvalidFieldError
from rollmesh.sidecar import seal
from rollmesh.v1 import chat_pb2, gateway_pb2
from tests.sidecar import reading
from tests.sidecar.reading import GOOGLE, KEY, counted, refused_field, told

CONFIG = "generationConfig"
THINKING = f"{CONFIG}.thinkingConfig"
CALL = {"functionCall": {"id": "c1", "name": "f", "args": {"a": 1}}}
OTHER = {"functionCall": {"id": "c2", "name": "f", "args": {}}}
OWN_FIELDS = {
    "http_options", "should_return_http_response", "automatic_function_calling",
    "automatic_continuation",
}  # fmt: skip
"""Options of the SDK itself."""


def text(said: str, **more: Any) -> dict[str, Any]:
    return {"text": said, **more}


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "parts": list(parts)}


def model(*parts: Any) -> dict[str, Any]:
    return {"role": "model", "parts": list(parts)}


def response(name: str = "f", **more: Any) -> dict[str, Any]:
    return {"functionResponse": {"name": name, "response": {"output": "1"}, **more}}


def image(**blob: Any) -> dict[str, Any]:
    return {"inlineData": {"mimeType": "image/png", "data": "UE5H", **blob}}


def read(*contents: Any, **more: Any) -> gateway_pb2.ChatRequest:
    return reading.read(GOOGLE, **({"contents": list(contents)} if contents else {}), **more)


def config(**members: Any) -> gateway_pb2.ChatRequest:
    return read(**{f"{CONFIG}.{name}": value for name, value in members.items()})


def camel(name: str) -> str:
    return re.sub("_(.)", lambda found: found[1].upper(), name)


def signature(answer_id: str = "a-1", key: str = KEY) -> str:
    return base64.b64encode(seal(key, answer_id, "I think.").encode()).decode()


def test_every_parameter_of_the_sdk_is_in_the_table() -> None:
    known = reading.table(GOOGLE)
    fields = set(types.GenerateContentConfig.model_fields) - OWN_FIELDS
    assert len(fields) > 30
    for field in fields:
        assert known & {camel(field), f"{CONFIG}.{camel(field)}"}, field
    assert {f"{CONFIG}.{camel(field)}" for field in types.GenerationConfig.model_fields} <= known


@pytest.mark.parametrize(
    ("contents", "same"),
    [
        pytest.param([{"parts": [text("Hi")]}], [user(text("Hi"))], id="no role"),
        pytest.param([user(text("H"), text("i"))], [user(text("Hi"))], id="texts"),
        pytest.param([{"role": "user", "parts": text("Hi")}], [user(text("Hi"))], id="no list"),
        pytest.param(
            [user(text("q")), model(text("H", thought=False)), model(text("i"), CALL),
             model(text("")), user(response())],
            [user(text("q")), model(text("Hi"), CALL), user(response())],
            id="chunks of an answer",
        ),
        pytest.param(
            [user(text("q")), model(CALL), user({"function_response": response(id="c1")[
                "functionResponse"]})],
            [user(text("q")), model(CALL), user(response(id="c1"))],
            id="snake case",
        ),
        pytest.param(
            [user(text("q")), model(CALL), {"role": "function", "parts": [response()]}],
            [user(text("q")), model(CALL), user(response())],
            id="role function",
        ),
    ],
)  # fmt: skip
def test_forms_of_one_conversation_are_read_alike(contents: Any, same: Any) -> None:
    assert read(*contents) == read(*same)


@pytest.mark.parametrize(
    ("responses", "ids"),
    [
        pytest.param([response(), response()], ["c1", "c2"], id="by order"),
        pytest.param([response(id="c2"), response()], ["c2", "c1"], id="one has its id"),
        pytest.param([response("g"), response()], ["c3", "c1"], id="by name"),
        pytest.param([response("h")], [""], id="unknown"),
        pytest.param([response(), response(), response()], ["c1", "c2", ""], id="too many"),
    ],
)
def test_a_response_without_an_id_answers_the_first_open_call_of_its_function(
    responses: list[Any], ids: list[str]
) -> None:
    last = {"functionCall": {"id": "c3", "name": "g", "args": {}}}
    answered = user(text("q")), model(CALL, OTHER, last)
    request = read(*answered, user(*responses))
    assert [one.tool_call_id for one in request.messages[2:]] == ids
    assert read(*answered, *(user(one) for one in responses)) == request  # one for each content


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"output": "42"}, "42"),
        ({"output": {"a": [1]}}, '{"a":[1]}'),
        ({"result": 42}, '{"result":42}'),
        ({"error": "no file"}, '{"error":"no file"}'),
        ({}, "{}"),
    ],
)
def test_a_response_is_its_output_or_all_of_it(given: Any, said: str) -> None:
    part = {"functionResponse": {"name": "f", "response": given}}
    assert told(read(user(text("q")), model(CALL), user(part, text("Go on."))))[2:] == [
        ("tool", said),
        ("user", "Go on."),
    ]


def test_an_answer_comes_back_as_one_message() -> None:
    cut = {"functionCall": {"name": "f", "args": {"INVALID_JSON": '{"a": '}}}
    thought = text("I think.", thought=True)
    request = read(user(text("q")), model(thought, text("Hi"), CALL, cut), user(text("go on")))
    message = request.messages[1]
    assert message.reasoning_content == "I think."
    assert [(one.id, one.arguments_json) for one in message.tool_calls] == [
        ("c1", '{"a":1}'),
        ("", '{"a": '),
    ]
    assert told(request)[1] == ("assistant", "Hi")


@pytest.mark.parametrize(
    ("given", "is_ours"),
    [
        pytest.param(signature(), True, id="as sent"),
        pytest.param(
            signature().replace("+", "-").replace("/", "_").rstrip("="), True, id="url-safe"
        ),
        pytest.param("skip_thought_signature_validator", False, id="Google's word for none"),
        pytest.param(
            base64.b64encode(b"skip_thought_signature_validator").decode(), False, id="as bytes"
        ),
        pytest.param("", False, id="empty"),
        pytest.param(None, False, id="null"),
    ],
)
def test_a_signature_names_its_answer(given: str | None, *, is_ours: bool) -> None:
    before = counted("echoed_reasoning", sealed="yes")
    request = read(user(text("q")), model(CALL | {"thoughtSignature": given}), user(response()))
    assert request.messages[1].answer_id == ("a-1" if is_ours else "")
    assert counted("echoed_reasoning", sealed="yes") == before + is_ours


@pytest.mark.parametrize(
    "given", [signature(key="rmk-6-x"), signature()[:-4], "c2ln", "ü", signature("a-1")[4:]]
)
def test_a_signature_of_another_session_is_refused(given: str) -> None:
    contents = [user(text("q")), model(text("Hi"), CALL | {"thoughtSignature": given}), user()]
    field = "contents[1].parts[1].thoughtSignature"
    assert refused_field(GOOGLE, contents=contents) == field


def test_images_are_parts_of_messages_and_responses() -> None:
    urlsafe = base64.urlsafe_b64encode(b"\xff\xfe\xfd").decode()
    shown = response(parts=[image(displayName="a.png"), {}])
    request = read(user(text("See"), image(data=urlsafe)), model(CALL), user(shown))
    first = request.messages[0].content
    field = "contents[0].parts[1].inlineData.data"
    assert first[1].image == chat_pb2.Media(
        media_type="image/png", data=b"\xff\xfe\xfd", field=field
    )
    result = request.messages[2]
    assert (result.content[0].text, result.content[1].image.data) == ("1", b"PNG")
    name = "contents[2].parts[0].functionResponse.parts[0].inlineData.data"
    assert result.content[1].image.field == name


def test_a_system_instruction_is_its_texts() -> None:
    asked = {"parts": [text("You "), text("count.")]}
    assert told(read(systemInstruction=asked))[0] == ("system", "You count.")
    assert read(system_instruction=asked) == read(systemInstruction=asked)
    assert told(read(systemInstruction={"parts": []})) == [("user", "Hi")]


def test_schemas_become_json_schemas() -> None:
    schema = {
        "type": "OBJECT",
        "properties": {
            "b": {"type": "STRING", "nullable": True, "enum": ["x"], "format": "enum"},
            "a_b": {"type": "ARRAY", "items": {"type": "INTEGER", "format": "int64"},
                    "minItems": "1", "max_items": 2},
            "c": {"anyOf": [{"type": "NUMBER"}, {"type": "TYPE_UNSPECIFIED"}], "nullable": True},
            "d": {"type": "STRING", "format": "date-time"},
        },
        "property_ordering": ["a_b", "b"],
        "required": ["a_b"],
    }  # fmt: skip
    expected = {
        "type": "object",
        "properties": {
            "a_b": {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 2},
            "b": {"type": ["string", "null"], "enum": ["x", None]},
            "c": {"anyOf": [{"type": "number"}, {}, {"type": "null"}]},
            "d": {"type": "string", "format": "date-time"},
        },
        "required": ["a_b"],
    }
    request = config(responseMimeType="application/json", responseSchema=schema)
    found = request.json_format
    assert (orjson.loads(found.schema_json), found.strict) == (expected, True)
    assert list(orjson.loads(found.schema_json)["properties"]) == ["a_b", "b", "c", "d"]
    tools = {"functionDeclarations": [{"name": "f", "parameters": schema}]}
    (tool,) = orjson.loads(read(tools=tools).tools_json)
    assert tool == {"type": "function", "function": {"name": "f", "parameters": expected}}


@pytest.mark.parametrize("count", ["9" * 5_000, "\u0663", "1.0"])
def test_a_count_that_is_no_64_bit_integer_stays_as_it_is(count: str) -> None:
    schema = {"type": "ARRAY", "minItems": count}
    found = config(responseMimeType="application/json", responseSchema=schema).json_format
    assert orjson.loads(found.schema_json) == {"type": "array", "minItems": count}


@pytest.mark.parametrize("name", ["responseJsonSchema", "_responseJsonSchema"])
def test_a_json_schema_is_taken_as_it_is(name: str) -> None:
    schema = {"type": "object", "properties": {"a_b": {"type": "integer"}}}
    request = config(responseMimeType="application/json", **{name: schema})
    assert orjson.loads(request.json_format.schema_json) == schema
    anything = config(responseMimeType="application/json")
    assert anything.HasField("json_format")
    assert anything.json_format.schema_json == ""
    assert not config(responseMimeType="text/plain").HasField("json_format")


def test_sampling_parameters_have_their_names_of_google() -> None:
    request = config(
        temperature=0.5, topP=0.9, topK=40.0, maxOutputTokens=7, seed=-1, presencePenalty=1,
        frequencyPenalty=-1, stopSequences=["x"], candidateCount=3, responseLogprobs=True,
        logprobs=2, responseModalities=["TEXT"],
    )  # fmt: skip
    sampling = request.sampling
    assert (sampling.top_k, sampling.max_tokens, request.choices) == (40, 7, 3)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (1, -1)
    assert list(request.stop) == ["x"]
    assert (request.returns.logprobs, request.returns.top_logprobs) == (True, 2)
    assert read(generation_config={"max_output_tokens": 7}) == config(maxOutputTokens=7)


@pytest.mark.parametrize(
    ("thinking", "options"),
    [
        ({"includeThoughts": True}, None),
        ({"thinkingBudget": 0}, {"enable_thinking": False, "reasoning_effort": "none"}),
        ({"thinkingBudget": -1}, {"enable_thinking": True}),
        ({"thinkingBudget": 512}, {"enable_thinking": True}),
        ({"thinkingLevel": "HIGH"}, {"enable_thinking": True, "reasoning_effort": "high"}),
        ({"thinkingLevel": "THINKING_LEVEL_UNSPECIFIED"}, None),
    ],
)
def test_thinking_is_an_option_of_the_template(thinking: Any, options: Any) -> None:
    found = config(thinkingConfig=thinking).template_options_json
    assert (orjson.loads(found) if found else None) == options


@pytest.mark.parametrize(
    ("calling", "expected"),
    [
        ({}, ("UNSPECIFIED", "")),
        ({"mode": "AUTO"}, ("AUTO", "")),
        ({"mode": "NONE"}, ("NONE", "")),
        ({"mode": "ANY"}, ("REQUIRED", "")),
        ({"mode": "ANY", "allowedFunctionNames": ["g"]}, ("NAMED", "g")),
        ({"mode": "ANY", "allowedFunctionNames": ["g", "f"]}, ("REQUIRED", "")),
        ({"mode": "ANY", "allowed_function_names": ["g"]}, ("NAMED", "g")),
    ],
)
def test_each_mode_of_calling_is_passed_on(calling: Any, expected: tuple[str, str]) -> None:
    tools = [{"functionDeclarations": [{"name": "f"}]}, {"functionDeclarations": [{"name": "g"}]}]
    request = read(tools=tools, toolConfig={"functionCallingConfig": calling})
    name = gateway_pb2.ToolChoice.Name(request.tool_choice).removeprefix("TOOL_CHOICE_")
    assert (name, request.tool_name) == expected


def declared(**function: Any) -> dict[str, Any]:
    return {"tools": [{"functionDeclarations": [{"name": "f", **function}]}]}


def calling(**members: Any) -> dict[str, Any]:
    return {**declared(), "toolConfig": {"functionCallingConfig": members}}


def asked(*parts: Any) -> dict[str, Any]:
    return {"contents": [user(*parts)]}


@pytest.mark.parametrize(
    ("field", "more"),
    [
        ("contents", {"contents": []}),
        ("contents[0]", {"contents": ["Hi"]}),
        ("contents[0].role", {"contents": [{"role": "system", "parts": []}]}),
        ("contents[1].role", {"contents": [user(text("q")), model(text("I"))]}),
        ("contents[0].parts", {"contents": [{"parts": "Hi"}]}),
        ("contents[0].parts[0]", asked("Hi")),
        ("contents[0].parts[0].text", asked(text("", text=5))),
        ("contents[0].parts[0].fileData", asked({"fileData": {"fileUri": "gs://x"}})),
        ("contents[0].parts[0].executableCode", asked({"executable_code": {}})),
        ("contents[0].parts[0].videoMetadata", asked({"videoMetadata": {}, "text": "x"})),
        ("contents[0].parts[0].functionCall", asked(CALL)),
        ("contents[0].parts[0].inlineData", asked({"text": "x", **image()})),
        ("contents[0].parts[0].inlineData.mimeType", asked(image(mimeType="video/mp4"))),
        ("contents[0].parts[0].inlineData.data", asked(image(data="!"))),
        ("contents[0].parts[0].functionResponse.name", asked({"functionResponse": {}})),
        ("contents[0].parts[0].functionResponse.response", asked(response(response="x"))),
        ("contents[0].parts[0].functionResponse.willContinue", asked(response(willContinue=True))),
        (
            "contents[0].parts[0].functionResponse.parts[0].fileData",
            asked(response(parts=[{"fileData": {}}])),
        ),
        ("contents[1].parts[0].inlineData", {"contents": [user(), model(image()), user()]}),
        (
            "contents[1].parts[0].functionCall.args",
            {"contents": [user(), model({"functionCall": {"name": "f", "args": "{}"}}), user()]},
        ),
        ("systemInstruction", {"systemInstruction": "You count."}),
        ("systemInstruction.parts[0].inlineData", {"systemInstruction": {"parts": [image()]}}),
        ("tools[0].googleSearch", {"tools": [{"googleSearch": {}}]}),
        ("tools[0].codeExecution", {"tools": [{"code_execution": {}}]}),
        ("tools[0].functionDeclarations[0].name", {"tools": [{"functionDeclarations": [{}]}]}),
        ("tools[0].functionDeclarations[0].behavior", declared(behavior="NON_BLOCKING")),
        (
            "tools[0].functionDeclarations[0].parametersJsonSchema",
            declared(parameters={}, parametersJsonSchema={}),
        ),
        (
            "tools[0].functionDeclarations[0].parameters.properties.a.type",
            declared(parameters={"properties": {"a": {"type": 1}}}),
        ),
        ("toolConfig.retrievalConfig", {"toolConfig": {"retrievalConfig": {"languageCode": "x"}}}),
        ("toolConfig.functionCallingConfig.mode", calling(mode="VALIDATED")),
        (
            "toolConfig.functionCallingConfig.allowedFunctionNames",
            calling(mode="AUTO", allowedFunctionNames=["f"]),
        ),
        (
            "toolConfig.functionCallingConfig.streamFunctionCallArguments",
            calling(streamFunctionCallArguments=True),
        ),
        (f"{CONFIG}.candidateCount", {f"{CONFIG}.candidateCount": 0}),
        (f"{CONFIG}.stopSequences", {f"{CONFIG}.stopSequences": [""]}),
        (f"{CONFIG}.logprobs", {f"{CONFIG}.logprobs": 2}),
        (f"{CONFIG}.responseModalities", {f"{CONFIG}.responseModalities": ["IMAGE"]}),
        (f"{CONFIG}.responseMimeType", {f"{CONFIG}.responseMimeType": "text/x.enum"}),
        (f"{CONFIG}.responseMimeType", {f"{CONFIG}.responseSchema": {"type": "STRING"}}),
        (
            f"{CONFIG}.responseJsonSchema",
            {
                f"{CONFIG}.responseMimeType": "application/json",
                f"{CONFIG}.responseSchema": {},
                f"{CONFIG}.responseJsonSchema": {},
            },
        ),
        (f"{THINKING}.thinkingLevel", {THINKING: {"thinkingLevel": 1}}),
        (f"{THINKING}.thinkingBudget", {THINKING: {"thinkingBudget": "1"}}),
    ],
)  # fmt: skip
def test_a_bad_body_is_refused_by_the_name_of_the_field(field: str, more: dict[str, Any]) -> None:
    assert refused_field(GOOGLE, **more) == field


def test_a_schema_that_is_nested_too_deeply_is_refused_by_name() -> None:
    deep = b'{"properties": {"a": ' * 500 + b"{}" + b"}}" * 500
    body = b'{"contents": [{"parts": []}], "tools": [{"functionDeclarations": [{"name": "f",'
    with pytest.raises(InvalidFieldError) as caught:
        reading.read_bytes(GOOGLE, body + b'"parameters": ' + deep + b"}]}]}")
    assert caught.value.field == "tools[0].functionDeclarations[0].parameters"
