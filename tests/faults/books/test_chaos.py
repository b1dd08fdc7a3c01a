"""Anything fails at any time: the events follow from the seed, and the books are in order."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.chaos.events import Event, Kind, plan_events
from benchmarks.kills.matrix import BOOKS
from tests.paths import ROOT
from tests.processes import run_to_end

_TARGETS: dict[Kind, list[str]] = {kind: [f"{kind}-{at}" for at in range(3)] for kind in Kind}
_WRONG = (*BOOKS, "agent_errors_unexplained", "wrong_versions", "wrong_scores", "crashes")


def events(seed: int, seconds: float = 100) -> list[Event]:
    return plan_events(seed, seconds, _TARGETS)


def test_the_same_seed_gives_the_same_events_and_another_one_others() -> None:
    assert events(7) == events(7)
    assert events(7) != events(8)


def test_the_events_of_a_run_are_the_first_of_a_longer_one() -> None:
    short, long = events(7, 50), events(7, 100)
    assert [one for one in long if one.at_s + one.seconds < 50] == short


def test_events_come_in_their_order_and_are_over_before_the_run_is() -> None:
    found = events(7)
    assert found == sorted(found, key=lambda event: event.at_s)
    assert all(event.at_s + event.seconds < 100 for event in found)


def test_a_short_run_has_some_of_every_kind_and_hits_every_target() -> None:
    found = events(7)
    assert {event.kind for event in found} == set(Kind)
    assert {event.target for event in found if event.kind == Kind.KILL} == set(_TARGETS[Kind.KILL])


def test_a_kind_without_targets_does_not_happen() -> None:
    found = plan_events(7, 100, {**_TARGETS, Kind.FILL: []})
    assert {event.kind for event in found} == {kind for kind in Kind if kind != Kind.FILL}


async def chaos(folder: Path, seconds: int, seed: int, *flags: str) -> dict[str, Any]:
    """Runs it as `make chaos` does. Its last line of output."""
    arguments = ("-m", "benchmarks.chaos", f"--seconds={seconds}", f"--seed={seed}")
    command = (sys.executable, *arguments, f"--keep={folder}", *flags)
    output, _ = await run_to_end(*command, cwd=ROOT, env=None, limit_s=600)
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    return found


@pytest.mark.long
async def test_a_few_failures_of_every_kind_lose_and_double_nothing(tmp_path: Path) -> None:
    found = await chaos(tmp_path, 15, seed=5)
    assert found["kills"] > 0
    assert found["stops"] > 0
    assert found["cuts"] > 0
    assert found["answered"] > 0
    assert found["scored"] > 0
    assert {name: found[name] for name in _WRONG} == dict.fromkeys(_WRONG, 0)


@pytest.mark.long
async def test_a_few_failures_lose_and_double_nothing_over_tls_with_tokens(tmp_path: Path) -> None:
    found = await chaos(tmp_path, 15, 8, "--locked")
    assert found["kills"] > 0
    assert found["cuts"] > 0
    assert found["answered"] > 0
    assert found["scored"] > 0
    assert {name: found[name] for name in _WRONG} == dict.fromkeys(_WRONG, 0)


@pytest.mark.long
async def test_two_minutes_of_failures_lose_and_double_nothing(tmp_path: Path) -> None:
    found = await chaos(tmp_path, 120, seed=6)
    assert found["kills"] > 10
    assert found["answered"] == found["delivered"] > 100
    assert found["versions"] > 5
    assert found["adapter_versions"] > 2
    assert found["scored"] > 100
    assert {name: found[name] for name in _WRONG} == dict.fromkeys(_WRONG, 0)
