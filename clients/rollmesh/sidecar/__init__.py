"""The sidecar: OpenAI-compatible HTTP in front of the gateway.

May import `mesh`, `runtime` and `v1`.
"""
