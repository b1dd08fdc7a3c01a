"""What a rollout shows of itself, on a terminal and elsewhere."""

import io
import os
import pty
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr

import pytest

from rollmesh.client import RolloutSummary, showing


def summary(completed: int, failed: int = 0) -> RolloutSummary:
    counts = Counter({"COMPLETED": completed, "FAILED": failed})
    return RolloutSummary(counts=+counts)


def fail_after_one() -> None:
    with showing(4, wanted=True) as show:
        show(summary(1))
        raise ValueError("agent")


class Terminal:
    """A terminal in the place of standard error."""

    def __init__(self) -> None:
        self._reading, writing = pty.openpty()
        self.stream = os.fdopen(writing, "w")

    def read(self) -> str:
        """What was written. Ends the terminal."""
        self.stream.close()
        parts = []
        while part := _read(self._reading):
            parts.append(part)
        os.close(self._reading)
        return b"".join(parts).decode()


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65_536)
    except OSError:  # the other end is closed
        return b""


@pytest.fixture
def terminal() -> Terminal:
    return Terminal()


@pytest.fixture
def file() -> io.StringIO:
    return io.StringIO()


@contextmanager
def clock_at(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    now = [0]
    monkeypatch.setattr("rollmesh.runtime.clock.monotonic_ms", lambda: now[0])
    yield now


def test_on_a_terminal_there_are_lines(terminal: Terminal) -> None:
    with redirect_stderr(terminal.stream), showing(4, wanted=None) as show:
        show(summary(3, failed=1))
    assert terminal.read().strip() == "rollout 4/4: completed 3, failed 1"


@pytest.mark.parametrize("wanted", [None, False], ids=["nobody looks", "progress=False"])
def test_where_nobody_looks_or_wants_it_nothing_is_written(
    file: io.StringIO,
    wanted: bool | None,  # a table's column
) -> None:
    with redirect_stderr(file), showing(4, wanted=wanted) as show:
        show(summary(4))
    assert file.getvalue() == ""


def test_nothing_is_written_to_a_terminal_either_with_progress_false(terminal: Terminal) -> None:
    with redirect_stderr(terminal.stream), showing(4, wanted=False) as show:
        show(summary(4))
    assert terminal.read() == ""


@pytest.mark.parametrize(("total", "of"), [(9, "/9"), (None, "")])
def test_elsewhere_there_is_a_line_now_and_then_and_the_last_state_at_the_end(
    file: io.StringIO, monkeypatch: pytest.MonkeyPatch, total: int | None, of: str
) -> None:
    with redirect_stderr(file), clock_at(monkeypatch) as now, showing(total, wanted=True) as show:
        for done in range(1, 8):
            now[0] += 2_000
            show(summary(done))
    assert file.getvalue().splitlines() == [
        f"rollout {done}{of}: completed {done}" for done in (3, 6, 7)
    ]


def test_a_state_that_was_shown_is_not_shown_again_at_the_end(
    file: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    with redirect_stderr(file), clock_at(monkeypatch) as now, showing(1, wanted=True) as show:
        now[0] += 6_000
        show(summary(1))
    assert file.getvalue() == "rollout 1/1: completed 1\n"


def test_an_exception_still_shows_the_last_state(file: io.StringIO) -> None:
    with redirect_stderr(file), pytest.raises(ValueError, match="agent"):
        fail_after_one()
    assert file.getvalue() == "rollout 1/4: completed 1\n"
