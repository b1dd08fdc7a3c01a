"""Complete answers of chat completions, and what requests may leave out or add."""

from typing import Any

from rollmesh.conformance.asked import CALCULATE, CALL_TOKENS, PARAMETERS
from rollmesh.conformance.chat.requests import (
    PATH,
    TOOL,
    ask,
    message_of,
    post,
    request,
    sampled_call,
    user,
)
from rollmesh.conformance.checks import Family, NotSeenError
from rollmesh.conformance.server import Server, need, numbers

ANSWERS = Family("chat.answers")
FINISHES = {"stop", "length", "tool_calls", "content_filter", "function_call"}
_ACCEPTED_KEYS: dict[str, Any] = {
    "client_metadata": {"turn": "1"},
    "context_management": {"edits": []},
    "output_config": {"effort": "high"},
    "prompt_cache_key": "a",
    "include": [],
    "store": False,
    "metadata": {"a": "b"},
    "user": "someone",
    "made_up_by_a_client": 1,
}
_NULLABLE = (
    "audio", "frequency_penalty", "logit_bias", "logprobs", "max_completion_tokens", "metadata",
    "n", "parallel_tool_calls", "presence_penalty", "reasoning_effort", "response_format", "seed",
    "stop", "stream", "stream_options", "temperature", "tool_choice", "tools", "top_logprobs",
    "top_p", "user",
)  # fmt: skip


@ANSWERS.check(
    "A complete answer has id, object, created, model, a role and a known finish_reason.",
    "Clients that parse strictly: the SDK's models hold None where the type promises a value.",
)
async def _fields(server: Server) -> None:
    body = await ask(server)
    for name, kind in (("id", str), ("object", str), ("created", int), ("model", str)):
        need(isinstance(body.get(name), kind), f"{name} is {body.get(name)!r}")
    need(body["object"] == "chat.completion", f"object is {body['object']!r}")
    choice = body["choices"][0]
    need(choice.get("index") == 0, f"index of the first choice is {choice.get('index')!r}")
    role = choice["message"].get("role")
    need(role == "assistant", f"role of the message is {role!r}")
    finish = choice.get("finish_reason")
    need(finish in FINISHES, f"finish_reason is {finish!r}")


@ANSWERS.check(
    "A complete answer counts its tokens, and the total is their sum.",
    "Budgets and context management of agents, which go by these counts.",
)
async def _usage(server: Server) -> None:
    usage = (await ask(server)).get("usage")
    prompt, answer, total = numbers(usage, "prompt_tokens", "completion_tokens", "total_tokens")
    need(prompt + answer == total, f"the total is not the sum: {usage!r}")
    need(prompt > 0, f"the prompt has no tokens: {usage!r}")


@ANSWERS.check(
    "Every answer has an id of its own.",
    "Clients that merge by id, and logs: Claude Code takes two answers with one id for one turn.",
)
async def _ids(server: Server) -> None:
    first, second = await ask(server), await ask(server)
    need(first.get("id") != second.get("id"), f"two answers have the id {first.get('id')!r}")


@ANSWERS.check(
    "An answer that is cut by max_tokens says finish_reason length.",
    "Agents that ask again for less, and trainers that mask truncated answers.",
)
async def _length(server: Server) -> None:
    body = await ask(server, max_tokens=1)
    tokens = (body.get("usage") or {}).get("completion_tokens")
    finish = body["choices"][0].get("finish_reason")
    if finish == "stop" and tokens == 1:
        raise NotSeenError("the model ended its answer with the first token")
    need(finish == "length", f"finish_reason is {finish!r}, with {tokens} tokens")


@ANSWERS.check(
    "Every answer has the header x-request-id.",
    "Whoever looks for a failed request in the logs: the SDKs show it as request_id.",
)
async def _request_id(server: Server) -> None:
    for answer in (await post(server), await post(server, messages=[])):
        need(answer.headers.get("x-request-id"), f"no x-request-id with status {answer.status}")


@ANSWERS.check(
    "A request that names only its model and messages is answered.",
    "Agents as published: none of them sends temperature or max_tokens unless told to.",
)
async def _bare_request(server: Server) -> None:
    bare = {"model": server.model, "messages": [user()], "stream": True}
    (await server.stream(PATH, bare, at_most=1)).datas()


