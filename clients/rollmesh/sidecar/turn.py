"""One turn over HTTP, in whatever protocol: its session, its answer or its stream, its error.

A protocol reads its JSON into the gateway's `ChatRequest` and writes its JSON from the gateway's
answers and deltas, both synchronously. `TurnEndpoint` owns the connection.
"""

import asyncio
import logging
import re
import secrets
import struct
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, NamedTuple
from urllib.parse import parse_qs

import orjson
from prometheus_client import Counter, Histogram
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from rollmesh.runtime import FairSlots
from rollmesh.runtime.codec import name_of, text_of
from rollmesh.runtime.errors import (
    DeadlineError,
    InvalidFieldError,
    RollmeshError,
    SessionKeyWrongError,
)
from rollmesh.runtime.process import FreedMemory, faults
from rollmesh.runtime.telemetry import current_request, fields, genai, tracing
from rollmesh.sidecar.body import Parameters
from rollmesh.sidecar.config import SidecarConfig
from rollmesh.sidecar.errors import JSON, Headers, HttpError, StoppingError, shown_text, typed
from rollmesh.sidecar.gateways import Gateways
from rollmesh.v1 import gateway_pb2, sampling_pb2, trajectory_pb2

TURNS = Counter(
    "rollmesh_sidecar_turns_total",
    "Requests for an answer, by protocol and HTTP status; 499 if the client left before it.",
    ["protocol", "status"],
)
FIRST_BYTE_SECONDS = Histogram(
    "rollmesh_sidecar_first_byte_seconds",
    "Time from a request's arrival to the first byte of its answer.",
    buckets=(0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 300),
)
HELD_BODY = "rollmesh.held_body"
"""Key of a request's `HeldRequest` in its scope. The bytes count for the client's address until an
endpoint knows the session."""
LINEAGE_HEADER = "x-rollmesh-lineage"
MODEL_REQUEST_HEADER = "X-ACP-Model-Request-ID"
_MODEL_REQUEST = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_log = logging.getLogger(__name__)
_LEFT = 499
_LARGE_BODY_BYTES = 64 * 1024
"""A body of this size is received only once its key was checked. So much JSON has a thread."""
_UNCHECKED_S = 1.0
"""A smaller body that takes longer is received only once its key was checked."""
_READ_AT_A_TIME = 2
"""Large bodies that are parsed at a time: they take up to 30 times their size."""
_STOPPED_MS = 1000
_UNFINISHED = "the gateway's answer ended without its final message"
_STREAM: Headers = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
_LEAST_LOGPROB = -9999.0  # JSON has no infinity; vLLM writes this number
_LAST_WORD_S = 5.0
"""Extra time after the turn's timeout in which a stream may send its error."""

# The head of a request

_KEY_PREFIX = "rmk-"
_MOST_METADATA_BYTES = 16 * 1024
_LINEAGES = {
    "main": trajectory_pb2.LINEAGE_MAIN,
    "sub_agent": trajectory_pb2.LINEAGE_SUB_AGENT,
    "compaction": trajectory_pb2.LINEAGE_COMPACTION,
    "auxiliary": trajectory_pb2.LINEAGE_AUXILIARY,
}


class Head(NamedTuple):
    """The path and the headers of one request."""

    session_id: str
    session_key: str
    headers: Mapping[bytes, str]
    """Headers by lower-case name."""
    lineage: trajectory_pb2.Lineage.ValueType
    """The lineage that the headers state. UNSPECIFIED if they state none."""
    model: str = ""
    """The model that the path names. Empty if it names none."""
    model_request_id: str = ""
    """The agent's own id of the request. May be empty."""


