"""OpenAI's Responses, as its SDK and Codex call them.

Nothing is stored here: a response is an answer of its session's tree, in the gateway.
"""

import re
import struct
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field as field_of, replace
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias

import orjson
from starlette.requests import Request
from starlette.responses import Response

from rollmesh.runtime import clock
from rollmesh.runtime.errors import AnswerUnknownError, InvalidFieldError
from rollmesh.sidecar import body
from rollmesh.sidecar.body import IGNORED, excerpt, flag, members, seal, sealed_answer, string
from rollmesh.sidecar.errors import PreviousResponseUnknownError, to_http
from rollmesh.sidecar.gateways import Gateways
from rollmesh.sidecar.turn import Head, Protocol, Turn, as_delta, is_cut, read_head
from rollmesh.v1 import chat_pb2, gateway_pb2

_LOGPROBS = "call /v1/chat/completions for log-probabilities"
PARAMETERS = body.Parameters(
    served="input instructions model stream previous_response_id tools tool_choice"
    " parallel_tool_calls text max_output_tokens truncation temperature top_p top_k min_p seed"
    " presence_penalty frequency_penalty repetition_penalty stop stop_token_ids ignore_eos"
    " logit_bias include_stop_str_in_output skip_special_tokens reasoning chat_template_kwargs"
    " include metadata",
    refused={
        "background": "an answer is sampled while its request waits; leave it out, or stream",
        "context_management": "nothing of a conversation is cut or summarised; send less of it",
        "conversation previous_input_messages": "give previous_response_id, or the complete input",
        "enable_response_messages": "the answer is what was sampled",
        "include_reasoning": "reasoning is part of the answer; drop the items of type reasoning",
        "prompt": "no prompts are stored here; send the input",
        "structured_outputs": "give text.format or tool_choice instead",
        "top_logprobs": _LOGPROBS,
    },
    unused="access_programs client_metadata image max_tool_calls media_io_kwargs"
    " mm_processor_kwargs moderation priority prompt_cache_key prompt_cache_options"
    " prompt_cache_retention request_id safety_identifier session_id store stream_options user",
    include_reasoning=True,
)
_PARAMS = {
    "messages": "input",
    "tools_json": "tools",
    "template_options_json": "chat_template_kwargs",
    "json_format": "text.format",
    "sampling.max_tokens": "max_output_tokens",
    "answer_id": "response_id",
}
"""Names of the gateway's fields in this protocol."""
_PREVIOUS, _ID = "previous_response_id", "response_id"
_ENCRYPTED_REASONING = "reasoning.encrypted_content"
_MAX_METADATA_BYTES = 64 * 1024
_ECHOED: Mapping[str, Any] = {
    "background": False,
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "prompt_cache_key": None,
    "reasoning": {"effort": None, "summary": None},
    "safety_identifier": None,
    "service_tier": "default",
    "store": True,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "truncation": "disabled",
    "user": None,
}
"""Members of a response that repeat the request, and their values if it does not give them."""

# Requests


def read(data: bytes, head: Head, *, counts: bool = False) -> "ResponseTurn":
    """Reads the body of a request for a response, or only for the size of its prompt."""
    values = body.parse(data)
    streams = not counts and flag(values, "stream")
    items = _Input(values.get("input"), head.session_key)
    tools_json, tool_names = read_tools([("tools", values.get("tools")), *items.added_tools])
    PARAMETERS.check(values)
    if values.get("truncation") not in (None, "disabled"):
        raise InvalidFieldError(
            "truncation",
            "only disabled is served: nothing of a conversation is cut silently; send less of it",
        )
    metadata: Any = {} if values.get("metadata") is None else values["metadata"]
    is_labels = isinstance(metadata, dict) and all(isinstance(v, str) for v in metadata.values())
    if not is_labels:
        raise InvalidFieldError("metadata", "is not an object of strings")
    size = sum(len(key.encode()) + len(value.encode()) for key, value in metadata.items())
    if size > _MAX_METADATA_BYTES:
        raise InvalidFieldError("metadata", f"has {size} bytes; give at most {_MAX_METADATA_BYTES}")
    choice, tool_name = _tool_choice(values.get("tool_choice"), tool_names)
    instructions = string(values.get("instructions"), "instructions", "")
    request = gateway_pb2.ChatRequest(
        tools_json=tools_json,
        tool_choice=choice,
        tool_name=tool_name,
        parallel_tool_calls=flag(values, "parallel_tool_calls", default=None),
        json_format=body.read_format(
            members(values.get("text"), "text", {}).get("format"), "text.format"
        ),
        sampling=body.read_sampling(values, ("max_output_tokens",)),
        stop=body.read_texts(values.get("stop"), "stop", are_stops=True),
        template_options_json=body.read_template_options(
            values.get("chat_template_kwargs"),
            members(values.get("reasoning"), "reasoning", {}).get("effort"),
            "reasoning.effort",
        ),
        include_stop=flag(values, "include_stop_str_in_output"),
        show_special_tokens=not flag(values, "skip_special_tokens", default=True),
        choices=1,
    )
    model = string(values.get("model"), "model", "")
    if instructions:
        request.messages.add(role=chat_pb2.ROLE_SYSTEM, content=body.text_parts(instructions))
    request.messages.extend(items.messages)
    settings = _settings(values)
    previous = values.get(_PREVIOUS)
    previous = None if previous is None else string(previous, _PREVIOUS)
    include = [] if values.get("include") is None else values["include"]
    if not isinstance(include, list):  # its other values name parts that no answer has here
        raise InvalidFieldError("include", "must be a list")
    if "message.output_text.logprobs" in include:
        raise InvalidFieldError("include", f"message.output_text.logprobs: {_LOGPROBS}")
    turn = ResponseTurn(
        request,
        model,
        streams,
        tool_names=tool_names,
        references=items.references,
        previous=previous,
        is_instructed=bool(instructions),
        settings=settings,
        seal_key=head.session_key if _ENCRYPTED_REASONING in include else "",
    )
    turn.edges = body.edges_of(metadata)
    return turn


