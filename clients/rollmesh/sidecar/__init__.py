"""The sidecar: OpenAI-compatible HTTP in front of the gateway."""
