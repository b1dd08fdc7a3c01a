"""The gateways of a mesh, as a sidecar's HTTP endpoints call them."""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import TypedDict

from rollmesh.mesh.gateways import GatewayDirectory
from rollmesh.runtime.errors import RemoteError, RollmeshError
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
        self._model = ""

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

    async def model(self, *, refresh: bool = False, session_id: str = "") -> str:
        """Returns the name of the served model.

        Args:
            refresh: Ask a gateway even if the name is known.
            session_id: Session whose gateway to ask; empty means any gateway.

        Raises:
            RollmeshError: The gateway did not answer.
        """
        if refresh:
            self._model = ""
        if not self._model:
            directory = self._directory
            gateway = await (directory.of(session_id) if session_id else directory.any())
            with typed_errors():
                info = await gateway.GetGatewayInfo(
                    gateway_pb2.GetGatewayInfoRequest(), timeout=_CHECK_TIMEOUT_S
                )
            self._model = info.model
        return self._model

    async def check_model(self, name: str, session_id: str) -> None:
        """Checks the model that a request names; with `unknown_models=take` any name passes.

        Raises:
            ModelUnknownError: The gateway serves another model.
            RollmeshError: The gateway did not answer.
        """
        if not name or self._config.unknown_models == "take" or name == self._model:
            return
        served = await self.model(refresh=True, session_id=session_id)  # it may have been replaced
        if name != served:
            raise ModelUnknownError("model", f"{name!r} does not exist; {served!r} is served here")

    @asynccontextmanager
    async def _gateway_of(
        self, session_id: str
    ) -> "AsyncIterator[gateway_pb2_grpc.GatewayServiceAsyncStub]":
        """Yields the gateway of a session, and looks for it again if it did not answer."""
        gateway = await self._directory.of(session_id)
        try:
            yield gateway
        except RemoteError as error:
            if error.code == "UNAVAILABLE":
                self._directory.lost(session_id)
            raise

    def _call_options(self, request_id: str) -> _CallOptions:
        return _CallOptions(
            timeout=self._config.turn_timeout_ms / 1000, metadata=(("x-request-id", request_id),)
        )
