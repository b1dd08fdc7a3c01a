"""Google's generateContent, as its SDKs and Gemini CLI call it."""

import base64
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import orjson

from rollmesh.runtime.errors import InvalidFieldError, RollmeshError
from rollmesh.sidecar import body
from rollmesh.sidecar.body import excerpt, flag, members, seal, sealed_answer, string
from rollmesh.sidecar.errors import JSON, HttpError, renamed, shown_text, to_http
from rollmesh.sidecar.turn import Head, Protocol, Token, Turn, as_delta, is_cut, with_tops
from rollmesh.v1 import chat_pb2, gateway_pb2

_CONFIG = "generationConfig"
_SAMPLING = {
    "temperature": "temperature",
    "topP": "top_p",
    "topK": "top_k",
    "maxOutputTokens": "max_tokens",
    "seed": "seed",
    "presencePenalty": "presence_penalty",
    "frequencyPenalty": "frequency_penalty",
}
"""Sampling parameters: their names here and in vLLM."""


def _configs(names: str) -> str:
    return " ".join(f"{_CONFIG}.{name}" for name in names.split())


PARAMETERS = body.Parameters(
    served="contents systemInstruction tools toolConfig generationConfig generateContentRequest "
    + _configs(
        "candidateCount stopSequences responseMimeType responseSchema responseJsonSchema"
        " _responseJsonSchema responseModalities responseLogprobs logprobs thinkingConfig "
        + " ".join(_SAMPLING)
    ),
    refused={
        "cachedContent": "nothing is stored between requests; send its contents",
        "continuationToken": "an answer is not continued; ask again",
        "generationOutputConfig": "an answer is returned, and stored nowhere else",
        "modelArmorConfig": "nothing is filtered here",
        _configs("modelSelectionConfig routingConfig"): "a session has one model",
        _configs("responseFormat"): "give responseMimeType and responseJsonSchema",
        _configs(
            "audioTimestamp audioTranscriptionConfig enableAffectiveDialog imageConfig speechConfig"
            " translationConfig"
        ): "answers are text",
        _configs("enableEnhancedCivicAnswers"): "the model alone answers",
    },
    unused=f"labels model safetySettings store serviceTier {_CONFIG}.mediaResolution",
    nested="behavior displayName includeServerSideToolInvocations mediaResolution partMetadata"
    " response responseJsonSchema scheduling thinkingBudget",
    of_vllm=False,
)
_FOREIGN_SIGNATURES = {"skip_thought_signature_validator", "context_engineering_is_the_way_to_go"}
"""Signatures that Google's API takes for parts that no model of Google's wrote."""

# Values. JSON of protocol buffers has camelCase or snake_case, and one entry may lack its list.

_SNAKE = re.compile(r"(?<=[a-z0-9])_([a-z0-9])")


def _members(value: Any, field: str, default: dict[str, Any] | None = None) -> dict[str, Any]:
    """Returns an object of the API with its names in camelCase."""
    given = members(value, field, default)
    if not any("_" in name for name in given):
        return given
    return {_SNAKE.sub(lambda found: found[1].upper(), name): one for name, one in given.items()}


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, dict) else value


# Requests