def _settings(values: Mapping[str, Any]) -> bytes:
    """Returns the members of a response that repeat its request, as JSON without braces.

    They are written once, because tools are large.
    """
    given = {name: values[name] for name in _ECHOED if values.get(name) is not None}
    return b",".join(
        b'"%s":%s' % (name.encode(), body.to_json(value, name).encode())
        for name, value in {**_ECHOED, **given}.items()
    )


# Tools, as the functions that chat templates print
#
# A function keeps its fields, so that the same tools in a chat-completions body print the same
# prompt. A custom (freeform) tool becomes a function with one string. A function of a namespace is
# shown as `namespace__name`. Both as in vLLM 0.32.

_FUNCTION_FIELDS = ("name", "description", "parameters", "strict")
_INPUT = "input"
_INPUT_DESCRIPTION = "The freeform text payload for this tool."
_DROPPED = {"web_search", "web_search_preview", "web_search_2025_08_26"}
"""Tools that agents offer by default: Codex always offers web_search."""


class ToolName(NamedTuple):
    """A tool as the agent knows it."""

    name: str
    namespace: str = ""
    is_custom: bool = False


def read_tools(lists: Sequence[tuple[str, Any]]) -> tuple[str, Mapping[str, ToolName]]:
    """Returns the tools that the template prints, in the form of chat completions, empty if none.

    Also the tools that are not plain functions, by the name that the model uses.

    A chat template prints all tools in one place, wherever the input adds them. A tool that is
    added under a known name replaces the earlier one.

    Args:
        lists: The list of the body, then the lists of its input items, each after its name.
    """
    names: dict[str, ToolName] = {}
    functions: dict[str, dict[str, Any]] = {}
    for field, given in lists:
        here: set[str] = set()
        for at, tool in enumerate(body.entries(given, field, body.MAX_TOOLS, "tools")):
            for function, name in _functions(tool, f"{field}[{at}]", ""):
                shown = function["name"]
                if shown in here:
                    raise InvalidFieldError(
                        f"{field}[{at}]", f"the name {excerpt(shown)} is taken; give another"
                    )
                here.add(shown)
                names[shown], functions[shown] = name, function
        body.entries([*functions], "tools", body.MAX_TOOLS, "tools")  # a namespace has several
    others = {shown: one for shown, one in names.items() if one.is_custom or one.namespace}
    printed = [{"type": "function", "function": one} for one in functions.values()]
    return body.to_json(printed, "tools") if printed else "", others


