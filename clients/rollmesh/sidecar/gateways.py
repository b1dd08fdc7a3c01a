"""The gateways of a mesh, as a sidecar's HTTP endpoints call them."""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import TypedDict

from rollmesh.mesh.gateways import GatewayDirectory
from rollmesh.runtime.errors import RollmeshError
from rollmesh.runtime.rpc.channels import read_stream, typed_errors
from rollmesh.sidecar.config import SidecarConfig
from rollmesh.sidecar.errors import ModelUnknownError
from rollmesh.v1 import gateway_pb2, gateway_pb2_grpc

_CHECK_TIMEOUT_S = 5.0


class _CallOptions(TypedDict):
    timeout: float
    metadata: tuple[tuple[str, str], ...]


class Gateways:
    """Calls the gateway of each session; answers and failures are typed."""

    def __init__(self, config: SidecarConfig, directory: GatewayDirectory) -> None:
        """Takes the settings and what finds the gateways."""
        self._config = config
        self._directory = directory

    async def chat(
        self, request: gateway_pb2.ChatRequest, request_id: str
    ) -> gateway_pb2.ChatResponse:
        """Returns the complete answers, one for each choice.

        Raises:
            RollmeshError: The gateway refused the request or failed.
        """
        async with self._gateway_of(request.session_id) as gateway:
            with typed_errors():
                response = await gateway.Chat(request, **self._call_options(request_id))
        if len(response.answers) != request.choices:
            raise RollmeshError("the gateway's answer ended without its final message")
        return response

    async def stream_chat(
        self, request: gateway_pb2.ChatRequest, request_id: str
    ) -> AsyncGenerator[gateway_pb2.StreamChatResponse, None]:
        """Yields the answers as they are generated; closing the iterator cancels the call.

        Raises:
            RollmeshError: The gateway refused the request or failed.
        """
        async with self._gateway_of(request.session_id) as gateway:
            call = gateway.StreamChat(
                gateway_pb2.StreamChatRequest(chat=request), **self._call_options(request_id)
            )
            async with aclosing(read_stream(call)) as responses:
                async for response in responses:
                    yield response

    async def models(self) -> list[str]:
        """Returns the names of the models of the mesh, sorted.

        Raises:
            RollmeshError: The router, or the only gateway, did not answer.
        """
        return await self._directory.models()

    async def check(self) -> None:
        """Checks that a gateway answers.

        Raises:
            RollmeshError: None does.
        """
        gateway = await self._directory.any()
        with typed_errors():
            await gateway.GetGatewayInfo(
                gateway_pb2.GetGatewayInfoRequest(), timeout=_CHECK_TIMEOUT_S
            )

    async def model_of(self, session_id: str, name: str) -> str:
        """Returns the name under which a session's model answers a request.

        A session has one model. A request that names another one of the mesh is a mistake. With
        `unknown_models=take`, a name that no model has is answered under that name.

        Args:
            session_id: Id of the session.
            name: The model that the request names; may be empty.

        Raises:
            ModelUnknownError: The request names another model.
            RollmeshError: The router, or the only gateway, did not answer.
        """
        own = await self._directory.model_of(session_id)
        if name in {"", own}:
            return own
        takes = self._config.unknown_models == "take"
        if takes and self._directory.is_fixed:  # there is no other model
            return name
        try:
            await self._directory.models()
        except RollmeshError:
            if not takes:  # else the session's gateway may be there although the router is not
                raise
        own = await self._directory.model_of(session_id)  # its gateway may have been replaced
        is_another = self._directory.has_model(name)
        if name == own or (takes and not is_another):
            return name
        raise ModelUnknownError(
            "model",
            f"{name!r} is another model of this mesh, and the session is one of {own!r}; "
            "open a session of that model"
            if is_another
            else f"{name!r} does not exist; the session is one of {own!r}",
        )

    @asynccontextmanager
    async def _gateway_of(
        self, session_id: str
    ) -> "AsyncIterator[gateway_pb2_grpc.GatewayServiceAsyncStub]":
        """Yields the gateway of a session, and looks for it again if it did not answer."""
        gateway = await self._directory.of(session_id)
        try:
            yield gateway
        except RollmeshError as error:
            self._directory.failed(session_id, error)
            raise

    def _call_options(self, request_id: str) -> _CallOptions:
        return _CallOptions(
            timeout=self._config.turn_timeout_ms / 1000, metadata=(("x-request-id", request_id),)
        )