@ANSWERS.check(
    "A parameter that is null is as one that is absent.",
    "Frameworks that send every field of a model: each request would be a 400.",
)
async def _null_parameters(server: Server) -> None:
    await ask(server, **dict.fromkeys(_NULLABLE))


@ANSWERS.check(
    "Parameters that change nothing are accepted, known or not.",
    "Agents that label their requests: Codex, Claude Code and LangChain send such keys.",
)
async def _unknown_parameters(server: Server) -> None:
    await ask(server, **_ACCEPTED_KEYS)


@ANSWERS.check(
    "A body of 300 kB is read.",
    "Coding agents, whose tools alone are 70 kB: they would get a 413.",
)
async def _large_body(server: Server) -> None:
    await ask(server, metadata={"padding": "x" * 300_000})


@ANSWERS.check(
    "The key is read from x-api-key where there is no bearer token.",
    "Clients of Anthropic's API, Claude Code among them: they would get a 401.",
)
async def _x_api_key(server: Server) -> None:
    answer = await server.post(
        PATH, request(server), {"authorization": "", "x-api-key": server.key}
    )
    answer.body()


@ANSWERS.check(
    "Header names are read in any case.",
    "Older SDKs: they write Authorization, newer ones authorization.",
)
async def _header_case(server: Server) -> None:
    body = request(server)
    for name in ("Authorization", "AUTHORIZATION"):
        (await server.post(PATH, body, {name: f"Bearer {server.key or 'none'}"})).body()


@ANSWERS.check(
    "A request with a wrong key is a 401.",
    "Scripts with a stale key: another status is retried, or raised as another class.",
)
async def _wrong_key(server: Server) -> None:
    answer = await server.post(PATH, request(server), {"authorization": "Bearer wrong"})
    if answer.status == 200:
        raise NotSeenError("the server asks for no key")
    need(answer.status == 401, f"status {answer.status}: {answer}")


@ANSWERS.check(
    "A call has an id, its type, the tool's name, and arguments as text.",
    "Every agent with tools: it runs the call by its name and answers by its id.",
)
async def _tool_call(server: Server) -> None:
    body, message = await sampled_call(server)
    call = message["tool_calls"][0]
    need(isinstance(call.get("id"), str) and call["id"], f"the call's id is {call.get('id')!r}")
    need(call.get("type") == "function", f"the call's type is {call.get('type')!r}")
    need(call["function"].get("name") == "calculator", f"the call is {call!r}")
    need(isinstance(call["function"].get("arguments"), str), f"the call is {call!r}")
    finish = body["choices"][0].get("finish_reason")
    need(finish in {"stop", "tool_calls"}, f"finish_reason is {finish!r}")


@ANSWERS.check(
    "Two calls never have the same id.",
    "Matching of an echo whose arguments were re-serialised: it goes by the call's id.",
)
async def _call_ids(server: Server) -> None:
    answers = [(await sampled_call(server))[1] for _ in range(2)]
    ids = [call.get("id") for message in answers for call in message["tool_calls"]]
    need(len(ids) == len(set(ids)), f"the ids are {ids}")


@ANSWERS.check(
    "Tools are accepted as the frameworks write them: strict or not, with titles, without text.",
    "openai-agents, which sends strict and titles, and LangChain, which sends neither.",
)
async def _tool_shapes(server: Server) -> None:
    titled = {**PARAMETERS, "title": "calculator_args"}
    shapes: list[dict[str, Any]] = [
        {"name": "calculator", "description": "", "parameters": titled, "strict": True},
        {"name": "calculator", "parameters": PARAMETERS, "strict": None},
        {"name": "now", "description": "The time."},
    ]
    for function in shapes:
        tools = [{"type": "function", "function": function}]
        answer = await post(server, user(CALCULATE), tools=tools)
        need(answer.status == 200, f"tools {tools}: status {answer.status}: {answer}")


@ANSWERS.check(
    "tool_choice required answers with a call of one of the tools.",
    "Agents that force a tool: they would get text and stop.",
)
async def _required_tool(server: Server) -> None:
    body = await ask(
        server, user(CALCULATE), tools=[TOOL], tool_choice="required", max_tokens=CALL_TOKENS
    )
    if body["choices"][0].get("finish_reason") == "length":
        raise NotSeenError(f"the model completed no tool call within {CALL_TOKENS} tokens")
    calls = message_of(body).get("tool_calls")
    need(calls, f"the answer has no call: {message_of(body)!r:.200}")
