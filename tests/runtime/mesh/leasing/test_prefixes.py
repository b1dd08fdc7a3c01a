"""Digests of the beginnings of prompts."""

import zlib

import numpy as np
import pytest

from rollmesh.mesh.leasing.prefixes import prefix_crc32s
from rollmesh.runtime.codec.arrays import pack_ids


@pytest.mark.parametrize(
    ("tokens", "prefixes"), [(0, 0), (1, 0), (255, 0), (256, 1), (511, 1), (512, 2), (5000, 5)]
)
def test_a_prompt_has_a_digest_for_each_power_of_two(tokens: int, prefixes: int) -> None:
    packed = pack_ids(np.arange(tokens, dtype=np.uint32))
    found, crc32 = prefix_crc32s(packed)
    assert found == [zlib.crc32(packed[: 4 * 256 * 2**at]) for at in range(prefixes)]
    assert crc32 == zlib.crc32(packed)
