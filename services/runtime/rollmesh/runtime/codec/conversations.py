"""Conversations of sessions that recorded their messages."""

import json
from math import isfinite
from typing import Any, NamedTuple

from rollmesh.runtime.errors import InvalidFieldError
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


def messages_in(node: session_pb2.NodeMessages) -> list[dict[str, Any]]:
    """Returns the messages of a node. None are recorded where its data is empty.

    Raises:
        InvalidFieldError: They are no JSON array of objects.
    """
    found = _json(node.data or b"[]", f"messages: of node {node.node_id}")
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise InvalidFieldError("messages", f"of node {node.node_id} are no array of objects")
    return found


def context_in(record: session_pb2.SessionRecord, index: int) -> dict[str, Any]:
    """Returns tools and template options by their names in `ConversationContext`.

    Raises:
        InvalidFieldError: The context is missing, or has another form.
    """
    if index >= len(record.contexts):
        raise InvalidFieldError("contexts", f"has no {index}, which a node names")
    found = _json(record.contexts[index].data or b"{}", f"contexts: [{index}]")
    kinds = {"tools": list, "chat_template_kwargs": dict}
    if not isinstance(found, dict) or any(
        not isinstance(found.get(name, kind()), kind) for name, kind in kinds.items()
    ):
        raise InvalidFieldError("contexts", f"[{index}] is no object with tools and options")
    return found


def check_conversations(record: session_pb2.SessionRecord) -> None:
    """Checks that messages and contexts have the form that `NodeMessages` says.

    Raises:
        InvalidFieldError: Names the node and the problem.
    """
    for index in range(len(record.contexts)):
        context_in(record, index)
    for node in record.messages:
        for message in messages_in(node):
            if problem := _wrong(message):
                raise InvalidFieldError("messages", f"of node {node.node_id}: {problem}")


def _wrong(message: dict[str, Any]) -> str:
    """Returns what is wrong with a message, or nothing."""
    if not isinstance(message.get("role"), str):
        return "one has no role"
    content, calls = message.get("content"), message.get("tool_calls") or []
    if isinstance(content, list):
        texts = [one.get("text") for one in content if _is_part(one, "text")]
        urls = [one.get("image_url") for one in content if _is_part(one, "image_url")]
        fits = all(isinstance(one, dict) for one in content)
        fits &= all(isinstance(one, str) for one in texts)
        fits &= all(isinstance(one, dict) and isinstance(one.get("url"), str) for one in urls)
        if not fits:
            return "content has a part of another form than OpenAI's"
    elif content is not None and not isinstance(content, str):
        return "content is neither text nor an array"
    named = isinstance(calls, list) and all(
        isinstance(one, dict)
        and isinstance(function := one.get("function"), dict)
        and isinstance(function.get("name"), str)
        and "arguments" in function
        for one in calls
    )
    return "" if named else "tool_calls has one without function, name and arguments"


def _is_part(part: Any, kind: str) -> bool:
    return isinstance(part, dict) and part.get("type") == kind


def _finite(text: str) -> float:
    if not isfinite(number := float(text)):
        raise ValueError(f"{text:.20} is no finite number")
    return number


def _json(data: bytes, field: str) -> Any:
    try:
        return json.loads(data, parse_float=_finite, parse_constant=_finite)
    except (ValueError, RecursionError) as error:
        raise InvalidFieldError(field, f"is no JSON: {error}") from error


def conversation_of(record: session_pb2.SessionRecord, leaf_node_id: int) -> Conversation | None:
    """Returns the conversation that ends at a node. None if the record lacks messages of it.

    Args:
        record: A session, with the data of its messages.
        leaf_node_id: Id of the node.

    Raises:
        InvalidFieldError: Messages or their context have another form.
    """
    nodes, path, node_id = {one.node_id: one for one in record.messages}, [], leaf_node_id
    while node_id:
        if node_id not in nodes or not nodes[node_id].data:
            return None
        path.append(nodes[node_id])
        node_id = nodes[node_id].parent_node_id
    context: dict[str, Any] = {}
    if path and path[0].HasField("context_index"):
        context = context_in(record, path[0].context_index)
    found = [(one.node_id, message) for one in reversed(path) for message in messages_in(one)]
    return Conversation(
        [message for _, message in found],
        [node_id for node_id, _ in found],
        context.get("tools", []),
        context.get("chat_template_kwargs", {}),
    )