def read(
    data: bytes, head: Head, *, streams: bool = False, counts: bool = False, sse: bool = True
) -> "ContentTurn":
    """Reads the body of a request for an answer, or only for the size of its prompt."""
    values = _members(body.parse(data), "body")
    if counts and values.get("generateContentRequest") is not None:
        values = _members(values["generateContentRequest"], "generateContentRequest")
    config = _members(values.get(_CONFIG), _CONFIG, {})
    PARAMETERS.check(values | {f"{_CONFIG}.{name}": value for name, value in config.items()})
    if config.get("responseModalities") not in (None, [], ["TEXT"]):
        raise InvalidFieldError(f"{_CONFIG}.responseModalities", 'only ["TEXT"] is served')
    tools = _tools(values.get("tools"))
    messages = _system(values.get("systemInstruction"))
    messages += _messages(values.get("contents"), head.session_key)
    choice, tool_name = _tool_choice(
        values.get("toolConfig"), [one["function"]["name"] for one in tools]
    )
    name = f"{_CONFIG}.thinkingConfig"
    thinking = _members(config.get("thinkingConfig"), name, {})
    PARAMETERS.ignore(thinking, ("includeThoughts", "thinkingLevel"))
    options, effort = None, None
    if (budget := _integer(thinking, "thinkingBudget", None, name)) is not None:
        options, effort = ({"enable_thinking": True}, None) if budget else (None, "none")
    level = string(thinking.get("thinkingLevel"), f"{name}.thinkingLevel", "")
    if level not in {"", "THINKING_LEVEL_UNSPECIFIED"}:
        effort = level.lower()
    sampling = {theirs: config.get(own) for own, theirs in _SAMPLING.items()}
    if isinstance(most := sampling["top_k"], float) and most.is_integer():
        sampling["top_k"] = int(most)  # Google's SDKs write it as a float
    request = gateway_pb2.ChatRequest(
        messages=messages,
        tools_json=body.to_json(tools, "tools") if tools else "",
        tool_choice=choice,
        tool_name=tool_name,
        json_format=_format(config),
        sampling=body.read_sampling(sampling, ("max_tokens",)),
        stop=body.read_texts(
            config.get("stopSequences"), f"{_CONFIG}.stopSequences", are_stops=True
        ),
        template_options_json=body.read_template_options(options, effort, f"{name}.thinkingLevel"),
        choices=_integer(config, "candidateCount", 1) or 1,
    )
    returns = flag(config, "responseLogprobs", f"{_CONFIG}.")
    lacking = "" if returns else f"{_CONFIG}.responseLogprobs"
    most = body.read_top_logprobs(config.get("logprobs"), f"{_CONFIG}.logprobs", lacking)
    if returns:
        request.returns.logprobs, request.returns.top_logprobs = True, most
    shows_thoughts = flag(thinking, "includeThoughts", f"{name}.")
    return ContentTurn(request, head.model, streams, head.session_key, shows_thoughts, sse)


def _integer(
    given: Mapping[str, Any], name: str, least: int | None, within: str = _CONFIG
) -> int | None:
    value = given.get(name)
    return None if value is None else body.integer(value, f"{within}.{name}", least)


def _format(config: Mapping[str, Any]) -> gateway_pb2.JsonFormat | None:
    """Returns the form of the text, from its media type and a schema of one of two kinds."""
    schemas = {
        f"{_CONFIG}.{name}": config[name]
        for name in ("responseSchema", "responseJsonSchema", "_responseJsonSchema")
        if config.get(name) is not None
    }
    media_type = config.get("responseMimeType") or "text/plain"
    served = "application/json" if schemas else "text/plain or application/json"
    if not isinstance(media_type, str) or media_type not in served.split(" or "):
        raise InvalidFieldError(
            f"{_CONFIG}.responseMimeType", f"is {excerpt(media_type)}; give {served}"
        )
    if not schemas:
        return gateway_pb2.JsonFormat() if media_type == "application/json" else None
    (name, schema), *others = schemas.items()
    if others:
        raise InvalidFieldError(others[0][0], f"is given beside {name}; give one of them")
    if name == f"{_CONFIG}.responseSchema":
        schema = _json_schema(schema, name)
    return body.read_schema(schema, name, strict=True)


# Schemas: OpenAPI 3.0's, with types in capitals, as JSON Schema

_OPENAPI_FORMATS = {"enum", "float", "double", "int32", "int64"}
_RENAMED = {"defs": "$defs", "ref": "$ref"}
_COUNTS = {"minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"}


def _json_schema(schema: Any, field: str) -> dict[str, Any]:
    try:
        return _schema(schema, field)
    except RecursionError as error:
        raise InvalidFieldError(field, "is nested too deeply; nest it less deeply") from error


