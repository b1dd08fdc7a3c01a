"""The SDK for trainers and agent runners.

Read first: `sessions`, `deliveries`.

May import `mesh`, `runtime` and `v1`.
"""

from rollmesh.runtime.doors import door

__getattr__, __dir__ = door(__name__)
