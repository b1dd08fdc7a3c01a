"""POST chat/completions: from the HTTP request to the gateway's calls, and the answers back."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, aclosing

from rollmesh.runtime import clock
from rollmesh.runtime.channels import read_stream, request_metadata
from rollmesh.runtime.errors import DeadlineError, RollmeshError, SessionKeyWrongError
from rollmesh.runtime.logs import current_request_id
from rollmesh.sidecar.answers import DONE, ChunkWriter, whole_body
from rollmesh.sidecar.config import SidecarConfig
from rollmesh.sidecar.metrics import count_ignored
from rollmesh.sidecar.replies import Receive, Reply, Scope, read_body
from rollmesh.sidecar.requests import HttpChat, read_chat
from rollmesh.v1 import gateway_pb2, gateway_pb2_grpc

_KEY = re.compile(r"rmk-([0-9a-f]+)-.+")
_Events = AbstractAsyncContextManager[AsyncIterator[gateway_pb2.ChatResponse]]


class ChatRoute:
    """Answers chat requests through one gateway."""

    def __init__(
        self, gateway: "gateway_pb2_grpc.GatewayServiceAsyncStub", config: SidecarConfig
    ) -> None:
        """Takes the gateway and the limits."""
        self._gateway = gateway
        self._config = config

    async def handle(self, scope: Scope, receive: Receive, reply: Reply) -> None:
        """Answers one request.

        Raises:
            RollmeshError: The request was refused or failed.
            ClientGoneError: The client left; the generation is cancelled.
            BaseExceptionGroup: Of these, where several calls ran.
        """
        headers: dict[bytes, bytes] = dict(scope["headers"])
        session_id, session_key = session_of(scope["path_params"].get("session_id"), headers)
        chat = read_chat(await read_body(receive, self._config.max_body_bytes))
        count_ignored(chat.ignored)
        chat.request.idempotency_key = headers.get(b"idempotency-key", b"").decode("latin-1")
        retries = headers.get(b"x-stainless-retry-count", b"")
        chat.request.retry_count = int(retries) if retries.isdigit() and len(retries) < 9 else 0
        calls = list(chat.calls(session_id, session_key))
        keep_alive_ms = self._config.keep_alive_ms if chat.request.stream else None
        try:
            async with (
                asyncio.timeout(self._config.turn_timeout_ms / 1000),
                asyncio.TaskGroup() as group,
            ):
                attendant = group.create_task(reply.attend(receive, keep_alive_ms))
                if chat.request.stream:
                    await self._answer_stream(chat, calls, reply)
                else:
                    await self._answer_whole(chat, calls, reply)
                attendant.cancel()
        except TimeoutError:
            limit = self._config.turn_timeout_ms
            raise DeadlineError(f"the turn took more than {limit} ms and was ended") from None

    async def _answer_whole(
        self, chat: HttpChat, calls: list[gateway_pb2.ChatRequest], reply: Reply
    ) -> None:
        if len(calls) == 1:
            answers = [await self._answer_of(calls[0])]
        else:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._answer_of(call)) for call in calls]
            answers = [task.result() for task in tasks]
        await reply.whole(whole_body(chat.model, answers))

    async def _answer_of(self, call: gateway_pb2.ChatRequest) -> gateway_pb2.ChatDone:
        async with self._events(call) as events:
            async for event in events:
                if event.HasField("done"):
                    return event.done
        raise _unfinished()

    async def _answer_stream(
        self, chat: HttpChat, calls: list[gateway_pb2.ChatRequest], reply: Reply
    ) -> None:
        chunk_id = f"chatcmpl-{current_request_id()}"
        writer = ChunkWriter(chunk_id, clock.unix_ms() // 1000, chat.model, len(calls))
        if len(calls) == 1:
            answers = [await self._relay(calls[0], writer, reply)]
            end = writer.finish(0, answers[0])
        else:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._relay_one_of(call, writer, reply)) for call in calls
                ]
            answers = [task.result() for task in tasks]
            end = b""
        if chat.include_usage:
            end += writer.usage(answers)
        await reply.write(end + DONE, last=True)

    async def _relay_one_of(
        self, call: gateway_pb2.ChatRequest, writer: ChunkWriter, reply: Reply
    ) -> gateway_pb2.ChatDone:
        done = await self._relay(call, writer, reply)
        await reply.write(writer.finish(call.choice_index, done))
        return done

    async def _relay(
        self, call: gateway_pb2.ChatRequest, writer: ChunkWriter, reply: Reply
    ) -> gateway_pb2.ChatDone:
        """Sends every delta as soon as the gateway does; returns the end."""
        async with self._events(call) as events:
            async for event in events:
                if event.HasField("done"):
                    return event.done
                await reply.write(writer.delta(call.choice_index, event.delta))
        raise _unfinished()

    def _events(self, call: gateway_pb2.ChatRequest) -> _Events:
        timeout_s = self._config.turn_timeout_ms / 1000
        answers = self._gateway.Chat(call, timeout=timeout_s, metadata=request_metadata())
        return aclosing(read_stream(answers))


def session_of(path_id: str | None, headers: dict[bytes, bytes]) -> tuple[str, str]:
    """Returns the id and the key of the session that a request is for.

    Under `/sessions/{id}` the id, which cannot be guessed, opens the session, and a key is checked
    only where it is one of ours: agents may need to send some static key of their own. Elsewhere
    the key names the session.

    Raises:
        SessionKeyWrongError: There is neither an id nor one of our keys.
    """
    scheme, _, token = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
    key = token.strip() if scheme.lower() == "bearer" else ""
    key = key or headers.get(b"x-api-key", b"").decode("latin-1")
    if path_id is not None:
        return path_id, key if key.startswith("rmk-") else ""
    match = _KEY.fullmatch(key)
    if match is None:
        raise SessionKeyWrongError(
            "the key is not a session's; send the key that opening the session gave, "
            "as bearer token or x-api-key"
        )
    return match[1], key


def _unfinished() -> RollmeshError:
    return RollmeshError("the gateway ended its answer without saying that it is whole")