def _schema(schema: Any, field: str) -> dict[str, Any]:
    given = _members(schema, field)
    result: dict[str, Any] = {}
    for name, value in given.items():
        where = f"{field}.{name}"
        if value is None or name in {"nullable", "propertyOrdering"}:
            continue
        if name == "type":
            if value != "TYPE_UNSPECIFIED":
                result["type"] = string(value, where).lower()
        elif name in {"properties", "defs"}:
            found = {
                key: _schema(one, f"{where}.{key}") for key, one in members(value, where).items()
            }
            result[_RENAMED.get(name, name)] = found
        elif name == "items" or (name == "additionalProperties" and isinstance(value, dict)):
            result[name] = _schema(value, where)
        elif name == "anyOf":
            forms = body.entries(value, where, body.MAX_TOOLS, "schemas")
            result[name] = [_schema(one, f"{where}[{at}]") for at, one in enumerate(forms)]
        elif name in _COUNTS and isinstance(value, str) and re.fullmatch("[0-9]{1,19}", value):
            result[name] = int(value)  # 64-bit integers are strings
        elif name != "format" or value not in _OPENAPI_FORMATS:
            result[_RENAMED.get(name, name)] = value
    if isinstance(order := given.get("propertyOrdering"), list) and "properties" in result:
        known = result["properties"]
        first = {key: known[key] for key in order if isinstance(key, str) and key in known}
        result["properties"] = first | known
    if flag(given, "nullable", f"{field}."):
        if "enum" in result:
            result["enum"] = [*result["enum"], None]
        if "anyOf" in result:
            result["anyOf"] = [*result["anyOf"], {"type": "null"}]
        if "type" in result:
            result["type"] = [result["type"], "null"]
    return result


# Tools


def _tools(tools: Any) -> list[dict[str, Any]]:
    """Returns the tools in the form of chat completions."""
    found: list[dict[str, Any]] = []
    for at, one in enumerate(body.entries(_listed(tools), "tools", body.MAX_TOOLS, "tools")):
        tool = _members(one, f"tools[{at}]")
        for name, value in tool.items():
            if name != "functionDeclarations" and value is not None:
                raise InvalidFieldError(
                    f"tools[{at}].{name}",
                    "is a tool of Google's service; declare a function that the agent runs",
                )
        field = f"tools[{at}].functionDeclarations"
        listed = _listed(tool.get("functionDeclarations"))
        functions = body.entries(listed, field, body.MAX_TOOLS, "functions")
        for index, declared in enumerate(functions):
            name = f"{field}[{index}]"
            given = _members(declared, name)
            known = ("name", "description", "parameters", "parametersJsonSchema")
            PARAMETERS.ignore(given, known)
            if given.get("behavior") == "NON_BLOCKING":
                raise InvalidFieldError(f"{name}.behavior", "is not served; give BLOCKING")
            function: dict[str, Any] = {"name": string(given.get("name"), f"{name}.name")}
            if given.get("description") is not None:
                function["description"] = string(given["description"], f"{name}.description")
            own, schema = given.get("parameters"), given.get("parametersJsonSchema")
            if own is not None and schema is not None:
                raise InvalidFieldError(
                    f"{name}.parametersJsonSchema", "is given beside parameters; give one of them"
                )
            if own is not None:
                function["parameters"] = _json_schema(own, f"{name}.parameters")
            elif schema is not None:
                function["parameters"] = members(schema, f"{name}.parametersJsonSchema")
            found.append({"type": "function", "function": function})
    return found


_MODES = {
    "": gateway_pb2.TOOL_CHOICE_UNSPECIFIED,
    "MODE_UNSPECIFIED": gateway_pb2.TOOL_CHOICE_UNSPECIFIED,
    "AUTO": gateway_pb2.TOOL_CHOICE_AUTO,
    "ANY": gateway_pb2.TOOL_CHOICE_REQUIRED,
    "NONE": gateway_pb2.TOOL_CHOICE_NONE,
}


