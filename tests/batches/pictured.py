"""A session that showed images to a vision model."""

import hashlib
import io
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from PIL import Image

from rollmesh.chat import load_rule
from rollmesh.client import SessionResult
from rollmesh.v1 import session_pb2, trajectory_pb2
from tests.batches.records import linear, session
from tests.chat.images.pictures import picture

FILES = picture(140, 100), picture(60, 90, seed=1, mode="RGBA")
NAMES = [hashlib.sha256(data).hexdigest() for data in FILES]


def pictured(model: str | Path, order: Sequence[int]) -> SessionResult:
    """Shows these of the files, with two tokens of text before each."""
    images: list[trajectory_pb2.TrajectoryImage] = []
    runs: list[tuple[int, np.ndarray]] = []
    at = 2
    for index in order:
        run = _run(model, index)
        images.append(_image(index, at, len(run)))
        runs.append((at, run))
        at += len(run) + 2
    row = linear("t", at, 3)
    ids = row.token_ids % 300 + 3  # none of them stands for an image
    for start, run in runs:
        ids[start : start + len(run)] = run
    row = replace(row, token_ids=ids.astype(np.uint32), images=tuple(images))
    return replace(session("s", [row]), images=_files())


def _run(model: str | Path, index: int) -> np.ndarray:
    """Returns the ids that stand for a file."""
    rule = load_rule(Path(model))
    assert rule is not None
    with Image.open(io.BytesIO(FILES[index])) as file:
        return rule.run(*file.size)


def _image(index: int, start: int, tokens: int) -> trajectory_pb2.TrajectoryImage:
    return trajectory_pb2.TrajectoryImage(sha256=NAMES[index], start=start, tokens=tokens)


def _files() -> dict[str, session_pb2.SessionImage]:
    return {
        name: session_pb2.SessionImage(sha256=name, data=data)
        for name, data in zip(NAMES, FILES, strict=True)
    }
