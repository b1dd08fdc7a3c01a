"""Which of several equal servers is used: plain state.

One is used until it is lost; then another one, which was never lost or was lost longest ago. Ties
are random, so that callers spread over the servers.
"""

import random
from collections.abc import Callable, Iterable


class Choice:
    """The servers that a caller knows, by address, and the one it uses."""

    def __init__(
        self, addresses: Iterable[str] = (), *, dice: Callable[[], float] = random.random
    ) -> None:
        """Starts with servers of which none was lost.

        Args:
            addresses: The servers.
            dice: Returns a uniform random number from 0 to 1.
        """
        self._known: tuple[str, ...] = ()
        self._lost_at: dict[str, int] = {}
        """By address: the number of losses before its last one, counted from 1."""
        self._losses = 0
        self._dice = dice
        self.current = ""
        """The server in use; empty if the next one is not chosen yet."""
        self.know(addresses)

    @property
    def known(self) -> tuple[str, ...]:
        """All servers."""
        return self._known

    def know(self, addresses: Iterable[str]) -> None:
        """Replaces the servers; the one in use stays in use until it is lost."""
        self._known = tuple(dict.fromkeys(addresses))
        self._lost_at = {one: at for one, at in self._lost_at.items() if one in self._known}

    def lose(self, address: str) -> None:
        """Notes that a server did not serve."""
        self._losses += 1
        if address in self._known:
            self._lost_at[address] = self._losses
        if self.current == address:
            self.current = ""

    def choose(self) -> str:
        """Returns the server to use; empty if there is none."""
        if not self.current and self._known:
            self.current = min(
                self._known, key=lambda one: (self._lost_at.get(one, 0), self._dice())
            )
        return self.current