def _tool_choice(
    config: Any, declared: Sequence[str]
) -> tuple[gateway_pb2.ToolChoice.ValueType, str]:
    """Returns how tools may be used, and the tool's name if only one may."""
    config = _members(config, "toolConfig", {})
    if config.get("retrievalConfig"):
        raise InvalidFieldError("toolConfig.retrievalConfig", "is not served; leave it out")
    PARAMETERS.ignore(config, ("functionCallingConfig", "retrievalConfig"))
    name = "toolConfig.functionCallingConfig"
    calling = _members(config.get("functionCallingConfig"), name, {})
    if flag(calling, "streamFunctionCallArguments", f"{name}."):
        raise InvalidFieldError(
            f"{name}.streamFunctionCallArguments", "is not served: calls come whole; leave it out"
        )
    mode = calling.get("mode") or ""
    if not isinstance(mode, str) or mode not in _MODES:
        raise InvalidFieldError(f"{name}.mode", f"is {excerpt(mode)}; give AUTO, ANY or NONE")
    allowed = body.read_texts(calling.get("allowedFunctionNames"), f"{name}.allowedFunctionNames")
    if not allowed or (set(allowed) >= set(declared) and len(declared) > 1):
        return _MODES[mode], ""
    if mode != "ANY" or len(set(allowed)) > 1:
        raise InvalidFieldError(
            f"{name}.allowedFunctionNames",
            "is served with mode ANY and one name: the chat template prints all tools; give one "
            "name, or declare only the allowed functions",
        )
    return gateway_pb2.TOOL_CHOICE_NAMED, allowed[0]


# Contents

_DATA = ("text", "inlineData", "functionCall", "functionResponse")
_HINTS = ("mediaResolution", "partMetadata")
_OF_MODEL = ("thought", "thoughtSignature")


def _parts(
    content: dict[str, Any], field: str, *served: str
) -> list[tuple[str, dict[str, Any], str]]:
    """Returns the parts of a content: the member with the data, the part, and the part's name.

    A part without data is an empty text.
    """
    PARAMETERS.ignore(content, ("role", "parts"))
    found: list[tuple[str, dict[str, Any], str]] = []
    parts = body.entries(_listed(content.get("parts")), f"{field}.parts", 2**31, "parts")
    for at, one in enumerate(parts):
        name = f"{field}.parts[{at}]"
        part = _members(one, name)
        kinds = [
            key for key, value in part.items()
            if value is not None and key not in _HINTS and key not in _OF_MODEL
        ]  # fmt: skip
        for kind in kinds:
            if kind not in served:
                raise InvalidFieldError(
                    f"{name}.{kind}", f"is not served here; give one of {', '.join(served)}"
                )
        if len(kinds) > 1:
            raise InvalidFieldError(f"{name}.{kinds[1]}", f"is given beside {kinds[0]}; give one")
        PARAMETERS.ignore(part, (*_DATA, *_OF_MODEL))
        found.append((kinds[0] if kinds else "text", part, name))
    return found


def _text(part: dict[str, Any], field: str) -> chat_pb2.ContentPart | None:
    text = string(part.get("text"), f"{field}.text", "")
    return chat_pb2.ContentPart(text=text) if text else None


def _image(part: dict[str, Any], field: str) -> chat_pb2.ContentPart:
    blob = _members(part["inlineData"], f"{field}.inlineData")
    PARAMETERS.ignore(blob, ("data", "mimeType"))
    return body.image_of_base64(blob, f"{field}.inlineData", "mimeType")


def _system(content: Any) -> list[chat_pb2.ChatMessage]:
    if content is None:
        return []
    field = "systemInstruction"
    parts = _parts(_members(content, field), field, "text")
    texts = body.joined(_text(part, name) for _, part, name in parts)
    return [chat_pb2.ChatMessage(role=chat_pb2.ROLE_SYSTEM, content=texts)] if texts else []


def _messages(contents: Any, session_key: str) -> list[chat_pb2.ChatMessage]:
    """Returns the contents as messages.

    The chats of Google's SDK keep each chunk of a stream as a content, so the contents of the model
    that follow one another are one answer.
    """
    found: list[chat_pb2.ChatMessage] = []
    answer: list[tuple[str, dict[str, Any], str]] = []
    calls: list[chat_pb2.ToolCall] = []
    contents = body.list_messages(_listed(contents), field="contents")
    for at, one in enumerate(contents):
        field = f"contents[{at}]"
        content = _members(one, field)
        match content.get("role"):
            case "model":
                answer += _parts(content, field, "text", "functionCall")
                continue
            case None | "" | "user" | "function":
                if answer:
                    found.append(_answer(answer, session_key))
                    answer, calls = [], list(found[-1].tool_calls)
                found += _user(content, field, calls)
            case role:
                raise InvalidFieldError(f"{field}.role", f"is {excerpt(role)}; give user or model")
    if answer:
        raise InvalidFieldError(
            f"contents[{len(contents) - 1}].role",
            "is model, and an answer cannot be begun for the model; end with a content of the user",
        )
    return found


