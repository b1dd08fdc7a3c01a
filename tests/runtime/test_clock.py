"""What the clocks say when somebody sets the host's."""

import time

import pytest

from rollmesh.runtime import clock

HOUR_MS = 3_600_000


@pytest.mark.parametrize("hours", [2, -2])
def test_the_steady_clock_does_not_jump_with_the_hosts(
    monkeypatch: pytest.MonkeyPatch, hours: int
) -> None:
    host, before = time.time_ns, clock.steady_unix_ms()
    monkeypatch.setattr(time, "time_ns", lambda: host() + hours * HOUR_MS * 1_000_000)
    assert before <= clock.steady_unix_ms() < before + HOUR_MS
    assert abs(clock.unix_ms() - clock.steady_unix_ms()) > HOUR_MS


def test_the_steady_clock_counts_from_1970() -> None:
    assert abs(clock.steady_unix_ms() - clock.unix_ms()) < HOUR_MS
