"""Which sample a request asks for: a retry is not a sample, and a sample is not a retry.

Equal requests are siblings, one after another and at the same time: best-of-n agents ask like that.
An idempotency key names one sample, however often it is asked for. Without a key, the turns of the
same request are candidates in this order:

| turn | a request that says it is a retry | any other request |
|---|---|---|
| nobody waits for it and its answer never left whole | joins: the newest | joins: the newest |
| somebody waits for it | joins: the oldest | begins a turn of its own |
| its answer left whole | joins: the newest | begins a turn of its own |

So no answer goes to two requests of which none is a retry. In the first row, and among those of the
other two, a retry joins the turn that was tried as often as it says that it was, before the order
of the table counts: when several siblings time out and all of them come again, each gets a turn of
its own, and the same one with each further try.

After a restart nobody waits, and an answer is known to have left whole only where the agent went on
from it: the request may be the retry of an answer that was lost with the process.
"""

from collections.abc import Sequence
from typing import Protocol, TypeVar


class Asked(Protocol):
    """One sample that was asked for."""

    waiting: int
    """Number of requests that wait for its answer now."""
    left: bool
    """Whether its answer left whole, to any of them."""
    tries: int
    """The highest retry count with which it was asked for."""


_Asked = TypeVar("_Asked", bound=Asked)


def retried(turns: Sequence[_Asked], retry_count: int) -> _Asked | None:
    """Returns the turn that a request without a key joins; None where it begins one.

    Args:
        turns: Those of equal requests, in flight or answered, oldest first.
        retry_count: How often the request says it was tried before.
    """
    lost = [turn for turn in turns if not turn.waiting and not turn.left]
    if lost or not retry_count:
        return _nearest(lost[::-1], retry_count)
    awaited = [turn for turn in turns if turn.waiting]
    gone = [turn for turn in turns if not turn.waiting]
    return _nearest(awaited + gone[::-1], retry_count)


def _nearest(turns: Sequence[_Asked], retry_count: int) -> _Asked | None:
    """Returns the first of those that were tried about as often as the request was."""
    return min(turns, key=lambda turn: abs(turn.tries + 1 - retry_count), default=None)
