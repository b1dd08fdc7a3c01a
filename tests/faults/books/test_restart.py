"""A trainer that is killed and restored makes the steps of an undisturbed one."""

from pathlib import Path

import pytest

from benchmarks.restart.restart import run_restarts


@pytest.mark.long
async def test_steps_after_kills_equal_the_steps_of_an_undisturbed_trainer(tmp_path: Path) -> None:
    found = await run_restarts(tmp_path / "worlds", kills=4, seed=3, engine="scripted")
    assert found["steps_equal"] == found["steps_total"] > 3
    assert (found["lost"], found["doubled"], found["steps_not_in_books"]) == (0, 0, 0)
    assert found["restores"]  # `make bench-restart` does it 100 times
