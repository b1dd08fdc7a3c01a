"""Shows the progress of a rollout: a bar on a terminal with rich installed, otherwise lines."""

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

from rollmesh.client.rollouts.summary import RolloutSummary
from rollmesh.runtime import clock

Show: TypeAlias = Callable[[RolloutSummary], None]
_LINE_MS = 5_000


@contextmanager
def showing(total: int | None, *, wanted: bool | None) -> Iterator[Show]:
    """Yields a function that shows a summary on standard error.

    Args:
        total: Number of seats; None if unknown.
        wanted: Whether to show anything; None: if standard error is a terminal.
    """
    is_terminal = sys.stderr.isatty()
    if not (is_terminal if wanted is None else wanted):
        yield lambda _: None
    elif is_terminal and importlib.util.find_spec("rich"):
        with _bar(total) as show:
            yield show
    else:
        with _lines(total) as show:
            yield show


@contextmanager
def _lines(total: int | None) -> Iterator[Show]:
    last: tuple[int, RolloutSummary | None] = (clock.monotonic_ms(), None)

    def show(summary: RolloutSummary) -> None:
        nonlocal last
        now = clock.monotonic_ms()
        if now - last[0] < _LINE_MS:
            last = (last[0], summary)
            return
        _write(summary, total)
        last = (now, None)

    try:
        yield show
    finally:
        if last[1] is not None:
            _write(last[1], total)


def _write(summary: RolloutSummary, total: int | None) -> None:
    of = "" if total is None else f"/{total}"
    sys.stderr.write(f"rollout {summary.counts.total()}{of}: {summary}\n")
    sys.stderr.flush()


@contextmanager
def _bar(total: int | None) -> Iterator[Show]:
    from rich import console, progress  # noqa: PLC0415 - optional

    columns: tuple[Any, ...] = (
        progress.TextColumn("rollout"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeElapsedColumn(),
        progress.TextColumn("{task.fields[text]}"),
    )
    with progress.Progress(*columns, console=console.Console(stderr=True)) as bar:
        task = bar.add_task("rollout", total=total, text="")

        def show(summary: RolloutSummary) -> None:
            bar.update(task, completed=summary.counts.total(), text=str(summary))

        yield show
