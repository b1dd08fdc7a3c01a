"""The sidecar: OpenAI-compatible HTTP in front of the gateway.

May import `runtime` and `v1`.
"""
