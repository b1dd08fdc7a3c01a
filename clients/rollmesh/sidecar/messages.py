"""Anthropic's Messages, as its SDK and Claude Code call them."""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

import orjson

from rollmesh.runtime.codec import text_of
from rollmesh.runtime.errors import InvalidFieldError, RollmeshError
from rollmesh.sidecar import body
from rollmesh.sidecar.body import excerpt, flag, members, seal, sealed_answer, string
from rollmesh.sidecar.errors import HttpError, renamed, shown_text, to_http
from rollmesh.sidecar.turn import Head, Protocol, Turn, is_cut
from rollmesh.v1 import chat_pb2, gateway_pb2, trajectory_pb2

PARAMETERS = body.Parameters(
    served="messages model max_tokens system stream temperature top_p top_k stop_sequences tools"
    " tool_choice thinking output_config output_format context_management chat_template_kwargs",
    refused={
        "compaction": "nothing of a conversation is summarised here; ask for a summary",
        "container mcp_servers": "it runs on Anthropic's servers",
        "fallbacks": "a session has one model",
        "thread": "a conversation is what its messages say",
    },
    unused="betas billing_policy cache_control diagnostics fallback_credit_token inference_geo"
    " speed user_profile_id workspace_id",
    nested="allowed_callers budget_tokens caller citations eager_input_streaming input_examples"
    " redacted_thinking task_budget x-anthropic-billing-header",
)
_THINKS = {"enabled": True, "adaptive": True, "disabled": False}
_SAMPLING = ("temperature", "top_p", "top_k", "max_tokens")
_BILLING = "x-anthropic-billing-header"
_SUB_AGENT = re.compile(r"\bcc_is_subagent=(?!false|0|;|$)\w")
_COMPACTION = "CRITICAL: Respond with TEXT ONLY. Do NOT call any tools"
"""How Claude Code asks for a summary, in a block after everything else that the user says."""

# Requests


def read(data: bytes, head: Head, *, counts: bool = False) -> "MessageTurn":
    """Reads the body of a request for a message, or only for the size of its prompt."""
    values = body.parse(data)
    if not counts and values.get("max_tokens") is None:
        raise InvalidFieldError("max_tokens", "is missing; give the most tokens to sample")
    streams = not counts and flag(values, "stream")
    PARAMETERS.check(values)
    management = values.get("context_management")
    edits = management.get("edits") if isinstance(management, dict) else management
    if not isinstance(edits, list | None):
        raise InvalidFieldError("context_management.edits", "must be a list")
    for at, edit in enumerate(edits or []):  # Claude Code always asks to clear no thinking
        keeps = isinstance(edit, dict) and edit.get("keep") == "all"
        if not keeps or not str(edit.get("type", "")).startswith("clear_thinking_"):
            raise InvalidFieldError(
                f"context_management.edits[{at}]",
                "is not served: nothing of a conversation is cut here; send less of it, or give "
                "clear_thinking with keep: all",
            )
    choice, tool_name, parallel = values.get("tool_choice"), "", None
    tool_choice = gateway_pb2.TOOL_CHOICE_UNSPECIFIED
    if choice is not None:
        kind = choice.get("type") if isinstance(choice, dict) else None
        if not isinstance(kind, str) or kind not in _CHOICES:
            raise InvalidFieldError(
                "tool_choice.type", f"is {excerpt(kind)}; give one of {', '.join(_CHOICES)}"
            )
        tool_choice = _CHOICES[kind]
        tool_name = string(choice.get("name"), "tool_choice.name") if kind == "tool" else ""
        one_call = flag(choice, "disable_parallel_tool_use", "tool_choice.")
        parallel = False if one_call else None
    system = values.get("system")
    tools = _Tools(values.get("tools"))
    messages = _system(system, "system", {})
    messages += _messages(values.get("messages"), head.session_key, tools)
    config = members(values.get("output_config"), "output_config", {})
    PARAMETERS.ignore(config, ("effort", "format"))
    form, form_field = config.get("format"), "output_config.format"
    if form is None:  # that of earlier SDKs
        form, form_field = values.get("output_format"), "output_format"
    json_format = None
    if form is not None:
        if not isinstance(form, dict) or form.get("type") != "json_schema":
            raise InvalidFieldError(f"{form_field}.type", "is not served; give json_schema")
        json_format = body.read_schema(form.get("schema"), f"{form_field}.schema", strict=True)
    thinking, options = values.get("thinking"), values.get("chat_template_kwargs")
    effort, shows_thinking = config.get("effort"), True
    if thinking is not None:
        kind = thinking.get("type") if isinstance(thinking, dict) else None
        if not isinstance(kind, str) or kind not in _THINKS:
            raise InvalidFieldError(
                "thinking.type", f"is {excerpt(kind)}; give one of {', '.join(_THINKS)}"
            )
        PARAMETERS.ignore(thinking, ("type", "display"))
        shows_thinking = thinking.get("display") != "omitted"
        if not _THINKS[kind]:
            effort = "none"
        elif isinstance(options, dict | None):
            options = {"enable_thinking": True, **(options or {})}
    request = gateway_pb2.ChatRequest(
        messages=messages,
        tools_json=body.to_json(tools.printed, "tools") if tools.printed else "",
        deferred_tools_json=(
            body.to_json(list(tools.deferred.values()), "tools") if tools.deferred else ""
        ),
        tool_choice=tool_choice,
        tool_name=tool_name,
        parallel_tool_calls=parallel,
        json_format=json_format,
        sampling=body.read_sampling(
            {name: values.get(name) for name in _SAMPLING}, ("max_tokens",)
        ),
        stop=body.read_texts(values.get("stop_sequences"), "stop_sequences", are_stops=True),
        template_options_json=body.read_template_options(options, effort, "output_config.effort"),
        choices=1,
        lineage=_lineage(system, values["messages"][-1].get("content")),
        max_tokens_must_fit=True,
    )
    model = string(values.get("model"), "model", "")
    return MessageTurn(request, model, streams, head.session_key, shows_thinking)


