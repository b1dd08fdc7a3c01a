"""When a settled unit may go, as tables."""

import pytest

from rollmesh.collector.delivery.retention import Retention, is_over


@pytest.mark.parametrize(
    ("seq", "settled_ms", "over"),
    [
        pytest.param(7, None, False, id="open"),
        pytest.param(5, None, True, id="before-the-consumer's-start"),
        pytest.param(7, 100, True, id="settled-long-enough-ago"),
        pytest.param(7, 101, False, id="settled-just-now"),
        pytest.param(None, None, False, id="a-group-that-waits"),
        pytest.param(None, 100, False, id="a-group-that-waits-again-under-another-policy"),
    ],
)
def test_a_consumer_is_done_with_what_it_settled_or_starts_after(
    seq: int | None, settled_ms: int | None, *, over: bool
) -> None:
    assert is_over(seq, settled_ms, start_seq=5, settled_before=100) is over


def test_near_full_settled_units_go_at_once() -> None:
    retention = Retention(settled_ms=1000, max_bytes=100)
    assert retention.settled_before(90, 5000) == 4000
    assert retention.settled_before(91, 5000) == 5000
