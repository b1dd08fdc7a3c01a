"""Complete messages, and what requests may leave out or add."""

from typing import Any

from rollmesh.conformance.asked import CALCULATE, DOUBT, QUESTION
from rollmesh.conformance.checks import Family, NotSeenError
from rollmesh.conformance.messages.requests import (
    FORCED,
    PATH,
    TOOL,
    ask,
    count,
    post,
    request,
    said,
    text,
    use_in,
    user,
)
from rollmesh.conformance.server import Server, need, numbers

ANSWERS = Family("messages.answers")
STOPS = {
    "end_turn", "max_tokens", "stop_sequence", "tool_use", "pause_turn", "refusal",
    "model_context_window_exceeded",
}  # fmt: skip
_CACHED = {"cache_control": {"type": "ephemeral"}}
_BETAS = "claude-code-20250219,interleaved-thinking-2025-05-14,context-management-2025-06-27"
_CLAUDE_CODE: dict[str, Any] = {
    "thinking": {"type": "adaptive"},
    "output_config": {"effort": "high"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "metadata": {"user_id": '{"session_id": "a"}'},
}
_TITLE: dict[str, Any] = {
    "system": [text("Generate a concise, sentence-case title")],
    "tools": [],
    "thinking": {"type": "disabled"},
    "output_config": {
        "format": {
            "type": "json_schema",
            "schema": {
                "type": "object",
                "properties": {"title": {"type": "string"}},
                "required": ["title"],
                "additionalProperties": False,
            },
        }
    },
}


@ANSWERS.check(
    "A message has id, type, role, model, content, and a known stop_reason.",
    "The SDK's models, and Claude Code, which goes by the stop_reason.",
)
async def _fields(server: Server) -> None:
    body = await ask(server)
    need(isinstance(body.get("id"), str), f"id is {body.get('id')!r}")
    need(body.get("type") == "message", f"type is {body.get('type')!r}")
    need(body.get("role") == "assistant", f"role is {body.get('role')!r}")
    need(isinstance(body.get("model"), str), f"model is {body.get('model')!r}")
    need(body.get("stop_reason") in STOPS, f"stop_reason is {body.get('stop_reason')!r}")


@ANSWERS.check(
    "A message counts its input and output tokens.",
    "Claude Code, which compacts by these counts.",
)
async def _usage(server: Server) -> None:
    numbers((await ask(server)).get("usage"), "input_tokens", "output_tokens")


@ANSWERS.check(
    "Every message has an id of its own.",
    "Claude Code, which merges two answers with one id into one message of its history.",
)
async def _ids(server: Server) -> None:
    ids = [(await ask(server)).get("id") for _ in range(2)]
    need(ids[0] != ids[1], f"two messages have the id {ids[0]!r}")


@ANSWERS.check(
    "A message that max_tokens cuts says so.",
    "Claude Code, which asks the model to go on after it.",
)
async def _length(server: Server) -> None:
    body = await ask(server, max_tokens=1)
    if body.get("stop_reason") == "end_turn":
        raise NotSeenError("the model ended its answer by itself")
    need(body.get("stop_reason") == "max_tokens", f"stop_reason is {body.get('stop_reason')!r}")


@ANSWERS.check(
    "Every answer has the header request-id.",
    "Whoever looks for a failed request in the logs: the SDK shows it.",
)
async def _request_id(server: Server) -> None:
    for body in (request(server), {**request(server), "messages": []}):
        answer = await post(server, body)
        need(answer.headers.get("request-id"), f"no request-id with status {answer.status}")


@ANSWERS.check(
    "The key is read from x-api-key, and from a bearer token.",
    "Claude Code sends the one, the SDK's newer versions the other.",
)
async def _keys(server: Server) -> None:
    (await post(server, request(server))).body()
    (await server.post(PATH, request(server))).body()


@ANSWERS.check(
    "Any anthropic-version, a list of betas and ?beta=true are accepted.",
    "Claude Code, and SDKs that are older or newer than the server.",
)
async def _versions(server: Server) -> None:
    for version in ("2023-06-01", "2026-10-21"):
        more = {"anthropic-version": version, "anthropic-beta": _BETAS}
        (await post(server, request(server), more, f"{PATH}?beta=true")).body()


@ANSWERS.check(
    "The parameters that Claude Code sends are accepted.",
    "Claude Code: it sends them with every request.",
)
async def _claude_code(server: Server) -> None:
    await ask(server, tools=[{**TOOL, **_CACHED}], **_CLAUDE_CODE)


@ANSWERS.check(
    "A model that the server does not know is accepted.",
    "Claude Code, whose sub-agents ask for a model of Anthropic's, whatever it was given.",
)
async def _other_models(server: Server) -> None:
    await ask(server, model="claude-haiku-4-5-20251001")


@ANSWERS.check(
    "A request for a title is answered: no tools, thinking disabled, an answer by a schema.",
    "Claude Code, which begins with it.",
)
async def _title(server: Server) -> None:
    await ask(server, user("<session>What is 6 times 7?</session>"), **_TITLE)


@ANSWERS.check(
    "System is accepted as a string and as blocks with cache_control.",
    "The SDK's examples write the one, Claude Code the other.",
)
async def _system_forms(server: Server) -> None:
    await ask(server, system="Be short.")
    await ask(server, system=[text("Be short."), text("Be kind.", **_CACHED)])


@ANSWERS.check(
    "A call is a block with id, name, and an object as input; the stop_reason is tool_use.",
    "Every agent with tools: it runs the call by its name and answers by its id.",
)
async def _tool_use(server: Server) -> None:
    body = await ask(server, user(CALCULATE), **FORCED)
    call = use_in(body)
    need(isinstance(call.get("id"), str) and call["id"], f"id is {call.get('id')!r}")
    need(call.get("name") == "calculator", f"name is {call.get('name')!r}")
    need(isinstance(call.get("input"), dict), f"input is {call.get('input')!r}")
    need(body.get("stop_reason") == "tool_use", f"stop_reason is {body.get('stop_reason')!r}")


@ANSWERS.check(
    "count_tokens counts what the same message is then prompted with.",
    "Claude Code: with counts that are too low it never compacts, and stops at the limit.",
)
async def _count_tokens(server: Server) -> None:
    fields: dict[str, Any] = {"system": "Be short.", "tools": [TOOL]}
    counted = await count(server, user(), **fields)
    usage = (await ask(server, user(), **fields)).get("usage") or {}
    cached = (usage.get("cache_read_input_tokens") or 0) + (
        usage.get("cache_creation_input_tokens") or 0
    )
    prompted = (usage.get("input_tokens") or 0) + cached
    need(counted == prompted, f"counted are {counted} tokens, prompted {prompted}")


@ANSWERS.check(
    "A text as a string and as one block are the same prompt.",
    "Prefix caches and exact training: Claude Code sends one message as a list, later as a string.",
)
async def _one_text(server: Server) -> None:
    tail = [said(), user(DOUBT)]
    forms = [user(), user([text(QUESTION)]), user([text(QUESTION, **_CACHED)])]
    counts = [await count(server, form, *tail) for form in forms]
    need(len(set(counts)) == 1, f"they have {counts} tokens")
