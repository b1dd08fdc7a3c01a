"""The services of a gateway: they validate fields, call the gateway and write the responses."""

import heapq
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing
from functools import partial

from rollmesh.gateway.config import GatewayConfig
from rollmesh.gateway.conversation import ImagePolicy, RequestImages, given_images
from rollmesh.gateway.deps import Deps
from rollmesh.gateway.registry import ChatCall, Registry, end_session
from rollmesh.gateway.requests import read_choices, read_edges
from rollmesh.gateway.responses import (
    write_nodes,
    write_running,
    write_session,
    write_stored,
)
from rollmesh.gateway.session import Session, TurnRequest
from rollmesh.gateway.starts import read_start
from rollmesh.gateway.tenancy import Gateway
from rollmesh.gateway.turn import count_tokens
from rollmesh.gateway.upstream import UpstreamDeps, check_chat
from rollmesh.runtime import begun, clock
from rollmesh.runtime.codec import KINDS, check_ranges
from rollmesh.runtime.errors import (
    InvalidFieldError,
    InvalidMessagesError,
    InvalidSamplingError,
    ModelMismatchError,
)
from rollmesh.runtime.process import FreedMemory
from rollmesh.runtime.rpc import Context, Repeats
from rollmesh.v1 import (
    gateway_admin_pb2 as pb,
    gateway_admin_pb2_grpc,
    gateway_pb2,
    gateway_pb2_grpc,
    sampling_pb2,
    session_pb2,
)

_MAX_METADATA_BYTES = 64 * 1024
_MAX_ID_CHARS = 128
_MAX_POLICIES = 16
_MAX_BUDGET = 1 << 53
_DEFAULT_PAGE, _MAX_PAGE, _PAGE_BYTES = 100, 1000, 4 * 1024 * 1024
_LARGE_BYTES, _MANY_MESSAGES = 256 * 1024, 512
"""A request of this many bytes or messages is read in a thread."""


