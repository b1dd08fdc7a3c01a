"""The end of a router: the streams of its members end with the last call that needs them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rollmesh.runtime.errors import ShuttingDownError

_RETRY_MS = 500


class Leaving:
    """Counts the calls that need members, and says when the last one has ended after a stop."""

    def __init__(self) -> None:
        """Starts with no calls and no stop."""
        self.on_over: list[Callable[[], None]] = []
        """Called once a stop was asked for and no call needs the members."""
        self.is_over = False
        """Whether that has happened."""
        self._asked = False
        self._calls = 0

    @contextmanager
    def needed(self) -> Iterator[None]:
        """Keeps the streams of members open during the block."""
        self._calls += 1
        try:
            yield
        finally:
            self._calls -= 1
            self._look()

    def ask(self) -> None:
        """Asks for a stop."""
        self._asked = True
        self._look()

    def error(self) -> ShuttingDownError:
        """Returns what ends the stream of a member."""
        return ShuttingDownError(
            "the router is stopping; go on with another, or come back", retry_delay_ms=_RETRY_MS
        )

    def _look(self) -> None:
        if self._asked and not self._calls and not self.is_over:
            self.is_over = True
            for tell in self.on_over:
                tell()
