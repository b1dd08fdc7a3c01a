"""Anthropic's Messages: requests, answers and streams, independent of the HTTP server.

May import `sidecar.turns` and `sidecar.errors`; the other protocols are its peers.
"""