def read_head(scope: Scope) -> Head:
    """Reads the path and the headers of a request.

    The path has the session's key, which works with any placeholder as bearer token. The session's
    id, which needs the key as bearer token, or neither, if the bearer token names the session.
    `x-api-key` is read if there is no bearer token, and then Google's `x-goog-api-key` and `?key=`.

    Raises:
        InvalidFieldError: `x-rollmesh-lineage` names an unknown lineage, or
            `X-ACP-Model-Request-ID` is no id.
        SessionKeyWrongError: There is no key, or there are two different ones.
    """
    headers = {key.lower(): value.decode("latin-1") for key, value in scope["headers"]}
    scheme, _, token = headers.get(b"authorization", "").partition(" ")
    key = token.strip() if scheme.lower() == "bearer" else ""
    key = key or headers.get(b"x-api-key") or headers.get(b"x-goog-api-key", "")
    if not key and b"key=" in (query := scope.get("query_string", b"")):
        key = parse_qs(query.decode("latin-1")).get("key", [""])[0]
    if not key.startswith(_KEY_PREFIX):  # a placeholder, which many agents require
        key = ""
    path = scope["path_params"]
    session, model = path.get("session", ""), path.get("model", "")
    if session.startswith(_KEY_PREFIX):
        if key and key != session:
            raise SessionKeyWrongError(
                "the bearer token differs from the key in the path; send only one of them"
            )
        session, key = "", session
    if not key:
        raise SessionKeyWrongError(
            "send the session's key as bearer token, or call the session's base URL, "
            "which contains it"
        )
    named = headers.get(MODEL_REQUEST_HEADER.lower().encode(), "").strip()
    if named and not _MODEL_REQUEST.fullmatch(named):
        raise InvalidFieldError(
            MODEL_REQUEST_HEADER, f"is {named!r:.200}; give 1 to 128 letters, digits and '._:-'"
        )
    # The request states its lineage itself, or by the headers of a known agent. Claude Code sends
    # `x-claude-code-agent-id` for its sub-agents. Codex sends `x-openai-subagent`, and the kind of
    # the request in `x-codex-turn-metadata`.
    metadata: Any = headers.get(b"x-codex-turn-metadata", "")
    if metadata and len(metadata) <= _MOST_METADATA_BYTES:
        with suppress(orjson.JSONDecodeError):
            metadata = orjson.loads(metadata)
    lineage = trajectory_pb2.LINEAGE_UNSPECIFIED
    if stated := headers.get(LINEAGE_HEADER.encode(), "").strip().lower():
        if stated not in _LINEAGES:
            raise InvalidFieldError(
                LINEAGE_HEADER, f"is {stated!r:.64}; give one of {', '.join(_LINEAGES)}"
            )
        lineage = _LINEAGES[stated]
    elif isinstance(metadata, dict) and metadata.get("request_kind") == "compaction":
        lineage = trajectory_pb2.LINEAGE_COMPACTION
    elif headers.get(b"x-claude-code-agent-id") or headers.get(b"x-openai-subagent"):
        lineage = trajectory_pb2.LINEAGE_SUB_AGENT
    return Head(session or key.split("-")[1], key, headers, lineage, model, named)


# The interface of a protocol


@dataclass(eq=False)
class Turn(ABC):
    """One request, as its protocol read it, and how its answer is written.

    For a stream the calls of a choice come in the order `prompt` (choice 0, if its ids were
    requested), `delta` (any number), `finish`. Then comes one `end`. Choice 0 begins first. Their
    results are sent at once. An empty result sends nothing.
    """

    chat: gateway_pb2.ChatRequest
    """The request to the gateway. The endpoint adds the headers' part."""
    model: str
    """Model that the request names, empty if it names none. The endpoint replaces it by the name
    under which the session's model answers."""
    streams: bool
    """Whether the answer is streamed."""
    edges: Sequence[trajectory_pb2.LineageEdge] = field(init=False, default=())
    """The edges that the request declares."""
    begun: dict[int, gateway_pb2.ChatBegun] = field(init=False, default_factory=dict)
    """The choices of a stream that have begun, each with the id of its answer."""
    answers: dict[int, gateway_pb2.ChatAnswer] = field(init=False, default_factory=dict)
    """The choices of a stream that are complete."""

    async def complete(self, gateways: Gateways) -> None:  # noqa: B027 - most need nothing
        """Adds stored parts of the conversation to which the body only refers.

        Raises:
            RollmeshError: They do not exist, or the gateway failed.
        """

    @abstractmethod
    def whole(self, response: gateway_pb2.ChatResponse) -> bytes:
        """Returns the body of the complete answer, given one answer for each choice."""

    def prompt(self, packed: bytes) -> bytes:
        """Returns the events for the ids of the prompt, unsigned 32-bit little-endian."""
        return b""

    @abstractmethod
    def delta(self, index: int, delta: gateway_pb2.ChatDelta) -> bytes:
        """Returns the events for the next part of a choice."""

    @abstractmethod
    def finish(self, index: int, done: gateway_pb2.ChatAnswer) -> bytes:
        """Returns the events that end a choice."""

    def end(self) -> bytes:
        """Returns the events that end the stream."""
        return b""


