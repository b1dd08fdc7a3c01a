"""The gateway service: startup, the order of its components, and shutdown."""

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any

import grpc

from rollmesh.chat import (
    InvalidInputError,
    ModelFilesError,
    load_reserved_ids,
    load_rule,
    reserved_texts,
)
from rollmesh.chat.parsing import UNKNOWN, VLLM, choose, known_parsers
from rollmesh.chat.templates import (
    MOVING,
    Continuation,
    SpecialText,
    context_of,
    load_model,
    vocabulary_of,
)
from rollmesh.gateway import metrics
from rollmesh.gateway.config import GatewayConfig
from rollmesh.gateway.conversation import ImagePolicy
from rollmesh.gateway.deps import Deps, FairExecutor
from rollmesh.gateway.journal import Journal, ModelFiles, open_sqlite
from rollmesh.gateway.responses import write_reasoning, write_template, write_tool_calls
from rollmesh.gateway.servicer import GatewayAdminServicer, GatewayServicer
from rollmesh.gateway.tenancy import Gateway, Tenancy
from rollmesh.gateway.upstream import Upstream, UpstreamDeps
from rollmesh.internal.v1 import tunnels_pb2_grpc
from rollmesh.mesh import (
    CollectorDirectory,
    EngineClients,
    Failover,
    LeaseClient,
    Membership,
    Tunnels,
    own_id,
)
from rollmesh.runtime import first_of, tokenizer_sha256
from rollmesh.runtime.codec import ImageLimits
from rollmesh.runtime.config import ConfigError
from rollmesh.runtime.errors import RollmeshError
from rollmesh.runtime.telemetry import fields
from rollmesh.v1 import (
    gateway_admin_pb2_grpc,
    gateway_pb2,
    gateway_pb2_grpc,
    router_pb2,
    server_pb2,
    session_pb2,
)

if TYPE_CHECKING:  # other journals and parsers need less
    from rollmesh.gateway.postgres import PostgresJournals

_log = logging.getLogger(__name__)


