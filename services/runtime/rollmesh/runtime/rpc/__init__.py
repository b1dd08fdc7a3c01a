"""gRPC as every service uses it: channels, servers, and typed errors at both ends.

May import `codec`, `telemetry` and the modules of `runtime` itself.
"""
