"""Calls to engines: one channel per address, opened when first leased."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

import grpc

from rollmesh.runtime.channels import open_channel, read_stream, request_metadata, typed_errors
from rollmesh.runtime.errors import (
    EngineMismatchError,
    PromptTooLongError,
    TokenOutOfVocabularyError,
)
from rollmesh.v1 import engine_pb2, engine_pb2_grpc

_ABORT_TIMEOUT_S = 10.0


class EngineClients:
    """The engines this gateway has talked to."""

    def __init__(self) -> None:
        """Begins without channels."""
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._stubs: dict[str, engine_pb2_grpc.EngineServiceAsyncStub] = {}

    async def generate(
        self, address: str, request: engine_pb2.GenerateRequest, timeout_ms: int
    ) -> AsyncGenerator[engine_pb2.GenerateResponse, None]:
        """Yields an engine's answers; closing the iterator aborts the request there.

        Raises:
            EngineMismatchError: The engine does not take the prompt: it has another model.
        """
        call = self._stub(address).Generate(
            request, timeout=timeout_ms / 1000, metadata=request_metadata()
        )
        try:
            async with aclosing(read_stream(call)) as responses:
                async for response in responses:
                    yield response
        except (PromptTooLongError, TokenOutOfVocabularyError) as error:  # not the agent's fault
            raise EngineMismatchError(
                f"engine {address} refused the prompt: {error.message}; "
                "start it and the gateway from the same model_path"
            ) from error

    async def abort(self, address: str, request_id: str) -> None:
        """Asks an engine to end a request with what it has."""
        with typed_errors():
            await self._stub(address).Abort(
                engine_pb2.AbortRequest(request_ids=[request_id]), timeout=_ABORT_TIMEOUT_S
            )

    async def close(self) -> None:
        """Closes all channels."""
        for channel in self._channels.values():
            await channel.close()
        self._channels.clear()
        self._stubs.clear()

    def _stub(self, address: str) -> "engine_pb2_grpc.EngineServiceAsyncStub":
        stub = self._stubs.get(address)
        if stub is None:
            channel = self._channels[address] = open_channel(address)
            stub = self._stubs[address] = engine_pb2_grpc.EngineServiceStub(channel)
        return stub
