"""Responses requests as agents make them."""

from typing import Any

from rollmesh.conformance.asked import ANSWER_TOKENS, ARGUMENTS, CALL_TOKENS, PARAMETERS, QUESTION
from rollmesh.conformance.checks import NotSeenError
from rollmesh.conformance.server import Server, Streamed, need

PATH = "responses"
TOOL: dict[str, Any] = {
    "type": "function",
    "name": "calculator",
    "description": "Multiplies.",
    "strict": True,
    "parameters": PARAMETERS,
}
NAMED: dict[str, Any] = {"type": "function", "name": "calculator"}


def user(text: str = QUESTION) -> dict[str, Any]:
    """Returns a user's message, as Codex and openai-agents write it."""
    return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}


def said(text: str = "  The answer is 42. \n", **fields: Any) -> dict[str, Any]:
    """Returns an assistant's message as it comes back with its id and status."""
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    fields = {"id": "msg_1", "status": "completed", **fields}
    return {"type": "message", "role": "assistant", "content": [part], **fields}


def called(call_id: str = "call_00Ab", **fields: Any) -> dict[str, Any]:
    """Returns a call of the tool."""
    common = {"type": "function_call", "name": "calculator", "arguments": ARGUMENTS}
    return {**common, "call_id": call_id, "id": f"fc_{call_id}", "status": "completed", **fields}


def result(call_id: str = "call_00Ab", output: Any = "42") -> dict[str, Any]:
    """Returns the result of a call."""
    return {"type": "function_call_output", "call_id": call_id, "output": output}


def request(server: Server, *items: Any, **fields: Any) -> dict[str, Any]:
    """Returns the body of a request for a short answer."""
    common = {"model": server.model, "max_output_tokens": ANSWER_TOKENS, "store": False}
    return {**common, "input": list(items) or QUESTION, **fields}


async def ask(server: Server, *items: Any, **fields: Any) -> dict[str, Any]:
    """Returns a complete response.

    Raises:
        FailedError: There is none, or it has no output.
    """
    body = (await server.post(PATH, request(server, *items, **fields))).body()
    need(isinstance(body.get("output"), list), "the response has no list output")
    return body


async def stream(
    server: Server, *items: Any, at_most: int | None = None, **fields: Any
) -> Streamed:
    """Asks for a streamed response. Leaves after `at_most` events if that is given."""
    body = request(server, *items, stream=True, **fields)
    return await server.stream(PATH, body, at_most=at_most)


FORCED: dict[str, Any] = {"tools": [TOOL], "tool_choice": NAMED, "max_output_tokens": CALL_TOKENS}
"""The members that make a model call the tool."""


def call_in(body: dict[str, Any]) -> dict[str, Any]:
    """Returns the first call of a response.

    Raises:
        NotSeenError: The model completed no call.
    """
    calls = [item for item in body.get("output") or [] if item.get("type") == "function_call"]
    if not calls or body.get("status") == "incomplete":
        raise NotSeenError(f"the model completed no tool call within {CALL_TOKENS} tokens")
    return dict(calls[0])
