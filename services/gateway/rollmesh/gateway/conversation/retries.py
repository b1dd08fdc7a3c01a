"""Decides which sample a request asks for: an existing one if it is a retry, else a new one.

Equal requests are siblings, whether sequential or concurrent: best-of-n agents send such requests.
An idempotency key names one sample, however often it is requested. Without a key, the turns of
equal requests are candidates in this order:

| turn | a request marked as a retry | any other request |
|---|---|---|
| no request waits for it, and its answer was never sent completely | joins newest | joins newest |
| a request waits for it | joins oldest | begins its own turn |
| its answer was sent completely | joins newest | begins its own turn |

So no answer goes to two requests unless one of them is a retry. Within the first row, and within
the other two rows together, a retry joins the turn whose number of tries fits its retry count best;
the order of the table breaks ties. When several siblings time out and all are retried, each retry
gets its own turn, and the same one on each further try.

After a restart no request waits. An answer counts as sent completely if the journal says so or the
agent continued from it. The journal may lack the answers of the last moments before a kill; equal
requests get these again, as they get those that were lost with the process.
"""

from collections.abc import Sequence
from typing import Protocol, TypeVar


class Asked(Protocol):
    """One requested sample."""

    waiting: int
    """Number of requests that currently wait for its answer."""
    sent: bool
    """Whether its complete answer was sent to any request."""
    tries: int
    """The highest retry count of the requests for it."""


_Asked = TypeVar("_Asked", bound=Asked)


def retried(turns: Sequence[_Asked], retry_count: int) -> _Asked | None:
    """Returns the turn that a request without a key joins; None if it begins a new one.

    Args:
        turns: The turns of equal requests, in flight or answered, oldest first.
        retry_count: Number of previous tries, as the request gives it.
    """
    lost = [turn for turn in turns if not turn.waiting and not turn.sent]
    if lost or not retry_count:
        return _nearest(lost[::-1], retry_count)
    awaited = [turn for turn in turns if turn.waiting]
    gone = [turn for turn in turns if not turn.waiting]
    return _nearest(awaited + gone[::-1], retry_count)


def _nearest(turns: Sequence[_Asked], retry_count: int) -> _Asked | None:
    """Returns the first turn whose number of tries is closest to the request's."""
    return min(turns, key=lambda turn: abs(turn.tries + 1 - retry_count), default=None)
