"""OpenAI's Responses: requests, answers and streams, independent of the HTTP server.

May import `sidecar.turns` and `sidecar.errors`; `openai_chat` is its peer.
"""
