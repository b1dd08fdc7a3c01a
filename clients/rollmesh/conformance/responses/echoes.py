"""Histories and images as Codex, openai-agents and scripts send them to Responses."""

from collections.abc import Sequence
from typing import Any

from rollmesh.conformance.asked import CALCULATE, DOUBT, QUESTION
from rollmesh.conformance.checks import Family, NotSeenError
from rollmesh.conformance.images import add_images, data_url
from rollmesh.conformance.responses.requests import (
    FORCED,
    PATH,
    TOOL,
    ask,
    call_in,
    called,
    request,
    result,
    said,
    user,
)
from rollmesh.conformance.server import Answer, Server, numbers

ECHOES = Family("responses.echoes")
_SECOND = "the second turn is a 400, and the rollout ends."


@ECHOES.check(
    "The items of a response are accepted as input.",
    f"Every agent on Responses: {_SECOND}",
)
async def _sampled_output(server: Server) -> None:
    body = await ask(server, user())
    if body.get("status") == "incomplete" and not body["output"]:
        raise NotSeenError("the response has no items")
    await ask(server, user(), *body["output"], user(DOUBT))


@ECHOES.check(
    "A sampled call and its result are accepted, in an answer of their own ids.",
    f"Every agent with tools: {_SECOND}",
)
async def _sampled_call(server: Server) -> None:
    body = await ask(server, user(CALCULATE), **FORCED)
    call = call_in(body)
    await ask(server, user(CALCULATE), *body["output"], result(call["call_id"]), tools=[TOOL])


@ECHOES.check(
    "An assistant's message is accepted with and without id, status, annotations and logprobs.",
    f"openai-agents, which sends all of them, and Codex, which sends fewer: {_SECOND}",
)
async def _message_forms(server: Server) -> None:
    bare = {"type": "message", "role": "assistant"}
    part = {"type": "output_text", "text": "42"}
    forms: list[dict[str, Any]] = [said(), {**bare, "content": [part]}, {**bare, "content": "42"}]
    for form in forms:
        await ask(server, user(), form, user(DOUBT))


@ECHOES.check(
    "Two calls and after them their two results are accepted, and in turns.",
    f"Codex, which sends all calls first: {_SECOND}",
)
async def _calls_then_results(server: Server) -> None:
    calls = [called("call_00Ab"), called("call_01Ab")]
    results = [result("call_00Ab"), result("call_01Ab")]
    await ask(server, user(CALCULATE), *calls, *results, tools=[TOOL])
    mixed = [calls[0], results[0], calls[1], results[1]]
    await ask(server, user(CALCULATE), *mixed, tools=[TOOL])


@ECHOES.check(
    "A call is accepted with and without id and status, and beside a message.",
    f"openai-agents, which sends them, and LangChain, which does not: {_SECOND}",
)
async def _call_forms(server: Server) -> None:
    bare = {key: value for key, value in called().items() if key not in {"id", "status"}}
    await ask(server, user(CALCULATE), bare, result(), tools=[TOOL])
    await ask(server, user(CALCULATE), said(" I will compute."), bare, result(), tools=[TOOL])


@ECHOES.check(
    "A call whose arguments are not JSON is accepted in a history.",
    "Agents that answer such a call with the error: one bad sample would end the rollout.",
)
async def _broken_arguments(server: Server) -> None:
    for arguments in ('{"a": 6, "b": ', ""):
        await ask(server, user(CALCULATE), called(arguments=arguments), result(), tools=[TOOL])


@ECHOES.check(
    "A call's output as a list of text parts is accepted.",
    f"Codex, whose tools may give a list: {_SECOND}",
)
async def _result_list(server: Server) -> None:
    output = [{"type": "input_text", "text": "42"}]
    await ask(server, user(CALCULATE), called(), result(output=output), tools=[TOOL])


@ECHOES.check(
    "A call's output with an id and a status of the client is accepted.",
    f"Codex, which numbers its own items: {_SECOND}",
)
async def _result_with_id(server: Server) -> None:
    own = {**result(), "id": "fco_1", "status": "completed"}
    await ask(server, user(CALCULATE), called(), own, tools=[TOOL])


@ECHOES.check(
    "A reasoning item without encrypted content is accepted in a history.",
    "Agents that go on from another server's history, and Codex after a change of model.",
)
async def _reasoning(server: Server) -> None:
    summary = [{"type": "summary_text", "text": "Let me think."}]
    await ask(
        server, user(), {"type": "reasoning", "id": "rs_1", "summary": summary}, said(), user(DOUBT)
    )


@ECHOES.check(
    "A history that was replaced by a summary is answered, without tools.",
    "Codex, which compacts so: it asks for the summary with tools left out.",
)
async def _compaction(server: Server) -> None:
    await ask(server, user(CALCULATE), called(), result(), user("Summarise."), tools=[])
    await ask(server, user("Another language model produced a summary: 42."), tools=[TOOL])


IMAGES = Family("responses.images")


def _parts(images: Sequence[bytes], text: str = QUESTION) -> list[dict[str, Any]]:
    shown = [{"type": "input_image", "image_url": data_url(one)} for one in images]
    return [*shown, {"type": "input_text", "text": text}]


async def _user(server: Server, images: Sequence[bytes]) -> Answer:
    asked = {**user(), "content": _parts(images)}
    return await server.post(PATH, request(server, asked))


async def _result(server: Server, images: Sequence[bytes]) -> Answer:
    items = (user(), called(), result(output=_parts(images, "Seen.")))
    return await server.post(PATH, request(server, *items, tools=[TOOL]))


def _count(body: dict[str, Any]) -> int:
    (prompt,) = numbers(body.get("usage"), "input_tokens")
    return prompt


add_images(IMAGES, _user, _result, _count)
