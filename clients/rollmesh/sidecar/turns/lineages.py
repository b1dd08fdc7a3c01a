"""The lineage of a request, as its headers state it.

`x-rollmesh-lineage` names the lineage. Otherwise the headers of known agents are read: Claude Code
sends `x-claude-code-agent-id` for its sub-agents; Codex sends `x-openai-subagent`, and the kind of
the request in `x-codex-turn-metadata`. Other headers are ignored.
"""

from collections.abc import Mapping

import orjson

from rollmesh.runtime.errors import InvalidFieldError
from rollmesh.v1 import trajectory_pb2

HEADER = "x-rollmesh-lineage"
_NAMED = {
    "main": trajectory_pb2.LINEAGE_MAIN,
    "sub_agent": trajectory_pb2.LINEAGE_SUB_AGENT,
    "compaction": trajectory_pb2.LINEAGE_COMPACTION,
    "auxiliary": trajectory_pb2.LINEAGE_AUXILIARY,
}
_MOST_METADATA_BYTES = 16 * 1024


def said_lineage(headers: Mapping[bytes, str]) -> trajectory_pb2.Lineage.ValueType:
    """Returns the lineage that the headers state; UNSPECIFIED if they state none.

    Args:
        headers: Headers by lower-case name.

    Raises:
        InvalidFieldError: `x-rollmesh-lineage` names an unknown lineage.
    """
    named = headers.get(HEADER.encode(), "").strip().lower()
    if named:
        if named not in _NAMED:
            raise InvalidFieldError(HEADER, f"is {named!r:.64}; give one of {', '.join(_NAMED)}")
        return _NAMED[named]
    if _codex_kind(headers.get(b"x-codex-turn-metadata", "")) == "compaction":
        return trajectory_pb2.LINEAGE_COMPACTION
    if headers.get(b"x-claude-code-agent-id") or headers.get(b"x-openai-subagent"):
        return trajectory_pb2.LINEAGE_SUB_AGENT
    return trajectory_pb2.LINEAGE_UNSPECIFIED


def _codex_kind(metadata: str) -> object:
    if not metadata or len(metadata) > _MOST_METADATA_BYTES:
        return None
    try:
        value = orjson.loads(metadata)
    except orjson.JSONDecodeError:
        return None
    return value.get("request_kind") if isinstance(value, dict) else None
