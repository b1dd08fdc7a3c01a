"""How long to wait before the next try: twice as long after each failure, with jitter."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Backoff:
    """The delays between tries of one thing.

    Each delay is a random one between half of a ceiling and the ceiling, so that peers that failed
    together do not return together. The ceiling doubles from `first_s` up to `most_s`.
    """

    first_s: float
    """Longest delay after the first failure, seconds."""
    most_s: float
    """Longest delay after any number of failures, seconds."""
    dice: Callable[[], float] = field(default=random.random, kw_only=True)
    """Returns a uniform random number from 0 to 1."""
    _ceiling_s: float = 0.0  # 0 before the first failure

    def next_s(self) -> float:
        """Returns how long to wait after one more failure, seconds."""
        ceiling_s = self._ceiling_s or self.first_s
        self._ceiling_s = min(ceiling_s * 2, self.most_s)
        return ceiling_s * (0.5 + self.dice() / 2)

    def reset(self) -> None:
        """Forgets the failures: a try succeeded."""
        self._ceiling_s = 0.0
