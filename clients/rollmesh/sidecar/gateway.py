"""The gateway of a sidecar, as its HTTP endpoints call it."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TypedDict

import grpc

from rollmesh.runtime.errors import RollmeshError
from rollmesh.runtime.rpc.channels import read_stream, typed_errors
from rollmesh.sidecar.config import SidecarConfig
from rollmesh.sidecar.errors import ModelUnknownError
from rollmesh.v1 import gateway_pb2, gateway_pb2_grpc

_CHECK_TIMEOUT_S = 5.0


class _CallOptions(TypedDict):
    timeout: float
    metadata: tuple[tuple[str, str], ...]


class Gateway:
    """Calls one gateway; answers and failures are typed."""

    def __init__(self, config: SidecarConfig, channel: grpc.aio.Channel) -> None:
        """Takes the settings and an open channel to the gateway."""
        self._config = config
        self._stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        self._model = ""

    async def chat(
        self, request: gateway_pb2.ChatRequest, request_id: str
    ) -> gateway_pb2.ChatResponse:
        """Returns the complete answers, one for each choice.

        Raises:
            RollmeshError: The gateway refused the request or failed.
        """
        with typed_errors():
            response = await self._stub.Chat(request, **self._call_options(request_id))
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
        call = self._stub.StreamChat(
            gateway_pb2.StreamChatRequest(chat=request), **self._call_options(request_id)
        )
        async with aclosing(read_stream(call)) as responses:
            async for response in responses:
                yield response

    async def model(self, *, refresh: bool = False) -> str:
        """Returns the name of the served model.

        Args:
            refresh: Ask the gateway even if the name is known.

        Raises:
            RollmeshError: The gateway did not answer.
        """
        if refresh:
            self._model = ""
        if not self._model:
            with typed_errors():
                info = await self._stub.GetGatewayInfo(
                    gateway_pb2.GetGatewayInfoRequest(), timeout=_CHECK_TIMEOUT_S
                )
            self._model = info.model
        return self._model

    async def check_model(self, name: str) -> None:
        """Checks the model that a request names; with `unknown_models=take` any name passes.

        Raises:
            ModelUnknownError: The gateway serves another model.
            RollmeshError: The gateway did not answer.
        """
        if not name or self._config.unknown_models == "take" or name == self._model:
            return
        if name != (served := await self.model(refresh=True)):  # the gateway may have been replaced
            raise ModelUnknownError("model", f"{name!r} does not exist; {served!r} is served here")

    def _call_options(self, request_id: str) -> _CallOptions:
        return _CallOptions(
            timeout=self._config.turn_timeout_ms / 1000, metadata=(("x-request-id", request_id),)
        )