def _functions(tool: Any, field: str, namespace: str) -> Iterator[tuple[dict[str, Any], ToolName]]:
    """Yields the functions by which a tool is shown to the model, each with its name."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    match kind:
        case "function" | "custom":
            name = string(tool.get("name"), f"{field}.name")
            shown = {key: tool[key] for key in _FUNCTION_FIELDS if tool.get(key) is not None}
            if kind == "custom":
                shown = {key: shown[key] for key in ("name", "description") if key in shown}
                shown["parameters"] = _custom_parameters(tool.get("format"), f"{field}.format")
            shown["name"] = _shown_name(name, namespace)
            yield shown, ToolName(name, namespace, kind == "custom")
        case "namespace" if not namespace:
            inner = tool.get("tools")
            if not isinstance(inner, list):
                raise InvalidFieldError(f"{field}.tools", "must be a list")
            space = string(tool.get("name"), f"{field}.name")
            for at, one in enumerate(inner):
                yield from _functions(one, f"{field}.tools[{at}]", space)
        case str() if kind in _DROPPED:
            IGNORED.labels(f"tools.{kind}").inc()
        case _:
            raise InvalidFieldError(
                f"{field}.type",
                f"{excerpt(kind)} is not served: nothing runs tools here; give functions, custom "
                "tools and namespaces of them",
            )


def _shown_name(name: str, namespace: str) -> str:
    return f"{namespace}__{name}" if namespace else name


def _custom_parameters(form: Any, field: str) -> dict[str, Any]:
    """Returns the parameters of the function that stands for a custom tool."""
    description = _INPUT_DESCRIPTION
    form = members(form, field, {})
    if form.get("type") == "grammar":  # told to the model, not enforced
        syntax = string(form.get("syntax"), f"{field}.syntax")
        grammar = string(form.get("definition"), f"{field}.definition")
        description += f" It matches this {syntax} grammar:\n{grammar}"
    return {
        "type": "object",
        "properties": {_INPUT: {"type": "string", "description": description}},
        "required": [_INPUT],
        "additionalProperties": False,
    }


def earlier_tools(printed_json: str) -> tuple[Mapping[str, ToolName], list[dict[str, Any]]]:
    """Returns the names of an earlier request's tools, and the tools as its body may have been.

    Functions of namespaces are plain functions here.
    """
    names: dict[str, ToolName] = {}
    given: list[dict[str, Any]] = []
    for tool in orjson.loads(printed_json) if printed_json else ():
        shown, said = tool["function"], None
        with suppress(TypeError, KeyError):
            said = shown["parameters"]["properties"][_INPUT]["description"]
        if isinstance(said, str) and said.startswith(_INPUT_DESCRIPTION):
            names[shown["name"]] = ToolName(shown["name"], is_custom=True)
            kept = {key: shown[key] for key in ("name", "description") if key in shown}
            given.append({"type": "custom", **kept})
        else:
            given.append({"type": "function", "parameters": None, "strict": None, **shown})
    return names, given


def _tool_choice(
    choice: Any, names: Mapping[str, ToolName]
) -> tuple[gateway_pb2.ToolChoice.ValueType, str]:
    """Returns `tool_choice`, and the name that the model uses for the tool if it names one."""
    if isinstance(choice, str | None) and choice in body.TOOL_CHOICES:
        return body.TOOL_CHOICES[choice], ""
    if not isinstance(choice, dict) or choice.get("type") not in ("function", "custom"):
        kind = choice.get("type") if isinstance(choice, dict) else choice
        raise InvalidFieldError(
            "tool_choice",
            f"{excerpt(kind)} is not served; give none, auto, required, or a function or a custom "
            "tool by its name",
        )
    name = string(choice.get("name"), "tool_choice.name")
    shown = [key for key, one in names.items() if one.name == name and one.namespace]
    if len(shown) > 1:
        raise InvalidFieldError(
            "tool_choice.name", f"several namespaces have {excerpt(name)}; give one of {shown}"
        )
    return gateway_pb2.TOOL_CHOICE_NAMED, shown[0] if shown else name


def custom_input(arguments: str) -> str | None:
    """Returns the input of a call of a custom tool. None if its arguments are something else."""
    try:
        value = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return None
    text = value.get(_INPUT) if isinstance(value, dict) and len(value) == 1 else None
    return text if isinstance(text, str) else None


# Ids of responses and of their items, made from the gateway's answer id
#
# An answer `chatcmpl-S-N` is the response `resp_S-N` with the items `rs_S-N`, `msg_S-N` and
# `fc_S-N_0`. Ids are never stored: an id that comes back names its answer, in every sidecar and
# after a restart.

_ANSWER, _RESPONSE = "chatcmpl-", "resp_"
_INSTRUCTED = "-i"
"""Ends the id of a response whose request had instructions: its conversation begins with them."""
_MAX_CHARS = 256
_REASONING, _MESSAGE, _CALL = "rs", "msg", "fc"
_CUSTOM_CALL, _RAW_CUSTOM_CALL = "ctc", "ctr"
"""A call of a custom tool. The same if its input is the sampled arguments."""
_ITEM = re.compile(r"(rs|msg|fc|ctc|ctr)_([0-9a-zA-Z]+-[0-9]+)(?:_[0-9]+)?")
"""Ids of other servers have no such form: they do not say which items are one turn."""


def response_id(answer_id: str, *, instructed: bool) -> str:
    """Returns the id of the response that is an answer."""
    return _RESPONSE + answer_id.removeprefix(_ANSWER) + (_INSTRUCTED if instructed else "")


def answer_of_response(given: str, field: str) -> tuple[str, bool]:
    """Returns the answer id of a response, and whether its request had instructions."""
    rest = given.removeprefix(_RESPONSE)
    if rest == given or not rest or len(given) > _MAX_CHARS:
        raise InvalidFieldError(field, f"{given!r:.100} is not the id of a response of this server")
    return _ANSWER + rest.removesuffix(_INSTRUCTED), rest.endswith(_INSTRUCTED)


def item_of(given: object) -> tuple[str, str]:
    """Returns the kind and the answer id of an item. Both are empty for another server's id."""
    made = None
    if isinstance(given, str) and len(given) <= _MAX_CHARS:
        made = _ITEM.fullmatch(given)
    return (made[1], _ANSWER + made[2]) if made else ("", "")