def _lineage(system: Any, last: Any) -> trajectory_pb2.Lineage.ValueType:
    """Returns the lineage that Claude Code states in its texts. UNSPECIFIED if it states none.

    Args:
        system: The system prompt, which has been read.
        last: Content of the last message, which has been read.
    """
    said = last if isinstance(last, str) else (last or [{}])[-1].get("text")
    if isinstance(said, str) and said.startswith(_COMPACTION):
        return trajectory_pb2.LINEAGE_COMPACTION
    blocks = system if isinstance(system, list) else [{"text": system or ""}]
    notes = [one["text"] for one in blocks if one["text"].startswith(_BILLING)]
    if any(_SUB_AGENT.search(note) for note in notes):
        return trajectory_pb2.LINEAGE_SUB_AGENT
    return trajectory_pb2.LINEAGE_UNSPECIFIED


# Content blocks

_Part: TypeAlias = chat_pb2.ContentPart | None
_Reader: TypeAlias = Callable[[dict[str, Any], str], _Part]


def _parts(content: Any, field: str, readers: Mapping[str, _Reader]) -> list[_Part]:
    """Returns the parts of a content: a string, or a list of blocks.

    Args:
        content: The content. None is empty.
        field: Its name.
        readers: Reads a block, by the block's type.
    """
    if content is None or isinstance(content, str):
        return [*body.text_parts(content)]
    return [readers[one["type"]](one, name) for one, name in _blocks(content, field, readers)]


def _blocks(content: Any, field: str, served: Collection[str]) -> list[tuple[dict[str, Any], str]]:
    """Returns the blocks of a list, each with its name, if all are of types that are served."""
    if not isinstance(content, list):
        raise InvalidFieldError(field, "must be a string or a list of content blocks")
    for at, block in enumerate(content):
        kind = block.get("type") if isinstance(block, dict) else None
        if not isinstance(kind, str) or kind not in served:
            raise InvalidFieldError(
                f"{field}[{at}].type",
                f"{excerpt(kind)} is not served here; give one of {', '.join(sorted(served))}",
            )
    return [(block, f"{field}[{at}]") for at, block in enumerate(content)]


def _text(block: dict[str, Any], field: str) -> _Part:
    PARAMETERS.ignore(block, ("type", "text"))
    text = string(block.get("text"), f"{field}.text")
    return chat_pb2.ContentPart(text=text) if text else None


