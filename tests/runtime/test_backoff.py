"""Delays between tries."""

import math

from rollmesh.runtime import Backoff


def delays(backoff: Backoff, count: int) -> list[float]:
    return [backoff.next_s() for _ in range(count)]


def test_delays_double_up_to_the_longest() -> None:
    assert delays(Backoff(1.0, 6.0, dice=lambda: 1.0), 5) == [1.0, 2.0, 4.0, 6.0, 6.0]


def test_jitter_takes_up_to_half_of_a_delay() -> None:
    assert delays(Backoff(1.0, 6.0, dice=lambda: 0.0), 4) == [0.5, 1.0, 2.0, 3.0]
    backoff = Backoff(1.0, 1.0)
    assert all(0.5 <= delay_s <= 1.0 for delay_s in delays(backoff, 1000))
    assert len(set(delays(backoff, 1000))) > 1


def test_a_success_begins_anew() -> None:
    backoff = Backoff(1.0, 6.0, dice=lambda: 1.0)
    assert delays(backoff, 3) == [1.0, 2.0, 4.0]
    backoff.reset()
    assert delays(backoff, 2) == [1.0, 2.0]


def test_a_delay_without_a_bound_stays_a_number() -> None:
    assert not math.isnan(delays(Backoff(1.0, math.inf, dice=lambda: 1.0), 2000)[-1])
    assert delays(Backoff(0.0, math.inf), 3) == [0.0, 0.0, 0.0]
