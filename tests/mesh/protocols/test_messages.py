"""The published anthropic package against a whole mesh of real processes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from rollmesh.client import Session
from tests.agents.trajectories import check_main
from tests.lazily import anthropic
from tests.mesh.protocols import multiplying
from tests.mesh.protocols.multiplying import BROKEN, REPLIES
from tests.meshes import Mesh, delivered

pytestmark = pytest.mark.asyncio(loop_scope="module")
RULES = multiplying.RULES
TOOLS: list[Any] = [
    {
        "name": "calculator",
        "description": "Multiplies.",
        "input_schema": {"type": "object", "properties": {"a": {"type": "number"}}},
    }
]


@asynccontextmanager
async def asking(session: Session, **settings: Any) -> AsyncIterator[anthropic.AsyncAnthropic]:
    """The published client, unmodified, pointed at a session."""
    base_url = session.base_url.removesuffix("/v1")
    settings = {"max_retries": 0, "timeout": 30, **settings}
    async with anthropic.AsyncAnthropic(base_url=base_url, api_key="static", **settings) as agent:
        yield agent


async def ask(agent: anthropic.AsyncAnthropic, *messages: Any, **fields: Any) -> Any:
    fields = {"model": "policy", "max_tokens": 200, **fields}
    return await agent.messages.create(messages=list(messages), **fields)


async def streamed(agent: anthropic.AsyncAnthropic, *messages: Any, **fields: Any) -> Any:
    fields = {"model": "policy", "max_tokens": 200, **fields}
    async with agent.messages.stream(messages=list(messages), **fields) as stream:
        return await stream.get_final_message()


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def results(answer: Any, *texts: str) -> dict[str, Any]:
    calls = [block for block in answer.content if block.type == "tool_use"]
    blocks = [
        {"type": "tool_result", "tool_use_id": call.id, "content": text}
        for call, text in zip(calls, texts, strict=True)
    ]
    return user(blocks)


def said(answer: Any) -> list[Any]:
    """The blocks of an answer without what differs between samples."""
    names = {"text": "text", "thinking": "thinking", "tool_use": "input"}
    return [(block.type, getattr(block, names[block.type])) for block in answer.content]


@pytest.mark.parametrize("form", [ask, streamed])
async def test_a_tool_loop_with_thinking_is_one_exact_trajectory(thinking: Mesh, form: Any) -> None:
    async with thinking.client() as client:
        async with client.session() as session, asking(session) as agent:
            fields: dict[str, Any] = {"tools": TOOLS, "system": "You compute."}
            first = await form(agent, user("compute"), **fields)
            assert (first.stop_reason, first.role) == ("tool_use", "assistant")
            assert said(first) == [
                ("thinking", "I take the tool."),
                ("text", " I will compute."),
                ("tool_use", {"a": 6, "b": 7.0, "s": "/"}),
                ("tool_use", {"a": 100.0, "b": 2}),
            ]
            history = [user("compute"), {"role": "assistant", "content": first.content}]
            history.append(results(first, "42", "100"))
            second = await form(agent, *history, **fields)
            assert second.stop_reason == "end_turn"
            assert second.id != first.id
            history += [{"role": "assistant", "content": second.content}]
            # One text is a list now and a string later: both are the same message.
            third = await form(
                agent, *history, user([{"type": "text", "text": "thanks"}]), **fields
            )
            history += [user("thanks"), {"role": "assistant", "content": third.content}]
            counted = await agent.messages.count_tokens(
                model="policy", messages=history[:-1], **fields
            )
            usage = third.usage
            assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens
        result = await delivered(client, session)
    check_main(thinking, result, REPLIES)


@pytest.mark.parametrize("form", [ask, streamed])
async def test_arguments_that_are_no_json_come_back_as_they_were_sampled(
    thinking: Mesh, form: Any
) -> None:
    async with thinking.client() as client:
        async with client.session() as session, asking(session) as agent:
            first = await form(agent, user("broken"), tools=TOOLS)
            assert first.stop_reason == "tool_use"
            echo = {"role": "assistant", "content": first.content}
            await form(agent, user("broken"), echo, results(first, "6"), tools=TOOLS)
        result = await delivered(client, session)
    reasons = () if form is ask else ("LENIENT_ECHO",)  # the SDK has mended what it streamed
    check_main(thinking, result, [BROKEN, "It is 6."], *reasons, "MALFORMED_TOOL_CALL")


@pytest.mark.parametrize("form", [ask, streamed])
async def test_a_stop_sequence_is_named(thinking: Mesh, form: Any) -> None:
    async with thinking.client() as client, client.session() as session, asking(session) as agent:
        answer = await form(agent, user("stop here"), stop_sequences=[" three", "9"])
        assert said(answer) == [("text", "one two")]
        assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", " three")
        cut = await form(agent, user("plain"), max_tokens=2)
        assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 2)


async def test_thinking_that_is_omitted_keeps_its_tokens_by_its_signature(thinking: Mesh) -> None:
    fields: dict[str, Any] = {
        "tools": TOOLS,
        "system": "You compute.",
        "thinking": {"type": "adaptive", "display": "omitted"},
    }
    async with thinking.client() as client:
        async with client.session() as session, asking(session) as agent:
            for form in (ask, streamed):
                first = await form(agent, user("compute"), **fields, extra_headers=once(form))
                assert (first.content[0].thinking, bool(first.content[0].signature)) == ("", True)
            echo = {"role": "assistant", "content": first.content}
            await ask(agent, user("compute"), echo, results(first, "42", "100"), **fields)
        result = await delivered(client, session)
    check_main(thinking, result, REPLIES[:2], "RETRY_REPLAY")


def once(form: Any) -> dict[str, str]:
    """Marks the second request as a retry of the first, in the other form."""
    return {"x-stainless-retry-count": "1"} if form is streamed else {}


async def test_a_small_context_is_told_in_the_words_that_claude_code_reads(thinking: Mesh) -> None:
    async with thinking.client() as client, client.session() as session, asking(session) as agent:
        with pytest.raises(anthropic.BadRequestError) as refused:
            await ask(agent, user("plain"), max_tokens=32_000)
        body: Any = refused.value.body
        error = body["error"]
        assert error["type"] == "invalid_request_error"
        prefix = "input length and `max_tokens` exceed context limit: "
        numbers, _, rest = error["message"].removeprefix(prefix).partition(", ")
        assert rest == "decrease input length or `max_tokens` and try again"
        prompt, asked, most = (int(part) for part in numbers.replace(" > ", " + ").split(" + "))
        assert (asked, most) == (32_000, 8192)
        answer = await ask(agent, user("plain"), max_tokens=most - prompt)
        assert answer.stop_reason == "end_turn"
        with pytest.raises(
            anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 8192 m"
        ):
            await ask(agent, user("word " * 9000))
