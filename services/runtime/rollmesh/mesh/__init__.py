"""Clients of routers, gateways, collectors and engines, for everything that joins a mesh.

Read first: `failover`, `generation`, `engines`.

May import `runtime`. `routers` is how the routers are reached and joined. `directory` finds the
other members by asking them, `leases` holds leases of engines, and `failover` runs a `generation`.
"""

from rollmesh.runtime.doors import door

__getattr__, __dir__ = door(__name__)
