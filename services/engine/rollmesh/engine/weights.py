"""Weight updates of an engine: received, loaded once and always completed."""

import asyncio
import errno
import tempfile
from collections.abc import AsyncIterator, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from rollmesh.engine import metrics
from rollmesh.engine.backend import Backend, Transfer
from rollmesh.engine.requests.transfer import read_transfer
from rollmesh.runtime.errors import InvalidWeightsError, StaleVersionError, StoreFullError
from rollmesh.runtime.rpc.uploads import check_room, write_chunks
from rollmesh.v1 import engine_pb2

_SILENCE_MS = 60_000  # longest wait for a chunk; other updates wait meanwhile
_MOST_SHOWN = 300
_T = TypeVar("_T")


class WeightUpdates:
    """The weight updates of one backend; they run one at a time."""

    def __init__(self, backend: Backend) -> None:
        """Takes the backend with its initial weights."""
        self._backend = backend
        self._lock = asyncio.Lock()
        self.push_id = ""
        """Id of the push that delivered the current weights; empty for the initial weights."""
        self.changed = asyncio.Event()
        """Set when what the engine reports to the router may have changed."""

    async def join(self, init_info: dict[str, Any]) -> None:
        """Joins the trainer through the transfer backend.

        Raises:
            WeightTransferError: Joining the trainer failed.
            EngineDeadError: The trainer took too long.
        """
        async with self._lock:
            await _to_the_end(self._backend.init_weight_transfer(init_info))

    async def update(
        self, header: engine_pb2.UpdateWeightsHeader, chunks: AsyncIterator[bytes]
    ) -> int:
        """Loads new weights; a push that the engine already holds changes nothing.

        Args:
            header: Version and source of the weights.
            chunks: The safetensors file, if that is the source.

        Returns:
            Duration of the sampling pause, milliseconds.

        Raises:
            InvalidFieldError: A field is invalid.
            StaleVersionError: The version is not above the current one.
            InvalidWeightsError: The weights do not fit the model; the old ones stay in use.
            StoreFullError: The disk has no room for the upload.
        """
        async with self._lock:
            if self._holds(header):
                return 0
            try:
                paused_ms = await self._receive(header, chunks)
                metrics.PAUSED_SECONDS.observe(paused_ms / 1000)
            finally:  # the version may have changed even if the caller left
                self.changed.set()
        return paused_ms

    def _holds(self, header: engine_pb2.UpdateWeightsHeader) -> bool:
        """Returns whether the engine already holds a push.

        Raises:
            StaleVersionError: Without a push id, the version must be above the current one.
        """
        current = self._backend.load().policy_version
        if header.push_id:
            return (header.policy_version, header.push_id) == (current, self.push_id)
        if header.policy_version <= current:
            raise StaleVersionError(
                f"policy_version {header.policy_version} is not above {current}; count up",
                policy_version=current,
            )
        return False

    async def _receive(
        self, header: engine_pb2.UpdateWeightsHeader, chunks: AsyncIterator[bytes]
    ) -> int:
        match header.WhichOneof("source"):
            case "checkpoint_dir":
                source = _folder(header.checkpoint_dir)
                return await _to_the_end(self._load(source, header))
            case "safetensors_bytes":
                with tempfile.TemporaryDirectory(prefix="rollmesh-weights-") as folder:
                    path = await _written(Path(folder), header.safetensors_bytes, chunks)
                    return await _to_the_end(self._load(path, header))
            case "transfer":
                transfer = read_transfer(header.transfer, self._backend.weight_transfer)
                return await _to_the_end(self._load(transfer, header))
            case _:
                raise AssertionError("the servicer has checked the header")

    async def _load(self, source: Path | Transfer, header: engine_pb2.UpdateWeightsHeader) -> int:
        paused_ms = await self._backend.update_weights(
            source, header.policy_version, header.pause_mode
        )
        self.push_id = header.push_id
        return paused_ms


def _folder(path: str) -> Path:
    """Returns a folder that a request names; asks the disk once.

    Raises:
        InvalidWeightsError: It is none that can be read.
    """
    with suppress(OSError, ValueError):  # a name may be too long
        if Path(path).is_dir():
            return Path(path)
    raise InvalidWeightsError(
        "header.checkpoint_dir", f"{path[:_MOST_SHOWN]!r} is no folder the engine can read"
    )


async def _written(folder: Path, size: int, chunks: AsyncIterator[bytes]) -> Path:
    """Writes an upload to a file, and returns its path.

    Raises:
        StoreFullError: The disk has too little free space, or became full.
    """
    path = folder / "weights.safetensors"
    try:
        await asyncio.to_thread(check_room, folder, size)
        with path.open("xb") as file:
            await write_chunks(file, size, chunks, _SILENCE_MS, "the engine's limit")
    except OSError as error:
        if error.errno not in {errno.ENOSPC, errno.EDQUOT}:
            raise
        raise StoreFullError(f"the disk of {folder} is full; make room on it") from error
    return path


async def _to_the_end(work: Coroutine[Any, Any, _T]) -> _T:
    """Runs an update to completion even if the caller is cancelled; then raises the cancellation.

    An interrupted update would leave the model paused, or new weights under the old version.
    """
    update = asyncio.get_running_loop().create_task(work)
    try:
        return await asyncio.shield(update)
    except asyncio.CancelledError:
        await asyncio.wait({update})
        raise
