"""What every rollmesh service shares: configuration, errors, gRPC, logs, metrics and storage.

May import `v1`.
"""

import os

# gRPC's core writes a line for each TLS handshake that fails: a stranger could fill a disk with its
# log. It reads this once, as it is imported, so services import this package first.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # noqa: TID251 - grpc reads it there

from rollmesh.runtime.doors import door

__getattr__, __dir__ = door(__name__)
