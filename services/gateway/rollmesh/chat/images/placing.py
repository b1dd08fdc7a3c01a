"""Puts the runs of images into ids, and finds them there."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from rollmesh.chat.images.rules import ImageRule
from rollmesh.chat.messages import Image
from rollmesh.runtime.codec.arrays import TokenIds


class PlacementError(Exception):
    """The placeholders in ids are not those of the images; the message says how they differ."""


class Placeholder(NamedTuple):
    """The ids that stand for one image."""

    sha256: str
    """SHA-256 of the image's bytes, hexadecimal."""
    offset: int
    """Index of the first id."""
    length: int
    """Number of ids."""


def expand(ids: TokenIds, images: Sequence[Image], rule: ImageRule) -> TokenIds:
    """Returns ids with the run of each image in place of its placeholder.

    Args:
        ids: Ids with one placeholder for each image, in order; uint32 [N].
        images: The images.
        rule: How the model's processor represents images.

    Raises:
        PlacementError: There are more or fewer placeholders than images.
        ImageRefusedError: The model cannot take an image of that size.
    """
    at = np.flatnonzero(np.isin(ids, rule.reserved_ids))
    if len(at) != len(images) or not (ids[at] == rule.printed_id).all():
        raise PlacementError(
            f"the chat template prints {len(at)} placeholders for {len(images)} images"
        )
    if not images:
        return ids
    parts: list[TokenIds] = []
    begin = 0
    for index, image in zip(at.tolist(), images, strict=True):
        parts += (ids[begin:index], rule.run(image.width, image.height))
        begin = index + 1
    return np.concatenate([*parts, ids[begin:]])


def locate(ids: TokenIds, images: Sequence[Image], rule: ImageRule) -> list[Placeholder]:
    """Returns where the runs of images are in expanded ids.

    Args:
        ids: What `expand` returned, or an array that contains it; uint32 [N].
        images: All images of these ids, in order.
        rule: The rule that expanded them.

    Raises:
        PlacementError: The ids do not hold exactly the runs of these images.
    """
    reserved = np.isin(ids, rule.reserved_ids)
    found: list[Placeholder] = []
    end = 0
    for image in images:
        run = rule.run(image.width, image.height)
        offset = end + int(np.argmax(reserved[end:])) if reserved[end:].any() else len(ids)
        end = offset + len(run)
        if not np.array_equal(ids[offset:end], run):
            raise PlacementError(f"the ids hold no run of {len(run)} ids for image {image.sha256}")
        found.append(Placeholder(image.sha256, offset, len(run)))
    if reserved[end:].any():
        raise PlacementError("the ids hold placeholders without an image")
    return found
