"""GatewayService: validates fields, calls the gateway and writes the responses."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing

from rollmesh.gateway.config import GatewayConfig
from rollmesh.gateway.conversation.choices import gathered, merged
from rollmesh.gateway.conversation.images import ImagePolicy
from rollmesh.gateway.conversation.session import (
    Answered,
    PromptIds,
    Reading,
    Session,
    Turn,
    TurnRequest,
)
from rollmesh.gateway.protocol.requests import read_choices
from rollmesh.gateway.protocol.responses import (
    write_answers,
    write_event,
    write_nodes,
    write_stored,
)
from rollmesh.gateway.sessions.gateway import Gateway
from rollmesh.gateway.sessions.registry import Registry
from rollmesh.runtime.errors import (
    InvalidFieldError,
    InvalidMessagesError,
    ModelMismatchError,
)
from rollmesh.runtime.process.memory import FreedMemory
from rollmesh.runtime.rpc.interceptors import Context
from rollmesh.runtime.rpc.repeats import Repeats
from rollmesh.v1 import gateway_pb2, gateway_pb2_grpc, session_pb2

_MAX_METADATA_BYTES = 64 * 1024
_MAX_ID_CHARS = 128
_DEFAULT_PAGE, _MAX_PAGE = 100, 1000
_LARGE_BYTES, _MANY_MESSAGES = 256 * 1024, 512
"""A request of this many bytes or messages is read in a thread."""
_READ_AT_A_TIME = 2


class GatewayServicer(gateway_pb2_grpc.GatewayServiceServicer):
    """Serves one gateway."""

    def __init__(
        self,
        info: gateway_pb2.GetGatewayInfoResponse,
        config: GatewayConfig,
        images: ImagePolicy | None = None,
    ) -> None:
        """Takes the constant part of the gateway's info, the settings, and the images it takes."""
        self._info = info
        self._images = ImagePolicy() if images is None else images
        self._max_choices = config.max_choices
        self._max_messages = config.max_session_nodes
        self._gateway: Gateway | None = None
        self._freed_memory = FreedMemory()
        self._large_requests = asyncio.Semaphore(_READ_AT_A_TIME)
        self._repeats = Repeats()

    @property
    def gateway(self) -> Gateway:
        """The gateway; set before the service has started."""
        assert self._gateway is not None
        return self._gateway

    def begin(self, gateway: Gateway) -> None:
        """Starts serving a gateway whose sessions have been rebuilt."""
        self._gateway = gateway

    async def CreateSession(
        self, request: gateway_pb2.CreateSessionRequest, context: Context
    ) -> gateway_pb2.CreateSessionResponse:
        for field in ("request_id", "group_id"):
            if len(getattr(request, field)) > _MAX_ID_CHARS:
                raise InvalidFieldError(field, f"is longer than {_MAX_ID_CHARS} characters")
        if request.sample_index >= (request.group_size or 1):
            raise InvalidFieldError(
                "sample_index", f"is {request.sample_index}; give one below group_size"
            )
        if request.export_mode not in gateway_pb2.ExportMode.values():
            raise InvalidFieldError(
                "export_mode", f"is {request.export_mode}; give one of ExportMode"
            )
        if request.model not in {"", self._info.model}:
            raise ModelMismatchError(
                "model", f"is {request.model!r}; this gateway serves {self._info.model!r}"
            )
        _check_metadata(request.metadata)
        spec, key = await self.gateway.create(request)
        return gateway_pb2.CreateSessionResponse(
            session_id=spec.session_id, session_key=key, model=spec.model
        )

    async def FindSession(
        self, request: gateway_pb2.FindSessionRequest, context: Context
    ) -> gateway_pb2.FindSessionResponse:
        if not 0 < len(request.request_id) <= _MAX_ID_CHARS:
            raise InvalidFieldError("request_id", f"give 1 to {_MAX_ID_CHARS} characters")
        session_id, is_closed = await self.gateway.find(request.request_id)
        return gateway_pb2.FindSessionResponse(session_id=session_id, closed=is_closed)

    async def Chat(
        self, request: gateway_pb2.ChatRequest, context: Context
    ) -> gateway_pb2.ChatResponse:
        registry, session = self._session(request)
        turns: list[Turn] = []
        is_complete = False

        def replied(_: Context) -> None:
            sent = is_complete and not context.cancelled()
            for turn in turns:
                registry.replies.replied(session, turn, sent=sent)

        context.add_done_callback(replied)  # type: ignore[arg-type]  # a wrong stub

        async def answer(choice: TurnRequest) -> Answered:
            turn, answered = await registry.replies.chat(session, choice)
            turns.append(turn)
            return answered

        size = request.ByteSize()  # it takes as long as writing the request
        try:
            choices = await self._read(request, size, session, stream=False)
            answers = await gathered([answer(choice) for choice in choices])
            is_complete = True
            return write_answers(answers)
        finally:
            self._freed_memory.served(size)

    async def StreamChat(
        self, request: gateway_pb2.StreamChatRequest, context: Context
    ) -> AsyncIterator[gateway_pb2.StreamChatResponse]:
        registry, session = self._session(request.chat)
        request_bytes = request.ByteSize()
        try:
            choices = await self._read(request.chat, request_bytes, session, stream=True)
            answers = [registry.replies.stream_chat(session, choice) for choice in choices]
            is_told, sizes = False, dict[int, int]()
            async with aclosing(merged(answers)) as events:
                async for index, event in events:
                    if isinstance(event, Reading):
                        sizes[index] = event.prompt_tokens
                        continue
                    if isinstance(event, PromptIds) and is_told:  # every choice starts with it
                        continue
                    is_told |= isinstance(event, PromptIds)
                    response = write_event(event, index)
                    if index in sizes and response.HasField("delta"):
                        response.delta.prompt_tokens = sizes.pop(index)
                    yield response
        finally:
            self._freed_memory.served(request_bytes)

    async def CountTokens(
        self, request: gateway_pb2.CountTokensRequest, context: Context
    ) -> gateway_pb2.CountTokensResponse:
        registry, session = self._session(request.chat)
        request_bytes = request.ByteSize()
        try:
            choice, *_ = await self._read(request.chat, request_bytes, session, stream=False)
            size = await registry.replies.count_tokens(session, choice)
        finally:
            self._freed_memory.served(request_bytes)
        return gateway_pb2.CountTokensResponse(
            prompt_tokens=size.tokens, is_lower_bound=size.is_lower_bound
        )

    async def GetAnswer(
        self, request: gateway_pb2.GetAnswerRequest, context: Context
    ) -> gateway_pb2.GetAnswerResponse:
        registry = self._registry(request.session_id, request.session_key)
        session = registry.session(request.session_id)
        answered = registry.replies.answered(session, request.answer_id)
        return write_stored(answered, request.session_id, with_messages=request.with_messages)

    async def WithdrawAnswer(
        self, request: gateway_pb2.WithdrawAnswerRequest, context: Context
    ) -> gateway_pb2.WithdrawAnswerResponse:
        registry = self._registry(request.session_id, request.session_key)
        session = registry.session(request.session_id)
        await registry.replies.withdraw(session, request.answer_id)
        return gateway_pb2.WithdrawAnswerResponse()

    def _session(self, request: gateway_pb2.ChatRequest) -> tuple[Registry, Session]:
        registry = self._registry(request.session_id, request.session_key)
        return registry, registry.session(request.session_id)

    def _registry(self, session_id: str, key: str) -> Registry:
        """Returns the registry of a session, whose key is checked."""
        registry = self.gateway.of(session_id)
        registry.keys.check(session_id, key)
        return registry

    async def _read(
        self, request: gateway_pb2.ChatRequest, size: int, session: Session, *, stream: bool
    ) -> list[TurnRequest]:
        """Reads a request of `size` bytes.

        A large one is read in a thread, and one with images, which are decoded: neither blocks
        others.
        """
        count = len(request.messages)
        if count > self._max_messages:
            raise InvalidMessagesError(
                "messages",
                f"has {count} messages; give at most {self._max_messages}, max_session_nodes of "
                "the gateway",
            )

        def read() -> list[TurnRequest]:
            return read_choices(request, session, self._max_choices, self._images, stream=stream)

        is_small = count < _MANY_MESSAGES and size < _LARGE_BYTES
        if is_small and not (self._images.rule is not None and _has_images(request)):
            return read()
        async with self._large_requests:
            return await asyncio.to_thread(read)

    async def CloseSession(
        self, request: gateway_pb2.CloseSessionRequest, context: Context
    ) -> gateway_pb2.CloseSessionResponse:
        registry = self._registry(request.session_id, request.session_key)
        request.ClearField("session_key")  # the request is stored, and keys are not
        if request.outcome == session_pb2.SESSION_OUTCOME_UNSPECIFIED:
            raise InvalidFieldError("outcome", "is not set; say how the session ended")
        if request.HasField("reward_timeout_ms") and not request.reward_timeout_ms:
            raise InvalidFieldError("reward_timeout_ms", "is 0; give at least 1, or leave it out")
        _check_metadata(request.metadata)
        ids = await registry.close(request)
        return gateway_pb2.CloseSessionResponse(trajectory_ids=ids)

    async def RevokeSessionKey(
        self, request: gateway_pb2.RevokeSessionKeyRequest, context: Context
    ) -> gateway_pb2.RevokeSessionKeyResponse:
        session_id, repeat = request.session_id, request.request_id
        if len(repeat) > _MAX_ID_CHARS:
            raise InvalidFieldError("request_id", f"is longer than {_MAX_ID_CHARS} characters")
        registry = self.gateway.of(session_id)
        registry.keys.next_revision(session_id, request.session_key, repeat)
        registry.session(session_id)  # only who has a key learns whether the session is open
        key = await registry.keys.revoke(session_id, request.session_key, repeat)
        return gateway_pb2.RevokeSessionKeyResponse(session_key=key)

    async def EndSessionKey(
        self, request: gateway_pb2.EndSessionKeyRequest, context: Context
    ) -> gateway_pb2.EndSessionKeyResponse:
        if len(request.request_id) > _MAX_ID_CHARS:
            raise InvalidFieldError("request_id", f"is longer than {_MAX_ID_CHARS} characters")
        registry = self.gateway.of(request.session_id)
        registry.session(request.session_id)
        await registry.keys.end(request.session_id, request.request_id)
        return gateway_pb2.EndSessionKeyResponse()

    async def GetSession(
        self, request: gateway_pb2.GetSessionRequest, context: Context
    ) -> gateway_pb2.GetSessionResponse:
        registry = self._registry(request.session_id, request.session_key)
        session = registry.session(request.session_id)
        nodes = list(write_nodes(session.tree, with_messages=request.with_messages))
        return gateway_pb2.GetSessionResponse(
            session_id=request.session_id,
            nodes=nodes,
            turns=sum(node.sampled for node in nodes),
            in_flight=len(session.in_flight),
        )

    async def GetGatewayInfo(
        self, request: gateway_pb2.GetGatewayInfoRequest, context: Context
    ) -> gateway_pb2.GetGatewayInfoResponse:
        info = gateway_pb2.GetGatewayInfoResponse()
        info.CopyFrom(self._info)
        info.live_sessions = self.gateway.live_sessions
        info.undelivered_sessions = self.gateway.undelivered_sessions
        info.dead_letters = self.gateway.count_dead_letters
        return info

    async def ListDeadLetters(
        self, request: gateway_pb2.ListDeadLettersRequest, context: Context
    ) -> gateway_pb2.ListDeadLettersResponse:
        size = request.page_size or _DEFAULT_PAGE
        if size > _MAX_PAGE:
            raise InvalidFieldError("page_size", f"is {size}; give at most {_MAX_PAGE}")
        letters = await self.gateway.list_dead_letters(request.page_token, size)
        return gateway_pb2.ListDeadLettersResponse(
            dead_letters=letters,
            next_page_token=letters[-1].session_id if len(letters) == size else "",
        )

    async def RetryDeadLetter(
        self, request: gateway_pb2.RetryDeadLetterRequest, context: Context
    ) -> gateway_pb2.RetryDeadLetterResponse:
        letters = self.gateway.of(request.session_id).dead_letters
        await self._repeats.once(request, lambda: letters.retry(request.session_id))
        return gateway_pb2.RetryDeadLetterResponse()

    async def DropDeadLetter(
        self, request: gateway_pb2.DropDeadLetterRequest, context: Context
    ) -> gateway_pb2.DropDeadLetterResponse:
        letters = self.gateway.of(request.session_id).dead_letters
        await self._repeats.once(request, lambda: letters.drop(request.session_id))
        return gateway_pb2.DropDeadLetterResponse()


def _has_images(request: gateway_pb2.ChatRequest) -> bool:
    return any(part.HasField("image") for one in request.messages for part in one.content)


def _check_metadata(metadata: Mapping[str, str]) -> None:
    size = sum(len(key.encode()) + len(value.encode()) for key, value in metadata.items())
    if size > _MAX_METADATA_BYTES:
        raise InvalidFieldError("metadata", f"has {size} bytes; give at most {_MAX_METADATA_BYTES}")
