"""Sessions that the record cannot hold: their bytes in files beside it, and a line of why."""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from rollmesh.record import images
from rollmesh.runtime import owner_only
from rollmesh.runtime.errors import InvalidFieldError

FOLDER, REASONS = "_set_aside", "reasons.jsonl"
MOST, LEAST_BATCH, MOST_OF_BATCH = 100, 20, 0.1
"""Most sessions of a folder, and the greatest part of a batch with more than `LEAST_BATCH`."""
_LONGEST_NAME = 200


class Refused(NamedTuple):
    """A session that could not be converted."""

    reason: str
    data: bytes
    """The message `SessionRecord`, serialized."""


def keep(refused: Mapping[str, Refused], root: Path, sessions: int) -> list[str]:
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
    images.sync(folder)
    _write(folder / REASONS, "".join(f"{json.dumps(one)}\n" for one in lines.values()).encode())
    images.sync(folder)
    images.sync(root)
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
