"""The sidecar: OpenAI-compatible HTTP in front of the gateway.

May import `mesh`, `runtime` and `v1`.
"""

import rollmesh.runtime  # noqa: F401 - before gRPC
