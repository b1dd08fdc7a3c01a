"""Bounds of a string's length as a pattern."""

import re

import pytest

from rollmesh.engine.vllm import length_pattern


@pytest.mark.parametrize(
    ("least", "most"), [(0, 3), (2, 64), (0, 65), (64, 128), (65, 129), (10, 400), (130, None)]
)
def test_a_pattern_matches_exactly_the_lengths_within_its_bounds(
    least: int, most: int | None
) -> None:
    pattern = length_pattern(least, most)
    assert max(int(count) for count in re.findall(r"\d+", pattern)) <= 64
    for length in range(500):
        fits = least <= length and (most is None or length <= most)
        assert bool(re.fullmatch(pattern, "a" * length)) == fits, length
