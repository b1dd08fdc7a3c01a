"""Histories and images as Claude Code and the SDK's tool runner send them to Messages."""

from collections.abc import Sequence
from typing import Any

from rollmesh.conformance.asked import CALCULATE, DOUBT, QUESTION
from rollmesh.conformance.checks import Family, NotSeenError
from rollmesh.conformance.images import add_images, encoded
from rollmesh.conformance.messages.requests import (
    FORCED,
    TOOL,
    ask,
    post,
    request,
    result,
    said,
    text,
    use,
    use_in,
    user,
)
from rollmesh.conformance.server import Answer, Server, numbers

ECHOES = Family("messages.echoes")
_CACHED = {"cache_control": {"type": "ephemeral"}}
_SECOND = "the second turn is a 400, and the rollout ends."


@ECHOES.check(
    "The content of a message is accepted as the assistant's.",
    f"Every agent on Messages: {_SECOND}",
)
async def _sampled_message(server: Server) -> None:
    body = await ask(server)
    if not body["content"]:
        raise NotSeenError("the message has no content")
    await ask(server, user(), {"role": "assistant", "content": body["content"]}, user(DOUBT))


@ECHOES.check(
    "A sampled call and its result are accepted.",
    f"Every agent with tools: {_SECOND}",
)
async def _sampled_use(server: Server) -> None:
    body = await ask(server, user(CALCULATE), **FORCED)
    answer = user([result(use_in(body)["id"])])
    echo = {"role": "assistant", "content": body["content"]}
    await ask(server, user(CALCULATE), echo, answer, tools=[TOOL])


@ECHOES.check(
    "A sampled thinking block with its signature is accepted.",
    f"Claude Code, which sends it back unchanged: {_SECOND}",
)
async def _thinking(server: Server) -> None:
    thinking = {"type": "adaptive"}
    body = await ask(server, thinking=thinking)
    if not any(block.get("type") == "thinking" for block in body["content"]):
        raise NotSeenError("the model did not think")
    echo = {"role": "assistant", "content": body["content"]}
    await ask(server, user(), echo, user(DOUBT), thinking=thinking)


@ECHOES.check(
    "Two calls in one message and their results in the next are accepted.",
    f"Claude Code, which runs tools in parallel: {_SECOND}",
)
async def _parallel_uses(server: Server) -> None:
    ids = ("toolu_00Ab", "toolu_01Ab")
    results = user([result(ids[0], is_error=False), result(ids[1], is_error=False, **_CACHED)])
    echo = said(text(" I will compute.\n\n"), *(use(one) for one in ids))
    await ask(server, user(CALCULATE), echo, results, tools=[TOOL])


@ECHOES.check(
    "A result is accepted as a string, as text blocks, without content, and as an error.",
    f"The SDK's tool runner and Claude Code, which write all of these: {_SECOND}",
)
async def _result_forms(server: Server) -> None:
    bare = {"type": "tool_result", "tool_use_id": "toolu_00Ab"}
    forms = [result(), result(content=[text("42")]), result(content=[]), bare]
    for form in (*forms, result(content="no such file", is_error=True)):
        await ask(server, user(CALCULATE), said(use()), user([form]), tools=[TOOL])


@ECHOES.check(
    "A message is accepted with cache_control in one request and without it in the next.",
    f"Claude Code, which moves it to the newest message: {_SECOND}",
)
async def _moving_cache_control(server: Server) -> None:
    await ask(server, user([text(QUESTION, **_CACHED)]))
    await ask(server, user(QUESTION), said(), user([text(DOUBT, **_CACHED)]))


@ECHOES.check(
    "A message of the role system within the messages is accepted.",
    f"Claude Code, which sends one after the first message: {_SECOND}",
)
async def _inner_system(server: Server) -> None:
    inner = {"role": "system", "content": "Today is Monday."}
    await ask(server, user(), inner, said(), user(DOUBT), system="Be short.")


@ECHOES.check(
    "A text beside a result is accepted.",
    "Claude Code, which asks so for the summary when it compacts.",
)
async def _text_after_result(server: Server) -> None:
    asked = [result(), text("CRITICAL: Respond with TEXT ONLY.")]
    await ask(server, user(CALCULATE), said(use()), user(asked), tools=[TOOL])


@ECHOES.check(
    "A call under a summary instead of its history is answered.",
    "Claude Code after compaction: it goes on from the summary with its newest call.",
)
async def _compaction(server: Server) -> None:
    summary = user([text("<system-reminder>"), text("This session is continued. Summary: 42.")])
    await ask(server, summary, said(use()), user([result()]), tools=[TOOL])


@ECHOES.check(
    "An answer that was cut, and a request to resume it, are accepted.",
    "Claude Code, which asks for the rest up to four times.",
)
async def _cut_answer(server: Server) -> None:
    first = await ask(server, max_tokens=2)
    echo = {"role": "assistant", "content": first["content"] or [text("The")]}
    await ask(server, user(), echo, user([text("Output token limit hit. Resume directly.")]))


@ECHOES.check(
    "A sub-agent of the same session, told by its header, is answered beside the main line.",
    "Claude Code, whose sub-agents share the key and the session.",
)
async def _sub_agents(server: Server) -> None:
    session = {"x-claude-code-session-id": "a"}
    body = request(server, system=[text("cc_is_subagent=1"), text("Explore.")])
    (await post(server, request(server), session)).body()
    (await post(server, body, {**session, "x-claude-code-agent-id": "0123456789abcdef0"})).body()
    (await post(server, request(server, user(), said(), user(DOUBT)), session)).body()


IMAGES = Family("messages.images")


def _blocks(images: Sequence[bytes], words: str = QUESTION) -> list[dict[str, Any]]:
    sources = [
        {"type": "base64", "media_type": "image/png", "data": encoded(one)} for one in images
    ]
    return [*({"type": "image", "source": source} for source in sources), text(words)]


async def _user(server: Server, images: Sequence[bytes]) -> Answer:
    return await post(server, request(server, user(_blocks(images))))


async def _result(server: Server, images: Sequence[bytes]) -> Answer:
    answered = user([result(content=_blocks(images, "Seen."))])
    return await post(server, request(server, user(), said(use()), answered, tools=[TOOL]))


def _count(body: dict[str, Any]) -> int:
    usage = body.get("usage")
    (fresh,) = numbers(usage, "input_tokens")
    return fresh + ((usage or {}).get("cache_read_input_tokens") or 0)


add_images(IMAGES, _user, _result, _count)
