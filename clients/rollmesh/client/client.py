"""The asynchronous client of one mesh."""

from rollmesh.client.deliveries.calls import DeliveryCalls
from rollmesh.client.engines import EngineCalls
from rollmesh.client.servers import ServerCalls
from rollmesh.client.sessions.calls import SessionCalls
from rollmesh.client.weights.calls import WeightCalls


class Client(SessionCalls, DeliveryCalls, WeightCalls, EngineCalls, ServerCalls):
    """One mesh: its sessions, deliveries, weights and engines; use it as a context."""
