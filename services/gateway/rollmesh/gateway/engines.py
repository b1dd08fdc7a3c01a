"""Calls to engines: one channel per address, opened when first leased."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

import grpc

from rollmesh.runtime.channels import (
    open_channel,
    read_stream,
    request_metadata,
    typed_errors,
    whole_call,
)
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
        self._engines: dict[str, _Engine] = {}

    async def generate(
        self, address: str, request: engine_pb2.GenerateRequest, timeout_ms: int
    ) -> AsyncGenerator[engine_pb2.GenerateResponse, None]:
        """Yields an engine's answers; closing the iterator aborts the request there.

        Raises:
            EngineMismatchError: The engine does not take the prompt: it has another model.
        """
        timeout_s, metadata = timeout_ms / 1000, request_metadata()
        engine = self._engine(address)
        try:
            if not request.max_chunk_tokens:
                with typed_errors():
                    yield await engine.generate_whole(request, timeout=timeout_s, metadata=metadata)
                return
            call = engine.stub.Generate(request, timeout=timeout_s, metadata=metadata)
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
            await self._engine(address).stub.Abort(
                engine_pb2.AbortRequest(request_ids=[request_id]), timeout=_ABORT_TIMEOUT_S
            )

    async def close(self) -> None:
        """Closes all channels."""
        for engine in self._engines.values():
            await engine.channel.close()
        self._engines.clear()

    def _engine(self, address: str) -> "_Engine":
        engine = self._engines.get(address)
        if engine is None:
            engine = self._engines[address] = _Engine(open_channel(address))
        return engine


class _Engine:
    """One engine's channel and calls."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self.stub: engine_pb2_grpc.EngineServiceAsyncStub
        self.stub = engine_pb2_grpc.EngineServiceStub(channel)
        self.generate_whole = whole_call(
            channel,
            "rollmesh.v1.EngineService/Generate",
            engine_pb2.GenerateRequest,
            engine_pb2.GenerateResponse,
        )
