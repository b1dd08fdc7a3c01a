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
