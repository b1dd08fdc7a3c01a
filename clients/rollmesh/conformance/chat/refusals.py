"""Bad requests to chat completions, and repeats of good ones."""

import json
from typing import Any

from rollmesh.conformance.chat.requests import PATH, ask, post, request, user
from rollmesh.conformance.checks import Family, NotSeenError
from rollmesh.conformance.retries import Repeats
from rollmesh.conformance.server import Answer, Server, Streamed, mapping, need, need_refused

REFUSALS = Family("chat.refusals")
_BODIES: dict[str, bytes] = {
    "no JSON": b"{",
    "empty": b"",
    "a list": b"[]",
    "a number": b"5",
    "no UTF-8": b'{"model": "\xff"}',
}
_MESSAGES: dict[str, Any] = {
    "missing": ...,
    "null": None,
    "empty": [],
    "a string": "Hi",
    "a number": 5,
    "of strings": ["Hi"],
    "without role": [{"content": "Hi"}],
    "role a number": [{"role": 5, "content": "Hi"}],
    "content a number": [user(5)],
    "a part without type": [user([{"text": "Hi"}])],
    "tool_calls a number": [user(), {"role": "assistant", "tool_calls": 5}, user()],
}
_PARAMETERS: dict[str, list[Any]] = {
    "temperature": [-1, "hot", [], {}],
    "top_p": [-0.1, 1.5, "x"],
    "top_k": [-2, 1.5],
    "max_tokens": [-1, 1.5, "many"],
    "n": [0, -1, "x"],
    "presence_penalty": [-9, "x"],
    "frequency_penalty": [9, "x"],
    "stop": [5, [5], {}],
    "logprobs": ["perhaps"],
    "top_logprobs": [-2, 10**9],
    "logit_bias": [5, {"x": 1}],
    "stream": ["perhaps", []],
    "seed": ["x", 1.5],
    "tools": [5, [5], [{"type": "function"}]],
    "tool_choice": [5, {"type": "function", "function": {"name": "absent"}}],
    "response_format": [5, {"type": "made_up"}],
}
_EXTREMES: dict[str, list[str]] = {
    "temperature": ["1e999", "-1e999", "NaN", "1e-320", "99999999999999999999999"],
    "top_p": ["1e-45", "1e-320", "NaN", "0"],
    "top_k": ["9223372036854775808", "2147483648", "0", "-1"],
    "min_p": ["1e-45", "NaN"],
    "max_tokens": ["0", "2147483648", "9223372036854775808", "1e30"],
    "seed": ["9223372036854775808", "-9223372036854775809", "1e400", "-1"],
    "presence_penalty": ["1e999", "NaN"],
    "frequency_penalty": ["-1e999", "NaN"],
    "repetition_penalty": ["0", "1e-45", "1e39", "NaN"],
    "top_logprobs": ["9223372036854775808", "-9223372036854775809"],
    "logit_bias": ['{"9223372036854775808": 1}', '{"-1": 1}', '{"5": 1e999}'],
    "stop": ['[""]', '"\\ud800"', '"\\u0000"'],
}
_DEPTH = 20_000


@REFUSALS.check(
    "A body that is no JSON object is a 400.",
    "Clients that retry: a 500 is asked again three to thirty times.",
)
async def _body(server: Server) -> None:
    answers = {name: await server.post(PATH, body) for name, body in _BODIES.items()}
    need_refused(answers)


@REFUSALS.check(
    "Messages of a wrong form are a 400.",
    "Clients that retry, and whoever looks for the bug in the agent: a 500 names nothing.",
)
async def _messages(server: Server) -> None:
    answers: dict[str, Answer] = {}
    for name, messages in _MESSAGES.items():
        body = {**request(server), "messages": messages}
        if messages is ...:
            del body["messages"]
        answers[name] = await server.post(PATH, body)
    need_refused(answers)


@REFUSALS.check(
    "A parameter of a wrong type or out of its range is a 400.",
    "Experiments: a setting that is silently ignored is trained with the wrong one.",
)
async def _parameters(server: Server) -> None:
    answers: dict[str, Answer] = {}
    for name, values in _PARAMETERS.items():
        for value in values:
            fields = {name: value, **({"logprobs": True} if name == "top_logprobs" else {})}
            answers[f"{name}={json.dumps(value)}"] = await post(server, **fields)
    need_refused(answers)


