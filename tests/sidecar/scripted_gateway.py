"""A scripted gateway on a real gRPC server."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import TypeAlias

import grpc

from rollmesh.mesh import GatewayDirectory
from rollmesh.runtime.errors import AnswerUnknownError, SessionKeyWrongError, SessionUnknownError
from rollmesh.runtime.rpc import Context, RpcInterceptor
from rollmesh.sidecar import SidecarConfig, serving as serving_agents
from rollmesh.v1 import (
    chat_pb2,
    gateway_admin_pb2,
    gateway_admin_pb2_grpc,
    gateway_pb2,
    gateway_pb2_grpc,
    sampling_pb2,
)

Events: TypeAlias = AsyncIterator[gateway_pb2.StreamChatResponse]
Script: TypeAlias = Callable[[gateway_pb2.ChatRequest], Events]

SESSION = "5e551011"
KEY = f"rmk-{SESSION}-secret"


def call(call_id: str, name: str, arguments: str) -> chat_pb2.ToolCall:
    return chat_pb2.ToolCall(id=call_id, name=name, arguments_json=arguments)


def done(
    content: str | None = None,
    *,
    calls: Sequence[chat_pb2.ToolCall] = (),
    reasoning: str | None = None,
    finish: sampling_pb2.FinishReason.ValueType = sampling_pb2.FINISH_REASON_STOP,
    answer_id: str = "chatcmpl-answer-1",
) -> gateway_pb2.StreamChatResponse:
    message = chat_pb2.ChatMessage(
        role=chat_pb2.ROLE_ASSISTANT,
        content=[chat_pb2.ContentPart(text=content)] if content else [],
        tool_calls=calls,
        reasoning_content=reasoning,
    )
    return gateway_pb2.StreamChatResponse(
        done=gateway_pb2.ChatAnswer(
            message=message,
            finish_reason=finish,
            prompt_tokens=11,
            completion_tokens=5,
            cached_tokens=3,
            answer_id=answer_id,
            created_unix_ms=1_790_000_000_123,
        )
    )


def begun(answer_id: str) -> gateway_pb2.StreamChatResponse:
    return gateway_pb2.StreamChatResponse(begun=gateway_pb2.ChatBegun(answer_id=answer_id))


def text(content: str) -> gateway_pb2.StreamChatResponse:
    return gateway_pb2.StreamChatResponse(delta=gateway_pb2.ChatDelta(content=content))


def call_piece(
    index: int, arguments: str, call_id: str = "", name: str = ""
) -> gateway_pb2.StreamChatResponse:
    piece = gateway_pb2.ToolCallDelta(index=index, id=call_id, name=name, arguments_json=arguments)
    return gateway_pb2.StreamChatResponse(delta=gateway_pb2.ChatDelta(tool_calls=[piece]))


def answering(*events: gateway_pb2.StreamChatResponse) -> Script:
    async def script(request: gateway_pb2.ChatRequest) -> Events:
        for event in events:
            yield event

    return script


def failing(error: Exception, *before: gateway_pb2.StreamChatResponse) -> Script:
    async def script(request: gateway_pb2.ChatRequest) -> Events:
        for event in before:
            yield event
        raise error

    return script


def waiting(
    until: Callable[[], Awaitable[object]],
    before: Iterable[gateway_pb2.StreamChatResponse],
    after: Iterable[gateway_pb2.StreamChatResponse],
) -> Script:
    """Sends `before`, waits, sends `after`."""

    async def script(request: gateway_pb2.ChatRequest) -> Events:
        for event in before:
            yield event
        await until()
        for event in after:
            yield event

    return script


def hanging(*before: gateway_pb2.StreamChatResponse) -> tuple[Script, asyncio.Event]:
    """Sends `before`, and never ends. The event is set once it has come so far."""
    reached = asyncio.Event()

    async def forever() -> None:
        reached.set()
        await asyncio.Event().wait()

    return waiting(forever, before, []), reached


async def _closes(request: gateway_pb2.CloseSessionRequest) -> None:
    pass


async def _opens(request: gateway_pb2.CreateSessionRequest) -> None:
    """Lets a session be opened."""


class ScriptedGateway(gateway_pb2_grpc.GatewayServiceServicer):
    """Answers every Chat with `script`, after `failures`, and records the requests."""

    def __init__(self) -> None:
        self.script: Script = answering(text("Hello"), done("Hello"))
        self.model = "policy"
        self.requests: list[gateway_pb2.ChatRequest] = []
        self.request_ids: list[str] = []
        self.cancelled = asyncio.Event()
        self.opened: list[gateway_pb2.CreateSessionRequest] = []
        self.closed: list[gateway_pb2.CloseSessionRequest] = []
        self.failures: list[Exception] = []
        self.opening: Callable[[gateway_pb2.CreateSessionRequest], Awaitable[None]] = _opens
        self.closing: Callable[[gateway_pb2.CloseSessionRequest], Awaitable[None]] = _closes
        self.dead: set[str] = set()
        """Ids of its dead letters."""
        self.found: dict[str, gateway_pb2.FindSessionResponse] = {}
        """What it says of a request id."""
        self.finds = asyncio.Event()
        """Set while it says so. Cleared, it is silent."""
        self.finds.set()
        self.checked_keys: list[str] = []
        """Keys that it was asked about without a turn."""

    async def FindSession(
        self, request: gateway_pb2.FindSessionRequest, context: Context
    ) -> gateway_pb2.FindSessionResponse:
        await self.finds.wait()
        if (found := self.found.get(request.request_id)) is None:
            raise SessionUnknownError(f"request_id: {request.request_id!r} opened no session here")
        return found

    async def Chat(
        self, request: gateway_pb2.ChatRequest, context: Context
    ) -> gateway_pb2.ChatResponse:
        """Answers with what the script says last of each choice."""
        found: dict[int, gateway_pb2.ChatAnswer] = {}
        async with aclosing(self._events(request, context)) as events:
            async for event in events:
                if event.HasField("done"):
                    found[event.choice_index] = event.done
        return gateway_pb2.ChatResponse(answers=[found[at] for at in sorted(found)])

    async def StreamChat(self, request: gateway_pb2.StreamChatRequest, context: Context) -> Events:
        for at in reversed(range(request.chat.choices)):
            response = begun(f"chatcmpl-answer-{at + 1}")
            response.choice_index = at
            yield response
        async with aclosing(self._events(request.chat, context)) as events:
            async for event in events:
                yield event

    async def CountTokens(
        self, request: gateway_pb2.CountTokensRequest, context: Context
    ) -> gateway_pb2.CountTokensResponse:
        self.requests.append(request.chat)
        if self.failures:
            raise self.failures.pop(0)
        return gateway_pb2.CountTokensResponse(prompt_tokens=11)

    async def _events(
        self, request: gateway_pb2.ChatRequest, context: Context
    ) -> AsyncGenerator[gateway_pb2.StreamChatResponse, None]:
        self.requests.append(request)
        self.request_ids.append(str(dict(context.invocation_metadata() or ())["x-request-id"]))
        try:
            async with aclosing(self.script(request)) as events:  # type: ignore[type-var]
                async for event in events:
                    yield event
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    async def CreateSession(
        self, request: gateway_pb2.CreateSessionRequest, context: Context
    ) -> gateway_pb2.CreateSessionResponse:
        self.opened.append(request)
        await self.opening(request)
        if self.failures:
            raise self.failures.pop(0)
        session_id = f"5e55{len(self.opened):04x}"
        return gateway_pb2.CreateSessionResponse(
            session_id=session_id, session_key=f"rmk-{session_id}-secret"
        )

    async def CloseSession(
        self, request: gateway_pb2.CloseSessionRequest, context: Context
    ) -> gateway_pb2.CloseSessionResponse:
        if self.failures:
            raise self.failures.pop(0)
        self.closed.append(request)
        await self.closing(request)
        return gateway_pb2.CloseSessionResponse(trajectory_ids=[f"{request.session_id}-1"])

    async def GetSession(
        self, request: gateway_pb2.GetSessionRequest, context: Context
    ) -> gateway_pb2.GetSessionResponse:
        raise SessionUnknownError("session_id: is unknown")

    async def GetGatewayInfo(
        self, request: gateway_pb2.GetGatewayInfoRequest, context: Context
    ) -> gateway_pb2.GetGatewayInfoResponse:
        return gateway_pb2.GetGatewayInfoResponse(model=self.model, max_context_tokens=8192)

    async def GetAnswer(
        self, request: gateway_pb2.GetAnswerRequest, context: Context
    ) -> gateway_pb2.GetAnswerResponse:
        self.checked_keys.append(request.session_key)
        if not request.session_key.endswith("-secret"):
            raise SessionKeyWrongError("session_key: does not open this session")
        if not request.answer_id:
            return gateway_pb2.GetAnswerResponse()
        raise AnswerUnknownError("answer_id: is unknown")

    async def WithdrawAnswer(
        self, request: gateway_pb2.WithdrawAnswerRequest, context: Context
    ) -> gateway_pb2.WithdrawAnswerResponse:
        raise AnswerUnknownError("answer_id: is unknown")

    async def DeclareLineage(
        self, request: gateway_pb2.DeclareLineageRequest, context: Context
    ) -> gateway_pb2.DeclareLineageResponse:
        if not request.session_key.endswith("-secret"):
            raise SessionKeyWrongError("session_key: does not open this session")
        return gateway_pb2.DeclareLineageResponse(edges=len(request.edges))

    async def RevokeSessionKey(
        self, request: gateway_pb2.RevokeSessionKeyRequest, context: Context
    ) -> gateway_pb2.RevokeSessionKeyResponse:
        raise SessionUnknownError("session_id: is unknown")


class ScriptedAdmin(gateway_admin_pb2_grpc.GatewayAdminServiceServicer):
    """Administers the dead letters of a scripted gateway."""

    def __init__(self, dead: set[str]) -> None:
        self.dead = dead

    async def ListDeadLetters(
        self, request: gateway_admin_pb2.ListDeadLettersRequest, context: Context
    ) -> gateway_admin_pb2.ListDeadLettersResponse:
        letters = [gateway_admin_pb2.DeadLetter(session_id=one) for one in sorted(self.dead)]
        return gateway_admin_pb2.ListDeadLettersResponse(dead_letters=letters)

    async def RetryDeadLetter(
        self, request: gateway_admin_pb2.RetryDeadLetterRequest, context: Context
    ) -> gateway_admin_pb2.RetryDeadLetterResponse:
        self._forget(request.session_id)
        return gateway_admin_pb2.RetryDeadLetterResponse()

    async def DropDeadLetter(
        self, request: gateway_admin_pb2.DropDeadLetterRequest, context: Context
    ) -> gateway_admin_pb2.DropDeadLetterResponse:
        self._forget(request.session_id)
        return gateway_admin_pb2.DropDeadLetterResponse()

    def _forget(self, session_id: str) -> None:
        if session_id not in self.dead:
            raise SessionUnknownError("session_id: is no dead letter")
        self.dead.remove(session_id)


@asynccontextmanager
async def serving(servicer: gateway_pb2_grpc.GatewayServiceServicer) -> AsyncIterator[str]:
    """Serves a gateway on a free port. Yields its address."""
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)], interceptors=[RpcInterceptor()])
    gateway_pb2_grpc.add_GatewayServiceServicer_to_server(servicer, server)
    if isinstance(servicer, ScriptedGateway):
        gateway_admin_pb2_grpc.add_GatewayAdminServiceServicer_to_server(
            ScriptedAdmin(servicer.dead),  # type: ignore[abstract]  # the others are absent
            server,
        )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


@asynccontextmanager
async def sidecar_of(config: SidecarConfig) -> AsyncIterator[str]:
    """Runs a sidecar's app on a free port. Yields its `http://host:port`."""
    directory = GatewayDirectory(config.router, config.gateway)
    async with asyncio.timeout(60), aclosing(directory):
        async with serving_agents(replace(config, port=0), directory, joins=False) as port:
            yield f"http://127.0.0.1:{port}"
