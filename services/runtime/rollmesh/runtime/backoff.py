"""How long to wait before the next try: twice as long after each failure, with jitter."""

import random
from collections.abc import Callable


class Backoff:
    """The delays between tries of one thing.

    Each delay is a random one between half of a ceiling and the ceiling, so that peers that failed
    together do not return together. The ceiling doubles from `first_s` up to `most_s`.
    """

    __slots__ = ("_ceiling_s", "_dice", "_first_s", "_most_s")

    def __init__(
        self, first_s: float, most_s: float, *, dice: Callable[[], float] = random.random
    ) -> None:
        """Starts with no failures.

        Args:
            first_s: Longest delay after the first failure, seconds.
            most_s: Longest delay after any number of failures, seconds.
            dice: Returns a uniform random number from 0 to 1.
        """
        self._first_s, self._most_s, self._dice = first_s, most_s, dice
        self._ceiling_s = first_s

    def next_s(self) -> float:
        """Returns how long to wait after one more failure, seconds."""
        delay_s = self._ceiling_s * (0.5 + self._dice() / 2)
        self._ceiling_s = min(self._ceiling_s * 2, self._most_s)
        return delay_s

    def reset(self) -> None:
        """Forgets the failures: a try succeeded."""
        self._ceiling_s = self._first_s
