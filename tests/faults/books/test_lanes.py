"""The processes of kills and chaos: whatever does not start or end is named, and soon over."""

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.chaos import chaos
from benchmarks.chaos.events import Event, Kind
from benchmarks.kills import lanes
from benchmarks.kills.lanes import Lane

SAYS_READY = "print('READY', flush=True)"
STAYS = "import time; time.sleep(600)"


def lane(folder: Path, *statements: str) -> Lane:
    """A process that runs Python statements."""
    command = ("timeit", "-n1", "-r1", *statements)
    return Lane("agents", lambda *_: command, folder / "agents-0.log", seed=0)


async def test_a_process_that_is_never_ready_is_named_and_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lanes, "_START_S", 0.5)
    process = lane(tmp_path, STAYS)
    with pytest.raises(TimeoutError, match="agents-0 to be ready"):
        await process.start()
    assert process.crashed


async def test_a_process_that_ends_before_it_is_ready_is_shown_with_its_last_words(
    tmp_path: Path,
) -> None:
    process = lane(tmp_path, "raise ValueError('no such door')")
    with pytest.raises(RuntimeError, match=r"(?s)agents-0 did not start.*no such door"):
        await process.start()


async def test_a_process_that_does_not_end_is_named_and_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lanes, "_STOP_S", 0.5)
    process = lane(tmp_path, SAYS_READY, STAYS)
    await process.start()
    with pytest.raises(TimeoutError, match="agents-0 to end after its standard input"):
        await process.stop()
    assert process.crashed


async def test_a_process_that_has_ended_is_stopped_killed_and_ended_in_vain(tmp_path: Path) -> None:
    process = lane(tmp_path, SAYS_READY, STAYS)
    await process.end()  # it was never started
    await process.start()
    await process.kill()
    with process.stopped():
        pass
    await process.stop()
    await process.end()


@dataclass
class Part:
    """A process that starts when what it needs runs."""

    needs: "Part | None" = None
    runs: bool = False
    service: str = "part"

    @property
    def crashed(self) -> bool:
        return not self.runs

    @property
    def pid(self) -> int:
        raise ProcessLookupError

    async def start(self) -> None:
        if self.needs is not None and not self.needs.runs:
            raise RuntimeError("what it needs is away")
        self.runs = True

    async def kill(self) -> None:
        self.runs = False

    @contextmanager
    def stopped(self) -> Iterator[None]:
        yield


def a_run(parts: dict[str, Part], *events: Event) -> chaos.Chaos:
    mesh: Any = SimpleNamespace(lanes=parts, cut_off=[])
    return chaos.Chaos(mesh, list(events), random.Random(0), _began=time.monotonic())


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chaos, "_START_S", 0.5)
    monkeypatch.setattr(chaos, "_RESTART_S", 0.01)
    monkeypatch.setattr(chaos, "_LOOK_S", 0.01)


@pytest.mark.usefixtures("impatient")
async def test_what_ended_by_itself_is_started_although_another_one_waits_for_it() -> None:
    needed, other = Part(), Part(runs=True)
    needing = Part(needs=needed)
    parts = {"needing": needing, "needed": needed, "other": other}
    run = a_run(parts, Event(0.0, Kind.STOP, "other", 0.1))
    await run.run()
    assert (needing.runs, needed.runs) == (True, True)
    assert sorted(run.crashes) == ["needed", "needing"]


@pytest.mark.usefixtures("impatient")
async def test_a_process_that_does_not_start_again_ends_the_run_by_its_name() -> None:
    needing = Part(needs=Part(), runs=True)
    run = a_run({"needing": needing}, Event(0.0, Kind.KILL, "needing", 0.0))
    with pytest.RaisesGroup(
        pytest.RaisesGroup(pytest.RaisesExc(TimeoutError, match="for needing: what it needs"))
    ):
        await run.run()
