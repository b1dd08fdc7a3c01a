"""System prompts: the `system` parameter, and system messages within a conversation."""

import re
from collections.abc import Mapping
from typing import Any

from rollmesh.sidecar.anthropic_messages.blocks import (
    Reader,
    is_billing_header,
    read_parts,
    read_text,
)
from rollmesh.sidecar.anthropic_messages.parameters import COUNTED
from rollmesh.sidecar.fields.ignored import count_ignored
from rollmesh.sidecar.turns.images import joined
from rollmesh.v1 import chat_pb2

_NONE: Mapping[str, Reader] = {}
_SUB_AGENT = re.compile(r"\bcc_is_subagent=(?!false|0|;|$)\w")


def read_system(
    content: Any, field: str, readers: Mapping[str, Reader] = _NONE
) -> list[chat_pb2.ChatMessage]:
    """Returns a system prompt as a message; nothing if it is empty.

    Args:
        content: A string, or a list of text blocks; None is none.
        field: Its name.
        readers: What reads blocks that are no text, by their type.

    Raises:
        InvalidFieldError: Names the block and what is wrong with it.
    """
    parts = read_parts(content, field, {"text": read_text, **readers})
    kept = [part for part in parts if not is_billing_header(part.text)]
    if len(kept) < len(parts):
        count_ignored({"x-anthropic-billing-header": True}, (), COUNTED)
    return [chat_pb2.ChatMessage(role=chat_pb2.ROLE_SYSTEM, content=joined(kept))] if kept else []


def says_sub_agent(content: Any) -> bool:
    """Returns whether Claude Code's note in a system prompt says that a sub-agent asks."""
    blocks = content if isinstance(content, list) else [{"text": content}]
    texts = [block.get("text") for block in blocks if isinstance(block, dict)]
    return any(
        isinstance(text, str) and is_billing_header(text) and _SUB_AGENT.search(text) is not None
        for text in texts
    )
