"""Complete responses, and what requests may leave out or add."""

from typing import Any

from rollmesh.conformance.asked import CALCULATE, DOUBT, QUESTION
from rollmesh.conformance.checks import Family, NotSeenError
from rollmesh.conformance.responses.requests import (
    FORCED,
    PATH,
    TOOL,
    ask,
    call_in,
    request,
    said,
    user,
)
from rollmesh.conformance.server import Server, need, numbers

ANSWERS = Family("responses.answers")
_NULLABLE = (
    "background", "include", "instructions", "metadata", "parallel_tool_calls",
    "previous_response_id", "reasoning", "service_tier", "stream", "temperature", "top_p",
    "truncation",
)  # fmt: skip
_CODEX: dict[str, Any] = {
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"summary": "auto"},
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "a",
    "client_metadata": {"turn": "1"},
}
_CODEX_TOOLS: list[dict[str, Any]] = [
    TOOL,
    {
        "type": "namespace",
        "name": "multi_agent_v1",
        "description": "Other agents.",
        "tools": [{**TOOL, "name": "spawn_agent"}],
    },
    {"type": "web_search", "external_web_access": False},
]


@ANSWERS.check(
    "A response has id, object, created_at, model, status and output, whose items have ids.",
    "The SDK's models, and openai-agents, which reads the items of output.",
)
async def _fields(server: Server) -> None:
    body = await ask(server)
    need(isinstance(body.get("id"), str), f"id is {body.get('id')!r}")
    need(body.get("object") == "response", f"object is {body.get('object')!r}")
    need(isinstance(body.get("created_at"), int | float), f"created_at {body.get('created_at')!r}")
    need(isinstance(body.get("model"), str), f"model is {body.get('model')!r}")
    need(body.get("status") in {"completed", "incomplete"}, f"status is {body.get('status')!r}")
    for item in body["output"]:
        need(isinstance(item.get("id"), str), f"an item has no id: {item!r:.200}")
        need(isinstance(item.get("type"), str), f"an item has no type: {item!r:.200}")


@ANSWERS.check(
    "A response counts its input, output and total tokens.",
    "Codex, which refuses a usage without these numbers, and compacts by them.",
)
async def _usage(server: Server) -> None:
    usage = (await ask(server)).get("usage")
    prompt, answer, total = numbers(usage, "input_tokens", "output_tokens", "total_tokens")
    need(prompt + answer == total, f"the total is not the sum: {usage!r}")


@ANSWERS.check(
    "Every response and every item has an id of its own.",
    "Clients that merge by id, and previous_response_id.",
)
async def _ids(server: Server) -> None:
    answers = [await ask(server) for _ in range(2)]
    ids = [one.get("id") for one in answers]
    ids += [item.get("id") for one in answers for item in one["output"]]
    need(len(set(ids)) == len(ids), f"the ids are {ids}")


@ANSWERS.check(
    "A response that max_output_tokens cuts is incomplete and says why.",
    "Codex and openai-agents, which take anything else for a complete answer.",
)
async def _length(server: Server) -> None:
    body = await ask(server, max_output_tokens=16)
    if body.get("status") == "completed":
        raise NotSeenError("the model ended its answer by itself")
    need(body.get("status") == "incomplete", f"status is {body.get('status')!r}")
    reason = (body.get("incomplete_details") or {}).get("reason")
    need(reason == "max_output_tokens", f"incomplete_details.reason is {reason!r}")


@ANSWERS.check(
    "Input is accepted as a string, as messages with and without type, and with instructions.",
    "Scripts, openai-agents and Codex, which each write another of these.",
)
async def _input_forms(server: Server) -> None:
    await ask(server, instructions="Be short.")
    await ask(server, {"role": "user", "content": QUESTION})
    await ask(server, user(), {"role": "assistant", "content": "42"}, user(DOUBT))
    await ask(server, {**user("Be short."), "role": "developer"}, user())
    await ask(server, {**user("Be short."), "role": "system"}, user(), user(DOUBT))


@ANSWERS.check(
    "A parameter that OpenAI lets be null may be null.",
    "Frameworks that send every field of a model: each request would be a 400.",
)
async def _null_parameters(server: Server) -> None:
    await ask(server, **dict.fromkeys(_NULLABLE))


@ANSWERS.check(
    "The parameters that Codex sends are accepted.",
    "Codex: it sends them with every request.",
)
async def _codex_parameters(server: Server) -> None:
    await ask(server, user(), tools=[TOOL], **_CODEX)


@ANSWERS.check(
    "Tools in a namespace and web_search are accepted beside functions.",
    "Codex: it offers all three with every request.",
)
async def _codex_tools(server: Server) -> None:
    await ask(server, user(), tools=_CODEX_TOOLS)


@ANSWERS.check(
    "A custom tool, whose input is text, is accepted.",
    "Codex with apply_patch as a freeform tool.",
)
async def _freeform_tool(server: Server) -> None:
    custom = {"type": "custom", "name": "apply_patch", "description": "Edits files."}
    await ask(server, user(), tools=[TOOL, custom])


@ANSWERS.check(
    "A call is an item with id, call_id, name, and arguments as text.",
    "Every agent with tools: it runs the call by its name and answers by its call_id.",
)
async def _function_call(server: Server) -> None:
    call = call_in(await ask(server, user(CALCULATE), **FORCED))
    for name in ("id", "call_id", "arguments"):
        need(isinstance(call.get(name), str) and call[name], f"{name} is {call.get(name)!r}")
    need(call.get("name") == "calculator", f"name is {call.get('name')!r}")


@ANSWERS.check(
    "A previous_response_id that the server does not know is refused.",
    "Agents that keep their history at the server: they would go on without it, unnoticed.",
)
async def _previous_unknown(server: Server) -> None:
    body = request(server, user(DOUBT), previous_response_id="resp_unknown")
    answer = await server.post(PATH, body)
    need(400 <= answer.status < 500, f"status {answer.status}: {answer}")


@ANSWERS.check(
    "previous_response_id continues the complete history, calls included, or is refused.",
    "Agents that keep their history at the server: a model that no longer sees its own call.",
)
async def _previous_complete(server: Server) -> None:
    first = await ask(server, user(CALCULATE), **{**FORCED, "store": True})
    output = {"type": "function_call_output", "call_id": call_in(first)["call_id"], "output": "42"}
    body = request(server, output, tools=[TOOL], previous_response_id=first["id"])
    continued = await server.post(PATH, body)
    if 400 <= continued.status < 500:
        raise NotSeenError(f"it is refused: {continued}")
    whole = await ask(server, user(CALCULATE), *first["output"], output, tools=[TOOL])
    counts = [(one.get("usage") or {}).get("input_tokens") for one in (continued.body(), whole)]
    need(counts[0] == counts[1], f"it is prompted with {counts[0]} tokens, not {counts[1]}")


@ANSWERS.check(
    "text.format asks for JSON by a schema.",
    "openai-agents with an output type, and Codex with an output schema.",
)
async def _json_text(server: Server) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer", "enum": [42]}}}
    form = {"type": "json_schema", "name": "answer", "schema": schema, "strict": False}
    await ask(server, user(), said(), user(DOUBT), text={"format": form})
