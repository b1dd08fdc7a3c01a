"""The weights that a router keeps on disk for engines that join later.

Each model has a folder:

    current                      header of the weights that its engines must hold
    offered                      header of a push that is being offered to engines
    VERSION-PUSH_ID.safetensors  the weights, if they were pushed as bytes
    *.part                       a push that is being received

A header names its file and is replaced by one rename, so version and bytes change together.
`offered` becomes `current` once an engine has loaded the weights. It stays while the outcome of a
push is unknown: an engine that registers with its push id has loaded it.
"""

import errno
import hashlib
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from google.protobuf.message import DecodeError

from rollmesh.runtime.errors import StoreError, StoreFullError
from rollmesh.v1 import engine_pb2

_CURRENT, _OFFERED, _PART, _FILE = "current", "offered", ".part", ".safetensors"
_SLUG_CHARS = 48


class KeptWeights:
    """The kept weights of one model. All methods except `__init__` may block on the disk."""

    def __init__(self, data_dir: Path, model: str) -> None:
        """Sets the folder; `restore` reads it."""
        slug = re.sub(r"[^A-Za-z0-9_-]", "_", model)[:_SLUG_CHARS]
        digest = hashlib.sha256(model.encode()).hexdigest()[:12]
        self.model = model
        self.folder = data_dir / "weights" / f"{slug}-{digest}"
        self.current: engine_pb2.UpdateWeightsHeader | None = None
        """Header of the last accepted weights."""
        self.offered: engine_pb2.UpdateWeightsHeader | None = None
        """Header of a push whose outcome is not known yet."""

    @property
    def target_version(self) -> int:
        """Version that engines must hold; 0 until the first push is accepted."""
        return self.current.policy_version if self.current is not None else 0

    @property
    def last_version(self) -> int:
        """Highest version that an engine may have received from this router."""
        offered = self.offered.policy_version if self.offered is not None else 0
        return max(self.target_version, offered)

    def restore(self) -> None:
        """Reads the folder, and removes files of pushes that were never offered.

        Raises:
            StoreError: A file cannot be read.
        """
        with typed_errors(self.folder):
            self.current = _read(self.folder / _CURRENT)
            self.offered = _read(self.folder / _OFFERED)
            self._sweep()

    def file_of(self, header: engine_pb2.UpdateWeightsHeader) -> Path | None:
        """Returns the weights file of a push; None if it was not pushed as bytes."""
        if not header.HasField("safetensors_bytes"):
            return None
        return self.folder / f"{header.policy_version}-{header.push_id}{_FILE}"

    def open_part(self, header: engine_pb2.UpdateWeightsHeader, claimed: int) -> IO[bytes]:
        """Opens the file for a push that is being received.

        Args:
            header: Announces the number of bytes.
            claimed: Bytes announced by other pushes that are being received.

        Raises:
            StoreFullError: The disk has too little free space.
            StoreError: The folder cannot be written.
        """
        with typed_errors(self.folder):
            self._make_folder()
            free = shutil.disk_usage(self.folder).free - claimed
            if header.safetensors_bytes > free:
                raise StoreFullError(
                    f"header.safetensors_bytes: is {header.safetensors_bytes}, and the disk of "
                    f"{self.folder} has room for {max(free, 0)}; free space on it"
                )
            return self._part(header).open("wb")

    def discard_part(self, header: engine_pb2.UpdateWeightsHeader) -> None:
        """Removes the partially received file of a push."""
        with suppress(OSError):
            self._part(header).unlink()

    def offer(self, header: engine_pb2.UpdateWeightsHeader) -> None:
        """Stores a received push until it is accepted or withdrawn; replaces an earlier offer.

        Raises:
            StoreError: The push could not be stored; the earlier offer remains.
        """
        with typed_errors(self.folder):
            self._make_folder()
            file = self.file_of(header)
            if file is not None:
                self._part(header).replace(file)
            self._write(_OFFERED, header)
            self.offered = header
            self._sweep()

    def accept(self) -> None:
        """Makes the offered weights current.

        Raises:
            StoreError: The change could not be stored; the earlier weights stay current.
        """
        with typed_errors(self.folder):
            (self.folder / _OFFERED).replace(self.folder / _CURRENT)
            _sync_folder(self.folder)
            self.current, self.offered = self.offered, None
            self._sweep()

    def withdraw(self) -> None:
        """Drops the offer, which no engine has loaded."""
        with typed_errors(self.folder):
            (self.folder / _OFFERED).unlink(missing_ok=True)
            _sync_folder(self.folder)
            self.offered = None
            self._sweep()

    def forget(self) -> None:
        """Drops the current weights and the offer."""
        with typed_errors(self.folder):
            for name in (_OFFERED, _CURRENT):
                (self.folder / name).unlink(missing_ok=True)
            if self.folder.exists():
                _sync_folder(self.folder)
            self.current = self.offered = None
            self._sweep()

    def _make_folder(self) -> None:
        if not self.folder.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            for parent in list(self.folder.parents)[:2]:
                _sync_folder(parent)

    def _part(self, header: engine_pb2.UpdateWeightsHeader) -> Path:
        return self.folder / f"{header.policy_version}-{header.push_id}{_PART}"

    def _write(self, name: str, header: engine_pb2.UpdateWeightsHeader) -> None:
        written = self.folder / f"{name}.new"
        with written.open("wb") as file:
            file.write(header.SerializeToString())
            sync(file)
        written.replace(self.folder / name)
        _sync_folder(self.folder)

    def _sweep(self) -> None:
        """Removes files that no header references, except pushes that are being received."""
        if not self.folder.exists():
            return
        named = {self.file_of(one) for one in (self.current, self.offered) if one is not None}
        for path in self.folder.glob(f"*{_FILE}"):
            if path not in named:
                path.unlink(missing_ok=True)


def kept_models(data_dir: Path) -> Iterator[str]:
    """Yields the models with kept weights; removes unfinished pushes.

    Raises:
        StoreError: A file cannot be read.
    """
    with typed_errors(data_dir):
        for folder in (data_dir / "weights").glob("*/"):
            for part in folder.glob(f"*{_PART}"):
                part.unlink(missing_ok=True)
            headers = (_read(folder / name) for name in (_CURRENT, _OFFERED))
            header = next((one for one in headers if one is not None), None)
            if header is not None:
                yield header.model


def check_folder(folder: Path) -> None:
    """Checks that a folder is writable.

    Raises:
        StoreError: It cannot.
    """
    with typed_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f"probe-{os.getpid()}"
        with probe.open("wb") as file:
            file.write(b"rollmesh")
            sync(file)
        probe.unlink()
        _sync_folder(folder)


def sync(file: IO[bytes]) -> None:
    """Flushes a file to disk."""
    file.flush()
    os.fsync(file.fileno())


@contextmanager
def typed_errors(folder: Path) -> Iterator[None]:
    """Raises OS errors inside the block as typed errors."""
    try:
        yield
    except OSError as error:
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            raise StoreFullError(f"data_dir: the disk of {folder} is full; make room") from error
        raise StoreError(
            f"data_dir: {folder} cannot be used: {error.strerror or error}; "
            "give a folder that can be read and written"
        ) from error


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read(path: Path) -> engine_pb2.UpdateWeightsHeader | None:
    if not path.exists():
        return None
    try:
        return engine_pb2.UpdateWeightsHeader.FromString(path.read_bytes())
    except DecodeError as error:
        raise StoreError(f"data_dir: {path} is damaged; remove its folder") from error
