"""Turns that a server elsewhere answers, behind OpenAI's chat completions API: recorded as text.

Such a turn has the session, the budget, the tree, the journal and the record of any other. It has
no template, no lease and no token ids: its nodes are empty but for their messages.

The server gets the conversation as the agent sends it. The tree keeps a sampled message as the
server sent it: if the agent's echo differs, the turn carries LENIENT_ECHO.
"""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rollmesh.chat import (
    Calls,
    Message,
    ParserEvent,
    ReasoningEvent,
    TextEvent,
    ToolCall,
    ToolCallEvent,
    new_call_id,
    replace_surrogates,
    write_message,
)
from rollmesh.gateway.config import GatewayConfig
from rollmesh.gateway.deps import BaseDeps
from rollmesh.gateway.journal import Journal
from rollmesh.gateway.limits import book_tokens, check_limits, reserve
from rollmesh.gateway.prompt import Prompt
from rollmesh.gateway.responses import write_deltas
from rollmesh.gateway.session import Session, Turn, TurnRequest
from rollmesh.gateway.tree import Finish, Node, Sample, Told, path_bytes
from rollmesh.gateway.turn import commit
from rollmesh.runtime import Backoff, clock
from rollmesh.runtime.config import ConfigError
from rollmesh.runtime.errors import (
    ContextLengthExceededError,
    DeadlineError,
    EngineFaultError,
    EngineLostError,
    EngineMismatchError,
    EnginesBusyError,
    InvalidFieldError,
    InvalidMessagesError,
    InvalidSamplingError,
    RollmeshError,
)
from rollmesh.v1 import gateway_pb2, sampling_pb2, trajectory_pb2

if TYPE_CHECKING:  # other gateways do not need it
    import aiohttp

_NO_IDS = np.empty(0, np.uint32)
_NO_LOGPROBS = np.empty(0, np.float32)
_FINISHES: Mapping[object, Finish] = {"length": sampling_pb2.FINISH_REASON_LENGTH}
_LARGEST = 64 * 1024 * 1024  # of an answer, and of a line of a stream, bytes
_SHOWN = 300
_UNFINISHED = "the upstream ended an answer before its finish_reason"
_FIRST_RETRY_S, _LONGEST_RETRY_S = 0.2, 5.0
_OLD_LIMIT, _NEW_LIMIT = "max_tokens", "max_completion_tokens"
_OF_IDS = ("allowed_token_ids", "bad_sequences")
_TOO_LONG = "context_length_exceeded"


