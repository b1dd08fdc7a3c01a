"""Histories and images as clients send them: each is accepted."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from rollmesh.conformance.asked import CALCULATE, DOUBT, QUESTION
from rollmesh.conformance.chat.requests import TOOL, ask, called, post, result, user
from rollmesh.conformance.chat.variants import CALLS, TEXTS, Variant
from rollmesh.conformance.checks import Family
from rollmesh.conformance.images import add_images, data_url
from rollmesh.conformance.server import Answer, Server, numbers

ECHOES = Family("chat.echoes")
_SAID = {"role": "assistant", "content": "  The answer is 42. \n"}
_SYSTEM = {"role": "system", "content": "Be short."}


async def _text(variant: Variant, server: Server) -> None:
    await ask(server, user(), variant(_SAID), user(DOUBT))


async def _call(variant: Variant, server: Server) -> None:
    await ask(
        server, user(CALCULATE), variant(called("call_00Ab")), result("call_00Ab"), tools=[TOOL]
    )


for _echoes, _run in ((TEXTS, _text), (CALLS, _call)):
    for _name, (_variant, _who) in _echoes.items():
        ECHOES.add(
            _name,
            f"An echo is accepted as this is: {_variant.__doc__}",
            f"{_who}: the second turn is a 400.",
            partial(_run, _variant),
        )


@ECHOES.check(
    "An echo with reasoning_content, also twice, is accepted.",
    "Clients that keep unknown keys of an answer: the SDK and litellm.",
)
async def _reasoning(server: Server) -> None:
    thought = "\n Let me think. \n"
    said = {**_SAID, "reasoning_content": thought}
    await ask(server, user(), said, user(DOUBT))
    doubled = {**said, "provider_specific_fields": {"reasoning_content": thought}}
    await ask(server, user(), doubled, user(DOUBT))


@ECHOES.check(
    "Two calls in one message and their two results are accepted.",
    "Agents that run tools in parallel.",
)
async def _parallel_calls(server: Server) -> None:
    results = [result("call_00Ab"), result("call_01Ab")]
    await ask(server, user(CALCULATE), called("call_00Ab", "call_01Ab"), *results, tools=[TOOL])


@ECHOES.check(
    "A call beside a text is accepted.",
    "Agents whose model says what it will do before it does it.",
)
async def _call_text(server: Server) -> None:
    said = {**called("call_00Ab"), "content": " I will compute.\n\n"}
    await ask(server, user(CALCULATE), said, result("call_00Ab"), tools=[TOOL])


@ECHOES.check(
    "A call whose arguments are not JSON, or are empty, is accepted in a history.",
    "Agents that answer such a call with the error: one bad sample would end the whole rollout.",
)
async def _broken_arguments(server: Server) -> None:
    for arguments in ('{"a": 6, "b": ', "", "[1]"):
        said = called("call_00Ab", arguments=arguments)
        failure = result("call_00Ab", "error: the arguments are not JSON")
        await ask(server, user(CALCULATE), said, failure, tools=[TOOL])


@ECHOES.check(
    "A tool's result as a list of text parts is accepted.",
    "Frameworks that write every content as parts.",
)
async def _result_parts(server: Server) -> None:
    parts = [{"type": "text", "text": "42"}]
    said = called("call_00Ab")
    await ask(server, user(CALCULATE), said, result("call_00Ab", parts), tools=[TOOL])


@ECHOES.check(
    "A tool's result with the name of its tool is accepted, and an empty one.",
    "Agents from the time of functions, and tools that print nothing.",
)
async def _result_names(server: Server) -> None:
    named = {**result("call_00Ab", ""), "name": "calculator"}
    await ask(server, user(CALCULATE), called("call_00Ab"), named, tools=[TOOL])


@ECHOES.check(
    "An assistant's message with neither text nor calls is accepted.",
    "Agents whose model once answered nothing: their history has that message for good.",
)
async def _no_content(server: Server) -> None:
    nothing: list[dict[str, Any]] = [{"content": None}, {"content": ""}, {}]
    for one in nothing:
        await ask(server, user(), {"role": "assistant", **one}, user(DOUBT))


@ECHOES.check(
    "A message of the role developer is accepted.",
    "Agents written for newer models: the SDK's examples and Codex send it.",
)
async def _developer(server: Server) -> None:
    await ask(server, {"role": "developer", "content": "Be short."}, user())


@ECHOES.check(
    "A system message after a user's message is accepted.",
    "Claude Code, and frameworks that add instructions in the middle.",
)
async def _late_system(server: Server) -> None:
    await ask(server, _SYSTEM, user(), _SYSTEM, user(DOUBT))


@ECHOES.check(
    "Two and three messages of the user in a row are accepted.",
    "mini-swe-agent: it drops an answer without a call and adds what was wrong.",
)
async def _two_users(server: Server) -> None:
    await ask(server, _SYSTEM, user(), user("No call was found."))
    await ask(server, _SYSTEM, user(), user("No call was found."), user("No call was found."))


@ECHOES.check(
    "A user's text as parts is accepted, and one with a name.",
    "LangChain and openai-agents, which write both forms.",
)
async def _user_parts(server: Server) -> None:
    await ask(server, user([{"type": "text", "text": QUESTION}]))
    await ask(server, {**user(), "name": "Ann"})


IMAGES = Family("chat.images")


def parts(images: Sequence[bytes], text: str = QUESTION) -> list[dict[str, Any]]:
    """Returns a content with images before a text."""
    shown = [{"type": "image_url", "image_url": {"url": data_url(one)}} for one in images]
    return [*shown, {"type": "text", "text": text}]


async def _user(server: Server, images: Sequence[bytes]) -> Answer:
    return await post(server, user(parts(images)))


async def _result(server: Server, images: Sequence[bytes]) -> Answer:
    answered = result("call_00Ab", parts(images, "Seen."))
    return await post(server, user(), called("call_00Ab"), answered, tools=[TOOL])


def _count(body: dict[str, Any]) -> int:
    (prompt,) = numbers(body.get("usage"), "prompt_tokens")
    return prompt


add_images(IMAGES, _user, _result, _count)
