"""What agents say of themselves in headers: which of their requests are work, and which are not.

`x-rollmesh-lineage` names it. Else the marks of agents that have some are read: Claude Code sends
`x-claude-code-agent-id` for its sub-agents, Codex `x-openai-subagent`, and the kind of the request
in `x-codex-turn-metadata`. An unknown mark says nothing.
"""

from collections.abc import Mapping

import orjson

from rollmesh.runtime.errors import InvalidFieldError
from rollmesh.v1 import types_pb2

HEADER = "x-rollmesh-lineage"
_NAMED = {
    "main": types_pb2.LINEAGE_MAIN,
    "sub_agent": types_pb2.LINEAGE_SUB_AGENT,
    "compaction": types_pb2.LINEAGE_COMPACTION,
    "auxiliary": types_pb2.LINEAGE_AUXILIARY,
}
_MOST_METADATA_BYTES = 16 * 1024


def said_lineage(headers: Mapping[bytes, str]) -> types_pb2.Lineage.ValueType:
    """Returns what the headers say that a request is; UNSPECIFIED where they say nothing.

    Args:
        headers: By name in lower case.

    Raises:
        InvalidFieldError: `x-rollmesh-lineage` names none.
    """
    named = headers.get(HEADER.encode(), "").strip().lower()
    if named:
        if named not in _NAMED:
            raise InvalidFieldError(HEADER, f"is {named!r:.64}; give one of {', '.join(_NAMED)}")
        return _NAMED[named]
    if _codex_kind(headers.get(b"x-codex-turn-metadata", "")) == "compaction":
        return types_pb2.LINEAGE_COMPACTION
    if headers.get(b"x-claude-code-agent-id") or headers.get(b"x-openai-subagent"):
        return types_pb2.LINEAGE_SUB_AGENT
    return types_pb2.LINEAGE_UNSPECIFIED


def _codex_kind(metadata: str) -> object:
    if not metadata or len(metadata) > _MOST_METADATA_BYTES:
        return None
    try:
        value = orjson.loads(metadata)
    except orjson.JSONDecodeError:
        return None
    return value.get("request_kind") if isinstance(value, dict) else None