@REFUSALS.check(
    "Numbers at the ends of what JSON can write are served, or refused with a status below 500.",
    "Everyone on the server: what passes the check of one process may end another.",
)
async def _extremes(server: Server) -> None:
    pairs = [(name, text) for name, texts in _EXTREMES.items() for text in texts]
    found = [f"{pair[0]}={pair[1]}: {await _problem(server, *pair)}" for pair in pairs]
    wrong = [one for one in found if not one.endswith(": ")]
    need(not wrong, "; ".join(wrong))
    await ask(server)


async def _problem(server: Server, name: str, text: str) -> str:
    """Returns the fault of the answer to a parameter, given as JSON. Empty if it has none."""
    body = json.dumps(request(server, stream=True, **{name: "@"})).replace('"@"', text)
    streamed = await server.stream(PATH, body.encode(), at_most=1)
    if streamed.answer.status >= 500:
        return f"status {streamed.answer.status}"
    if streamed.broken:
        return "the connection was closed"
    first = streamed.events[0].data if streamed.events else ""
    return f"the stream begins with {first[:120]}" if '"error"' in first[:20] else ""


@REFUSALS.check(
    "Lone surrogates, NUL and deep nesting in a body are served or refused, never a 500.",
    "Agents whose tools read files: binary output reaches the server as such text.",
)
async def _hard_text(server: Server) -> None:
    nested = b'{"messages": ' + b"[" * _DEPTH + b"]" * _DEPTH + b"}"
    schema = b'{"a":' * _DEPTH + b"1" + b"}" * _DEPTH
    plain = json.dumps(request(server, max_tokens=1, metadata="@"))
    bodies = {
        "a lone surrogate": json.dumps(request(server, user("a \ud800 b"))).encode(),
        "a NUL": json.dumps(request(server, user("a \0 b"))).encode(),
        "nested messages": nested,
        "a nested value": plain.replace('"@"', schema.decode()).encode(),
    }
    wrong: list[str] = []
    for name, body in bodies.items():
        answer = await server.post(PATH, body)
        if answer.status >= 500:
            wrong.append(f"{name}: status {answer.status}: {answer}")
    need(not wrong, "; ".join(wrong))


@REFUSALS.check(
    "A refusal is JSON: an error with a message, a type, and the keys param and code.",
    "The SDKs: e.code, e.type and e.param stay empty, and the message is the raw body.",
)
async def _error_body(server: Server) -> None:
    answer = await post(server, temperature="hot")
    need(400 <= answer.status < 500, f"status {answer.status}")
    kind = answer.headers.get("content-type", "")
    need(kind.startswith("application/json"), f"the content-type is {kind!r}")
    value = answer.value()
    error = mapping(mapping(value, "the body").get("error"), "error")
    for name in ("message", "type"):
        need(isinstance(error.get(name), str), f"error.{name} is {error.get(name)!r}")
    need({"param", "code"} <= error.keys(), f"the error has only {', '.join(error)}")


@REFUSALS.check(
    "A prompt that is too long is a 400 that says the maximum context length.",
    "mini-swe-agent and all that use litellm: it knows the case by these words, else retries.",
)
async def _context_length(server: Server) -> None:
    answer = await _too_long(server)
    need(answer.status == 400, f"status {answer.status}: {answer}")
    need("maximum context length" in answer.text, f"the message is {answer}")


@REFUSALS.check(
    "A prompt that is too long has the code context_length_exceeded.",
    "Clients that shorten the history by the code, as OpenAI sends it.",
)
async def _context_code(server: Server) -> None:
    error = (await _too_long(server)).value().get("error") or {}
    need(error.get("code") == "context_length_exceeded", f"code is {error.get('code')!r}")


async def _too_long(server: Server) -> Answer:
    if server.context_tokens is None:
        raise NotSeenError("the context length is not known; give --context-tokens")
    return await post(server, user("one two three " * server.context_tokens), max_tokens=1)


def _asked(server: Server, text: str) -> dict[str, Any]:
    return request(server, user(text))


def _said(body: dict[str, Any]) -> Any:
    return body["choices"]


def _streamed_id(streamed: Streamed) -> Any:
    return streamed.datas()[0].get("id")


RETRIES = Repeats(PATH, _asked, _said, _streamed_id).family("chat")