@dataclass(frozen=True, slots=True)
class Protocol:
    """A protocol that agents speak over HTTP."""

    name: str
    """Its name in metrics."""
    parameters: Parameters
    """Which parameters of the API are served, refused or ignored."""
    read: Callable[[bytes, Head], Turn]
    """Reads a body. Raises an InvalidFieldError that names the parameter."""
    error: Callable[[RollmeshError, str], HttpError]
    """Returns an error as an answer, given the request's id."""
    error_event: bytes
    """The beginning of the event that reports an error inside a stream, before its JSON."""
    keep_alive: bytes
    """The event that is sent on a stream after a silence."""
    new_bytes: Callable[[bytes, Head], int] = lambda body, _: len(body)
    """Returns how many bytes of a body `read` would parse."""
    request_id_header: bytes = b"x-request-id"
    """Header of every answer with the request's id."""
    count: Callable[[int], bytes] | None = None
    """Writes the number of a prompt's tokens, for an endpoint that samples nothing."""
    stream_headers: Headers = _STREAM
    """Headers of a stream."""
    without_sse: "Protocol | None" = None
    """Answers a request without `?alt=sse` in the place of this protocol."""


def as_delta(done: gateway_pb2.ChatAnswer) -> gateway_pb2.ChatDelta:
    """Returns a complete answer as one part of a stream: a replay has no deltas."""
    message = done.message
    delta = gateway_pb2.ChatDelta(
        content=text_of(message),
        reasoning_content=message.reasoning_content,
        prompt_tokens=done.prompt_tokens,
    )
    for at, call in enumerate(message.tool_calls):
        delta.tool_calls.add(
            index=at, id=call.id, name=call.name, arguments_json=call.arguments_json
        )
    return delta


def is_cut(done: gateway_pb2.ChatAnswer) -> bool:
    """Returns whether a limit ended an answer, and neither the model nor a stop string.

    Raises:
        RollmeshError: It ended in a way in which no turn ends, as an abort.
    """
    if done.finish_reason == sampling_pb2.FINISH_REASON_STOP:
        return False
    if done.finish_reason == sampling_pb2.FINISH_REASON_LENGTH:
        return True
    name = name_of(sampling_pb2.FinishReason.DESCRIPTOR, done.finish_reason)
    raise RollmeshError(f"finish_reason: the gateway sent {name}, which cannot end a turn")


class Token(NamedTuple):
    """A sampled token, or another candidate for its place."""

    id: int
    logprob: float
    text: bytes


def with_tops(tokens: gateway_pb2.SampledTokens) -> list[tuple[Token, list[Token]]]:
    """Returns the sampled tokens, each with the most likely ones in its place."""
    rows = _rows(tokens.token_ids_u32le, tokens.logprobs_f32le, tokens.texts)
    tops = _rows(tokens.top_ids_u32le, tokens.top_logprobs_f32le, tokens.top_texts)
    width = len(tops) // len(rows) if rows else 0
    return [(row, tops[at * width : (at + 1) * width]) for at, row in enumerate(rows)]


