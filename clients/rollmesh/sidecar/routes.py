"""The one table of the sidecar's routes: what opens each of them."""

from collections.abc import Iterator, Mapping
from enum import StrEnum


class Opens(StrEnum):
    """What a request needs to be answered."""

    NOTHING = "nothing"
    SESSION_KEY = "the session's key"


TABLE: Mapping[str, Opens] = {
    "POST /v1/chat/completions": Opens.SESSION_KEY,
    "POST /v1/messages": Opens.SESSION_KEY,
    "POST /v1/messages/count_tokens": Opens.SESSION_KEY,
    "POST /v1/responses": Opens.SESSION_KEY,
    "POST /v1/responses/input_tokens": Opens.SESSION_KEY,
    "GET /v1/responses/{response}": Opens.SESSION_KEY,
    "DELETE /v1/responses/{response}": Opens.SESSION_KEY,
    "GET /v1/models": Opens.NOTHING,
    "GET /v1/models/{model:path}": Opens.NOTHING,
    "GET /healthz": Opens.NOTHING,
}
"""What opens a route, by its method and path. `HEAD` counts as `GET`."""
IN_SESSION = "/sessions/{session}"
"""May precede each path; it has the session's id or key."""


def prefixes(path_prefix: str) -> Iterator[str]:
    """Yields what may precede each path; a proxy may strip its own prefix or keep it.

    Args:
        path_prefix: The proxy's prefix; empty without one.
    """
    for root in dict.fromkeys(("", path_prefix)):
        yield root
        yield f"{root}{IN_SESSION}"
