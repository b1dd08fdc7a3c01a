"""The creation settings of a session and the receipts of its answers; both are stored."""

from dataclasses import dataclass, field

from rollmesh.v1 import gateway_pb2


@dataclass(frozen=True, slots=True)
class SessionSpec:
    """The settings with which a session was created."""

    session_id: str
    opened_unix_ms: int
    model: str = ""
    """Name of the model that answers."""
    request_id: str = ""
    group_id: str = ""
    sample_index: int = 0
    group_size: int = 1
    sampling: str = "{}"
    """Default sampling parameters: the JSON form of `SamplingParams`."""
    metadata: dict[str, str] = field(default_factory=dict)
    finish_on_disconnect: bool = False
    export_mode: int = gateway_pb2.EXPORT_MODE_LEAVES
    """The form in which the tree is exported: an `ExportMode`."""


def answer_id_of(session_id: str, node_id: int) -> str:
    """Returns the id of the answer that a session's node holds."""
    return f"chatcmpl-{session_id}-{node_id}"


def node_of(answer_id: str, session_id: str) -> int:
    """Returns the node of a session that an answer id names; 0 if it names none."""
    node = answer_id.removeprefix(f"chatcmpl-{session_id}-")
    is_own = node != answer_id and node.isdecimal() and len(node) < 10
    return int(node) if is_own else 0


@dataclass(frozen=True, slots=True)
class AnswerReceipt:
    """What identifies an answered turn to a retry."""

    answer_id: str
    fingerprint: str
    idempotency_key: str
    created_unix_ms: int
    lineage: int | None = None
    """The lineage that the request gives the turn: a `Lineage`."""
    awaited: bool = True
    """Whether a request waited for the answer when it was committed."""
    tries: int = 0
    """The highest retry count of the requests for it until then."""
    stop: str = ""
    """The stop string that ended it; empty if none did."""
    is_withdrawn: bool = False
    """Whether the agent deleted it: it is no longer found by its id."""
