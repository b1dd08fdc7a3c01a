"""Progress of a run of many minutes, on stderr."""

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

_EVERY_S = 15.0


@asynccontextmanager
async def telling(line: Callable[[], str]) -> AsyncIterator[None]:
    """Prints a line periodically until the block ends."""

    async def tell() -> None:
        while True:
            await asyncio.sleep(_EVERY_S)
            print(line(), file=sys.stderr, flush=True)

    task = asyncio.ensure_future(tell())
    try:
        yield
    finally:
        task.cancel()
