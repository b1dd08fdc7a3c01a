"""OpenAI's chat completions: requests, answers and streams; knows nothing of HTTP servers.

May import `sidecar.errors`.
"""