def _user(
    content: dict[str, Any], field: str, calls: list[chat_pb2.ToolCall]
) -> list[chat_pb2.ChatMessage]:
    """Returns the responses of functions and the user's own words as messages, in order.

    Args:
        content: The content.
        field: Its name.
        calls: The open calls of the last answer, from which answered ones are removed.
    """
    return body.in_order(
        _response(part[kind], f"{name}.{kind}", calls)
        if kind == "functionResponse"
        else (_text if kind == "text" else _image)(part, name)
        for kind, part, name in _parts(content, field, "text", "inlineData", "functionResponse")
    )


def _response(given: Any, field: str, calls: list[chat_pb2.ToolCall]) -> chat_pb2.ChatMessage:
    """Returns the result of a function: its `output`, else the complete response.

    A response without an id is of the first call of that function that is not answered.
    """
    given = _members(given, field)
    PARAMETERS.ignore(given, ("id", "name", "response", "parts", "willContinue"))
    if flag(given, "willContinue", f"{field}."):
        raise InvalidFieldError(f"{field}.willContinue", "is not served; send the whole response")
    name = string(given.get("name"), f"{field}.name")
    id_ = string(given.get("id"), f"{field}.id", "")
    for call in calls:
        if call.id == id_ or (not id_ and call.name == name):
            id_ = call.id
            calls.remove(call)
            break
    response = members(given.get("response"), f"{field}.response", {})
    output = response.get("output", response)
    text = output if isinstance(output, str) else body.to_json(output, f"{field}.response")
    parts = [*body.text_parts(text)]
    for kind, part, where in _parts({"parts": given.get("parts")}, field, "inlineData"):
        parts += [_image(part, where)] if kind == "inlineData" else []
    return chat_pb2.ChatMessage(role=chat_pb2.ROLE_TOOL, content=parts, tool_call_id=id_)


def _answer(
    parts: Sequence[tuple[str, dict[str, Any], str]], session_key: str
) -> chat_pb2.ChatMessage:
    """Returns an answer that the agent sends back. It may have dropped thoughts and signatures."""
    result = chat_pb2.ChatMessage(role=chat_pb2.ROLE_ASSISTANT)
    texts: list[chat_pb2.ContentPart | None] = []
    for kind, part, name in parts:
        signature = string(part.get("thoughtSignature"), f"{name}.thoughtSignature", "")
        sealed = ""
        with suppress(ValueError):
            padded = signature.replace("-", "+").replace("_", "/") + "=" * (-len(signature) % 4)
            sealed = base64.b64decode(padded).decode(errors="replace")
        if signature and not {signature, sealed} & _FOREIGN_SIGNATURES:
            # The thoughts themselves are compared by the session's tree, which knows them.
            answer_id = sealed_answer(session_key, sealed, "")
            if not answer_id:
                raise InvalidFieldError(
                    f"{name}.thoughtSignature",
                    "is no signature of this session; send it as it came, leave it out, or send "
                    "skip_thought_signature_validator",
                )
            result.answer_id = result.answer_id or answer_id
        if kind == "functionCall":
            where = f"{name}.{kind}"
            given = _members(part[kind], where)
            PARAMETERS.ignore(given, ("id", "name", "args"))
            result.tool_calls.add(
                id=string(given.get("id"), f"{where}.id", ""),
                name=string(given.get("name"), f"{where}.name"),
                arguments_json=body.read_arguments(given.get("args"), f"{where}.args"),
            )
        elif not flag(part, "thought", f"{name}."):
            texts.append(_text(part, name))
        elif thought := string(part.get("text"), f"{name}.text", ""):
            result.reasoning_content += thought
    result.content.extend(body.joined(texts))
    return result


# Answers


