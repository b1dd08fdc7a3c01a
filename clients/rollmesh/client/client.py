"""The asynchronous client of one mesh."""

from rollmesh.client.deliveries.calls import DeliveryCalls
from rollmesh.client.servers import ServerCalls
from rollmesh.client.sessions.calls import SessionCalls
from rollmesh.client.weights.calls import WeightCalls


class Client(SessionCalls, DeliveryCalls, WeightCalls, ServerCalls):
    """One mesh: its sessions, deliveries and weights; use it as a context."""
