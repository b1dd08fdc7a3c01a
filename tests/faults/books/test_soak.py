"""Two minutes of `make soak`: its books are in order, however busy the machine is."""

from pathlib import Path

import pytest

from benchmarks.kills.matrix import BOOKS
from benchmarks.soak.soak import run_soak


@pytest.mark.long
async def test_the_books_are_in_order_after_load_hostile_requests_and_kills(tmp_path: Path) -> None:
    found = await run_soak(tmp_path, 100)
    assert found["kills"] > 3
    assert found["answered"] > 50
    assert found["streams"] > 0
    wrong = (*BOOKS, "fds_leaked")
    assert {name: found[name] for name in wrong} == dict.fromkeys(wrong, 0)
