"""A mesh on a Ray cluster.

`Mesh` brings it up, finds it from any driver and scales it; docs/deploy/ray.md is its guide.
May import `launch`, `client` and `runtime`; needs `rollmesh[mesh,ray]` on every node.
"""

from rollmesh.integrations.ray.mesh import Mesh, MeshError
from rollmesh.integrations.ray.placement import Losses, RayConfig
from rollmesh.integrations.ray.services import Status

__all__ = ["Losses", "Mesh", "MeshError", "RayConfig", "Status"]
