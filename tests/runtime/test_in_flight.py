"""Bytes of requests count for all and for their owners, with room for small ones."""

import pytest

from rollmesh.runtime import BytesInFlight, HeldRequest
from rollmesh.runtime.errors import OverloadedError

MOST = 1_000_000
LARGE = 600_000


def test_an_owner_that_is_alone_may_hold_more_than_its_share_and_two_requests_may_not() -> None:
    whole = BytesInFlight(MOST)
    first, second = (HeldRequest(whole, LARGE, "one") for _ in range(2))
    first.hold(LARGE)
    with pytest.raises(OverloadedError, match="of one"):
        second.hold(1)
    assert (whole.held, whole.owned, second.held) == (LARGE, {"one": LARGE}, 0)
    first.give()
    second.hold(1)
    assert whole.owned == {"one": 1}


def test_an_owner_that_is_named_again_counts_once() -> None:
    whole = BytesInFlight(MOST)
    other, request = HeldRequest(whole, 1, "one"), HeldRequest(whole, 200_000, "address")
    other.hold(1)
    request.hold(200_000)
    for _ in range(2):
        request.hold(owner="one")
    assert whole.owned == {"one": 200_001}
    request.give()
    other.give()
    assert (whole.held, whole.owned) == (0, {})


def test_bytes_that_an_owner_has_no_room_for_stay_with_the_former() -> None:
    whole = BytesInFlight(MOST)
    other, request = HeldRequest(whole, 200_000, "one"), HeldRequest(whole, 100_000, "address")
    other.hold(200_000)
    request.hold(100_000)
    with pytest.raises(OverloadedError, match="of one"):
        request.hold(owner="one")
    assert whole.owned == {"one": 200_000, "address": 100_000}
    request.hold(1)
    assert whole.owned["address"] == 100_001