def _image(block: dict[str, Any], field: str) -> _Part:
    PARAMETERS.ignore(block, ("type", "source"))
    source, field = block.get("source"), f"{field}.source"
    kind = source.get("type") if isinstance(source, dict) else None
    if not isinstance(source, dict) or kind not in ("base64", "url"):
        raise InvalidFieldError(field, "is not served; give type base64 with data, or type url")
    if kind == "url":
        return body.image_of_url(source.get("url"), f"{field}.url")
    return body.image_of_base64(source, field, "media_type")


_SEEN: Mapping[str, _Reader] = {"text": _text, "image": _image}


# Tools

_CHOICES = {
    "auto": gateway_pb2.TOOL_CHOICE_AUTO,
    "any": gateway_pb2.TOOL_CHOICE_REQUIRED,
    "none": gateway_pb2.TOOL_CHOICE_NONE,
    "tool": gateway_pb2.TOOL_CHOICE_NAMED,
}


def _tool(tool: Any, field: str) -> dict[str, Any]:
    """Returns a tool in the form of chat completions."""
    kind = members(tool, field).get("type")
    if kind not in (None, "custom"):
        raise InvalidFieldError(
            f"{field}.type",
            f"{excerpt(kind)} is a tool of Anthropic's service; give a tool of the agent's own "
            "with its name and input_schema",
        )
    known = ("type", "name", "description", "input_schema", "strict", "defer_loading")
    PARAMETERS.ignore(tool, known)
    function: dict[str, Any] = {"name": string(tool.get("name"), f"{field}.name")}
    if tool.get("description") is not None:
        function["description"] = string(tool["description"], f"{field}.description")
    function["parameters"] = members(tool.get("input_schema"), f"{field}.input_schema")
    if flag(tool, "strict", f"{field}."):
        function["strict"] = True
    return {"type": "function", "function": function}


class _Tools:
    """The tools of a request, and the blocks of its conversation that name tools.

    Claude Code defers most of its tools: it offers a search, and names the tools that were found in
    the result. A chat template prints tools before the conversation, which a later tool would begin
    anew. So a deferred tool is not printed: its definition is the text of the block that names it.
    """

    def __init__(self, tools: Any) -> None:
        self.printed: list[dict[str, Any]] = []
        """The tools that the template prints."""
        self.deferred: dict[str, dict[str, Any]] = {}
        """The tools that it does not print, by name."""
        self._tools: dict[str, dict[str, Any]] = {}
        for at, tool in enumerate(body.entries(tools, "tools", body.MAX_TOOLS, "tools")):
            read = _tool(tool, f"tools[{at}]")
            self._tools[tool["name"]] = read
            if flag(tool, "defer_loading", f"tools[{at}]."):
                self.deferred[tool["name"]] = read
            else:
                self.printed.append(read)
        self.in_results: Mapping[str, _Reader] = {**_SEEN, "tool_reference": self._reference}
        """Reads the blocks of a tool's result."""
        self.in_systems: Mapping[str, _Reader] = {
            "tool_addition": self._addition,
            "tool_removal": self._removal,
        }
        """Reads the further blocks of a system message within a conversation."""

    def _reference(self, block: dict[str, Any], field: str) -> _Part:
        PARAMETERS.ignore(block, ("type", "tool_name"))
        return self._defined(string(block.get("tool_name"), f"{field}.tool_name"))

    def _addition(self, block: dict[str, Any], field: str) -> _Part:
        tool = _changed(block, field, ("tool_reference", "tool_definition"))
        if tool["type"] == "tool_reference":
            return self._defined(string(tool.get("name"), f"{field}.tool.name"))
        defined = _tool(tool.get("definition"), f"{field}.tool.definition")
        name = defined["function"]["name"]
        if name not in self._tools:
            self.deferred[name] = defined
        return chat_pb2.ContentPart(text=f"{body.to_json(defined, 'tools')}\n")

    def _removal(self, block: dict[str, Any], field: str) -> _Part:
        tool = _changed(block, field, ("tool_reference",))
        name = string(tool.get("name"), f"{field}.tool.name")
        return chat_pb2.ContentPart(text=f"{name} is no longer available.\n")

    def _defined(self, name: str) -> _Part:
        """Returns the definition of a tool. Its name if the body does not have it any more."""
        tool = self._tools.get(name)
        said = name if tool is None else body.to_json(tool, "tools")
        return chat_pb2.ContentPart(text=f"{said}\n")


