"""A mesh on a Ray cluster.

`Mesh` brings it up, finds it from any driver and scales it (docs/deploy/ray.md).
May import `launch`, `client` and `runtime`. Needs `rollmesh[mesh,ray]` on every node.
"""

from rollmesh.integrations.ray.mesh import (
    Mesh as Mesh,
    MeshError as MeshError,
    absolute_tables as absolute_tables,
    check_same as check_same,
)
from rollmesh.integrations.ray.placement import (
    Home as Home,
    Node as Node,
    RayConfig as RayConfig,
    further as further,
    pattern as pattern,
    places as places,
    same_kind as same_kind,
    spread as spread,
)
from rollmesh.integrations.ray.services import ServiceActor as ServiceActor, Status as Status