class GatewayService:
    """One gateway process."""

    names = (
        "rollmesh.v1.GatewayService",
        "rollmesh.v1.GatewayAdminService",
        "rollmesh.internal.v1.TunnelService",
    )

    def __init__(self, config: GatewayConfig) -> None:
        """Loads the model's files and probes its template, unless an upstream answers.

        Raises:
            ModelFilesError: A file is missing.
            TemplateRefusedError: The template cannot be continued exactly.
            ConfigError: A setting is invalid.
        """
        self._config = config
        self._gateway_id = config.gateway_id or own_id("gateway")
        self._upstream = Upstream(config) if config.upstream else None
        info = self._load()
        info.gateway_id, info.model = self._gateway_id, config.model
        self._servicer = GatewayServicer(info, config, self._images)
        self._collectors = CollectorDirectory(config.router, config.collector)
        self._tunnels = Tunnels()
        self._membership: Membership | None = None
        self._first: Journal | None = None
        """The journal without which the gateway cannot go on, if there is one."""

    def _load(self) -> gateway_pb2.GetGatewayInfoResponse:
        """Loads the model and returns the constant part of the gateway's info."""
        config = self._config
        self._capture = session_pb2.Capture.Value(f"CAPTURE_{config.capture.upper()}")
        if self._upstream is not None:
            self._model_files, self._vocabulary_tokens = ModelFiles("", ""), 0
            self._images, self._parses_tool_calls = ImagePolicy(), True
            return gateway_pb2.GetGatewayInfoResponse(
                capture=self._capture, tool_calls=gateway_pb2.TOOL_CALL_PARSING_PARSED
            )
        template, self._tokenizer = load_model(config.model_path)
        try:
            self._model_files = ModelFiles(tokenizer_sha256(config.model_path), template.sha256)
        except (OSError, ValueError) as error:
            raise ModelFilesError(str(error)) from error
        rule = load_rule(config.model_path)
        self._continuation = Continuation(template, self._tokenizer, rule)
        self._reserved_ids = load_reserved_ids(config.model_path)
        # An answer may contain special tokens before its end.
        ends = self._continuation.end_ids | self._tokenizer.stop_ids
        texts, id_of = self._tokenizer.special_texts, self._tokenizer.special_id
        try:
            self._format = choose(
                template,
                self._tokenizer,
                tool_parser=config.tool_parser,
                reasoning_parser=config.reasoning_parser,
                shown=tuple(text for text in texts if id_of(text) not in ends),
            )
        except InvalidInputError as error:
            raise ConfigError(str(error)) from error
        moved = self._continuation.profile.findings & MOVING
        if config.history == "rewrite" and moved:
            raise ConfigError(
                f"history: rewrite is not possible, because the template {min(moved)}; give keep"
            )
        self._vocabulary_tokens = vocabulary_of(config.model_path)
        self._max_context_tokens = config.max_context_tokens or context_of(config.model_path)
        if not self._max_context_tokens:
            raise ModelFilesError(
                f"{config.model_path}/config.json has no max_position_embeddings; "
                "set max_context_tokens"
            )
        tool_calls = write_tool_calls(self._format)
        self._parses_tool_calls = tool_calls == gateway_pb2.TOOL_CALL_PARSING_PARSED
        self._images = ImagePolicy(
            rule,
            self._continuation.profile.image_roles,
            ImageLimits(config.max_image_bytes, config.max_image_pixels),
            config.max_conversation_images,
        )
        return gateway_pb2.GetGatewayInfoResponse(
            max_context_tokens=self._max_context_tokens,
            template=write_template(self._continuation.profile, template.sha256),
            tool_calls=tool_calls,
            tool_parser=self._format.tools if self._parses_tool_calls else "",
            tool_calls_explanation=self._format.why,
            one_tool_call=self._format.one_call,
            reasoning_format=write_reasoning(self._format),
            special_text=gateway_pb2.SpecialTextPolicy.Value(
                f"SPECIAL_TEXT_POLICY_{config.special_text.upper()}"
            ),
            capture=session_pb2.CAPTURE_TOKENS,
        )

    @property
    def capabilities(self) -> frozenset[server_pb2.Capability.ValueType]:
        """Whether tool calls and reasoning are parsed from answers."""
        found = {
            server_pb2.CAPABILITY_TOOL_CALLS: self._parses_tool_calls,
            server_pb2.CAPABILITY_REASONING: self._upstream is not None or self._format.reasoning,
        }
        return frozenset(one for one, is_there in found.items() if is_there)

    @property
    def servicer(self) -> GatewayServicer:
        """The RPCs, for callers in this process."""
        return self._servicer

    def register(self, server: grpc.aio.Server) -> None:
        """Adds the servicers."""
        gateway_pb2_grpc.add_GatewayServiceServicer_to_server(self._servicer, server)
        admin = GatewayAdminServicer(lambda: self._servicer.gateway)
        gateway_admin_pb2_grpc.add_GatewayAdminServiceServicer_to_server(admin, server)
        tunnels_pb2_grpc.add_TunnelServiceServicer_to_server(self._tunnels, server)

    @asynccontextmanager
    async def running(self, address: str) -> AsyncIterator[None]:
        """Opens the journal, rebuilds the sessions and joins the mesh. Exits in reverse order."""
        config = self._config
        if self._upstream is not None:
            _log.info("answers come from an upstream", extra=fields(capture=config.capture))
        else:
            tools, reasoning = self._format.tools, self._format.reasoning_name
            _log.info("answer formats", extra=fields(tools=tools, reasoning=reasoning))
            if tools == UNKNOWN:
                _log.warning(
                    "the chat template shows no known tool-call format: requests with tools are "
                    "refused until tool_parser is set",
                    extra=fields(give=known_parsers()),
                )
        async with AsyncExitStack() as stack:
            first, shared = await stack.enter_async_context(self._open_journals())
            stack.push_async_callback(self._collectors.aclose)
            stack.push_async_callback(self._images.close)
            leases = await stack.enter_async_context(
                LeaseClient(
                    config.router,
                    self._gateway_id,
                    model=config.model,
                    tokenizer_sha256=self._model_files.tokenizer_sha256,
                    vocabulary_tokens=self._vocabulary_tokens,
                )
            )
            async with asyncio.TaskGroup() as tasks:
                deps = await self._deps(stack, leases)
                gateway = Gateway(deps, self._collectors, tasks)
                await gateway.hold(first)
                self._servicer.gateway = gateway
                metrics.OPEN_SESSIONS.set_function(lambda: gateway.live_sessions)
                metrics.DEAD_LETTERS.set_function(lambda: gateway.count_dead_letters)
                metrics.UNDELIVERED.set_function(lambda: gateway.undelivered_sessions)
                metrics.RETRIED.set_function(
                    lambda: sum(one.outbox.retried for one in gateway.registries)
                )
                metrics.JOURNALS.set_function(lambda: len(gateway.registries))
                owned: list[asyncio.Task[None]] = []
                if shared is not None:
                    tenancy = Tenancy(shared, gateway, config.journal_lease_ms)
                    owned.append(tasks.create_task(tenancy.run()))
                else:
                    self._first = first
                hello = router_pb2.ReplicaHello(
                    replica_id=self._gateway_id,
                    kind=router_pb2.REPLICA_KIND_GATEWAY,
                    address=address,
                    model=config.model,
                    tokenizer_sha256=self._model_files.tokenizer_sha256,
                    vocabulary_tokens=self._vocabulary_tokens,
                    journal_id=first.journal_id,
                )
                async with Membership(config.router, hello, gateway.load) as membership:
                    self._membership = membership
                    gateway.changed = membership.notify
                    gateway.name_adapters = membership.name_adapters
                    metrics.REGISTERED.set_function(lambda: membership.registered)
                    yield
                gateway.changed = lambda: None
                await gateway.stop()
                for task in owned:
                    task.cancel()

    @asynccontextmanager
    async def _open_journals(self) -> AsyncIterator[tuple[Journal, "PostgresJournals | None"]]:
        """Yields the journal for new sessions, and where it is shared, the others' too."""
        config = self._config
        if config.journal == "sqlite":
            async with open_sqlite(
                config.data_dir, self._model_files, config.model_path
            ) as journal:
                yield journal, None
            return
        try:  # not needed by the journal in a file
            from rollmesh.gateway.postgres import ServedModel, open_postgres
        except ImportError as error:
            raise ConfigError(
                "journal: PostgreSQL needs the psycopg package: pip install 'rollmesh[gateway]'"
            ) from error
        model = ServedModel(config.model, self._model_files)
        async with open_postgres(config.journal, model, config.journal_lease_ms) as journals:
            yield await journals.take() or await journals.create(), journals

    async def _deps(self, stack: AsyncExitStack, leases: LeaseClient) -> Deps | UpstreamDeps:
        """Returns the dependencies of turns. The stack ends threads and closes channels."""
        config = self._config
        executor, long_executor = (
            stack.enter_context(ThreadPoolExecutor(config.workers, name))
            for name in ("tokenise", "tokenise-long")
        )
        long_work = FairExecutor(long_executor, config.workers)
        if self._upstream is not None:
            return UpstreamDeps(
                config=config,
                threads=executor,
                long_work=long_work,
                leases=leases,
                capture=self._capture,
                upstream=await stack.enter_async_context(self._upstream),
            )
        engines = EngineClients(config.stall_timeout_ms)
        leases.on_silent = engines.suspect
        stack.push_async_callback(engines.close)
        vllm_parser = None
        if self._format.tools.startswith(VLLM):
            from rollmesh.gateway.vllm_parser import VllmParser

            vllm_parser = VllmParser(
                self._format.tools.removeprefix(VLLM),
                config.model_path,
                timeout_ms=config.tool_parser_timeout_ms,
                on_failure=lambda reason: metrics.PARSER_FAILURES.labels(reason).inc(),
            )
            stack.push_async_callback(vllm_parser.close)
        reserved = reserved_texts(self._reserved_ids, self._tokenizer)
        return Deps(
            config=config,
            tokenizer=self._tokenizer,
            continuation=self._continuation,
            answer_format=self._format,
            special_text=SpecialText(self._tokenizer, config.special_text, reserved),
            vllm_parser=vllm_parser,
            threads=executor,
            long_work=long_work,
            leases=leases,
            model_files=self._model_files,
            failover=Failover(
                leases,
                engines,
                on_loss=metrics.ENGINE_LOSSES.inc,
                on_migration=metrics.MIGRATIONS.inc,
            ),
            max_context_tokens=self._max_context_tokens,
            vocabulary_tokens=self._vocabulary_tokens,
            banned_ids=self._reserved_ids,
        )

    async def ready(self) -> None:
        """Waits until the gateway is registered with the router."""
        assert self._membership is not None
        await self._membership.wait_registered()

    async def drain(self) -> None:
        """Deregisters from the router, refuses new work, and leaves shared journals to others.

        Running turns may need the tunnels of engines, which would hold up the end of the server.
        """
        self._servicer.gateway.drain()
        if self._membership is not None:
            await self._membership.leave()
        await self._servicer.gateway.hand_over()
        try:
            if len(self._tunnels):
                await self._servicer.gateway.rest()
        finally:
            self._tunnels.end()

    async def failed(self) -> str:
        """Returns why, once the router refuses the gateway or the files of its journal are gone."""
        assert self._membership is not None
        waits: list[Coroutine[Any, Any, str | RollmeshError]] = [self._membership.wait_refused()]
        if self._first is not None:
            waits.append(self._first.lost())
        found = await first_of(waits)
        return found.message if isinstance(found, RollmeshError) else found
