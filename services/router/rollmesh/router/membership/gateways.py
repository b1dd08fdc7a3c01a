"""Gateways, and one rule that places new sessions: plain state.

Invariant: `placed` is the number of sessions placed on a gateway since its last report.
"""

from collections.abc import Collection
from dataclasses import dataclass

from rollmesh.router.membership.members import Member
from rollmesh.runtime.errors import InvalidFieldError, NoGatewayError
from rollmesh.v1 import router_pb2

_RETRY_MS = 1000


@dataclass(slots=True, eq=False)
class RegisteredGateway:
    """One gateway."""

    member: Member
    """The member that it is."""
    placed: int = 0
    """Number of sessions placed on it that its last report does not count."""
    last_placed: int = 0
    """Sequence number of its last placement, so that ties rotate."""

    @property
    def hello(self) -> router_pb2.ReplicaHello:
        """Its identity and its last reported load."""
        return self.member.hello

    @property
    def live_sessions(self) -> int:
        """Number of its open sessions, with those that were placed since its last report."""
        return self.hello.load.live_sessions + self.placed

    def to_proto(self) -> router_pb2.Gateway:
        """Returns it as clients see it."""
        return router_pb2.Gateway(
            gateway_id=self.hello.replica_id,
            address=self.hello.address,
            model=self.hello.model,
            journal_id=self.hello.journal_id,
            live_sessions=self.live_sessions,
            draining=self.hello.load.draining,
            journals=self.hello.load.journals,
        )


class GatewayTable:
    """The gateways of a mesh; every method is one synchronous step."""

    def __init__(self) -> None:
        """Starts empty."""
        self._gateways: dict[str, RegisteredGateway] = {}
        self._placements = 0

    def add(self, member: Member) -> RegisteredGateway:
        """Adds a gateway; it replaces an earlier one with the same id."""
        gateway = self._gateways[member.hello.replica_id] = RegisteredGateway(member)
        return gateway

    def remove(self, gateway: RegisteredGateway) -> None:
        """Removes a gateway, unless another has replaced it."""
        if self._gateways.get(gateway.hello.replica_id) is gateway:
            del self._gateways[gateway.hello.replica_id]

    def reported(self, gateway: RegisteredGateway) -> None:
        """Counts from the latest report of a gateway, which is in its hello."""
        gateway.placed = 0

    def gateways(self) -> list[router_pb2.Gateway]:
        """Returns the gateways in the order of their ids."""
        return [self._gateways[id_].to_proto() for id_ in sorted(self._gateways)]

    def place(self, model: str, known: Collection[str] = ()) -> router_pb2.Gateway:
        """Places a new session on the gateway with the fewest; ties rotate.

        A gateway of which a report is missing gets one only if reports of all others are missing:
        its process may stand still, and if it is only slow, nothing is lost.

        Args:
            model: Name of the model; empty means the only one.
            known: Models of the mesh, also those without a gateway now.

        Raises:
            InvalidFieldError: The mesh does not have the model, or has several and none is named.
            NoGatewayError: No gateway of the model takes new sessions.
        """
        models = sorted({one.hello.model for one in self._gateways.values()})
        is_known = model in models or model in known
        if models and (not is_known if model else len(models) > 1):
            problem = f"{model!r} is not served" if model else "is empty"
            raise InvalidFieldError("model", f"{problem}; give one of {', '.join(models)}")
        taking = [
            one
            for one in self._gateways.values()
            if model in {"", one.hello.model} and not one.hello.load.draining
        ]
        if not taking:
            of_model = f" of model {model!r}" if model else ""
            raise NoGatewayError(
                f"none of {len(self._gateways)} gateways takes new sessions{of_model}; try again",
                retry_delay_ms=_RETRY_MS,
            )
        gateway = min(
            taking, key=lambda one: (one.member.is_late, one.live_sessions, one.last_placed)
        )
        self._placements += 1
        gateway.placed += 1
        gateway.last_placed = self._placements
        return gateway.to_proto()