class GatewayServicer(gateway_pb2_grpc.GatewayServiceServicer):
    """Serves one gateway."""

    def __init__(
        self,
        info: gateway_pb2.GetGatewayInfoResponse,
        config: GatewayConfig,
        images: ImagePolicy,
    ) -> None:
        """Takes the constant part of the gateway's info, the settings, and the images it takes."""
        self._info = info
        self._images = images
        self._config = config
        self._sampling_policy = sampling_pb2.SamplingPolicy.Value(
            f"SAMPLING_POLICY_{config.sampling_policy.upper()}"
        )
        self.gateway: Gateway
        """Set before the service has started, once its sessions have been rebuilt."""
        self._freed_memory = FreedMemory()

    async def CreateSession(
        self, request: gateway_pb2.CreateSessionRequest, context: Context
    ) -> gateway_pb2.CreateSessionResponse:
        for field in ("request_id", "group_id", "run_id"):
            if len(getattr(request, field)) > _MAX_ID_CHARS:
                raise InvalidFieldError(field, f"is longer than {_MAX_ID_CHARS} characters")
        if request.sample_index >= (request.group_size or 1):
            raise InvalidFieldError(
                "sample_index", f"is {request.sample_index}; give one below group_size"
            )
        for field, values in (
            ("export_mode", gateway_pb2.ExportMode),
            ("purpose", session_pb2.SessionPurpose),
            ("sampling_policy", sampling_pb2.SamplingPolicy),
        ):
            if (given := getattr(request, field)) not in values.values():
                name = values.DESCRIPTOR.name
                raise InvalidFieldError(field, f"is {given}; give one of {name}")
        if request.model not in {"", self._info.model}:
            raise ModelMismatchError(
                "model", f"is {request.model!r}; this gateway serves {self._info.model!r}"
            )
        _check_metadata(request.metadata)
        request.sampling_policy = request.sampling_policy or self._sampling_policy
        check_ranges(request.sampling)
        if request.sampling.HasField("max_tokens") and not request.sampling.max_tokens:
            raise InvalidSamplingError("sampling.max_tokens", "is 0; give at least 1")
        if request.budget.action not in gateway_pb2.BudgetAction.values():
            raise InvalidFieldError("budget.action", "give one of BudgetAction")
        for field in ("sampled_tokens", "time_ms"):
            if (given := getattr(request.budget, field)) > _MAX_BUDGET:
                raise InvalidFieldError(f"budget.{field}", f"is {given}; give at most 2^53")
        names = {one.name for one in request.adapters}
        if len(names) > _MAX_POLICIES or len(names) < len(request.adapters):
            raise InvalidFieldError(
                "adapters", f"give at most {_MAX_POLICIES} with different names"
            )
        for at, one in enumerate(request.adapters):
            if one.version < 0 or (one.version and (one.pinned or not one.name)):
                raise InvalidFieldError(
                    f"adapters[{at}].version",
                    "give one above 0 for an adapter with a name, without pinned",
                )
        if len(request.columns) > len(set(request.columns) & set(KINDS.values())):
            raise InvalidFieldError("columns", "give kinds of ColumnKind, each once")
        start = None
        if request.HasField("start"):
            start = await read_start(self.gateway.deps, self._images, request.start)
            request.ClearField("start")
        spec, key = await self.gateway.create(request, start=start)
        return gateway_pb2.CreateSessionResponse(
            session_id=spec.session_id,
            session_key=key,
            model=spec.model,
            adapters=spec.policies,
        )

    async def FindSession(
        self, request: gateway_pb2.FindSessionRequest, context: Context
    ) -> gateway_pb2.FindSessionResponse:
        if not 0 < len(request.request_id) <= _MAX_ID_CHARS:
            raise InvalidFieldError("request_id", f"give 1 to {_MAX_ID_CHARS} characters")
        return await self.gateway.find(request.request_id)

    async def Chat(
        self, request: gateway_pb2.ChatRequest, context: Context
    ) -> gateway_pb2.ChatResponse:
        registry, session = self._session(request.session_id, request.session_key)
        call, size = ChatCall(registry, session), request.ByteSize()
        is_complete = is_over = False

        def replied(_: Context) -> None:
            nonlocal is_over
            is_over = True
            call.leave(sent=is_complete and not context.cancelled())

        context.add_done_callback(replied)  # type: ignore[arg-type]  # a wrong stub
        try:
            choices = await self._read(request, size, registry, session, stream=False)
            response = await call.answers(choices)
            is_complete = True
            return response
        finally:
            if is_over or not is_complete:
                call.leave(sent=False)
            self._freed_memory.served(size)

    async def StreamChat(
        self, request: gateway_pb2.StreamChatRequest, context: Context
    ) -> AsyncIterator[gateway_pb2.StreamChatResponse]:
        registry, session = self._session(request.chat.session_id, request.chat.session_key)
        call, size = ChatCall(registry, session), request.ByteSize()
        try:
            choices = await self._read(request.chat, size, registry, session, stream=True)
            async with aclosing(call.stream(choices)) as responses:
                async for response in responses:
                    yield response
        finally:
            call.leave(sent=False)
            self._freed_memory.served(size)

    async def CountTokens(
        self, request: gateway_pb2.CountTokensRequest, context: Context
    ) -> gateway_pb2.CountTokensResponse:
        registry, session = self._session(request.chat.session_id, request.chat.session_key)
        request_bytes = request.ByteSize()
        try:
            choice, *_ = await self._read(
                request.chat, request_bytes, registry, session, stream=False, samples=False
            )
            session.used_ms = clock.monotonic_ms()
            if isinstance(registry.deps, UpstreamDeps):
                raise InvalidFieldError("model", "is served elsewhere, which counts no prompts")
            tokens, is_lower_bound = await count_tokens(registry.deps, session, choice)
        finally:
            self._freed_memory.served(request_bytes)
        return gateway_pb2.CountTokensResponse(prompt_tokens=tokens, is_lower_bound=is_lower_bound)

    async def GetAnswer(
        self, request: gateway_pb2.GetAnswerRequest, context: Context
    ) -> gateway_pb2.GetAnswerResponse:
        _, session = self._session(request.session_id, request.session_key)
        if not request.answer_id:
            return gateway_pb2.GetAnswerResponse()
        session.used_ms = clock.monotonic_ms()
        turn = session.find_answer(request.answer_id)
        return write_stored(turn, request.session_id, with_messages=request.with_messages)

    async def WithdrawAnswer(
        self, request: gateway_pb2.WithdrawAnswerRequest, context: Context
    ) -> gateway_pb2.WithdrawAnswerResponse:
        registry, session = self._session(request.session_id, request.session_key)
        session.used_ms = clock.monotonic_ms()
        await begun(registry.tasks, registry.withdraw(session, request.answer_id))
        return gateway_pb2.WithdrawAnswerResponse()

    async def DeclareLineage(
        self, request: gateway_pb2.DeclareLineageRequest, context: Context
    ) -> gateway_pb2.DeclareLineageResponse:
        registry, session = self._session(request.session_id, request.session_key)
        count = await registry.declare(session, read_edges(request.edges))
        return gateway_pb2.DeclareLineageResponse(edges=count)

    def _session(self, session_id: str, key: str) -> tuple[Registry, Session]:
        """Returns an open session, whose key is checked, and its registry."""
        registry = self.gateway.of(session_id)
        registry.keys.check(session_id, key)
        return registry, registry.session(session_id)

    async def _read(
        self,
        request: gateway_pb2.ChatRequest,
        size: int,
        registry: Registry,
        session: Session,
        *,
        stream: bool,
        samples: bool = True,
    ) -> list[TurnRequest]:
        """Reads a request of `size` bytes.

        A large one is read in a thread. Images are decoded in processes before. In both, sessions
        take turns.
        """
        count = len(request.messages)
        if count > self._config.max_session_nodes:
            raise InvalidMessagesError(
                "messages",
                f"has {count} messages; give at most {self._config.max_session_nodes}, "
                "max_session_nodes of the gateway",
            )
        spec = session.spec
        if isinstance(registry.deps, UpstreamDeps):
            check_chat(request)
        is_adapter = request.model != spec.model and request.model in self.gateway.adapters
        if is_adapter and request.model not in {one.name for one in spec.policies}:
            raise ModelMismatchError(
                "model", f"{request.model!r} is no policy of this session; open one that has it"
            )
        images = RequestImages(self._images, session.images)
        read = partial(read_choices, request, session, self._config.max_choices, images)
        read = partial(read, stream=stream, samples=samples)
        is_small = count < _MANY_MESSAGES and size < _LARGE_BYTES
        run = partial(registry.deps.long_work.run, session.spec.session_id)
        if self._images.rule is not None:
            find = partial(given_images, request, self._images)
            given = find() if is_small else await run(find)
            images.decoded = await self._images.decode(given, session.spec.session_id)
        return read() if is_small else await run(read)

    async def CloseSession(
        self, request: gateway_pb2.CloseSessionRequest, context: Context
    ) -> gateway_pb2.CloseSessionResponse:
        registry = self.gateway.of(request.session_id)
        registry.keys.check(request.session_id, request.session_key)
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
        registry.session(session_id)  # only the holder of a key learns whether the session is open
        key = await registry.keys.revoke(session_id, request.session_key, repeat)
        return gateway_pb2.RevokeSessionKeyResponse(session_key=key)

    async def GetSession(
        self, request: gateway_pb2.GetSessionRequest, context: Context
    ) -> gateway_pb2.GetSessionResponse:
        registry = self.gateway.of(request.session_id)
        session = registry.session(request.session_id)
        most, token = _page_size(request.page_size, _MAX_PAGE), request.page_token
        after = int(token) if token.isdecimal() and len(token) <= _MAX_ID_CHARS else 0
        if token and after not in session.tree.nodes:
            raise InvalidFieldError("page_token", "give the next_page_token of the previous page")
        response = gateway_pb2.GetSessionResponse(session=write_session(session))
        response.session.metadata.update(session.spec.metadata)
        size = 0
        for node in write_nodes(session.tree, after, with_messages=request.with_messages):
            if len(response.nodes) == most or size > _PAGE_BYTES:
                response.next_page_token = str(response.nodes[-1].node_id)
                break
            response.nodes.append(node)
            size += node.ByteSize()
        if request.with_running and not response.next_page_token:
            deps = registry.deps
            if isinstance(deps, Deps):
                response.running.extend(write_running(session, deps.tokenizer))
        return response

    async def GetGatewayInfo(
        self, request: gateway_pb2.GetGatewayInfoRequest, context: Context
    ) -> gateway_pb2.GetGatewayInfoResponse:
        info = gateway_pb2.GetGatewayInfoResponse()
        info.CopyFrom(self._info)
        info.live_sessions = self.gateway.live_sessions
        info.undelivered_sessions = self.gateway.undelivered_sessions
        info.dead_letters = self.gateway.count_dead_letters
        info.adapters.extend(sorted(self.gateway.adapters))
        return info


