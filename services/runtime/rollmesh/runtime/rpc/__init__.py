"""gRPC as every service uses it: channels, servers, and typed errors on both sides.

May import `codec`, `telemetry` and the modules of `runtime` itself.
"""
