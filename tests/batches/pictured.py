"""A session that showed images to a vision model."""

import hashlib
import io
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from PIL import Image

from rollmesh.chat import load_rule
from rollmesh.client import SessionResult, Trajectory, TrajectoryTree
from rollmesh.v1 import session_pb2, trajectory_pb2
from tests.batches.records import linear, session
from tests.chat.images.pictures import picture
from tests.token_arrays import pack_tokens

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


def pictured_tree(model: str | Path) -> tuple[SessionResult, SessionResult]:
    """Returns a session as a tree and as its leaves: an image, then one more or two more."""
    parts = [  # text, images, text
        (2, [0], 2),
        (1, [1], 2),
        (0, [], 3),
        (1, [0, 1], 1),
        (0, [], 2),
    ]
    parents = [None, 0, 1, 0, 3]
    ids: list[int] = []
    nodes: list[trajectory_pb2.TrajectoryNode] = []
    images: list[trajectory_pb2.TrajectoryImage] = []
    for at, ((before, shown, after), parent) in enumerate(zip(parts, parents, strict=True)):
        node = trajectory_pb2.TrajectoryNode(node_id=at + 1, start=len(ids), parent_index=parent)
        node.sampled = node.trained = not shown
        ids += [3 + at] * before
        for index in shown:
            run = _run(model, index).tolist()
            images.append(_image(index, len(ids), len(run)))
            ids += run
        ids += [10 + at] * after
        node.end = len(ids)
        nodes.append(node)
    sampled = np.repeat([n.sampled for n in nodes], [n.end - n.start for n in nodes])
    logprobs = np.where(sampled, -1, 0).astype(np.float32)
    tokens = pack_tokens(np.array(ids, np.uint32), logprobs, sampled)
    tree = TrajectoryTree.from_proto(
        trajectory_pb2.TrajectoryTree(nodes=nodes, tokens=tokens, images=images)
    )
    leaves = [_leaf(tree, at, path) for at, path in enumerate(tree.paths())]
    whole = SessionResult("s", "", 0, "COMPLETED", 1.0, 2, {}, (), tree)
    return replace(whole, images=_files()), replace(session("s", leaves), images=_files())


def _leaf(tree: TrajectoryTree, at: int, path: np.ndarray) -> Trajectory:
    sampled = int(tree.loss_mask[path].sum())
    row = linear(f"t{at}", len(path) - sampled, sampled)
    images = tuple(
        trajectory_pb2.TrajectoryImage(sha256=one.sha256, start=start, tokens=one.tokens)
        for one in tree.images
        if (start := int(np.searchsorted(path, one.start))) < len(path) and path[start] == one.start
    )
    return replace(row, token_ids=tree.token_ids[path], images=images)


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
