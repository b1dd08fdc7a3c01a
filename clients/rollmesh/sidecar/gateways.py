"""The gateways of a mesh, as a sidecar's HTTP endpoints call them."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TypedDict

from rollmesh.mesh.gateways import GatewayDirectory
from rollmesh.runtime import clock
from rollmesh.runtime.backoff import Backoff
from rollmesh.runtime.errors import RollmeshError
from rollmesh.runtime.rpc.channels import read_stream, typed_errors
from rollmesh.sidecar.config import SidecarConfig
from rollmesh.sidecar.errors import ModelUnknownError
from rollmesh.v1 import gateway_pb2

_CHECK_TIMEOUT_S = 5.0
_FIRST_RETRY_S, _LONGEST_RETRY_S = 0.1, 0.5


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

        If the session's gateway goes away, the one that takes over is asked again.

        Raises:
            RollmeshError: The gateway refused the request or failed.
        """
        takeover = _Takeover(self._config.takeover_wait_ms)
        while True:
            gateway = await self._directory.of(request.session_id)
            try:
                with typed_errors():
                    response = await gateway.Chat(request, **self._call_options(request_id))
                break
            except RollmeshError as error:
                await self._ask_again(request, error, takeover)
        if len(response.answers) != request.choices:
            raise RollmeshError("the gateway's answer ended without its final message")
        return response

    async def stream_chat(
        self, request: gateway_pb2.ChatRequest, request_id: str
    ) -> AsyncGenerator[gateway_pb2.StreamChatResponse, None]:
        """Yields the answers as they are generated; closing the iterator cancels the call.

        If the session's gateway goes away before they begin, the one that takes over is asked
        again.

        Raises:
            RollmeshError: The gateway refused the request or failed.
        """
        takeover = _Takeover(self._config.takeover_wait_ms)
        has_begun = False
        while True:
            gateway = await self._directory.of(request.session_id)
            call = gateway.StreamChat(
                gateway_pb2.StreamChatRequest(chat=request), **self._call_options(request_id)
            )
            try:
                async with aclosing(read_stream(call)) as responses:
                    async for response in responses:
                        has_begun = True
                        yield response
            except RollmeshError as error:
                if has_begun:
                    self._directory.failed(request.session_id, error)
                    raise
                await self._ask_again(request, error, takeover)
            else:
                return

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

    async def _ask_again(
        self, request: gateway_pb2.ChatRequest, error: RollmeshError, takeover: "_Takeover"
    ) -> None:
        """Waits a moment before a request is sent again, marked as a retry.

        Raises:
            RollmeshError: The error, if the gateway is there or the wait was long enough.
        """
        if not self._directory.failed(request.session_id, error) or takeover.is_over():
            raise error
        await asyncio.sleep(takeover.pause_s())
        request.retry_count += 1  # the gateway may have committed the answer before it went away

    def _call_options(self, request_id: str) -> _CallOptions:
        return _CallOptions(
            timeout=self._config.turn_timeout_ms / 1000, metadata=(("x-request-id", request_id),)
        )


class _Takeover:
    """The wait of one request until another gateway serves its session."""

    def __init__(self, wait_ms: int) -> None:
        """Takes the longest wait, milliseconds from the first failure."""
        self._wait_ms = wait_ms
        self._until_ms: int | None = None
        self._backoff = Backoff(_FIRST_RETRY_S, _LONGEST_RETRY_S)

    def is_over(self) -> bool:
        """Returns whether to give up at this failure; the first one starts the clock."""
        now_ms = clock.monotonic_ms()
        if self._until_ms is None:
            self._until_ms = now_ms + self._wait_ms
        return now_ms >= self._until_ms

    def pause_s(self) -> float:
        """Returns how long to wait before the gateway is looked for again, seconds."""
        return self._backoff.next_s()
