"""What a request says outside its body: the session, the lineage, and whether it is a retry."""

from collections.abc import Mapping
from dataclasses import dataclass

from starlette.types import Scope

from rollmesh.sidecar.turns.lineages import said_lineage
from rollmesh.sidecar.turns.sessions import named_session
from rollmesh.v1 import gateway_pb2, trajectory_pb2


@dataclass(frozen=True, slots=True)
class Head:
    """The path and the headers of one request."""

    request_id: str
    """Its id in logs, in the gateway and in the answer."""
    session_id: str
    """Id of its session."""
    session_key: str
    """Key of its session."""
    headers: Mapping[bytes, str]
    """Headers by lower-case name."""
    lineage: trajectory_pb2.Lineage.ValueType
    """The lineage that the headers state; UNSPECIFIED if they state none."""

    def mark(self, chat: gateway_pb2.ChatRequest) -> None:
        """Sets the session, the lineage and the retry marks of a request.

        A lineage that the protocol has set stays unless the headers state one.
        """
        chat.session_id, chat.session_key = self.session_id, self.session_key
        chat.idempotency_key = self.headers.get(b"idempotency-key", "")
        if self.lineage:
            chat.lineage = self.lineage
        retries = self.headers.get(b"x-stainless-retry-count", "0")
        chat.retry_count = int(retries) if retries.isdecimal() and len(retries) < 9 else 0


def read_head(scope: Scope, request_id: str) -> Head:
    """Reads the path and the headers of a request.

    Args:
        scope: Its ASGI scope, with the headers and the session in the path.
        request_id: Its id.

    Raises:
        InvalidFieldError: A header has a value that is not known.
        SessionKeyWrongError: It carries no session key, or two different ones.
    """
    headers = {key.lower(): value.decode("latin-1") for key, value in scope["headers"]}
    session_id, session_key = named_session(scope["path_params"].get("session", ""), headers)
    return Head(request_id, session_id, session_key, headers, said_lineage(headers))