# Items of the input, as messages
#
# A sampled turn is one message and several items: reasoning, text, calls. Consecutive items of the
# assistant are joined again, by the answer that their ids name. Agents that drop the ids get the
# same message where the order of the items shows it.

_MAX_ITEMS = 60_000
"""Three items for each message of the longest session that a gateway holds by default."""
_TEXTS = {
    "input_text": "text",
    "output_text": "text",
    "text": "text",
    "summary_text": "text",
    "reasoning_text": "text",
    "refusal": "refusal",
    "encrypted_content": "encrypted_content",
}
"""Parts that are text, and their member with it. A message between agents of Codex comes as
`encrypted_content`: OpenAI's servers encrypt it, and here it is as the model wrote it."""


class _Input:
    """The input of a request."""

    def __init__(self, given: Any, session_key: str) -> None:
        """Reads an `input`: a string, or a list of items.

        Args:
            given: The input.
            session_key: Key of the session, with which reasoning was sealed.
        """
        self._session_key = session_key
        self.messages: list[chat_pb2.ChatMessage] = []
        self.references: dict[int, tuple[str, str]] = {}
        """Messages that are only referred to: their index, the field that does, the answer's id."""
        self.added_tools: list[tuple[str, Any]] = []
        """Lists of tools that items add to the tools of the body, each after its name."""
        self._turn: chat_pb2.ChatMessage | None = None
        """The message of the assistant that the next item may belong to."""
        self._answer = ""
        """The answer that it is, as far as its items have said."""
        if isinstance(given, str):
            self._other(chat_pb2.ROLE_USER, body.text_parts(given))
            return
        if not isinstance(given, list):
            raise InvalidFieldError("input", "must be a string or a list of items")
        for at, item in enumerate(body.entries(given, "input", _MAX_ITEMS, "items")):
            self._take(members(item, f"input[{at}]"), f"input[{at}]")

    def _take(self, item: dict[str, Any], field: str) -> None:
        kind, (form, answer) = item.get("type", "message"), item_of(item.get("id"))
        if item.get("type") is None and "role" not in item and "id" in item:
            kind = "item_reference"
        match kind:
            case "message":
                name = item.get("role")
                role = body.ROLES.get(name) if isinstance(name, str) else None
                if role is None:
                    raise InvalidFieldError(f"{field}.role", f"{excerpt(name)} is not a role")
                is_answer = role == chat_pb2.ROLE_ASSISTANT
                parts = _content(item.get("content"), f"{field}.content", images=not is_answer)
                if is_answer:  # one text a message, unless the ids say that they are of one answer
                    is_new = self._turn is not None and bool(self._turn.content)
                    self._joined(answer, is_new=is_new).content.extend(parts)
                else:
                    self._other(role, parts)
            case "reasoning":
                parts = _content(item.get("content"), f"{field}.content", images=False)
                parts = parts or _content(item.get("summary"), f"{field}.summary", images=False)
                text = parts[0].text if parts else ""
                if item.get("encrypted_content") is not None:
                    sealed = string(item["encrypted_content"], f"{field}.encrypted_content")
                    answer = sealed_answer(self._session_key, sealed, text) or answer
                turn = self._joined(answer, is_new=True)
                if text:
                    turn.reasoning_content += text
            case "function_call" | "custom_tool_call":
                name = string(item.get("name"), f"{field}.name")
                namespace = string(item.get("namespace") or "", f"{field}.namespace")
                member = "arguments" if kind == "function_call" else "input"
                arguments = string(item.get(member) or "", f"{field}.{member}")
                if member == "input" and form != _RAW_CUSTOM_CALL:
                    arguments = orjson.dumps({_INPUT: arguments}).decode()
                self._joined(answer).tool_calls.add(
                    id=string(item.get("call_id"), f"{field}.call_id"),
                    name=_shown_name(name, namespace),
                    arguments_json=arguments,
                )
            case "function_call_output" | "custom_tool_call_output":
                parts = _content(item.get("output"), f"{field}.output")
                call_id = string(item.get("call_id"), f"{field}.call_id")
                self._other(chat_pb2.ROLE_TOOL, parts, call_id)
            case "item_reference":  # the answer's further items are in there too
                if not answer:
                    raise InvalidFieldError(
                        f"{field}.id",
                        f"{excerpt(item.get('id'))} is no item of an answer of this server",
                    )
                if self._turn is None or self._answer != answer:
                    self.references[len(self.messages)] = f"{field}.id", answer
                    self._begin(answer)
            case "agent_message":  # from another agent of Codex
                self._other(chat_pb2.ROLE_USER, _content(item.get("content"), f"{field}.content"))
            case "additional_tools":  # Codex gives its tools so, before everything else
                self.added_tools.append((f"{field}.tools", item.get("tools")))
            case _:
                raise InvalidFieldError(
                    f"{field}.type",
                    f"{excerpt(kind)} is not served; send messages, reasoning, function calls, "
                    "custom tool calls and their outputs",
                )

    def _joined(self, answer: str, *, is_new: bool = False) -> chat_pb2.ChatMessage:
        """Returns the assistant's message that an item of an answer belongs to.

        Args:
            answer: The answer. Empty if the item does not name it.
            is_new: Whether the item begins a message unless the ids say that it goes on.
        """
        if self._turn is None or (is_new and not (answer and answer == self._answer)):
            return self._begin(answer)
        if answer and self._answer and answer != self._answer:
            return self._begin(answer)
        self._answer = self._turn.answer_id = self._answer or answer
        return self._turn

    def _begin(self, answer: str) -> chat_pb2.ChatMessage:
        self._turn = chat_pb2.ChatMessage(role=chat_pb2.ROLE_ASSISTANT, answer_id=answer)
        self._answer = answer
        self.messages.append(self._turn)
        return self._turn

    def _other(
        self, role: chat_pb2.Role.ValueType, parts: list[chat_pb2.ContentPart], call_id: str = ""
    ) -> None:
        self._turn, self._answer = None, ""
        self.messages.append(
            chat_pb2.ChatMessage(role=role, content=parts, tool_call_id=call_id or None)
        )


