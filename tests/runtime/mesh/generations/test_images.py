"""The images of a request: places and hashes that are checked, and bytes that are held and sent."""

import hashlib
from unittest.mock import patch

import pytest
from hypothesis import given, strategies as st

from rollmesh.mesh import HeldBytes, SentImages, check_hashes, check_places
from rollmesh.runtime.errors import ImageUnknownError, InvalidFieldError, InvalidImageError
from rollmesh.runtime.rpc import from_status, to_status
from rollmesh.v1 import engine_pb2


def image(
    data: bytes, offset: int = 0, length: int = 4, *, send: bool = True
) -> engine_pb2.PromptImage:
    return engine_pb2.PromptImage(
        sha256=sha(data), offset=offset, length=length, data=data if send else b""
    )


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def files(*data: bytes) -> dict[str, bytes]:
    return {sha(one): one for one in data}


def test_bytes_that_came_once_need_not_come_again() -> None:
    held = HeldBytes(100)
    assert held.take([image(b"a"), image(b"b", 4)]) == files(b"a", b"b")
    again = [image(b"b", send=False), image(b"a", 4, send=False)]
    assert held.take(again) == files(b"a", b"b")


def test_missing_bytes_are_named_and_those_that_came_are_held() -> None:
    held = HeldBytes(100)
    with pytest.raises(ImageUnknownError) as caught:
        held.take([image(b"a"), image(b"b", 4, send=False), image(b"b", 8, send=False)])
    assert caught.value.sha256s == [sha(b"b")]
    assert caught.value.metadata["missing"] == "1"
    assert held.take([image(b"a", send=False), image(b"b")]) == files(b"a", b"b")


def test_hashes_that_are_missing_survive_the_wire_whole() -> None:
    many = [image(bytes([at]), at * 4, send=False) for at in range(100)]
    with pytest.raises(ImageUnknownError) as caught:
        HeldBytes(100).take(many)
    received = from_status(to_status(caught.value))
    assert isinstance(received, ImageUnknownError)
    assert received.sha256s == [one.sha256 for one in many[:16]]
    assert received.metadata["missing"] == "100"


@given(
    st.lists(st.lists(st.tuples(st.integers(0, 6), st.booleans()), max_size=4), max_size=12),
    st.integers(0, 12),
)
def test_held_images_stay_within_their_bound_and_are_the_received_ones(
    requests: list[list[tuple[int, bool]]], bound: int
) -> None:
    held = HeldBytes(bound)
    for request in requests:
        images = [image(bytes([n]) * (n + 1), send=send) for n, send in request]
        known = {one.sha256 for one in images if one.data or one.sha256 in held}
        missing = {one.sha256 for one in images} - known
        if missing:
            with pytest.raises(ImageUnknownError) as caught:
                held.take(images)
            assert set(caught.value.sha256s) == missing
        else:
            found = held.take(images)
            assert set(found) == known
            assert all(sha(data) == key for key, data in found.items())
        assert held.held_bytes <= bound
        sizes = (n + 1 for n in range(7) if sha(bytes([n]) * (n + 1)) in held)
        assert held.held_bytes == sum(sizes)


def test_the_least_recently_used_entry_makes_room() -> None:
    held = HeldBytes(3)
    held.take([image(b"a"), image(b"b"), image(b"c")])
    held.take([image(b"a", send=False)])
    held.take([image(b"d")])
    assert [sha(one) in held for one in (b"a", b"b", b"c", b"d")] == [True, False, True, True]


@pytest.mark.parametrize(
    ("images", "field"),
    [
        pytest.param([image(b"a", 0, 4), image(b"b", 3, 4)], "images[1].offset", id="overlap"),
        pytest.param([image(b"a", 8, 4), image(b"b", 0, 4)], "images[1].offset", id="order"),
        pytest.param([image(b"a", 17, 4)], "images[0].length", id="outside"),
        pytest.param([image(b"a", 2**32 - 1, 2**32 - 1)], "images[0].length", id="far-outside"),
        pytest.param([image(b"a", 0, 0)], "images[0].length", id="empty"),
        pytest.param(
            [engine_pb2.PromptImage(sha256="A" * 64, length=1)], "images[0].sha256", id="case"
        ),
        pytest.param(
            [engine_pb2.PromptImage(sha256="a" * 63, length=1)], "images[0].sha256", id="short"
        ),
        pytest.param([image(b"a")] * 257, "images", id="many"),
    ],
)
def test_an_image_without_a_place_is_named(
    images: list[engine_pb2.PromptImage], field: str
) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        check_places(images, 20)
    assert caught.value.field == field


def test_images_side_by_side_up_to_the_end_have_places() -> None:
    check_places([image(b"a", 0, 10), image(b"a", 10, 10)], 20)


def test_bytes_with_another_hash_are_refused() -> None:
    lie = image(b"a")
    lie.data = b"b"
    check_hashes([image(b"a"), image(b"b", 4, send=False)])
    with pytest.raises(InvalidImageError) as caught:
        check_hashes([image(b"a"), lie])
    assert caught.value.field == "images[1].data"


def test_an_engine_is_sent_an_image_once_and_again_if_it_asks() -> None:
    sent, data = SentImages(), files(b"a", b"b")
    images = [image(b"a", send=False), image(b"b", 4, send=False), image(b"a", 8, send=False)]
    sent.fill(images, data)
    assert [one.data for one in images] == [b"a", b"b", b""]
    sent.fill(images, data)
    assert [one.data for one in images] == [b"", b"", b""]
    sent.lost(ImageUnknownError.of([sha(b"a")], 1), data)
    sent.fill(images, data)
    assert [one.data for one in images] == [b"a", b"", b""]


def test_images_beyond_one_message_are_sent_with_the_next_ones() -> None:
    sent, data = SentImages(), files(b"aaaa", b"bbbb", b"cc", b"d" * 99)
    images = [image(one, send=False) for one in data.values()]
    received: set[str] = set()
    with patch("rollmesh.mesh.images._MESSAGE_BYTES", 7):
        sent.fill(images, data)
        for _ in images:
            assert sum(len(one.data) for one in images) <= 7 or received
            received |= {one.sha256 for one in images if one.data}
            if missing := set(data) - received:
                sent.lost(ImageUnknownError.of(sorted(missing), len(missing)), data)
                sent.fill(images, data)
    assert received == set(data)


def test_the_image_that_was_used_longest_ago_is_sent_again_once_there_are_too_many() -> None:
    sent, data = SentImages(), files(b"a", b"b", b"c")

    def filled(*names: bytes) -> list[bytes]:
        images = [image(name, send=False) for name in names]
        sent.fill(images, data)
        return [one.data for one in images]

    with patch("rollmesh.mesh.images._SENT", 2):
        assert filled(b"a") == [b"a"]
        assert filled(b"b") == [b"b"]
        assert filled(b"a") == [b""]
        assert filled(b"c") == [b"c"]  # in the place of b
        assert filled(b"a") == [b""]
        assert filled(b"b") == [b"b"]


def test_an_image_whose_bytes_nobody_has_stays_unknown() -> None:
    sent, images = SentImages(), [image(b"a", send=False)]
    sent.fill(images, {})
    assert not images[0].data
    with pytest.raises(ImageUnknownError):
        sent.lost(ImageUnknownError.of([sha(b"a")], 1), {})
