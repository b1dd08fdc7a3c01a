"""Waiting for what no event tells: the state of another process, a file, a counter."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from inspect import isawaitable
from pathlib import Path
from typing import Any, TypeVar, overload

Found = TypeVar("Found")
_LIMIT_S = 300.0
_PAUSE_S = 0.02  # leaves the machine to what is waited for


@overload
async def until(look: Callable[[], Awaitable[Found]], limit_s: float = ...) -> Found: ...
@overload
async def until(look: Callable[[], Found], limit_s: float = ...) -> Found: ...
async def until(look: Callable[[], Any], limit_s: float = _LIMIT_S) -> Any:
    """Looks again and again, with a pause between. Returns the first result that is true.

    Raises:
        TimeoutError: No result was true in time.
    """
    async with asyncio.timeout(limit_s):
        while True:
            result = look()
            found = await result if isawaitable(result) else result
            if found:
                return found
            await asyncio.sleep(_PAUSE_S)


@asynccontextmanager
async def within(limit_s: float, what: Callable[[], str]) -> AsyncIterator[None]:
    """Ends the block after a time.

    Raises:
        TimeoutError: It took too long. The message has what it waited for, as it was then.
    """
    limit = asyncio.timeout(limit_s)
    try:
        async with limit:
            yield
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise TimeoutError(f"waited {limit_s:.0f} s for {what()}") from error


async def until_says(path: Path, text: str, times: int = 1) -> None:
    """Waits until a file, which need not exist yet, contains a text a number of times."""
    await until(lambda: path.exists() and path.read_text().count(text) >= times)