def _changed(block: dict[str, Any], field: str, kinds: tuple[str, ...]) -> dict[str, Any]:
    """Returns the tool of a block that changes the tools."""
    PARAMETERS.ignore(block, ("type", "tool"))
    tool = block.get("tool")
    kind = tool.get("type") if isinstance(tool, dict) else None
    if not isinstance(tool, dict) or kind not in kinds:
        raise InvalidFieldError(
            f"{field}.tool.type", f"is {excerpt(kind)}; give {' or '.join(kinds)}"
        )
    return tool


# Messages


def _system(content: Any, field: str, readers: Mapping[str, _Reader]) -> list[chat_pb2.ChatMessage]:
    """Returns a system prompt as a message. None if it is empty.

    Claude Code's note to Anthropic's billing has another value for each prompt, and is not meant
    for the model, which never sees it.
    """
    said: list[_Part] = []
    for part in _parts(content, field, {"text": _text, **readers}):
        if part is not None and part.text.startswith(_BILLING):
            PARAMETERS.ignore({_BILLING: True})
        else:
            said.append(part)
    parts = body.joined(said)
    return [chat_pb2.ChatMessage(role=chat_pb2.ROLE_SYSTEM, content=parts)] if parts else []


def _messages(messages: Any, session_key: str, tools: _Tools) -> list[chat_pb2.ChatMessage]:
    found: list[chat_pb2.ChatMessage] = []
    for at, message in enumerate(body.list_messages(messages)):
        field = f"messages[{at}]"
        PARAMETERS.ignore(members(message, field), ("role", "content"))
        content, name = message.get("content"), f"{field}.content"
        match message.get("role"):
            case "user":
                found += _user(content, name, tools)
            case "assistant":
                found.append(_assistant(content, name, session_key))
            case "system":
                found += _system(content, name, tools.in_systems)
            case role:
                raise InvalidFieldError(
                    f"{field}.role", f"is {excerpt(role)}; give user, assistant or system"
                )
    if not found:
        raise InvalidFieldError("messages", "says nothing; end with a user message")
    if found[-1].role == chat_pb2.ROLE_ASSISTANT:
        raise InvalidFieldError(
            f"messages[{len(messages) - 1}].role",
            "is assistant, and an answer cannot be begun for the model; end with a user message",
        )
    return found


def _user(content: Any, field: str, tools: _Tools) -> list[chat_pb2.ChatMessage]:
    """Returns the results of tools and the user's own words as messages, in order."""
    if isinstance(content, str):
        return body.in_order(body.text_parts(content))
    return body.in_order(
        _result(block, name, tools)
        if block["type"] == "tool_result"
        else _SEEN[block["type"]](block, name)
        for block, name in _blocks(content, field, {**_SEEN, "tool_result": None})
    )


def _result(block: dict[str, Any], field: str, tools: _Tools) -> chat_pb2.ChatMessage:
    """Returns the result of a tool. A failed one without content says that it failed."""
    PARAMETERS.ignore(block, ("type", "tool_use_id", "content", "is_error"))
    parts = body.joined(_parts(block.get("content"), f"{field}.content", tools.in_results))
    if flag(block, "is_error", f"{field}.") and not parts:
        parts = body.text_parts("Error")
    return chat_pb2.ChatMessage(
        role=chat_pb2.ROLE_TOOL,
        content=parts,
        tool_call_id=string(block.get("tool_use_id"), f"{field}.tool_use_id"),
    )


_ANSWERED = ("text", "thinking", "redacted_thinking", "tool_use")


def _assistant(content: Any, field: str, session_key: str) -> chat_pb2.ChatMessage:
    if isinstance(content, str):
        parts = body.text_parts(content)
        return chat_pb2.ChatMessage(role=chat_pb2.ROLE_ASSISTANT, content=parts)
    result = chat_pb2.ChatMessage(role=chat_pb2.ROLE_ASSISTANT)
    texts: list[_Part] = []
    for block, name in _blocks(content, field, _ANSWERED):
        match block["type"]:
            case "text":
                texts.append(_text(block, name))
            case "thinking":
                thinking = string(block.get("thinking"), f"{name}.thinking")
                signature = string(block.get("signature"), f"{name}.signature", "")
                # Thinking that was not sampled here is carried too: the tree finds no such answer,
                # so it becomes context that is not trained.
                answer_id = sealed_answer(session_key, signature, thinking)
                result.answer_id = result.answer_id or answer_id
                if thinking:
                    result.reasoning_content += thinking
            case "tool_use":
                PARAMETERS.ignore(block, ("type", "id", "name", "input"))
                result.tool_calls.add(
                    id=string(block.get("id"), f"{name}.id"),
                    name=string(block.get("name"), f"{name}.name"),
                    arguments_json=body.read_arguments(block.get("input"), f"{name}.input"),
                )
            case _:  # opaque text of another server's model
                PARAMETERS.ignore({"redacted_thinking": True})
    result.content.extend(body.joined(texts))
    return result


