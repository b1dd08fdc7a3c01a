from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.collector.collectors import stub_at


@pytest.fixture
async def stub(tmp_path: Path) -> AsyncIterator[Any]:
    """Of a collector in this process, on a real port, over a real store."""
    async with stub_at(tmp_path) as stub:
        yield stub