def _content(content: Any, field: str, *, images: bool = True) -> list[chat_pb2.ContentPart]:
    """Returns the parts of a content. Texts beside each other are one part."""
    if content is None or isinstance(content, str):
        return body.text_parts(content)
    if not isinstance(content, list):
        raise InvalidFieldError(field, "must be a string or a list of text parts")
    parts = (_part(one, f"{field}[{at}]", images=images) for at, one in enumerate(content))
    return body.joined(parts)


def _part(part: Any, field: str, *, images: bool) -> chat_pb2.ContentPart:
    kind = part.get("type") if isinstance(part, dict) else None
    if images and kind == "input_image":
        if part.get("file_id") is not None:
            raise InvalidFieldError(
                f"{field}.file_id", "is not served: no files are stored here; give image_url"
            )
        return body.image_of_url(part.get("image_url"), f"{field}.image_url")
    key = _TEXTS.get(kind) if isinstance(kind, str) else None
    if key is None:
        served = "text and input_image" if images else "text"
        raise InvalidFieldError(
            field, f"is {excerpt(kind)}, not a text part; only {served} is supported here"
        )
    return chat_pb2.ContentPart(text=string(part.get(key), f"{field}.{key}"))


# Answers

_Answer: TypeAlias = gateway_pb2.ChatBegun | gateway_pb2.ChatAnswer
_CUT = {"reason": "max_output_tokens"}
_DELTAS = {
    _REASONING: "response.reasoning_text.delta",
    _MESSAGE: "response.output_text.delta",
    _CALL: "response.function_call_arguments.delta",
}
_NO_TOOL = ToolName("")


@dataclass(slots=True)
class _Segment:
    """A part of an answer that is an item: reasoning, text, or one call."""

    kind: str
    """_REASONING, _MESSAGE or _CALL."""
    at: int | None
    """Index of the call, or how many segments of this kind precede it. None if none may."""
    call_id: str = ""
    tool: ToolName = _NO_TOOL
    pieces: list[str] = field_of(default_factory=list)
    head: bytes = b""
    """The constant beginning of its deltas, up to their text."""

    @property
    def text(self) -> str:
        """The reasoning, the text, or the arguments."""
        return "".join(self.pieces)

    @property
    def input(self) -> str:
        """The input of a call of a custom tool. The arguments as they are if they have none."""
        found = custom_input(self.text)
        return self.text if found is None else found


