"""What a session was created with, and how its answers are found again; both are stored."""

from dataclasses import dataclass, field

from rollmesh.v1 import gateway_pb2


@dataclass(frozen=True, slots=True)
class SessionSpec:
    """What a session was opened with."""

    session_id: str
    opened_unix_ms: int
    request_id: str = ""
    group_id: str = ""
    sample_index: int = 0
    group_size: int = 1
    sampling: str = "{}"
    """Default sampling parameters: the JSON form of `SamplingParams`."""
    metadata: dict[str, str] = field(default_factory=dict)
    finish_on_disconnect: bool = False
    export_mode: int = gateway_pb2.EXPORT_MODE_LEAVES
    """In which form the tree is exported: an `ExportMode`."""


@dataclass(frozen=True, slots=True)
class AnswerRecord:
    """How an answered turn is found again by a retry."""

    answer_id: str
    fingerprint: str
    idempotency_key: str
    created_unix_ms: int
    lineage: int | None = None
    """What the request says that the turn is: a `Lineage`."""