@dataclass(eq=False)
class ContentTurn(Turn):
    """One request for content.

    Text and thoughts are streamed. Calls come whole in the last chunk of a candidate, with the
    signature of the thoughts on the first one, as in Google's API.
    """

    session_key: str
    """Key of the session, which signs thoughts."""
    shows_thoughts: bool
    """Whether thoughts are sent, and not only their signature."""
    sse: bool
    """Whether a stream is events. Otherwise it is one JSON array."""
    _is_begun: bool = field(default=False, init=False)

    def whole(self, response: gateway_pb2.ChatResponse) -> bytes:
        """Returns the `GenerateContentResponse`."""
        answers = response.answers
        candidates = []
        for at, done in enumerate(answers):
            parts = self._texts(as_delta(done)) + self._calls(done)
            reason = "MAX_TOKENS" if is_cut(done) else "STOP"
            candidate = _candidate(at, _signed(parts, self._signature(done)), reason)
            candidates.append(candidate | self._logprobs(done.tokens))
        return self._response(answers[0].answer_id, candidates, usageMetadata=_usage(answers))

    def delta(self, index: int, delta: gateway_pb2.ChatDelta) -> bytes:
        """Returns the chunk for the text and the thoughts of a delta."""
        parts, logprobs = self._texts(delta), self._logprobs(delta.tokens)
        if not parts and not logprobs:
            return b""
        return self._chunk(_candidate(index, parts) | logprobs)

    def finish(self, index: int, done: gateway_pb2.ChatAnswer) -> bytes:
        """Returns the last chunk of a candidate."""
        parts = _signed(self._calls(done), self._signature(done))
        answers = [one for _, one in sorted(self.answers.items())]
        last = _candidate(index, parts, "MAX_TOKENS" if is_cut(done) else "STOP")
        return self._chunk(last, usageMetadata=_usage(answers))

    def end(self) -> bytes:
        """Returns the end of an array. Events have none."""
        return b"" if self.sse else b"]"

    def _chunk(self, candidate: dict[str, Any], **others: Any) -> bytes:
        data = self._response(self.begun[0].answer_id, [candidate], **others)
        if self.sse:
            return b"data: " + data + b"\r\n\r\n"
        before, self._is_begun = b",\r\n" if self._is_begun else b"[", True
        return before + data

    def _response(self, id_: str, candidates: list[dict[str, Any]], **others: Any) -> bytes:
        named = {"modelVersion": self.model, "responseId": id_}
        return orjson.dumps({"candidates": candidates, **others, **named})

    def _texts(self, delta: gateway_pb2.ChatDelta) -> list[dict[str, Any]]:
        thought = delta.reasoning_content if self.shows_thoughts else ""
        parts: list[dict[str, Any]] = [{"text": thought, "thought": True}] if thought else []
        return parts + ([{"text": delta.content}] if delta.content else [])

    def _calls(self, done: gateway_pb2.ChatAnswer) -> list[dict[str, Any]]:
        return [
            {
                "functionCall": {
                    "id": call.id,
                    "name": call.name,
                    "args": body.write_arguments(call.arguments_json),
                }
            }
            for call in done.message.tool_calls
        ]

    def _signature(self, done: gateway_pb2.ChatAnswer) -> str:
        """Returns the signature of an answer's thoughts. Empty if it has none."""
        if not (thought := done.message.reasoning_content):
            return ""
        sealed = seal(self.session_key, done.answer_id, thought)
        return base64.b64encode(sealed.encode()).decode()

    def _logprobs(self, tokens: gateway_pb2.SampledTokens) -> dict[str, Any]:
        rows = with_tops(tokens) if self.chat.returns.logprobs else []
        if not rows:
            return {}
        result: dict[str, Any] = {"chosenCandidates": [_token(one) for one, _ in rows]}
        if self.chat.returns.top_logprobs:
            result["topCandidates"] = [{"candidates": [*map(_token, tops)]} for _, tops in rows]
        return {"logprobsResult": result}


def _token(token: Token) -> dict[str, Any]:
    said = token.text.decode(errors="replace")
    return {"token": said, "tokenId": token.id, "logProbability": token.logprob}


