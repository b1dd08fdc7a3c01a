"""Conversations of sessions that recorded their messages."""

import json
from typing import Any, NamedTuple

from rollmesh.v1 import session_pb2


class Conversation(NamedTuple):
    """The messages of a path of a session's tree, oldest first."""

    messages: list[dict[str, Any]]
    """Messages in OpenAI's form: see `NodeMessages`."""
    node_ids: list[int]
    """The node of each message."""
    tools: list[dict[str, Any]]
    template_options: dict[str, Any]


def arguments_of(text: Any) -> dict[str, Any] | None:
    """Returns the arguments of a call, if they are an object that every reader of JSON takes.

    None for other texts of models: no JSON, NaN, half an emoji, or a deep nest.
    """
    try:
        value = json.loads(text) if isinstance(text, str) else text
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def conversation_of(record: session_pb2.SessionRecord, leaf_node_id: int) -> Conversation | None:
    """Returns the conversation that ends at a node. None if the record lacks messages of it.

    Args:
        record: A session, with the data of its messages.
        leaf_node_id: Id of the node.
    """
    nodes, path, node_id = {one.node_id: one for one in record.messages}, [], leaf_node_id
    while node_id:
        if node_id not in nodes:
            return None
        path.append(nodes[node_id])
        node_id = nodes[node_id].parent_node_id
    context: dict[str, Any] = {}
    if path and path[0].HasField("context_index"):
        context = json.loads(record.contexts[path[0].context_index].data)
    found = [(one.node_id, message) for one in reversed(path) for message in json.loads(one.data)]
    return Conversation(
        [message for _, message in found],
        [node_id for node_id, _ in found],
        context.get("tools", []),
        context.get("chat_template_kwargs", {}),
    )
