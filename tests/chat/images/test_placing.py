"""Runs of images in ids: put in, found again, and refused where they do not fit."""

import re

import numpy as np
import pytest
from hypothesis import given, strategies as st

from rollmesh.chat import (
    ConstantRule,
    GridRule,
    Image,
    Placeholder,
    PlacementError,
    TokenIds,
    expand,
    locate,
)

PAD, VIDEO = 90, 91
RULE = GridRule(PAD, (PAD, VIDEO), square=28, min_pixels=56 * 56, max_pixels=28 * 28 * 16)
IMAGES = st.builds(
    Image,
    st.just(0),
    st.sampled_from(("a" * 64, "b" * 64)),
    st.integers(1, 200),
    st.integers(1, 200),
)


def ids_of(*ids: int) -> TokenIds:
    return np.array(ids, np.uint32)


@given(parts=st.lists(st.one_of(st.integers(0, 80), IMAGES), max_size=12))
def test_runs_are_found_where_they_were_put(parts: list[int | Image]) -> None:
    images = [part for part in parts if isinstance(part, Image)]
    ids = expand(
        ids_of(*(PAD if isinstance(part, Image) else part for part in parts)), images, RULE
    )
    wanted: list[Placeholder] = []
    at = 0
    for part in parts:
        if isinstance(part, Image):
            size = len(RULE.run(part.width, part.height))
            wanted.append(Placeholder(part.sha256, at, size))
        else:
            size = 1
            assert ids[at] == part
        at += size
    assert (len(ids), locate(ids, images, RULE)) == (at, wanted)


def test_two_adjacent_images_keep_their_own_ranges() -> None:
    images = [Image(0, "a" * 64, 1, 1), Image(0, "b" * 64, 1, 1)]
    rule = ConstantRule(PAD, (PAD,), 3)
    ids = expand(ids_of(PAD, PAD), images, rule)
    assert ids.tolist() == [PAD] * 6
    assert [one[1:] for one in locate(ids, images, rule)] == [(0, 3), (3, 3)]


@pytest.mark.parametrize(
    ("ids", "images", "message"),
    [
        pytest.param(ids_of(1, PAD, PAD), 1, "prints 2 placeholders for 1 images", id="spelled"),
        pytest.param(ids_of(1, 2), 1, "prints 0 placeholders for 1 images", id="not-printed"),
        pytest.param(ids_of(1, VIDEO), 1, "prints 1 placeholders for 1 images", id="video"),
        pytest.param(ids_of(PAD), 0, "prints 1 placeholders for 0 images", id="without-image"),
    ],
)
def test_a_placeholder_that_is_no_image_is_refused(
    ids: TokenIds, images: int, message: str
) -> None:
    with pytest.raises(PlacementError, match=re.escape(message)):
        expand(ids, [Image(0, "a" * 64, 8, 8)] * images, RULE)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        pytest.param(ids_of(1, PAD, PAD, 2), "no run of 3 ids", id="short"),
        pytest.param(ids_of(1, PAD, PAD, PAD, PAD), "placeholders without an image", id="long"),
        pytest.param(ids_of(1, 2), "no run of 3 ids", id="missing"),
        pytest.param(ids_of(PAD, PAD, PAD, VIDEO), "placeholders without an image", id="video"),
    ],
)
def test_ids_that_are_not_the_runs_of_the_images_are_refused(ids: TokenIds, message: str) -> None:
    with pytest.raises(PlacementError, match=message):
        locate(ids, [Image(0, "a" * 64, 8, 8)], ConstantRule(PAD, (PAD, VIDEO), 3))
