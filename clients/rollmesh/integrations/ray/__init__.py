"""A mesh on a Ray cluster.

`Mesh` brings it up, finds it from any driver and scales it (docs/deploy/ray.md).
May import `launch`, `client` and `runtime`. Needs `rollmesh[mesh,ray]` on every node.
"""

from rollmesh.integrations.ray.mesh import Mesh, MeshError
from rollmesh.integrations.ray.placement import RayConfig
from rollmesh.integrations.ray.services import Status

__all__ = ["Mesh", "MeshError", "RayConfig", "Status"]
