"""Files beside the tables of a record: images, and sessions that the record cannot hold.

An image is there once, named by the hash of its bytes. A session that is set aside has its bytes in
a file, and a line of why.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from rollmesh.runtime import owner_only
from rollmesh.runtime.errors import InvalidFieldError
from rollmesh.v1 import session_pb2

_SUFFIXES = {"image/jpeg": ".jpg"} | {f"image/{one}": f".{one}" for one in ("png", "webp", "gif")}
_SHA256 = re.compile("[0-9a-f]{64}")
FOLDER, REASONS = "_set_aside", "reasons.jsonl"
MOST, LEAST_BATCH, MOST_OF_BATCH = 100, 20, 0.1
"""Most sessions of a folder, and the greatest part of a batch with more than `LEAST_BATCH`."""
_LONGEST_NAME = 200


def write_images(images: Iterable[session_pb2.SessionImage], folder: Path) -> None:
    """Writes the images that the folder does not have. A file is complete when it has its name.

    Raises:
        OSError: One cannot be written.
    """
    made = False
    for image in images:
        path = folder / image_name(image.sha256, image.media_type)
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


def read_image(folder: Path, sha256: str, media_type: str) -> bytes:
    """Returns the bytes of an image.

    Raises:
        OSError: It cannot be read.
    """
    if not _SHA256.fullmatch(sha256):
        raise FileNotFoundError(f"{sha256[:100]!r} is no SHA-256")
    return (folder / image_name(sha256, media_type)).read_bytes()


def read_image_if_any(folder: Path, sha256: str, media_type: str) -> bytes:
    """Returns the bytes of an image, or none if its file is missing."""
    try:
        return read_image(folder, sha256, media_type)
    except FileNotFoundError:
        return b""


def image_name(sha256: str, media_type: str) -> str:
    """Returns the name of an image's file."""
    return f"{sha256}{_SUFFIXES.get(media_type, '')}"


def sync(folder: Path) -> None:
    """Makes the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Refused(NamedTuple):
    """A session that could not be converted."""

    reason: str
    data: bytes
    """The message `SessionRecord`, serialized."""


def set_aside(refused: Mapping[str, Refused], root: Path, sessions: int) -> list[str]:
    """Writes sessions beside the record. Durable. The same session again changes nothing.

    Returns:
        The new ids.

    Raises:
        InvalidFieldError: Too many sessions. Nothing was written.
        OSError: A file cannot be written.
    """
    folder = root / FOLDER
    lines = reasons(root)
    new = [one for one in refused if one not in lines]
    if not new:
        return []
    is_much = sessions > LEAST_BATCH and len(new) > sessions * MOST_OF_BATCH
    if is_much or len(lines) + len(new) > MOST:
        raise InvalidFieldError(
            "record",
            f"{len(new)} of {sessions} sessions cannot be written, and {len(lines)} are in "
            f"{folder}; the first: {new[0]}: {refused[new[0]].reason}; update rollmesh, or "
            "move the folder away when its sessions are understood",
        )
    owner_only.make_folder(folder)
    for id_ in new:
        _write(folder / name_of(id_), refused[id_].data)
        lines[id_] = {"session_id": id_, "file": name_of(id_), "reason": refused[id_].reason}
    sync(folder)
    _write(folder / REASONS, "".join(f"{json.dumps(one)}\n" for one in lines.values()).encode())
    sync(folder)
    sync(root)
    return new


def reasons(root: Path) -> dict[str, dict[str, str]]:
    """Returns the lines of a record's sessions that were set aside, by session id.

    Raises:
        OSError: The file cannot be read.
    """
    path = root / FOLDER / REASONS
    if not path.exists():
        return {}
    return {one["session_id"]: one for one in map(json.loads, path.read_text().splitlines())}


def name_of(session_id: str) -> str:
    """Returns the name of a session's file: the id with `%` escapes, or a long id's hash."""
    name = quote(session_id, safe="")
    if len(name) > _LONGEST_NAME:
        name = hashlib.sha256(session_id.encode()).hexdigest()
    return f"{name}.binpb"


def _write(path: Path, data: bytes) -> None:
    part = path.with_name(path.name + ".part")
    with part.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
