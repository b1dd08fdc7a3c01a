"""The gateways of a mesh, as the HTTP endpoints call them."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from rollmesh.mesh import GatewayDirectory
from rollmesh.runtime import Backoff, clock
from rollmesh.runtime.errors import InvalidFieldError, RollmeshError
from rollmesh.runtime.rpc import request_metadata, typed_errors
from rollmesh.sidecar.config import SidecarConfig
from rollmesh.sidecar.errors import ModelUnknownError
from rollmesh.v1 import gateway_pb2

_CHECK_TIMEOUT_S = 5.0
_STORED_TIMEOUT_S = 30.0
_CHECKED_MS, _MOST_CHECKED = 60_000, 16_384
"""How long a checked key counts as checked, milliseconds, and the number of such keys."""
_MOST_NAME_CHARS = 256
_FIRST_RETRY_S, _LONGEST_RETRY_S = 0.1, 0.5


class Gateways:
    """Calls the gateway of each session. Every failure is a `RollmeshError`.

    If a session's gateway goes away or stands still before its answer began, the gateway that takes
    over is asked again.
    """

    def __init__(self, config: SidecarConfig, directory: GatewayDirectory) -> None:
        """Takes the settings and the directory of the gateways."""
        self._takeover_wait_ms = config.takeover_wait_ms
        self._turn_timeout_s = config.turn_timeout_ms / 1000
        self._takes_unknown_models = config.unknown_models == "take"
        self._directory = directory
        self._checked_until: dict[str, int] = {}
        """When each checked key has to be checked again, oldest first, monotonic milliseconds."""

    async def stream_chat(
        self, request: gateway_pb2.ChatRequest
    ) -> AsyncGenerator[gateway_pb2.StreamChatResponse, None]:
        """Yields the answers as they are generated. Closing the iterator cancels the call."""
        backoff, until_ms, has_begun = Backoff(_FIRST_RETRY_S, _LONGEST_RETRY_S), 0, False
        while True:
            gateway = await self._directory.of(request.session_id)
            call = gateway.stub.StreamChat(
                gateway_pb2.StreamChatRequest(chat=request),
                timeout=self._turn_timeout_s,
                metadata=request_metadata(),
            )
            try:
                with gateway.watched(call) as peer, typed_errors():
                    async for response in call:
                        has_begun = peer.heard = True
                        yield response
            except RollmeshError as error:
                if not self._directory.failed(request.session_id, error) or has_begun:
                    raise
                until_ms = until_ms or clock.monotonic_ms() + self._takeover_wait_ms
                if clock.monotonic_ms() >= until_ms:
                    raise
                await asyncio.sleep(backoff.next_s())
            else:
                return
            finally:
                if isinstance(call, AsyncGenerator):  # of a gateway in this process
                    await call.aclose()
                else:
                    call.cancel()

    async def ask(
        self, session_id: str, method: str, request: Any, timeout_s: float = _STORED_TIMEOUT_S
    ) -> Any:
        """Returns the response of a session's gateway, or of the gateway that takes over.

        Raises:
            RollmeshError: The gateway refused the request or failed. An answer may be unknown
                because the gateway that went away had withdrawn it.
        """
        backoff, until_ms = Backoff(_FIRST_RETRY_S, _LONGEST_RETRY_S), 0
        while True:
            gateway = await self._directory.of(session_id)
            call = getattr(gateway.stub, method)
            running = call(request, timeout=timeout_s, metadata=request_metadata())
            try:
                with typed_errors(), gateway.watched(running):
                    return await running
            except RollmeshError as error:
                if not self._directory.failed(session_id, error):
                    raise
                until_ms = until_ms or clock.monotonic_ms() + self._takeover_wait_ms
                if clock.monotonic_ms() >= until_ms:
                    raise
                await asyncio.sleep(backoff.next_s())

    async def check_key(self, session_id: str, key: str) -> None:
        """Checks that a key opens an open session, or did within the last minute.

        Raises:
            SessionKeyWrongError: It does not.
            RollmeshError: The gateway refused the request or failed.
        """
        known, now_ms = f"{session_id} {key}", clock.monotonic_ms()
        if now_ms < self._checked_until.get(known, 0):
            return
        request = gateway_pb2.GetAnswerRequest(session_id=session_id, session_key=key)
        await self.ask(session_id, "GetAnswer", request, _CHECK_TIMEOUT_S)
        self._checked_until.pop(known, None)
        self._checked_until[known] = now_ms + _CHECKED_MS
        if len(self._checked_until) > _MOST_CHECKED:
            del self._checked_until[next(iter(self._checked_until))]

    async def check(self) -> None:
        """Checks that a gateway answers."""
        gateway = self._directory.at(await self._directory.any_address())
        with typed_errors():
            await gateway.GetGatewayInfo(
                gateway_pb2.GetGatewayInfoRequest(), timeout=_CHECK_TIMEOUT_S
            )

    async def model_of(self, session_id: str, name: str) -> str:
        """Returns the name under which a session's model answers a request.

        A session has one model, with adapters of it. Another model of the mesh is a mistake. With
        `unknown_models=take`, a name that no model has is answered under that name.

        Args:
            session_id: Id of the session.
            name: The model that the request names. May be empty.

        Raises:
            InvalidFieldError: The name is too long.
            ModelUnknownError: The request names another model.
            RollmeshError: The router, or the only gateway, did not answer.
        """
        if len(name) > _MOST_NAME_CHARS:
            problem = f"has {len(name)} characters; give at most {_MOST_NAME_CHARS}"
            raise InvalidFieldError("model", problem)
        own = await self._directory.model_of(session_id)
        if name in {"", own} or self._directory.has_adapter(name):
            return name or own
        takes = self._takes_unknown_models
        if takes and self._directory.is_fixed:  # there is no other model
            return name
        try:
            await self._directory.models()
        except RollmeshError:
            if not takes:  # else the session's gateway may be there although the router is not
                raise
        own = await self._directory.model_of(session_id)  # its gateway may have been replaced
        is_another = self._directory.has_model(name)
        if name == own or self._directory.has_adapter(name) or (takes and not is_another):
            return name
        raise ModelUnknownError(
            "model",
            f"{name!r} is another model of this mesh, and the session is one of {own!r}; "
            "open a session of that model"
            if is_another
            else f"{name!r} does not exist; the session is one of {own!r}",
        )
