"""gRPC options that both sides of a connection share."""

WINDOW_OPTIONS: list[tuple[str, int]] = [
    ("grpc.http2.lookahead_bytes", 1024 * 1024),
    ("grpc.http2.max_frame_size", 1024 * 1024),
]
"""For both sides: a long conversation is sent at once instead of in 64 KB windows."""
KEEPALIVE_MS = 20_000
"""Idle time after which the peer is pinged, milliseconds."""
SHORT_KEEPALIVE_MS = 6_000
"""The same for a peer that another one can replace. Servers accept a ping every 5 s."""


def keepalive_options(keepalive_ms: int) -> list[tuple[str, int]]:
    """Returns options that close a connection if a ping is not answered within half the time."""
    return [
        ("grpc.keepalive_time_ms", keepalive_ms),
        ("grpc.keepalive_timeout_ms", keepalive_ms // 2),
        ("grpc.http2.ping_timeout_ms", keepalive_ms // 2),  # the default in grpc 1.85 is a minute
    ]