def _signed(parts: list[dict[str, Any]], signature: str) -> list[dict[str, Any]]:
    """Returns parts with a signature: on the first call, else on the last text, or an empty one."""
    if not signature:
        return parts
    calls = [part for part in parts if "functionCall" in part]
    texts = [part for part in parts[-1:] if "thought" not in part]
    carrier = (calls or texts or [{"text": ""}])[0]
    carrier["thoughtSignature"] = signature
    return parts if carrier in parts else [*parts, carrier]


def _candidate(index: int, parts: list[dict[str, Any]], reason: str = "") -> dict[str, Any]:
    """Returns a candidate. Its last chunk has a part too: clients take it for a broken one else."""
    shown = parts or ([{"text": ""}] if reason else [])
    result: dict[str, Any] = {"content": {"parts": shown, "role": "model"}, "index": index}
    return result | ({"finishReason": reason} if reason else {})


def _usage(answers: Sequence[gateway_pb2.ChatAnswer]) -> dict[str, int]:
    """Returns the token counts: the prompt counted once, all candidates summed."""
    prompt, cached = answers[0].prompt_tokens, answers[0].cached_tokens
    sampled = sum(done.completion_tokens for done in answers)
    return {
        "promptTokenCount": prompt,
        "candidatesTokenCount": sampled,
        "totalTokenCount": prompt + sampled,
        **({"cachedContentTokenCount": cached} if cached else {}),
    }


# Errors, as google.rpc.Status

_NAMES = {theirs: f"{_CONFIG}.{name}" for name, theirs in _SAMPLING.items()} | {
    "choices": f"{_CONFIG}.candidateCount",
    "json_format": f"{_CONFIG}.responseJsonSchema",
    "messages": "contents",
    "returns.top_logprobs": f"{_CONFIG}.logprobs",
    "stop": f"{_CONFIG}.stopSequences",
    "template_options_json": f"{_CONFIG}.thinkingConfig",
    "tool_choice": "toolConfig.functionCallingConfig.mode",
    "tool_name": "toolConfig.functionCallingConfig.allowedFunctionNames",
    "tools_json": "tools",
}
_RPC = "type.googleapis.com/google.rpc."


def _to_http(error: RollmeshError, request_id: str) -> HttpError:
    """Returns an error as an HTTP answer, with its message cut to 1,500 bytes."""
    plain = to_http(error)
    name, message = renamed(error, _NAMES)
    numbers = error.metadata
    if error.reason == "CONTEXT_LENGTH_EXCEEDED" and "prompt_tokens" in numbers:  # Google's words
        prompt, most = int(numbers["prompt_tokens"]), int(numbers["max_tokens"])
        message = (
            f"The input token count ({prompt}) exceeds the maximum number of tokens allowed "
            f"({min(most, prompt - 1)})."
        )
    details: list[dict[str, Any]] = [
        {"@type": f"{_RPC}ErrorInfo", "reason": error.reason, "domain": "rollmesh"},
        {"@type": f"{_RPC}RequestInfo", "requestId": request_id},
    ]
    if name:
        violation = {"field": shown_text(name), "description": shown_text(message)}
        details.append({"@type": f"{_RPC}BadRequest", "fieldViolations": [violation]})
    if delay := dict(plain.headers).get(b"retry-after"):
        details.append({"@type": f"{_RPC}RetryInfo", "retryDelay": f"{delay.decode()}s"})
    status = "UNAVAILABLE" if plain.status == 503 else error.code
    value = {"code": plain.status, "message": shown_text(message), "status": status}
    return HttpError(
        plain.status, orjson.dumps({"error": value | {"details": details}}), plain.headers
    )


GENERATE = Protocol(
    name="generate_content",
    parameters=PARAMETERS,
    read=read,
    error=_to_http,
    error_event=b"",  # Google's SDKs know an error in a stream by its bare JSON
    keep_alive=b"\r\n",  # they take no comments
)
STREAM = replace(
    GENERATE,
    read=partial(read, streams=True),
    without_sse=replace(
        GENERATE,
        read=partial(read, streams=True, sse=False),
        error_event=b",",
        keep_alive=b"",
        stream_headers=(*JSON, (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")),
    ),
)
COUNT_CONTENT = replace(
    GENERATE,
    name="count_content",
    read=partial(read, counts=True),
    count=lambda tokens: orjson.dumps({"totalTokens": tokens}),
)
