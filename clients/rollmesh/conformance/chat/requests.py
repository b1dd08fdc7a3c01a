"""Chat-completions requests as agents make them."""

from typing import Any

from rollmesh.conformance.asked import (
    ANSWER_TOKENS,
    ARGUMENTS,
    CALCULATE,
    CALL_TOKENS,
    PARAMETERS,
    QUESTION,
)
from rollmesh.conformance.checks import NotSeenError
from rollmesh.conformance.server import Answer, Server, Streamed, need

PATH = "chat/completions"
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "calculator", "description": "Multiplies.", "parameters": PARAMETERS},
}
_STRICT = {"type": "function", "function": {**TOOL["function"], "strict": True}}
FORCED: dict[str, Any] = {
    "tools": [_STRICT],
    "tool_choice": {"type": "function", "function": {"name": "calculator"}},
    "max_tokens": CALL_TOKENS,
    "seed": 0,
}
"""The members that make a model call the tool."""


def user(content: Any = QUESTION) -> dict[str, Any]:
    """Returns a message of the user."""
    return {"role": "user", "content": content}


def called(*call_ids: str, arguments: str = ARGUMENTS) -> dict[str, Any]:
    """Returns an assistant's message that calls the tool, as the fewest keys say it."""
    function = {"name": "calculator", "arguments": arguments}
    calls = [{"id": one, "type": "function", "function": function} for one in call_ids]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def result(call_id: str, content: Any = "42") -> dict[str, Any]:
    """Returns the result of a call."""
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def request(server: Server, *messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """Returns the body of a request for a short answer."""
    return {
        "model": server.model,
        "messages": list(messages) or [user()],
        "max_tokens": ANSWER_TOKENS,
        **fields,
    }


async def post(server: Server, *messages: dict[str, Any], **fields: Any) -> Answer:
    """Asks for a complete answer."""
    return await server.post(PATH, request(server, *messages, **fields))


async def ask(server: Server, *messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """Returns the body of a complete answer. It has a choice with a message.

    Raises:
        FailedError: There is no such answer.
    """
    return checked((await post(server, *messages, **fields)).body())


def checked(body: dict[str, Any]) -> dict[str, Any]:
    """Returns the body of an answer that has a choice with a message.

    Raises:
        FailedError: It has none.
    """
    choices = body.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else None
    message = first.get("message") if isinstance(first, dict) else None
    need(isinstance(message, dict), "the answer has no choices[0].message")
    return body


async def stream(
    server: Server, *messages: dict[str, Any], at_most: int | None = None, **fields: Any
) -> Streamed:
    """Asks for a streamed answer. Leaves after `at_most` events if that is given."""
    body = request(server, *messages, stream=True, **fields)
    return await server.stream(PATH, body, at_most=at_most)


def message_of(body: dict[str, Any]) -> dict[str, Any]:
    """Returns the message of the first choice."""
    return dict(body["choices"][0]["message"])


async def sampled_call(server: Server, **fields: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns an answer that calls the tool, and its message.

    Raises:
        NotSeenError: The model completed no call.
    """
    body = await ask(server, user(CALCULATE), **FORCED, **fields)
    message = message_of(body)
    if not message.get("tool_calls") or body["choices"][0].get("finish_reason") == "length":
        raise NotSeenError(f"the model completed no tool call within {CALL_TOKENS} tokens")
    return body, message


def deltas(chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the deltas of the first choice, in order."""
    return [
        dict(choice.get("delta") or {})
        for chunk in chunks
        for choice in chunk.get("choices") or []
        if choice.get("index") == 0
    ]


def text_of(chunks: list[dict[str, Any]]) -> str:
    """Returns the text of the first choice."""
    return "".join(delta.get("content") or "" for delta in deltas(chunks))