def _rows(ids: bytes, logprobs: bytes, texts: Sequence[bytes]) -> list[Token]:
    values = struct.unpack(f"<{len(logprobs) // 4}f", logprobs)
    return [
        Token(id_, max(_LEAST_LOGPROB, value), text)
        for id_, value, text in zip(unpacked(ids), values, texts, strict=True)
    ]


def unpacked(packed: bytes) -> list[int]:
    """Unpacks ids [N] without NumPy, which a sidecar beside an agent does without."""
    return list(struct.unpack(f"<{len(packed) // 4}I", packed))


# The connection


@dataclass(eq=False)
class Exchange:
    """One request and its answer, on their connection.

    Nothing is buffered here for a slow client. While the server's 64 KiB buffer is full, a write
    waits and nothing more is read from the gateway; gRPC's flow-control window then bounds the
    backlog to a few MiB per choice.
    """

    protocol: Protocol
    scope: Scope
    _receive: Receive
    _send: Send
    request_id: str
    status: int = _LEFT
    """Status of the answer, once it has begun."""
    is_received: bool = False
    """Whether the body is complete."""
    size: int = 0
    """Bytes of the body so far. The server bounds them."""
    is_answered: bool = False
    """Whether the answer is complete."""
    _body: list[bytes] = field(default_factory=list)
    _begun: float = field(default_factory=time.perf_counter)
    _is_silent: bool = True

    async def body(self) -> bytes:
        """Returns the complete body. A call that is cancelled may be followed by another.

        Raises:
            ClientDisconnect: The client left.
        """
        while not self.is_received:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            self._body.append(message.get("body", b""))
            self.size += len(self._body[-1])
            self.is_received = not message.get("more_body", False)
        return b"".join(self._body)

    async def cancel_when_left(self, work: asyncio.Task[None]) -> None:
        """Cancels the work on the answer when the client leaves."""
        while (await self._receive())["type"] != "http.disconnect":
            continue
        work.cancel()

    async def write(
        self,
        data: bytes,
        *,
        more: bool = True,
        status: int = HTTPStatus.OK,
        headers: Headers | None = None,
    ) -> None:
        """Sends a part of the answer, after its head: an earlier error gets a status.

        Args:
            data: The part. Empty events of a stream are not sent.
            more: Whether further parts follow. A first part without any is the complete answer.
            status: Status of the answer.
            headers: Headers of the answer. Default: a stream's.
        """
        if more and not data:
            return
        self._is_silent = False
        if self.status == _LEFT:
            self.status = status
            FIRST_BYTE_SECONDS.observe(time.perf_counter() - self._begun)
            headers = headers or self.protocol.stream_headers
            named = [*headers, (self.protocol.request_id_header, self.request_id.encode())]
            if not more:
                named.append((b"content-length", b"%d" % len(data)))
            await self._send({"type": "http.response.start", "status": status, "headers": named})
        self.is_answered = not more
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def fail(self, error: RollmeshError) -> None:
        """Sends an error with its status, or as an event if the stream has started.

        A started stream is not terminated properly and the server closes the connection. Clients
        would mistake a properly terminated partial answer for a complete one.
        """
        if self.is_answered:
            return
        tracing.tell({"error.type": error.reason})
        http = self.protocol.error(error, self.request_id)
        if self.status != _LEFT:
            _log.warning("stream failed", extra=fields(reason=error.reason))
            await self.write(self.protocol.error_event + http.body + b"\n\n")
            return
        if http.status == HTTPStatus.INTERNAL_SERVER_ERROR:
            _log.error(
                "request failed",
                extra=fields(reason=error.reason, error=shown_text(error.message)),
            )
        await self.write(http.body, more=False, status=http.status, headers=http.headers)

    async def fill_silence(self, pause_ms: int) -> None:
        """Sends a keep-alive after each silence of `pause_ms`. Runs until cancelled."""
        while True:
            await asyncio.sleep(pause_ms / 1000)
            if self._is_silent:
                await self.write(self.protocol.keep_alive)
            self._is_silent = True