class GatewayAdminServicer(gateway_admin_pb2_grpc.GatewayAdminServiceServicer):
    """Serves operators, who have no session keys."""

    def __init__(self, gateway: Callable[[], Gateway]) -> None:
        """Takes the getter of the gateway."""
        self._gateway = gateway
        self._repeats = Repeats()

    async def ListSessions(
        self, request: pb.ListSessionsRequest, context: Context
    ) -> pb.ListSessionsResponse:
        size = _page_size(request.page_size, _DEFAULT_PAGE)
        now_ms = clock.monotonic_ms()
        found = (
            session
            for registry in self._gateway().registries
            for session in registry.sessions
            if session.spec.session_id > request.page_token
            and request.run_id in {"", session.spec.run_id}
            and request.group_id in {"", session.spec.group_id}
            and now_ms - session.used_ms >= request.idle_ms
        )
        page = heapq.nsmallest(size, found, key=lambda session: session.spec.session_id)
        return pb.ListSessionsResponse(
            sessions=map(write_session, page),
            next_page_token=page[-1].spec.session_id if len(page) == size else "",
        )

    async def EndSession(
        self, request: pb.EndSessionRequest, context: Context
    ) -> pb.EndSessionResponse:
        registry = self._gateway().of(request.session_id)
        return pb.EndSessionResponse(
            trajectory_ids=await end_session(registry, request.session_id, "operator")
        )

    async def EndSessionKey(
        self, request: pb.EndSessionKeyRequest, context: Context
    ) -> pb.EndSessionKeyResponse:
        if len(request.request_id) > _MAX_ID_CHARS:
            raise InvalidFieldError("request_id", f"is longer than {_MAX_ID_CHARS} characters")
        registry = self._gateway().of(request.session_id)
        registry.session(request.session_id)
        await registry.keys.revoke(request.session_id, None, request.request_id)
        return pb.EndSessionKeyResponse()

    async def ListDeadLetters(
        self, request: pb.ListDeadLettersRequest, context: Context
    ) -> pb.ListDeadLettersResponse:
        size = _page_size(request.page_size, _DEFAULT_PAGE)
        letters = await self._gateway().list_dead_letters(request.page_token, size)
        return pb.ListDeadLettersResponse(
            dead_letters=letters,
            next_page_token=letters[-1].session_id if len(letters) == size else "",
        )

    async def RetryDeadLetter(
        self, request: pb.RetryDeadLetterRequest, context: Context
    ) -> pb.RetryDeadLetterResponse:
        registry = self._gateway().of(request.session_id)
        revived = self._repeats.once(
            request, lambda: registry.retry_dead_letter(request.session_id)
        )
        await begun(registry.tasks, revived)
        return pb.RetryDeadLetterResponse()

    async def DropDeadLetter(
        self, request: pb.DropDeadLetterRequest, context: Context
    ) -> pb.DropDeadLetterResponse:
        registry = self._gateway().of(request.session_id)
        dropped = self._repeats.once(request, lambda: registry.outbox.drop(request.session_id))
        await begun(registry.tasks, dropped)
        return pb.DropDeadLetterResponse()


def _page_size(asked: int, default: int) -> int:
    if asked > _MAX_PAGE:
        raise InvalidFieldError("page_size", f"is {asked}; give at most {_MAX_PAGE}")
    return asked or default


def _check_metadata(metadata: Mapping[str, str]) -> None:
    size = sum(len(key.encode()) + len(value.encode()) for key, value in metadata.items())
    if size > _MAX_METADATA_BYTES:
        raise InvalidFieldError("metadata", f"has {size} bytes; give at most {_MAX_METADATA_BYTES}")
