"""The sidecar's own metrics."""

from collections.abc import Iterable

from prometheus_client import Counter, Histogram

HTTP_REQUESTS = Counter(
    "rollmesh_http_requests_total",
    "HTTP requests, by route and status; status 0 means the client left first.",
    ["route", "status"],
)
HTTP_SECONDS = Histogram(
    "rollmesh_http_seconds",
    "Time from the arrival of an HTTP request to the end of its reply.",
    ["route"],
    buckets=(0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 300, 600),
)
IGNORED_KEYS = Counter(
    "rollmesh_http_ignored_keys_total",
    "Chat requests that gave a value to a key that is not used, by key.",
    ["key"],
)

_NAMED_KEYS = frozenset(
    {
        "annotations",
        "audio",
        "cache_control",
        "client_metadata",
        "include",
        "logprobs",
        "metadata",
        "name",
        "parallel_tool_calls",
        "parsed",
        "prediction",
        "prompt_cache_key",
        "provider_specific_fields",
        "refusal",
        "response_format",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
        "verbosity",
    }
)


def count_ignored(keys: Iterable[str]) -> None:
    """Counts keys; those that are not well known share one label, so that labels stay few."""
    for key in keys:
        IGNORED_KEYS.labels(key if key in _NAMED_KEYS else "other").inc()
