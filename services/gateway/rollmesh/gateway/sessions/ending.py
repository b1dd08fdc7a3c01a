"""Ends turns before they are committed: their clients disconnect, or their session closes."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rollmesh.gateway.conversation.session import Session, Turn
from rollmesh.runtime.errors import GenerationAbortedError, RollmeshError


@asynccontextmanager
async def subscribed(session: Session, turn: Turn) -> AsyncIterator[None]:
    """Counts a waiting request; the last one to leave cancels a turn that need not finish."""
    turn.waiting += 1
    turn.joins += 1
    try:
        yield
    finally:
        turn.waiting -= 1
        abandoned = not (turn.waiting or turn.ended or turn.committing)
        if abandoned and not turn.finish_on_disconnect:
            session.forget(turn)
            turn.cancel(cancelled())


async def end_turns(session: Session, error: RollmeshError) -> None:
    """Ends the turns that are being sampled with an error; waits for those being committed."""
    committing: list[asyncio.Task[None]] = []
    for turn in session.in_flight:
        if not turn.committing:
            turn.cancel(error)
        elif turn.task is not None:
            committing.append(turn.task)
    if committing:
        await asyncio.wait(committing)


def cancelled() -> GenerationAbortedError:
    """Returns the error of a turn that no request waits for any more."""
    return GenerationAbortedError("the turn was cancelled; nothing was committed")
