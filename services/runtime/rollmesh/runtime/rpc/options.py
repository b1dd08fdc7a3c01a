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


SERVER_BOUNDS: list[tuple[str, int]] = [
    # A gateway has a stream to an engine for each lease, a sidecar one to a gateway for each turn:
    # a client with more waits for a free one. Streams beyond it are refused as they arrive.
    ("grpc.max_concurrent_streams", 2_048),
    # Calls that wait for the event loop, of all connections together. Beyond 1,000 gRPC would
    # cancel calls at random, those of others too.
    ("grpc.server.max_pending_requests", 16_384),
    ("grpc.server.max_pending_requests_hard_limit", 32_768),
    # Of headers and trailers. gRPC's own default, stated because errors are cut to fit into it.
    ("grpc.max_metadata_size", 8 * 1024),
    ("grpc.absolute_max_metadata_size", 16 * 1024),
    # Clients ping every 6 s at most; one that pings more often is told so, then disconnected.
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 2),
    # The times of ServerConfig bound the rest. There is no greatest age of a connection: leases,
    # registrations and deliveries are streams that last for days.
]
"""What bounds one peer, so that calls of others go on; milliseconds, bytes and counts."""
