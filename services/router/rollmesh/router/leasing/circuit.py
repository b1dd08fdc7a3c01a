"""The circuit of an engine: whether turns reach it, as gateways see it.

The router itself hears from an engine over its `Register` stream. A gateway may still be unable to
reach it, or may lose every generation on it; the circuit counts that.
"""

import enum
from typing import NamedTuple

from rollmesh.v1 import router_pb2

_MOST_DOUBLINGS = 30


class CircuitLimits(NamedTuple):
    """When a circuit opens, and for how long."""

    losses: int = 3
    """Turns lost in a row that open it."""
    first_ms: int = 1_000
    """Time for which it stays open, milliseconds. Doubles each time a probe is lost ..."""
    longest_ms: int = 60_000
    """... up to this."""


class CircuitState(enum.Enum):
    """Which leases an engine may get."""

    CLOSED = "closed"
    """As many as it has slots for."""
    OPEN = "open"
    """None."""
    HALF_OPEN = "half-open"
    """One at a time: a probe."""


class Circuit:
    """Opens after turns lost in a row, and closes when a probe is answered.

    Backpressure, cancelled turns and errors of clients say nothing about an engine and change
    nothing. Each opening begins an epoch. The outcome of a lease counts only in the epoch in which
    the lease was granted, so 200 generations that die together open the circuit once.
    """

    __slots__ = ("_epoch", "_losses", "_openings", "_probing", "state", "until_ms")

    def __init__(self) -> None:
        """Starts closed."""
        self.state = CircuitState.CLOSED
        self.until_ms = 0
        """Time at which an open circuit half-opens, on the monotonic clock."""
        self._epoch = 0
        self._losses = 0
        self._openings = 0  # since it was last closed
        self._probing = False

    @property
    def admits(self) -> bool:
        """Whether a lease may be granted now."""
        if self.state is CircuitState.HALF_OPEN:
            return not self._probing
        return self.state is CircuitState.CLOSED

    @property
    def epoch(self) -> int:
        """The epoch, for leases that another router granted."""
        return self._epoch

    def grant(self) -> int:
        """Notes that a lease is granted; returns the epoch to give to `end`."""
        self._probing = self.state is CircuitState.HALF_OPEN
        return self._epoch

    def end(
        self,
        epoch: int,
        outcome: router_pb2.LeaseOutcome.ValueType,
        now_ms: int,
        limits: CircuitLimits,
    ) -> bool:
        """Takes the outcome of a lease; returns whether the state changed.

        Args:
            epoch: What `grant` returned.
            outcome: What the turn says about the engine.
            now_ms: The time, monotonic milliseconds.
            limits: When to open, and for how long.
        """
        if epoch != self._epoch:
            return False
        self._probing = False
        before = self.state
        if outcome == router_pb2.LEASE_OUTCOME_LOST:
            self._losses += 1
            if before is CircuitState.HALF_OPEN or self._losses >= limits.losses:
                self._open(now_ms, limits)
        elif outcome == router_pb2.LEASE_OUTCOME_ANSWERED:
            self._losses = self._openings = 0
            self.state = CircuitState.CLOSED
        return self.state is not before

    def half_open(self) -> None:
        """Admits a probe; call it at `until_ms`."""
        self.state = CircuitState.HALF_OPEN

    def _open(self, now_ms: int, limits: CircuitLimits) -> None:
        doublings = min(self._openings, _MOST_DOUBLINGS)
        self.until_ms = now_ms + min(limits.first_ms << doublings, limits.longest_ms)
        self.state = CircuitState.OPEN
        self._epoch += 1
        self._openings += 1
        self._losses = 0
