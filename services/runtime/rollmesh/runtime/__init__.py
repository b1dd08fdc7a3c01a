"""What every rollmesh service shares: configuration, errors, gRPC, logs, metrics and storage.

May import `v1`.
"""
