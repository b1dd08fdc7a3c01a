"""OpenAI's chat completions: requests, answers and streams, independent of the HTTP server.

May import `sidecar.errors`.
"""
