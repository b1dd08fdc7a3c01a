"""Weights received as a stream: one header, then the chunks of a safetensors file."""

import asyncio
from collections.abc import AsyncIterator
from typing import IO, TypeAlias

from rollmesh.runtime.errors import DeadlineError, InvalidFieldError, InvalidWeightsError
from rollmesh.v1 import engine_pb2, router_pb2

UploadRequest: TypeAlias = router_pb2.PushWeightsRequest | engine_pb2.UpdateWeightsRequest


def check_update(header: engine_pb2.UpdateWeightsHeader) -> None:
    """Checks the fields of an update that every receiver needs.

    Raises:
        InvalidFieldError: One of them is not set.
    """
    check_pause_mode(header.pause_mode, "header.pause_mode")
    if header.WhichOneof("source") is None:
        raise InvalidFieldError("header.source", "is not set; name where weights come from")


def check_pause_mode(mode: engine_pb2.PauseMode.ValueType, field: str) -> None:
    """Checks that a pause mode is set.

    Raises:
        InvalidFieldError: It is not; the error names `field`.
    """
    if mode == engine_pb2.PAUSE_MODE_UNSPECIFIED:
        raise InvalidFieldError(field, "is not set; say what happens to running requests")


async def chunks_of(requests: AsyncIterator[UploadRequest]) -> AsyncIterator[bytes]:
    """Yields the chunks that follow the header.

    Raises:
        InvalidFieldError: A message is not a chunk.
    """
    async for request in requests:
        if not request.HasField("safetensors_chunk"):
            raise InvalidFieldError("part", "is not a chunk; send one header and then chunks")
        yield request.safetensors_chunk


async def write_chunks(
    file: IO[bytes], size: int, chunks: AsyncIterator[bytes], silence_ms: int, limit: str
) -> None:
    """Writes the chunks to a file.

    Args:
        file: File opened for writing; writes run in threads.
        size: Announced size of the file, bytes.
        chunks: Parts of the file, in order.
        silence_ms: Longest wait for a chunk, milliseconds.
        limit: Name of that limit in errors.

    Raises:
        InvalidWeightsError: The chunks are shorter or longer than announced.
        DeadlineError: The sender paused for too long.
    """
    written = 0
    while (chunk := await _next(chunks, silence_ms, limit)) is not None:
        written += len(chunk)
        if written > size:
            break
        await asyncio.to_thread(file.write, chunk)
    if written != size:
        received = f"at least {written}" if written > size else written
        raise InvalidWeightsError(
            "safetensors_chunk", f"received {received} bytes, but {size} were announced"
        )


async def _next(chunks: AsyncIterator[bytes], silence_ms: int, limit: str) -> bytes | None:
    try:
        async with asyncio.timeout(silence_ms / 1000):
            return await anext(chunks, None)
    except TimeoutError as error:
        raise DeadlineError(
            f"no chunk arrived for {silence_ms} ms, {limit}; send the weights again"
        ) from error