class Upstream:
    """The server that answers. Its key is sent to it alone, and appears in no log or error."""

    def __init__(self, config: GatewayConfig) -> None:
        """Reads the key.

        Raises:
            ConfigError: The file of the key cannot be read, or aiohttp is missing.
        """
        if find_spec("aiohttp") is None:
            raise ConfigError("upstream: needs the aiohttp package; run: pip install aiohttp")
        headers, name = {}, config.upstream_key_file
        try:
            if name and (key := Path(name).read_text().strip()):
                headers["authorization"] = f"Bearer {key}"
        except (OSError, ValueError) as error:
            raise ConfigError(f"upstream_key_file: {name} cannot be read: {error}") from error
        self._url = config.upstream.rstrip("/") + "/chat/completions"
        self._headers = headers
        self._connect_s = config.lease_timeout_ms / 1000
        self._limit_name = _OLD_LIMIT
        self._http: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> "Upstream":
        import aiohttp

        # A model that thinks is silent for long: the turn's own limit ends a call.
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self._connect_s)
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=timeout, headers=self._headers
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._http is not None
        await self._http.close()

    async def parts(self, body: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """Yields the parts of an answer: chunks of a stream, or the whole answer as one part.

        Raises:
            InvalidFieldError: The server refuses the request.
            EngineMismatchError: The server refuses the gateway: its key, its path or its model.
            EnginesBusyError: The server has no room.
            EngineLostError: The server failed, or the connection to it.
            EngineFaultError: The answer is no JSON of that API, or too large.
        """
        import aiohttp

        assert self._http is not None
        limit = {self._limit_name: body[_OLD_LIMIT]} if _OLD_LIMIT in body else {}
        body = {name: value for name, value in body.items() if name != _OLD_LIMIT} | limit
        try:
            async with self._http.post(self._url, json=body, allow_redirects=False) as response:
                if response.status != 200:
                    error = await _refusal(response)
                    if limit and _NEW_LIMIT in str(error) and self._limit_name == _OLD_LIMIT:
                        self._limit_name = _NEW_LIMIT  # newer models of OpenAI know only this one
                        raise EngineLostError("the upstream wants another name of max_tokens")
                    raise error
                if response.content_type == "text/event-stream":
                    async for line in _lines(response):
                        if line.startswith(b"data:") and (data := line[5:].strip()) != b"[DONE]":
                            yield _object(data)
                else:
                    yield _object(await _whole(response))
        except (aiohttp.ClientError, OSError) as error:  # a TimeoutError is an OSError
            said = f"{error or type(error).__name__!s:.{_SHOWN}}"
            raise EngineLostError(f"the connection to the upstream was lost: {said}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamDeps(BaseDeps):
    """The dependencies of turns that a server elsewhere answers."""

    upstream: Upstream


def check_chat(request: gateway_pb2.ChatRequest) -> None:
    """Checks that a request asks nothing that only engines of the mesh can do.

    Raises:
        InvalidFieldError: It does. The error names the field.
    """
    elsewhere = "is not served, because the model is served elsewhere; leave it out"
    for name in ("token_ids", "logprobs"):
        if getattr(request.returns, name):
            raise InvalidFieldError(f"returns.{name}", elsewhere)
    for name in ("include_stop", "show_special_tokens", "bad_words"):
        if getattr(request, name):
            raise InvalidFieldError(name, elsewhere)


async def run_text_turn(
    deps: UpstreamDeps, store: Journal, session: Session, turn: Turn, request: TurnRequest
) -> Node:
    """Answers one turn and commits it, as `run_turn` does.

    Raises:
        RollmeshError: The turn failed and nothing was committed.
    """
    timeout_ms = deps.config.turn_timeout_ms
    check_limits(deps.config, session)
    tree, conversation = session.tree, request.conversation
    context, earlier = request.settings.render_context, conversation.earlier
    start = tree.start(context, conversation.groups, earlier.digest if earlier else b"")
    match, bookmark = tree.search(start, conversation.groups)
    tree.keep(context, conversation.digest, bookmark)
    groups = conversation.groups[match.depth :]
    sampling = sampling_pb2.SamplingParams()
    sampling.CopyFrom(request.sampling)
    if (most := session.spec.budget.sampled_tokens) and not sampling.max_tokens:
        sampling.max_tokens = min(most, 2**31)
    try:
        async with asyncio.timeout(timeout_ms / 1000):
            await book_tokens(session, turn, sampling)
            size = match.node.record_bytes + sampling.ByteSize()
            reserve(deps.config, session, turn, size + path_bytes(0, len(groups) + 1))
            answer = await _answer(deps, turn, request, sampling)
    except TimeoutError as error:
        raise DeadlineError(f"the turn took longer than {timeout_ms} ms") from error
    turn.committing, turn.prompt_tokens = True, answer.prompt_tokens
    reasons = set(match.reasons)
    if request.settings.sampling.is_changed:
        reasons.add(trajectory_pb2.FIDELITY_REASON_SAMPLING_CHANGED)
    if turn.is_limited and answer.finish == sampling_pb2.FINISH_REASON_LENGTH:
        reasons.add(trajectory_pb2.FIDELITY_REASON_BUDGET)
    new = Prompt(match, [(group, _NO_IDS.copy(), ()) for group in groups], _NO_IDS, None)
    calls = tuple([ToolCall(**call) for call in answer.calls])
    message = Message("assistant", answer.content, calls, reasoning=answer.reasoning)
    sample = answer.sample(sampling, turn)
    return await commit(store, session, turn, new, message, sample, frozenset(reasons))


async def _answer(
    deps: UpstreamDeps, turn: Turn, request: TurnRequest, sampling: sampling_pb2.SamplingParams
) -> "_Answer":
    """Returns the complete answer. A failed try is repeated while nothing of it has arrived."""
    body = _body(deps.config, request, sampling)
    backoff = Backoff(_FIRST_RETRY_S, _LONGEST_RETRY_S)
    until = time.monotonic() + deps.config.lease_timeout_ms / 1000
    while True:
        answer = _Answer()
        why: RollmeshError = EngineLostError(_UNFINISHED)
        try:
            async with aclosing(deps.upstream.parts(body)) as parts:
                async for part in parts:
                    turn.emit(answer.read(part, turn.choice))
        except (EngineLostError, EnginesBusyError) as error:
            why = error
        else:
            if answer.finish:
                turn.sampled, turn.stop = True, answer.stop
                return answer
        wait_s = max((why.retry_delay_ms or 0) / 1000, backoff.next_s())
        has_begun = answer.content or answer.reasoning or answer.calls or answer.finish
        if has_begun or time.monotonic() + wait_s > until:
            raise why
        await asyncio.sleep(wait_s)


def _body(
    config: GatewayConfig, request: TurnRequest, sampling: sampling_pb2.SamplingParams
) -> dict[str, Any]:
    """Returns the request in OpenAI's form.

    Raises:
        InvalidSamplingError: A sampling parameter needs ids of the mesh's own models.
    """
    settings, wanted = request.settings, request.settings.wanted
    body: dict[str, Any] = {
        "model": config.upstream_model or config.model,
        "messages": [
            write_message(message) for group in request.conversation.groups for message in group
        ],
        "stream": request.stream,
    }
    if request.stream:
        body["stream_options"] = {"include_usage": True}
    for one, value in sampling.ListFields():
        if one.name in _OF_IDS:
            raise InvalidSamplingError(
                f"sampling.{one.name}", "needs a model of the mesh; leave it out"
            )
        if one.name == "logit_bias":
            body[one.name] = {str(id_): bias for id_, bias in value.items()}
        elif one.name == "stop_token_ids":
            body[one.name] = list(value)
        else:
            body[one.name] = float(f"{value:.7g}") if isinstance(value, float) else value
    if config.capture == "logprobs":
        body["logprobs"] = True
    if settings.stops:
        body["stop"] = list(settings.stops)
    if settings.render_context.options_json:
        body["chat_template_kwargs"] = json.loads(settings.render_context.options_json)
    if settings.callable_context.tools_json:
        body["tools"] = json.loads(settings.callable_context.tools_json)
        if wanted.calls is Calls.NAMED:
            function = {"name": wanted.tool_name}
            body["tool_choice"] = {"type": "function", "function": function}
        elif wanted.calls is not Calls.AUTO:
            body["tool_choice"] = wanted.calls.name.lower()
        if wanted.one_call:
            body["parallel_tool_calls"] = False
    if wanted.json_schema is not None:
        body["response_format"] = {"type": "json_object"}
        if wanted.json_schema:
            schema = json.loads(wanted.json_schema)
            named = {"name": "answer", "schema": schema, "strict": wanted.strict}
            body["response_format"] = {"type": "json_schema", "json_schema": named}
    return body


@dataclass(slots=True)
class _Answer:
    """An answer as far as it has arrived."""

    content: str = ""
    reasoning: str = ""
    calls: list[dict[str, str]] = field(default_factory=list)
    """Id, name and arguments of each tool call."""
    logprobs: list[Mapping[str, Any]] = field(default_factory=list)
    finish: Finish = sampling_pb2.FINISH_REASON_UNSPECIFIED
    stop: str = ""
    model: str = ""
    prompt_tokens: int = 0
    """Number of tokens of the prompt, as the server counts them."""
    cached_tokens: int = 0
    completion_tokens: int = 0

    def read(self, part: Mapping[str, Any], choice: int) -> list[gateway_pb2.StreamChatResponse]:
        """Adds a part and returns it as parts of the stream of a choice.

        Raises:
            EngineLostError: It is an error in the middle of a stream.
            EngineFaultError: It has another form.
        """
        if part.get("error"):
            raise EngineLostError(f"the upstream failed: {_message_of(part):.{_SHOWN}}")
        try:
            return write_deltas(self._events(part), choice)
        except (TypeError, ValueError, LookupError, AttributeError, OverflowError) as error:
            raise EngineFaultError(
                f"the upstream sent another form of answer: {error!r}"
            ) from error

    def _events(self, part: Mapping[str, Any]) -> Iterator[ParserEvent]:
        self.model = _text(part.get("model")) or self.model
        if usage := part.get("usage"):
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
            counts = usage.get("prompt_tokens"), cached, usage.get("completion_tokens")
            found = [int(one or 0) for one in counts]
            if min(found) < 0 or max(found) >= 2**31:
                raise ValueError(f"{found} are no numbers of tokens")
            self.prompt_tokens, self.cached_tokens, self.completion_tokens = found
        for choice in part.get("choices") or ():
            said = choice.get("delta") or choice.get("message") or {}
            if text := _text(said.get("reasoning_content") or said.get("reasoning")):
                self.reasoning += text
                yield ReasoningEvent(text)
            if text := _text(said.get("content") or said.get("refusal")):
                self.content += text
                yield TextEvent(text)
            for at, call in enumerate(said.get("tool_calls") or ()):
                index, function = call.get("index", at), call.get("function") or {}
                if is_new := index == len(self.calls):
                    id_ = _text(call.get("id")) or new_call_id()
                    self.calls.append({"id": id_, "name": "", "arguments": ""})
                known, more = self.calls[index], _text(function.get("arguments"))
                known["arguments"] += more
                if is_new:
                    known["name"] = _text(function["name"])
                    yield ToolCallEvent(index, known["id"], known["name"], more)
                elif more:
                    yield ToolCallEvent(index, arguments=more)
            self.logprobs += (choice.get("logprobs") or {}).get("content") or ()
            if reason := choice.get("finish_reason"):
                self.finish = _FINISHES.get(reason, sampling_pb2.FINISH_REASON_STOP)
                stopped = choice.get("stop_reason")  # vLLM tells it
                self.stop = _text(stopped) if isinstance(stopped, str) else ""

    def sample(self, sampling: sampling_pb2.SamplingParams, turn: Turn) -> Sample:
        """Returns the sample of the turn, without ids."""
        return Sample(
            _NO_IDS,
            _NO_LOGPROBS,
            (sampling_pb2.VersionSpan(engine_id=self.model),),
            self.finish,
            self.prompt_tokens,
            min(self.cached_tokens, self.prompt_tokens),
            0,
            sampling=sampling,
            request_ids=turn.request_ids,
            told=Told(self.completion_tokens or len(self.logprobs), self.logprobs),
            begun_unix_ms=turn.begun_unix_ms,
            ended_unix_ms=max(clock.unix_ms(), turn.begun_unix_ms),
        )


def _text(value: Any) -> str:
    """Returns a text, in which half an emoji is U+FFFD. None is empty."""
    return replace_surrogates(value or "")


async def _whole(response: "aiohttp.ClientResponse") -> bytes:
    data = bytearray()
    async for part in response.content.iter_any():
        data += part
        if len(data) > _LARGEST:
            raise EngineFaultError(f"the upstream sent an answer of more than {_LARGEST} bytes")
    return bytes(data)


async def _lines(response: "aiohttp.ClientResponse") -> AsyncGenerator[bytes, None]:
    """Yields the lines of a body, whatever their lengths up to a limit."""
    unread = bytearray()
    async for part in response.content.iter_any():
        unread += part
        *lines, rest = unread.split(b"\n")
        for line in lines:
            yield bytes(line)
        unread = bytearray(rest)
        if len(unread) > _LARGEST:
            raise EngineFaultError(f"the upstream sent a line of more than {_LARGEST} bytes")
    yield bytes(unread)


def _object(data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise EngineFaultError(f"the upstream sent no JSON: {error!s:.{_SHOWN}}") from error
    if not isinstance(value, dict):
        raise EngineFaultError("the upstream sent no JSON object")
    return value


async def _refusal(response: "aiohttp.ClientResponse") -> RollmeshError:
    """Returns the error of an answer that is none.

    The server's words about the gateway's own key are not repeated: some quote a part of it.
    """
    status, data = response.status, await _whole(response)
    try:
        found = json.loads(data)
        said = f"{_message_of(found):.{_SHOWN}}"
        is_too_long = _TOO_LONG in {found["error"].get("code"), found["error"].get("type")}
    except (ValueError, RecursionError, TypeError, LookupError, AttributeError):
        said, is_too_long = data[:_SHOWN].decode(errors="replace"), False
    if status in {400, 413, 422}:
        if is_too_long or "maximum context length" in said:
            return ContextLengthExceededError("messages", said, max_tokens=0, prompt_tokens=0)
        return InvalidMessagesError("messages", f"the upstream refused the request: {said}")
    if status in {408, 409, 425, 429}:
        after = response.headers.get("retry-after", "")
        is_number = after.replace(".", "", 1).isdecimal()
        delay_ms = int(min(float(after), 3600) * 1000) if is_number else 1000
        return EnginesBusyError(
            f"the upstream has no room ({status}); try again", retry_delay_ms=delay_ms
        )
    if status >= 500:
        return EngineLostError(f"the upstream failed ({status}): {said}")
    return EngineMismatchError(
        f"the upstream refused the gateway ({status}); check upstream, upstream_model and "
        "upstream_key_file of the gateway"
    )


def _message_of(found: Mapping[str, Any]) -> str:
    error = found["error"]
    return str(error["message"] if isinstance(error, dict) else error)
