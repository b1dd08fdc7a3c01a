"""Checks of control calls, and weights received as a stream: a header, then chunks of a file."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import IO, Any, TypeAlias

from rollmesh.runtime import clock
from rollmesh.runtime.errors import (
    DeadlineError,
    InvalidFieldError,
    InvalidWeightsError,
    StoreFullError,
)
from rollmesh.v1 import engine_pb2, router_pb2, sampling_pb2

_LEAST_BYTES_PER_MS = 256
"""Lowest rate of an upload. A slower sender would hold up others for days."""
_MOST_NAME_CHARS = 64
_MOST_CONFIG_BYTES = 64 * 1024
_UploadRequest: TypeAlias = (
    router_pb2.PushWeightsRequest
    | router_pb2.PushAdapterRequest
    | engine_pb2.UpdateWeightsRequest
    | engine_pb2.LoadAdapterRequest
)


def check_update(header: engine_pb2.UpdateWeightsHeader) -> None:
    """Checks the fields of an update that every receiver needs.

    Raises:
        InvalidFieldError: One of them is not set, or two of them contradict each other.
    """
    check_pause_mode(header.pause_mode, "header.pause_mode")
    if header.WhichOneof("source") is None:
        raise InvalidFieldError("header.source", "is not set; name where weights come from")
    if header.keep_file and not header.HasField("safetensors_bytes"):
        raise InvalidFieldError("header.keep_file", "is for weights by bytes; leave it out")
    for name in ("base_push_id", "file_only"):
        if getattr(header, name) and not header.keep_file:
            raise InvalidFieldError(f"header.{name}", "needs keep_file; set it, too")


def check_adapter(adapter: sampling_pb2.AdapterRef, field: str, least_version: int = 1) -> None:
    """Checks the name and the version of an adapter revision.

    Raises:
        InvalidFieldError: One of them is malformed. The error names `field`.
    """
    name = adapter.name
    if not (0 < len(name) <= _MOST_NAME_CHARS and name.isprintable()):
        raise InvalidFieldError(
            f"{field}.name", f"give 1 to {_MOST_NAME_CHARS} printable characters"
        )
    if adapter.version < least_version:
        raise InvalidFieldError(
            f"{field}.version", f"is {adapter.version}; give at least {least_version}"
        )


def check_adapter_header(header: engine_pb2.AdapterHeader) -> None:
    """Checks the fields of an adapter that every receiver needs.

    Raises:
        InvalidFieldError: One of them is missing or malformed.
    """
    check_adapter(header.adapter, "header.adapter")
    if not 0 < len(header.config_json.encode()) <= _MOST_CONFIG_BYTES:
        raise InvalidFieldError(
            "header.config_json", f"give PEFT's config, at most {_MOST_CONFIG_BYTES} bytes"
        )
    if not header.safetensors_bytes:
        raise InvalidFieldError("header.safetensors_bytes", "is 0; announce the size of the file")


def check_pause_mode(mode: engine_pb2.PauseMode.ValueType, field: str) -> None:
    """Checks that a pause mode is set.

    Raises:
        InvalidFieldError: It is not. The error names `field`.
    """
    if mode == engine_pb2.PAUSE_MODE_UNSPECIFIED:
        raise InvalidFieldError(field, "is not set; say what happens to running requests")


def check_action(request: engine_pb2.ControlEnginesRequest) -> None:
    """Checks the action of a control call. `InvalidFieldError` names what is wrong or missing."""
    match request.WhichOneof("action"):
        case None:
            raise InvalidFieldError("action", "is not set; give one, such as `pause`")
        case "pause":
            check_pause_mode(request.pause.mode, "pause.mode")
        case "sleep" if request.sleep.HasField("level") and request.sleep.level not in {1, 2}:
            raise InvalidFieldError("sleep.level", f"is {request.sleep.level}; give 1 or 2")
        case "abort" if not (request.abort.all or request.abort.request_ids):
            raise InvalidFieldError("abort.request_ids", "is empty; name generations or give `all`")
        case "unload_adapter":
            check_adapter(request.unload_adapter.adapter, "unload_adapter.adapter", 0)


async def header_of(requests: AsyncIterator[Any]) -> Any:
    """Returns the header of an upload.

    Raises:
        InvalidFieldError: The first message has none.
    """
    first = await anext(requests, None)
    if first is None or not first.HasField("header"):
        raise InvalidFieldError("header", "is missing; send it in the first message")
    return first.header


async def chunks_of(requests: AsyncIterator[_UploadRequest]) -> AsyncIterator[bytes]:
    """Yields the chunks that follow the header.

    Raises:
        InvalidFieldError: A message is not a chunk.
    """
    async for request in requests:
        if not request.HasField("safetensors_chunk"):
            raise InvalidFieldError("part", "is not a chunk; send one header and then chunks")
        yield request.safetensors_chunk


def check_room(folder: Path, size: int, claimed: int = 0) -> None:
    """Checks that a file fits on a disk, and asks the disk, which may block.

    Args:
        folder: Where the file will be.
        size: Announced size of the file, bytes.
        claimed: Bytes that other files are about to take there.

    Raises:
        StoreFullError: It does not fit.
        OSError: The folder cannot be read.
    """
    free = shutil.disk_usage(folder).free - claimed
    if size > free:
        raise StoreFullError(
            f"header.safetensors_bytes: is {size}, and the disk of {folder} has room for "
            f"{max(free, 0)}; free space on it"
        )


async def write_chunks(
    file: IO[bytes], size: int, chunks: AsyncIterator[bytes], silence_ms: int, limit: str
) -> None:
    """Writes the chunks to a file.

    Args:
        file: File opened for writing. Writes run in threads.
        size: Announced size of the file, bytes.
        chunks: Parts of the file, in order.
        silence_ms: Longest wait for a chunk, milliseconds.
        limit: Name of that limit in errors.

    Raises:
        InvalidWeightsError: The chunks are shorter or longer than announced, or one is empty.
        DeadlineError: The sender paused for too long, or sends less than 256 kB a second.
    """
    written = 0
    until_ms = clock.monotonic_ms() + 2 * silence_ms + size // _LEAST_BYTES_PER_MS
    while True:
        try:
            async with asyncio.timeout(silence_ms / 1000):
                chunk = await anext(chunks, None)
        except TimeoutError as error:
            raise DeadlineError(
                f"no chunk arrived for {silence_ms} ms, {limit}; send the weights again"
            ) from error
        if chunk is None:
            break
        written += len(chunk)
        if written > size:
            break
        if not chunk:
            raise InvalidWeightsError("safetensors_chunk", "is empty; send at least a byte")
        if clock.monotonic_ms() > until_ms:
            raise DeadlineError(
                f"{written} of {size} bytes arrived in time; send at least "
                f"{_LEAST_BYTES_PER_MS} kB a second"
            )
        await asyncio.to_thread(file.write, chunk)
    if written != size:
        received = f"at least {written}" if written > size else written
        raise InvalidWeightsError(
            "safetensors_chunk", f"received {received} bytes, but {size} were announced"
        )
