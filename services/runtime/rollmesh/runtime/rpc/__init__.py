"""gRPC as every service uses it: channels, servers, and typed errors on both sides.

May import `codec`, `telemetry` and the modules of `runtime` itself.
"""

from rollmesh.runtime.doors import door

__getattr__, __dir__ = door(__name__)
