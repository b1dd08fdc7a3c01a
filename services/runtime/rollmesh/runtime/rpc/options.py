"""gRPC options that both ends of a connection share."""

WINDOW_OPTIONS: list[tuple[str, int]] = [
    ("grpc.http2.lookahead_bytes", 1024 * 1024),
    ("grpc.http2.max_frame_size", 1024 * 1024),
]
"""For both ends: a long conversation is sent at once, not in windows of 64 KB."""
KEEPALIVE_MS = 20_000
"""Silence after which the other end is pinged, milliseconds."""


def keepalive_options(keepalive_ms: int) -> list[tuple[str, int]]:
    """Returns options that end a connection to a dead host, which has half the time to answer."""
    return [
        ("grpc.keepalive_time_ms", keepalive_ms),
        ("grpc.keepalive_timeout_ms", keepalive_ms // 2),
        ("grpc.http2.ping_timeout_ms", keepalive_ms // 2),  # else it has a minute, in grpc 1.85
    ]
