"""Images of sessions as files beside their rows, each once, named by the hash of its bytes."""

import os
import re
from collections.abc import Iterable
from pathlib import Path

from rollmesh.v1 import session_pb2

_SUFFIXES = {"image/jpeg": ".jpg"} | {f"image/{one}": f".{one}" for one in ("png", "webp", "gif")}
_SHA256 = re.compile("[0-9a-f]{64}")


def write(images: Iterable[session_pb2.SessionImage], folder: Path) -> None:
    """Writes the images that the folder does not have. A file is complete when it has its name.

    Raises:
        OSError: One cannot be written.
    """
    made = False
    for image in images:
        path = folder / name_of(image.sha256, image.media_type)
        if path.exists():
            continue
        folder.mkdir(parents=True, exist_ok=True)
        part = path.with_name(path.name + ".part")
        part.unlink(missing_ok=True)  # an agent may have left a link to another file
        with part.open("xb") as file:
            file.write(image.data)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
        made = True
    if made:
        sync(folder)
        sync(folder.parent)


def read(folder: Path, sha256: str, media_type: str) -> bytes:
    """Returns the bytes of an image.

    Raises:
        OSError: It cannot be read.
    """
    if not _SHA256.fullmatch(sha256):
        raise FileNotFoundError(f"{sha256[:100]!r} is no SHA-256")
    return (folder / name_of(sha256, media_type)).read_bytes()


def read_if_any(folder: Path, sha256: str, media_type: str) -> bytes:
    """Returns the bytes of an image, or none if its file is missing."""
    try:
        return read(folder, sha256, media_type)
    except FileNotFoundError:
        return b""


def name_of(sha256: str, media_type: str) -> str:
    """Returns the name of an image's file."""
    return f"{sha256}{_SUFFIXES.get(media_type, '')}"


def sync(folder: Path) -> None:
    """Makes the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
