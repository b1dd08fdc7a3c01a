"""Bad requests to Responses, and repeats of good ones."""

import json
from typing import Any

from rollmesh.conformance.checks import Family, NotSeenError
from rollmesh.conformance.responses.requests import PATH, request, user
from rollmesh.conformance.retries import Repeats
from rollmesh.conformance.server import Server, Streamed, mapping, need, need_refused

REFUSALS = Family("responses.refusals")
_BODIES = {"no JSON": b"{", "empty": b"", "a list": b"[]", "a number": b"5"}
_FIELDS: dict[str, list[Any]] = {
    "input": [5, [5], [{"type": "made_up"}], [{"role": "bot", "content": "Hi"}]],
    "temperature": [-1, "hot"],
    "top_p": [1.5, "x"],
    "max_output_tokens": [-1, "many"],
    "tools": [5, [5], [{"type": "function"}]],
    "tool_choice": [5, {"type": "function", "name": "absent"}],
    "text": [5, {"format": {"type": "made_up"}}],
    "stream": ["perhaps"],
}


@REFUSALS.check(
    "A body that is no JSON object is a 400.",
    "Clients that retry: a 500 is asked again three to five times.",
)
async def _body(server: Server) -> None:
    need_refused({name: await server.post(PATH, body) for name, body in _BODIES.items()})


@REFUSALS.check(
    "A field of a wrong type or out of its range is a 400.",
    "Clients that retry, and experiments whose setting is silently ignored.",
)
async def _fields(server: Server) -> None:
    pairs = [(name, value) for name, values in _FIELDS.items() for value in values]
    need_refused(
        {
            f"{name}={json.dumps(value)}": await server.post(PATH, request(server, **{name: value}))
            for name, value in pairs
        }
    )


@REFUSALS.check(
    "A refusal is JSON: an error with a message, a type, and the keys param and code.",
    "Codex and the SDK, which decide by error.code.",
)
async def _error_body(server: Server) -> None:
    answer = await server.post(PATH, request(server, temperature="hot"))
    value = answer.value()
    error = mapping(mapping(value, "the body").get("error"), "error")
    need({"message", "type", "param", "code"} <= error.keys(), f"the error is {error!r:.200}")


@REFUSALS.check(
    "An input that is too long has the code context_length_exceeded.",
    "Codex: it ends at once with this code, and retries without it.",
)
async def _context_code(server: Server) -> None:
    if server.context_tokens is None:
        raise NotSeenError("the context length is not known; give --context-tokens")
    body = request(server, user("one two three " * server.context_tokens))
    answer = await server.post(PATH, body)
    need(answer.status == 400, f"status {answer.status}: {answer}")
    error = answer.value().get("error") or {}
    need(error.get("code") == "context_length_exceeded", f"code is {error.get('code')!r}")


def _asked(server: Server, text: str) -> dict[str, Any]:
    return request(server, user(text))


def _said(body: dict[str, Any]) -> Any:
    return body.get("output")


def _streamed_id(streamed: Streamed) -> Any:
    return (streamed.datas()[0].get("response") or {}).get("id")


RETRIES = Repeats(PATH, _asked, _said, _streamed_id).family("responses")
