"""The circuit of an engine: whether turns reach it, as gateways see it.

The router itself hears from an engine over its `Register` stream. A gateway may still be unable to
reach it, or may lose every generation on it.
"""

from dataclasses import dataclass
from typing import NamedTuple

from rollmesh.internal.v1 import leases_pb2
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


@dataclass(slots=True)
class Circuit:
    """Opens after turns lost in a row, and closes when a probe is answered.

    Backpressure, cancelled turns and client errors change nothing. Each opening begins an epoch.
    The outcome of a lease counts only in the epoch in which the lease was granted, so 200
    generations that die together open the circuit once.
    """

    state: router_pb2.CircuitState.ValueType = router_pb2.CIRCUIT_STATE_CLOSED
    until_ms: int = 0
    """Time at which an open circuit half-opens, on the monotonic clock."""
    epoch: int = 0
    """Number of times that it opened."""
    admits: bool = True
    """Whether a lease may be granted now. A half-open circuit admits one at a time, a probe."""
    _losses: int = 0
    _openings: int = 0  # since it was last closed

    def grant(self) -> int:
        """Records a granted lease and returns the epoch to give to `end`."""
        self.admits = self.state == router_pb2.CIRCUIT_STATE_CLOSED
        return self.epoch

    def end(
        self,
        epoch: int,
        outcome: leases_pb2.LeaseOutcome.ValueType,
        now_ms: int,
        limits: CircuitLimits,
    ) -> bool:
        """Records the outcome of a lease. Returns whether the state changed."""
        if epoch != self.epoch:
            return False
        before = self.state
        if before == router_pb2.CIRCUIT_STATE_HALF_OPEN:
            self.admits = True
        if outcome == leases_pb2.LEASE_OUTCOME_LOST:
            self._losses += 1
            if before == router_pb2.CIRCUIT_STATE_HALF_OPEN or self._losses >= limits.losses:
                doublings = min(self._openings, _MOST_DOUBLINGS)
                self.until_ms = now_ms + min(limits.first_ms << doublings, limits.longest_ms)
                self.state, self.admits = router_pb2.CIRCUIT_STATE_OPEN, False
                self.epoch += 1
                self._openings += 1
                self._losses = 0
        elif outcome == leases_pb2.LEASE_OUTCOME_ANSWERED:
            self._losses = self._openings = 0
            self.state, self.admits = router_pb2.CIRCUIT_STATE_CLOSED, True
        return self.state != before

    def half_open(self) -> None:
        """Admits a probe. Call it at `until_ms`."""
        self.state, self.admits = router_pb2.CIRCUIT_STATE_HALF_OPEN, True