class TurnEndpoint:
    """An ASGI application, so that it owns the connection and notices when the client leaves."""

    def __init__(
        self, route: str, protocol: Protocol, gateways: Gateways, config: SidecarConfig
    ) -> None:
        """Takes the path without the session, whose key may be in the real one."""
        self._route = route
        self._protocol = protocol
        self._gateways = gateways
        self._turn_timeout_s = config.turn_timeout_ms / 1000
        self._keep_alive_ms = config.keep_alive_ms
        self._freed_memory = FreedMemory()
        self._large_bodies = FairSlots(_READ_AT_A_TIME)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request. A client that leaves cancels the call to the gateway.

        The server cancels the requests that are still running when its grace is over.
        """
        protocol = self._protocol
        if protocol.without_sse and b"alt=sse" not in scope["query_string"].split(b"&"):
            protocol = protocol.without_sse
        exchange = Exchange(protocol, scope, receive, send, uuid.uuid4().hex)
        current_request.set(exchange.request_id)
        known: dict[str, Any] = {"http.request.method": "POST", "http.route": self._route}
        agent = dict(scope["headers"]).get(tracing.TRACEPARENT.encode(), b"").decode("latin-1")
        with tracing.span(f"POST {self._route}", "server", known, of_agent=agent) as span:
            try:
                head = read_head(scope)
                if span is not None:
                    span.set({genai.SESSION_ID: head.session_id})
                turn = await self._read(exchange, head)
                chat = turn.chat
                chat.session_id, chat.session_key = head.session_id, head.session_key
                chat.call_id = secrets.token_hex(16)  # a gateway that went away may have its answer
                chat.idempotency_key = head.headers.get(b"idempotency-key", "")
                chat.model_request_id = head.model_request_id
                chat.lineage = head.lineage or chat.lineage
                retries = head.headers.get(b"x-stainless-retry-count", "0")
                chat.retry_count = int(retries) if retries.isdecimal() and len(retries) < 9 else 0
                if turn.edges:
                    declared = gateway_pb2.DeclareLineageRequest(
                        session_id=head.session_id, session_key=head.session_key, edges=turn.edges
                    )
                    await self._gateways.ask(head.session_id, "DeclareLineage", declared)
                await turn.complete(self._gateways)
                turn.model = chat.model = await self._gateways.model_of(head.session_id, turn.model)
                answer = self._stream if turn.streams else self._answer
                async with asyncio.TaskGroup() as group:
                    answering = group.create_task(answer(turn, exchange))
                    leaving = group.create_task(exchange.cancel_when_left(answering))
                    await asyncio.wait([answering])
                    leaving.cancel()
            except ClientDisconnect:
                return
            except asyncio.CancelledError:
                stopping = "the sidecar is stopping; try again"
                await exchange.fail(StoppingError(stopping, retry_delay_ms=_STOPPED_MS))
            except Exception as error:  # the edge: everything becomes an answer
                await exchange.fail(typed(error))
            finally:
                status = int(exchange.status)
                TURNS.labels(protocol.name, str(status)).inc()
                if span is not None:
                    span.set(
                        {"http.response.status_code": status, genai.REQUEST_ID: exchange.request_id}
                    )
                    if status >= 500 or (status < 400 and not exchange.is_answered):
                        span.error = span.attributes.get("error.type", str(status))
                self._freed_memory.served(exchange.size)

    async def _read(self, exchange: Exchange, head: Head) -> Turn:
        """Receives and reads a body.

        A small one is received first, and the gateway checks the key with the request. The key of a
        larger or slower one is checked before more of it is taken than the server reads ahead. One
        with much that is new is read in a thread, so that it does not block the event loop.
        """
        if int(head.headers.get(b"content-length") or _LARGE_BODY_BYTES) < _LARGE_BODY_BYTES:
            with suppress(TimeoutError):
                async with asyncio.timeout(_UNCHECKED_S):
                    await exchange.body()
        if not exchange.is_received:
            await self._gateways.check_key(head.session_id, head.session_key)
        if (held := exchange.scope.get(HELD_BODY)) is not None:
            held.hold(owner=f"session {head.session_id}")
        body = await exchange.body()
        new_bytes = len(body)
        if new_bytes >= _LARGE_BODY_BYTES:
            new_bytes = exchange.protocol.new_bytes(body, head)
        if new_bytes < _LARGE_BODY_BYTES:
            return exchange.protocol.read(body, head)
        async with self._large_bodies.slot(head.session_id):
            return await asyncio.to_thread(exchange.protocol.read, body, head)

    async def _answer(self, turn: Turn, exchange: Exchange) -> None:
        session = turn.chat.session_id
        if exchange.protocol.count is not None:
            asked = gateway_pb2.CountTokensRequest(chat=turn.chat)
            counted = await self._gateways.ask(session, "CountTokens", asked, self._turn_timeout_s)
            body = exchange.protocol.count(counted.prompt_tokens)
        else:
            response = await self._gateways.ask(session, "Chat", turn.chat, self._turn_timeout_s)
            if len(response.answers) != turn.chat.choices:
                raise RollmeshError(_UNFINISHED)
            await faults.reach("sidecar-before-answer")
            body = turn.whole(response)
        await exchange.write(body, more=False, headers=JSON)

    async def _stream(self, turn: Turn, exchange: Exchange) -> None:
        """Streams all choices within the turn's timeout, even if the client does not read."""
        limit_s = self._turn_timeout_s + _LAST_WORD_S
        try:
            async with asyncio.timeout(limit_s):
                try:
                    async with asyncio.TaskGroup() as group:
                        filling = group.create_task(exchange.fill_silence(self._keep_alive_ms))
                        try:
                            async with asyncio.timeout(self._turn_timeout_s):
                                await self._relay(turn, exchange)
                        except TimeoutError as error:
                            text = "the turn took longer than its timeout; try again"
                            raise DeadlineError(text) from error
                        filling.cancel()
                    await exchange.write(turn.end(), more=False)
                except ExceptionGroup as error:
                    await exchange.fail(typed(error))
        except TimeoutError:  # the server closes a connection whose answer is incomplete
            _log.warning("stream was not read in time", extra=fields(after_s=limit_s))

    async def _relay(self, turn: Turn, exchange: Exchange) -> None:
        """Forwards every event as it arrives."""
        said: set[int] = set()
        early: list[gateway_pb2.StreamChatResponse] = []
        async with aclosing(self._gateways.stream_chat(turn.chat)) as responses:
            async for response in responses:  # read to the end: the gateway treats less as not read
                early.append(response)
                if 0 not in turn.begun:
                    if response.choice_index != 0:
                        continue  # the first choice begins the stream
                    early.insert(0, early.pop())
                for one in early:
                    index, event = one.choice_index, one.WhichOneof("event")
                    if event == "begun":
                        turn.begun[index] = one.begun
                    elif index not in turn.begun:
                        raise RollmeshError("the gateway's answer began without an id")
                    elif event == "delta":
                        delta = one.delta
                        if delta.content or delta.reasoning_content or delta.tool_calls:
                            said.add(index)
                        await exchange.write(turn.delta(index, delta))
                        await faults.reach("sidecar-mid-answer")
                    elif event == "done":
                        turn.answers[index] = one.done
                        parts = b"" if index in said else turn.delta(index, as_delta(one.done))
                        await exchange.write(parts + turn.finish(index, one.done))
                    elif event == "prompt":
                        await exchange.write(turn.prompt(one.prompt.token_ids_u32le))
                early.clear()
        if turn.answers.keys() != set(range(turn.chat.choices)):
            raise RollmeshError(_UNFINISHED)