# Answers


@dataclass(eq=False)
class MessageTurn(Turn):
    """One request for a message.

    Blocks of a stream come one after the other: a block is stopped before the next one starts, and
    clients refuse a delta of another block. The message starts with the first delta, which has the
    size of the prompt.
    """

    session_key: str
    """Key of the session, which signs thinking."""
    shows_thinking: bool
    """Whether thinking is sent, and not only its signature."""
    _is_started: bool = field(default=False, init=False)
    _open: str = field(default="", init=False)
    """The open block: "thinking", "text", "call 0". Empty if none is open."""
    _block: int = field(default=-1, init=False)
    _thought: list[str] = field(default_factory=list, init=False)
    """The pieces of the open block of thinking."""

    def whole(self, response: gateway_pb2.ChatResponse) -> bytes:
        """Returns the message."""
        (done,) = response.answers
        content: list[dict[str, Any]] = []
        if thought := done.message.reasoning_content:
            signature = seal(self.session_key, done.answer_id, thought)
            content = [_thinking(thought if self.shows_thinking else "", signature)]
        if text := text_of(done.message):
            content.append({"type": "text", "text": text})
        content += [
            {**_tool_use(call), "input": body.write_arguments(call.arguments_json)}
            for call in done.message.tool_calls
        ]
        return orjson.dumps(self._message(done, content, **_stop_fields(done)))

    def delta(self, index: int, delta: gateway_pb2.ChatDelta) -> bytes:
        """Returns the events for the next part of the answer."""
        events = b""
        if not self._is_started:
            self._is_started = True
            begun = gateway_pb2.ChatAnswer(
                answer_id=self.begun[0].answer_id, prompt_tokens=delta.prompt_tokens
            )
            events = _event({"type": "message_start", "message": self._message(begun, [])})
        if delta.reasoning_content:
            if self._open != "thinking":
                events += self._enter("thinking", _thinking("", ""))
            self._thought.append(delta.reasoning_content)
            if self.shows_thinking:
                events += self._delta("thinking_delta", thinking=delta.reasoning_content)
        if delta.content:
            if self._open != "text":
                events += self._enter("text", {"type": "text", "text": ""})
            events += self._delta("text_delta", text=delta.content)
        for call in delta.tool_calls:
            if call.id:
                events += self._enter(f"call {call.index}", {**_tool_use(call), "input": {}})
            elif self._open != f"call {call.index}":
                raise RollmeshError("the gateway continued a tool call that had ended")
            if call.arguments_json:
                events += self._delta("input_json_delta", partial_json=call.arguments_json)
        return events

    def finish(self, index: int, done: gateway_pb2.ChatAnswer) -> bytes:
        """Returns the end of the message."""
        end = {"type": "message_delta", "delta": _stop_fields(done), "usage": _usage(done)}
        return self._leave() + _event(end)

    def end(self) -> bytes:
        """Returns the last event."""
        return _event({"type": "message_stop"})

    def _message(
        self, answer: gateway_pb2.ChatAnswer, content: list[dict[str, Any]], **stop: str | None
    ) -> dict[str, Any]:
        return {
            "id": answer.answer_id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            **stop,
            "usage": _usage(answer),
        }

    def _enter(self, name: str, block: dict[str, Any]) -> bytes:
        """Stops the open block and starts another."""
        before = self._leave()
        self._open, self._block = name, self._block + 1
        started = {"type": "content_block_start", "index": self._block, "content_block": block}
        return before + _event(started)

    def _leave(self) -> bytes:
        """Stops the open block. Thinking is signed before that."""
        if not self._open:
            return b""
        signed = b""
        if self._open == "thinking":
            signature = seal(self.session_key, self.begun[0].answer_id, "".join(self._thought))
            signed = self._delta("signature_delta", signature=signature)
            self._thought.clear()
        self._open = ""
        return signed + _event({"type": "content_block_stop", "index": self._block})

    def _delta(self, kind: str, **fields: str) -> bytes:
        delta = {"type": kind, **fields}
        return _event({"type": "content_block_delta", "index": self._block, "delta": delta})


