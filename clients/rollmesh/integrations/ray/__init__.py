"""A mesh on a Ray cluster.

`Mesh` brings it up, finds it from any driver and scales it (docs/deploy/ray.md).
May import `launch`, `client` and `runtime`. Needs `rollmesh[mesh,ray]` on every node.
"""

from rollmesh.integrations.ray.mesh import Mesh, MeshError, absolute_tables, check_same
from rollmesh.integrations.ray.placement import (
    Home,
    Node,
    RayConfig,
    further,
    pattern,
    places,
    same_kind,
    spread,
)
from rollmesh.integrations.ray.services import Status

__all__ = [
    "Home",
    "Mesh",
    "MeshError",
    "Node",
    "RayConfig",
    "Status",
    "absolute_tables",
    "check_same",
    "further",
    "pattern",
    "places",
    "same_kind",
    "spread",
]