@dataclass(eq=False)
class ResponseTurn(Turn):
    """One request for a response.

    Deltas of a stream are sent as they are sampled. Every event that says that something is done is
    sent after the turn was committed: Codex keeps each item, and runs each call, as soon as it is
    done, and does not take it back if the stream fails.
    """

    tool_names: Mapping[str, ToolName]
    """Its tools that are not plain functions, by the name that the model uses."""
    is_instructed: bool
    """Whether the conversation begins with instructions."""
    settings: bytes
    """The members of the response that the request gives, as JSON without braces."""
    seal_key: str
    """Key of the session, which seals reasoning. Empty if it has no `encrypted_content`."""
    references: Mapping[int, tuple[str, str]] = field_of(default_factory=dict)
    """Messages after the instructions that are only referred to, as in `_Input`."""
    previous: str | None = None
    """Id of the response that the request continues."""
    _answer: _Answer = field_of(default_factory=gateway_pb2.ChatBegun, init=False)
    """The answer, as far as it is known."""
    _created: int = field_of(default_factory=lambda: clock.unix_ms() // 1000, init=False)
    _has_begun: bool = field_of(default=False, init=False)
    _sequence: int = field_of(default=0, init=False)
    _segments: list[_Segment] = field_of(default_factory=list, init=False)
    _calls: dict[int, int] = field_of(default_factory=dict, init=False)
    """Output index of each call, by its index in the answer."""

    async def complete(self, gateways: Gateways) -> None:
        """Adds the conversation that the request continues, and the items that it refers to."""
        chat, first = self.chat, 1 if self.is_instructed else 0
        messages, instructed = chat.messages, False
        wanted = [(first + at, *reference) for at, reference in self.references.items()]
        if self.previous is not None:
            answer_id, instructed = answer_of_response(self.previous, _PREVIOUS)
            wanted.append((-1, _PREVIOUS, answer_id))
        for at, field, answer_id in wanted:
            asked = gateway_pb2.GetAnswerRequest(
                session_id=chat.session_id,
                session_key=chat.session_key,
                answer_id=answer_id,
                with_messages=at < 0,
            )
            try:
                stored = await gateways.ask(chat.session_id, "GetAnswer", asked)
            except AnswerUnknownError as error:
                problem = "is not known in this session, or was deleted; send the items themselves"
                kind = PreviousResponseUnknownError if at < 0 else InvalidFieldError
                raise kind(field, problem) from error
            message = stored.answer.message
            message.answer_id = stored.answer.answer_id  # it names the answer that it echoes
            if at >= 0:
                messages[at].CopyFrom(message)
                continue
            own = messages[first:]
            del messages[first:]
            # Instructions are not carried over, as in OpenAI's API.
            messages.extend([*stored.messages[1 if instructed else 0 :], message, *own])

    def whole(self, response: gateway_pb2.ChatResponse) -> bytes:
        """Returns the `response` object."""
        (done,) = response.answers
        self._answer, self._created, self._has_begun = done, done.created_unix_ms // 1000, True
        self.delta(0, as_delta(done))
        if not self._segments:
            self._at(_MESSAGE)
        return self._object(self._items(done), done)

    def delta(self, index: int, delta: gateway_pb2.ChatDelta) -> bytes:
        """Returns the events for a delta of the answer.

        The first event is sent with the first delta: until then an error has a status of its own.
        """
        events = b""
        if not self._has_begun:
            self._has_begun, self._answer = True, self.begun[0]
            response = orjson.Fragment(self._object([]))
            events = self._event("response.created", response=response)
            events += self._event("response.in_progress", response=response)
        for kind, text in ((_REASONING, delta.reasoning_content), (_MESSAGE, delta.content)):
            if text:
                at, added = self._at(kind)
                events += added + self._piece(at, text)
        for call in delta.tool_calls:
            at, added = self._at(_CALL, call)
            events += added + self._piece(at, call.arguments_json)
        return events

    def finish(self, index: int, done: gateway_pb2.ChatAnswer) -> bytes:
        """Returns the events that end the answer."""
        # If the model said nothing, the response still has a text.
        events = b"" if self._segments else self._at(_MESSAGE)[1]
        items = self._items(done)
        for at, item in enumerate(items):
            events += self._end_of(at, item)
        response = orjson.Fragment(self._object(items, done))
        return events + self._event(f"response.{_status(done)}", response=response)

    def _at(self, kind: str, call: gateway_pb2.ToolCallDelta | None = None) -> tuple[int, bytes]:
        """Returns the output index of a part, and the events that begin its item if it is new."""
        at = len(self._segments)
        if call is not None:
            if call.index in self._calls:
                return self._calls[call.index], b""
            self._calls[call.index] = at
            segment = _Segment(
                kind, call.index, call.id, self.tool_names.get(call.name) or ToolName(call.name)
            )
        else:
            if self._segments and self._segments[-1].kind == kind:
                return at - 1, b""
            before = sum(one.kind == kind for one in self._segments)
            segment = _Segment(kind, before or None)
        self._segments.append(segment)
        if segment.tool.is_custom:  # its item is sent when its input can be decoded
            return at, b""
        item = self._item(segment, "in_progress")
        events = self._event("response.output_item.added", output_index=at, item=item)
        where: dict[str, Any] = {"item_id": item["id"], "output_index": at}
        if call is None:
            where["content_index"] = 0
            part = _text_part(segment)
            events += self._event("response.content_part.added", **where, part=part)
        if kind == _MESSAGE:
            where["logprobs"] = []
        delta = orjson.dumps({"type": _DELTAS[kind], **where})[:-1]
        segment.head = b'event: %s\ndata: %s,"delta":' % (_DELTAS[kind].encode(), delta)
        return at, events

    def _piece(self, at: int, text: str) -> bytes:
        """Returns the event for more text of a segment."""
        segment = self._segments[at]
        segment.pieces.append(text)
        if segment.tool.is_custom or not text:
            return b""
        number, self._sequence = self._sequence, self._sequence + 1
        return b'%s%s,"sequence_number":%d}\n\n' % (segment.head, orjson.dumps(text), number)

    def _end_of(self, at: int, item: dict[str, Any]) -> bytes:
        """Returns the events that end an item."""
        segment = self._segments[at]
        where: dict[str, Any] = {"item_id": item["id"], "output_index": at}
        if segment.tool.is_custom:
            added = {**item, "input": "", "status": "in_progress"}
            name = "response.custom_tool_call_input"
            events = self._event("response.output_item.added", output_index=at, item=added)
            events += self._event(f"{name}.delta", **where, delta=segment.input)
            events += self._event(f"{name}.done", **where, input=segment.input)
        elif segment.kind == _CALL:
            name = "response.function_call_arguments.done"
            events = self._event(name, **where, name=item["name"], arguments=segment.text)
        else:
            name = _DELTAS[segment.kind].removesuffix("delta") + "done"
            where["content_index"], part = 0, _text_part(segment)
            others: dict[str, Any] = {"logprobs": []} if segment.kind == _MESSAGE else {}
            events = self._event(name, **where, text=segment.text, **others)
            events += self._event("response.content_part.done", **where, part=part)
        return events + self._event("response.output_item.done", output_index=at, item=item)

    def _item(self, segment: _Segment, status: str) -> dict[str, Any]:
        """Returns the item of a segment. A call of a custom tool must be complete."""
        kind, tool = segment.kind, segment.tool
        if tool.is_custom:
            kind = _RAW_CUSTOM_CALL if custom_input(segment.text) is None else _CUSTOM_CALL
        end = "" if segment.at is None else f"_{segment.at}"
        number = self._answer.answer_id.removeprefix(_ANSWER)
        item: dict[str, Any] = {"id": f"{kind}_{number}{end}", "status": status}
        content = [] if status == "in_progress" else [_text_part(segment)]
        if kind == _REASONING:
            item |= {"type": "reasoning", "summary": [], "content": content}
            if self.seal_key:
                answer_id = self._answer.answer_id
                item["encrypted_content"] = seal(self.seal_key, answer_id, segment.text)
        elif kind == _MESSAGE:
            item |= {"type": "message", "role": "assistant", "content": content}
        else:
            item |= {"call_id": segment.call_id, "name": tool.name}
            if tool.namespace:
                item["namespace"] = tool.namespace
            if tool.is_custom:
                item |= {"type": "custom_tool_call", "input": segment.input}
            else:
                item |= {"type": "function_call", "arguments": segment.text}
        return item

    def _items(self, done: gateway_pb2.ChatAnswer) -> list[dict[str, Any]]:
        """Returns the items of a complete answer. A limit leaves the last one incomplete."""
        *others, last = self._segments
        return [
            *(self._item(one, "completed") for one in others),
            self._item(last, _status(done)),
        ]

    def _object(
        self, items: list[dict[str, Any]], done: gateway_pb2.ChatAnswer | None = None
    ) -> bytes:
        """Returns the `response` object, in progress until the answer is complete."""
        status = "in_progress" if done is None else _status(done)
        own = {
            "id": response_id(self._answer.answer_id, instructed=self.is_instructed),
            "object": "response",
            "created_at": self._created,
            "status": status,
            "model": self.model,
            "output": items,
            "error": None,
            "incomplete_details": _CUT if status == "incomplete" else None,
            "usage": None if done is None else _usage(done),
            "temperature": _shortest(self._answer, "temperature"),
            "top_p": _shortest(self._answer, "top_p"),
        }
        if done is not None:
            own["completed_at"] = done.created_unix_ms // 1000 if status == "completed" else None
        return orjson.dumps(own)[:-1] + b"," + self.settings + b"}"

    def _event(self, kind: str, /, **fields: Any) -> bytes:
        value = {"type": kind, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return b"event: %s\ndata: %s\n\n" % (kind.encode(), orjson.dumps(value))


def _status(done: gateway_pb2.ChatAnswer) -> str:
    return "incomplete" if is_cut(done) else "completed"


def _text_part(segment: _Segment) -> dict[str, Any]:
    if segment.kind == _REASONING:
        return {"type": "reasoning_text", "text": segment.text}
    return {"type": "output_text", "text": segment.text, "annotations": [], "logprobs": []}


def _shortest(answer: _Answer, name: Literal["temperature", "top_p"]) -> float | None:
    """Returns a parameter as the shortest number that is the same 32-bit float."""
    if not answer.HasField(name):
        return None
    value: float = getattr(answer, name)
    shorter = (float(f"{value:.{digits}g}") for digits in range(1, 9))
    packed = struct.pack("<f", value)
    return next((one for one in shorter if struct.pack("<f", one) == packed), value)


def _usage(done: gateway_pb2.ChatAnswer) -> dict[str, Any]:
    return {
        "input_tokens": done.prompt_tokens,
        "input_tokens_details": {"cached_tokens": done.cached_tokens},
        "output_tokens": done.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": done.prompt_tokens + done.completion_tokens,
    }


RESPONSES = Protocol(
    name="responses",
    parameters=PARAMETERS,
    read=read,
    error=lambda error, _request_id: to_http(error, _PARAMS),
    error_event=b"event: error\ndata: ",
    keep_alive=b": keep-alive\n\n",
)
COUNT_INPUT = replace(
    RESPONSES,
    name="responses_input_tokens",
    read=partial(read, counts=True),
    count=lambda tokens: orjson.dumps({"object": "response.input_tokens", "input_tokens": tokens}),
)


# Earlier responses: `/v1/responses/{id}`


async def retrieve(gateways: Gateways, request: Request) -> Response:
    """`GET /v1/responses/{id}`: the response as it is without streaming."""
    if request.query_params.get("stream", "false").lower() not in {"", "0", "false"}:
        raise InvalidFieldError("stream", "is not served for an earlier response; leave it out")
    head = read_head(request.scope)
    answer_id, instructed = answer_of_response(request.path_params["response"], _ID)
    asked = gateway_pb2.GetAnswerRequest(
        session_id=head.session_id, session_key=head.session_key, answer_id=answer_id
    )
    stored = await gateways.ask(head.session_id, "GetAnswer", asked)
    names, given = earlier_tools(stored.tools_json)
    is_sealed = _ENCRYPTED_REASONING in request.query_params.getlist("include")
    turn = ResponseTurn(
        gateway_pb2.ChatRequest(),
        await gateways.model_of(head.session_id, ""),
        streams=False,
        tool_names=names,
        is_instructed=instructed,
        settings=_settings({"tools": given}),
        seal_key=head.session_key if is_sealed else "",
    )
    return _answered(turn.whole(gateway_pb2.ChatResponse(answers=[stored.answer])))


async def delete(gateways: Gateways, request: Request) -> Response:
    """`DELETE /v1/responses/{id}`: it is no longer found. Its turn is trained all the same."""
    head, name = read_head(request.scope), request.path_params["response"]
    answer_id, _ = answer_of_response(name, _ID)
    asked = gateway_pb2.WithdrawAnswerRequest(
        session_id=head.session_id, session_key=head.session_key, answer_id=answer_id
    )
    await gateways.ask(head.session_id, "WithdrawAnswer", asked)
    return _answered(orjson.dumps({"id": name, "object": "response", "deleted": True}))


def _answered(body: bytes) -> Response:
    headers = {RESPONSES.request_id_header.decode(): uuid.uuid4().hex}
    return Response(body, headers=headers, media_type="application/json")
