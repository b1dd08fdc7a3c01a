"""Garbage collection of a process of tests, which keeps its modules and tests until its end."""

import gc

import pytest

_THRESHOLD = 20_000  # a walk over all that is loaded takes a tenth of a second

gc.set_threshold(_THRESHOLD, *gc.get_threshold()[1:])


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Exempts what is loaded and collected."""
    gc.freeze()
