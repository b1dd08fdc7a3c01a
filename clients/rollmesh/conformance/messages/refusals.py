"""Bad requests to Messages, and repeats of good ones."""

import json
import re
from typing import Any

from rollmesh.conformance.checks import Family, NotSeenError
from rollmesh.conformance.messages.requests import PATH, post, request, user
from rollmesh.conformance.retries import Repeats
from rollmesh.conformance.server import Server, Streamed, mapping, need, need_refused

REFUSALS = Family("messages.refusals")
_BODIES = {"no JSON": b"{", "empty": b"", "a list": b"[]", "a number": b"5"}
_FIELDS: dict[str, list[Any]] = {
    "messages": [None, [], "Hi", ["Hi"], [{"role": "bot", "content": "Hi"}], [user(5)]],
    "max_tokens": [-1, "many", None],
    "temperature": [-1, "hot"],
    "top_p": [1.5, "x"],
    "tools": [5, [5]],
    "tool_choice": [5, {"type": "made_up"}],
    "system": [5],
    "stream": ["perhaps"],
}
_WINDOW = re.compile(r"exceed context limit: (\d+) \+ (\d+) > (\d+)")


@REFUSALS.check(
    "A body that is no JSON object is a 400.",
    "Clients that retry: a 500 is asked again three times.",
)
async def _body(server: Server) -> None:
    need_refused({name: await post(server, body) for name, body in _BODIES.items()})


@REFUSALS.check(
    "A field of a wrong type or out of its range is a 400.",
    "Clients that retry, and experiments whose setting is silently ignored.",
)
async def _fields(server: Server) -> None:
    pairs = [(name, value) for name, values in _FIELDS.items() for value in values]
    need_refused(
        {
            f"{name}={json.dumps(value)}": await post(server, request(server, **{name: value}))
            for name, value in pairs
        }
    )


@REFUSALS.check(
    "A refusal is Anthropic's: type error, and an error with its type and message.",
    "The SDK and Claude Code, which decide by error.type.",
)
async def _error_body(server: Server) -> None:
    value = (await post(server, request(server, temperature="hot"))).value()
    need(isinstance(value, dict) and value.get("type") == "error", f"the body is {value!r:.200}")
    error = mapping(value.get("error"), "error")
    need(error.get("type") == "invalid_request_error", f"error.type is {error.get('type')!r}")
    need(isinstance(error.get("message"), str), f"error.message is {error.get('message')!r}")


@REFUSALS.check(
    "A prompt that is too long is a 400 that says prompt is too long.",
    "Claude Code, which compacts by these words.",
)
async def _prompt_too_long(server: Server) -> None:
    context = _context(server)
    answer = await post(server, request(server, user("one two three " * context)))
    need(answer.status == 400, f"status {answer.status}: {answer}")
    need("prompt is too long" in answer.text.lower(), f"the message is {answer}")


@REFUSALS.check(
    "A max_tokens that does not fit is cut, or refused with the three numbers.",
    "Claude Code, which asks for 32000 tokens and reads from the refusal what would fit.",
)
async def _small_window(server: Server) -> None:
    context = _context(server)
    body = request(server, max_tokens=context, stream=True)
    streamed = await server.stream(PATH, body, at_most=1)
    if streamed.answer.status == 200:
        return
    need(streamed.answer.status == 400, f"status {streamed.answer.status}: {streamed.answer}")
    numbers = _WINDOW.search(streamed.answer.text)
    need(numbers is not None, f"the message is {streamed.answer}")


def _context(server: Server) -> int:
    if server.context_tokens is None:
        raise NotSeenError("the context length is not known; give --context-tokens")
    return server.context_tokens


def _asked(server: Server, text: str) -> dict[str, Any]:
    return request(server, user(text))


def _said(body: dict[str, Any]) -> Any:
    return body.get("content")


def _streamed_id(streamed: Streamed) -> Any:
    return (streamed.datas()[0].get("message") or {}).get("id")


RETRIES = Repeats(PATH, _asked, _said, _streamed_id).family("messages")
