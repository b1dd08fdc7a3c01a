"""Messages requests as the Anthropic SDK and Claude Code make them."""

from collections.abc import Mapping
from typing import Any

from rollmesh.conformance.asked import ANSWER_TOKENS, CALL_TOKENS, PARAMETERS, QUESTION
from rollmesh.conformance.checks import NotSeenError
from rollmesh.conformance.server import Answer, Server, Streamed, need

PATH = "messages"
COUNT = "messages/count_tokens"
TOOL: dict[str, Any] = {
    "name": "calculator",
    "description": "Multiplies.",
    "input_schema": PARAMETERS,
}
FORCED: dict[str, Any] = {
    "tools": [TOOL],
    "tool_choice": {"type": "tool", "name": "calculator"},
    "max_tokens": CALL_TOKENS,
}
"""The members that make a model call the tool."""


def headers(server: Server) -> dict[str, str]:
    """Returns the headers of Claude Code: the key in x-api-key, no bearer token."""
    return {"authorization": "", "x-api-key": server.key, "anthropic-version": "2023-06-01"}


def user(content: Any = QUESTION) -> dict[str, Any]:
    """Returns a message of the user."""
    return {"role": "user", "content": content}


def text(content: str, **fields: Any) -> dict[str, Any]:
    """Returns a text block."""
    return {"type": "text", "text": content, **fields}


def said(*blocks: dict[str, Any]) -> dict[str, Any]:
    """Returns a message of the assistant."""
    return {"role": "assistant", "content": list(blocks) or [text("  The answer is 42. \n")]}


def use(call_id: str = "toolu_00Ab") -> dict[str, Any]:
    """Returns a call of the tool."""
    given = {"a": 6, "b": 7.0, "note": "café "}
    return {"type": "tool_use", "id": call_id, "name": "calculator", "input": given}


def result(call_id: str = "toolu_00Ab", content: Any = "42", **fields: Any) -> dict[str, Any]:
    """Returns the result of a call."""
    return {"type": "tool_result", "tool_use_id": call_id, "content": content, **fields}


def request(server: Server, *messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """Returns the body of a request for a short answer."""
    common = {"model": server.model, "max_tokens": ANSWER_TOKENS}
    return {**common, "messages": list(messages) or [user()], **fields}


async def post(
    server: Server, body: Any, more: Mapping[str, str] | None = None, path: str = PATH
) -> Answer:
    """Posts a body with the headers of Claude Code, and `more`."""
    return await server.post(path, body, {**headers(server), **(more or {})})


async def ask(server: Server, *messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """Returns a complete message.

    Raises:
        FailedError: There is none, or it has no content.
    """
    body = (await post(server, request(server, *messages, **fields))).body()
    need(isinstance(body.get("content"), list), "the message has no list content")
    return body


async def stream(
    server: Server, *messages: dict[str, Any], at_most: int | None = None, **fields: Any
) -> Streamed:
    """Asks for a streamed message. Leaves after `at_most` events if that is given."""
    body = request(server, *messages, stream=True, **fields)
    return await server.stream(PATH, body, headers(server), at_most=at_most)


async def count(server: Server, *messages: dict[str, Any], **fields: Any) -> int:
    """Returns the tokens that count_tokens counts.

    Raises:
        FailedError: It counts none.
    """
    body = request(server, *messages, **fields)
    del body["max_tokens"]
    found = (await post(server, body, path=COUNT)).body().get("input_tokens")
    need(type(found) is int and found > 0, f"input_tokens is {found!r}")
    return int(found or 0)


def use_in(body: dict[str, Any]) -> dict[str, Any]:
    """Returns the first call of a message.

    Raises:
        NotSeenError: The model completed no call.
    """
    calls = [block for block in body["content"] if block.get("type") == "tool_use"]
    if not calls or body.get("stop_reason") == "max_tokens":
        raise NotSeenError(f"the model completed no tool call within {CALL_TOKENS} tokens")
    return dict(calls[0])
