"""How the load generator speaks each protocol: its path, its bodies, and its answers."""

from dataclasses import dataclass
from typing import Any, Protocol

import orjson

_MAX_TOKENS = 1024


class Wire(Protocol):
    """One protocol, as an agent speaks it that repeats the conversation in each request."""

    path: str
    """Path after the base URL."""
    field: str
    """The field of a body that holds the conversation."""
    settings: dict[str, Any]
    """Further fields of each body."""

    def tool(self, tool: dict[str, Any]) -> dict[str, Any]:
        """Returns a tool of chat completions as this protocol lists it."""
        ...

    def reply(self, answer: Any) -> "Reply":
        """Reads an answer."""
        ...


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer."""

    text: str
    echo: bytes
    """The answer as the next requests repeat it, JSON."""
    tokens: int
    """Prompt and answer tokens."""


class Chat:
    """OpenAI's chat completions."""

    path, field = "/chat/completions", "messages"
    settings: dict[str, Any] = {}  # noqa: RUF012 - never changed

    def tool(self, tool: dict[str, Any]) -> dict[str, Any]:
        """Returns the tool."""
        return tool

    def reply(self, answer: Any) -> Reply:
        """Reads an answer."""
        text, usage = str(answer["choices"][0]["message"]["content"]), answer["usage"]
        tokens = usage["prompt_tokens"] + usage["completion_tokens"]
        return Reply(text, orjson.dumps({"role": "assistant", "content": text}), tokens)


class Messages:
    """Anthropic's Messages."""

    path, field = "/messages", "messages"
    settings: dict[str, Any] = {"max_tokens": _MAX_TOKENS}  # noqa: RUF012 - never changed

    def tool(self, tool: dict[str, Any]) -> dict[str, Any]:
        """Returns the tool with its `input_schema`."""
        function = dict(tool["function"])
        return {"input_schema": function.pop("parameters"), **function}

    def reply(self, answer: Any) -> Reply:
        """Reads an answer, which is repeated block by block."""
        usage, content = answer["usage"], answer["content"]
        tokens = usage["input_tokens"] + usage["cache_read_input_tokens"] + usage["output_tokens"]
        echo = orjson.dumps({"role": "assistant", "content": content})
        return Reply(str(content[0]["text"]), echo, tokens)


class Responses:
    """OpenAI's Responses, with the complete input in each request, as Codex sends it."""

    path, field = "/responses", "input"
    settings: dict[str, Any] = {"store": False}  # noqa: RUF012 - never changed

    def tool(self, tool: dict[str, Any]) -> dict[str, Any]:
        """Returns the tool without the object around it."""
        return {"type": "function", **tool["function"]}

    def reply(self, answer: Any) -> Reply:
        """Reads an answer, whose only item is repeated as it came."""
        (item,) = answer["output"]
        text, tokens = str(item["content"][0]["text"]), int(answer["usage"]["total_tokens"])
        return Reply(text, orjson.dumps(item), tokens)


WIRES: dict[str, Wire] = {"chat": Chat(), "messages": Messages(), "responses": Responses()}
"""By the name that a shape gives."""