def _thinking(thinking: str, signature: str) -> dict[str, Any]:
    return {"type": "thinking", "thinking": thinking, "signature": signature}


def _tool_use(call: chat_pb2.ToolCall | gateway_pb2.ToolCallDelta) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id, "name": call.name}


def _stop_fields(done: gateway_pb2.ChatAnswer) -> dict[str, str | None]:
    """Returns why an answer ended. Calls that a limit cut short must not run, others must."""
    reason, sequence = "end_turn", None
    if is_cut(done):
        reason = "max_tokens"
    elif done.message.tool_calls:
        reason = "tool_use"
    elif done.stop:
        reason, sequence = "stop_sequence", done.stop
    return {"stop_reason": reason, "stop_sequence": sequence}


def _usage(done: gateway_pb2.ChatAnswer) -> dict[str, int]:
    """Returns the token counts. Prompt tokens from the KV cache are counted apart, not twice."""
    return {
        "input_tokens": done.prompt_tokens - done.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": done.cached_tokens,
        "output_tokens": done.completion_tokens,
    }


def _event(value: dict[str, Any]) -> bytes:
    return f"event: {value['type']}\ndata: ".encode() + orjson.dumps(value) + b"\n\n"


# Errors, as Anthropic's SDKs and Claude Code expect them

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}
_OVERLOADED = {"OVERLOADED", "TOO_MANY_CONNECTIONS"}
"""Reasons of 529: this server has too much to do. Claude Code gives up after three of them, so a
wait for an engine or for another gateway stays 429 and 503."""
_UNTHREADED = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
_FINAL = {401, 403, 404}
_NAMES = {
    "tools_json": "tools",
    "deferred_tools_json": "tools",
    "template_options_json": "chat_template_kwargs",
    "json_format": "output_config.format",
    "stop": "stop_sequences",
}
"""Names of the gateway's fields in this protocol."""


def _to_http(error: RollmeshError, request_id: str) -> HttpError:
    """Returns an error as an HTTP answer, with its message cut to 1,500 bytes."""
    plain = to_http(error)
    status = 529 if error.reason in _OVERLOADED else plain.status
    headers = plain.headers
    if status in _FINAL:  # Claude Code would try again
        headers += ((b"x-should-retry", b"false"),)
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    fields: dict[str, Any] = {"type": kind, "message": _problem(error)}
    if error.metadata.get("field") == "thread":  # the SDK's tool runner goes on without
        fields["details"] = _UNTHREADED
    value = {"type": "error", "error": fields, "request_id": request_id}
    return HttpError(status, orjson.dumps(value), headers)


def _problem(error: RollmeshError) -> str:
    """Returns the message of an error. Clients know the context's end by Anthropic's words."""
    numbers = error.metadata
    if error.reason != "CONTEXT_LENGTH_EXCEEDED" or "prompt_tokens" not in numbers:
        return shown_text(renamed(error, _NAMES)[1])
    prompt, most = int(numbers["prompt_tokens"]), int(numbers["max_tokens"])
    if "wanted_tokens" in numbers:
        return (
            f"input length and `max_tokens` exceed context limit: {prompt} + "
            f"{numbers['wanted_tokens']} > {most}, decrease input length or `max_tokens` and "
            "try again"
        )
    return f"prompt is too long: {prompt} tokens > {min(most, prompt - 1)} maximum"


MESSAGES = Protocol(
    name="messages",
    parameters=PARAMETERS,
    read=read,
    error=_to_http,
    error_event=b"event: error\ndata: ",
    keep_alive=b'event: ping\ndata: {"type":"ping"}\n\n',
    request_id_header=b"request-id",
)
COUNT_TOKENS = replace(
    MESSAGES,
    name="messages_count_tokens",
    read=partial(read, counts=True),
    count=lambda tokens: orjson.dumps({"input_tokens": tokens}),
)
