"""Token arrays as bytes."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from rollmesh.runtime.codec import pack_ids, pack_logprobs, unpack_ids, unpack_logprobs, unpack_mask
from rollmesh.runtime.errors import InvalidFieldError

CODECS = [
    pytest.param(pack_ids, unpack_ids, np.uint32, id="ids"),
    pytest.param(pack_logprobs, unpack_logprobs, np.float32, id="logprobs"),
    pytest.param(np.ndarray.tobytes, unpack_mask, np.bool_, id="mask"),
]


@given(st.lists(st.integers(0, 2**32 - 1)))
def test_ids_come_back_equal(values: list[int]) -> None:
    found = unpack_ids(pack_ids(np.array(values, np.uint32)), "ids")
    assert found.dtype == np.uint32
    assert found.tolist() == values


@given(st.lists(st.floats(width=32)))
def test_logprobs_come_back_to_the_bit(values: list[float]) -> None:
    sent = np.array(values, np.float32)
    found = unpack_logprobs(pack_logprobs(sent), "logprobs")
    assert found.dtype == np.float32
    assert found.tobytes() == sent.tobytes()


@given(st.lists(st.booleans()))
def test_masks_come_back_equal(values: list[bool]) -> None:
    found = unpack_mask(np.array(values, np.bool_).tobytes(), "mask")
    assert found.dtype == np.bool_
    assert found.tolist() == values


@pytest.mark.parametrize(("pack", "unpack", "dtype"), CODECS)
def test_nothing_is_no_bytes(
    pack: Callable[[Any], bytes], unpack: Callable[[bytes, str], Any], dtype: Any
) -> None:
    assert pack(np.empty(0, dtype)) == b""
    assert unpack(b"", "field").tolist() == []


@pytest.mark.parametrize(("pack", "unpack", "dtype"), CODECS)
def test_an_array_with_gaps_is_packed_as_it_reads(
    pack: Callable[[Any], bytes], unpack: Callable[[bytes, str], Any], dtype: Any
) -> None:
    every_second = np.array([1, 0, 0, 0, 1, 0], dtype)[::2]
    assert unpack(pack(every_second), "field").tolist() == [1, 0, 1]


@pytest.mark.parametrize("order", ["<", ">"])
def test_the_wire_is_little_endian_whatever_the_array_is(order: str) -> None:
    assert pack_ids(np.array([0x01020304], f"{order}u4")) == b"\x04\x03\x02\x01"
    assert pack_logprobs(np.array([-1.0], f"{order}f4")) == b"\x00\x00\x80\xbf"


@pytest.mark.parametrize("unpack", [unpack_ids, unpack_logprobs], ids=["ids", "logprobs"])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 4001])
def test_bytes_that_are_no_whole_numbers_name_their_field(
    unpack: Callable[[bytes, str], Any], size: int
) -> None:
    with pytest.raises(InvalidFieldError, match=rf"^turns\[1\]\.data: has {size} bytes") as caught:
        unpack(bytes(size), "turns[1].data")
    assert caught.value.field == "turns[1].data"


@pytest.mark.parametrize("data", [b"\x02", b"\x00\x01\xff", b"01"])
def test_a_mask_of_other_than_flags_names_its_field(data: bytes) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        unpack_mask(data, "mask_u8")
    assert caught.value.field == "mask_u8"


@pytest.mark.parametrize(("pack", "unpack", "dtype"), CODECS)
def test_received_arrays_are_read_only(
    pack: Callable[[Any], bytes], unpack: Callable[[bytes, str], Any], dtype: Any
) -> None:
    found = unpack(pack(np.ones(3, dtype)), "field")
    with pytest.raises(ValueError, match="read-only"):
        found[0] = 0
