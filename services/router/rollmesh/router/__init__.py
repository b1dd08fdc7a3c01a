"""The router: membership, least-active sticky leases, control fan-out.

May import `runtime` and `v1`.
"""

import rollmesh.runtime  # noqa: F401 - before gRPC
