"""What agents get, through the published SDK."""

import asyncio
from typing import Any

import httpx2
import pytest
from openai import AsyncOpenAI

from rollmesh.sidecar import SidecarConfig
from rollmesh.v1 import gateway_pb2, sampling_pb2
from tests.sidecar.scripted_gateway import (
    KEY,
    Events,
    ScriptedGateway,
    answering,
    call,
    call_piece,
    done,
    serving,
    sidecar_of,
    text,
    waiting,
)

ASK: list[Any] = [{"role": "user", "content": "What is 6 x 7?"}]
ARGUMENTS = '{"a": 6,  "b":7.0, "note": "caf\\u00e9 "}'
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "calculator", "parameters": {"type": "object"}}}
]
TWO_CALLS = [call("call_00Ab", "calculator", ARGUMENTS), call("call_01Ab", "clock", "{}")]


async def test_a_whole_answer_has_every_field_of_the_sdk(
    gateway: ScriptedGateway, client: AsyncOpenAI
) -> None:
    gateway.script = answering(done("  The answer is 42. \n", reasoning="\n Let me think. \n"))
    answer = await client.chat.completions.create(model="any-name", messages=ASK)
    assert answer.id == "chatcmpl-answer-1"
    assert (answer.object, answer.model, answer.created) == (
        "chat.completion",
        "any-name",
        1_790_000_000,
    )
    choice = answer.choices[0]
    assert choice.message.content == "  The answer is 42. \n"
    assert choice.message.model_extra == {"reasoning_content": "\n Let me think. \n"}
    assert choice.finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (11, 5)
    assert answer.usage.total_tokens == 16
    assert answer.usage.prompt_tokens_details.cached_tokens == 3


async def test_parallel_tool_calls_keep_ids_and_argument_bytes(
    gateway: ScriptedGateway, client: AsyncOpenAI
) -> None:
    gateway.script = answering(done(" I will compute.\n\n", calls=TWO_CALLS))
    answer = await client.chat.completions.create(model="m", messages=ASK, tools=TOOLS)
    message = answer.choices[0].message
    assert answer.choices[0].finish_reason == "tool_calls"
    assert message.content == " I will compute.\n\n"
    assert message.tool_calls is not None
    assert [entry.id for entry in message.tool_calls] == ["call_00Ab", "call_01Ab"]
    first = message.tool_calls[0]
    assert first.type == "function"
    assert (first.function.name, first.function.arguments) == ("calculator", ARGUMENTS)


async def test_a_turn_of_calls_only_has_null_content(
    gateway: ScriptedGateway, client: AsyncOpenAI
) -> None:
    gateway.script = answering(done(calls=TWO_CALLS))
    answer = await client.chat.completions.create(model="m", messages=ASK, tools=TOOLS)
    assert answer.choices[0].message.content is None


async def test_length_stays_length_even_after_tool_calls(
    gateway: ScriptedGateway, client: AsyncOpenAI
) -> None:
    gateway.script = answering(done(calls=TWO_CALLS, finish=sampling_pb2.FINISH_REASON_LENGTH))
    answer = await client.chat.completions.create(model="m", messages=ASK, tools=TOOLS)
    assert answer.choices[0].finish_reason == "length"


async def test_each_delta_leaves_before_the_gateway_sends_the_next(
    gateway: ScriptedGateway, client: AsyncOpenAI
) -> None:
    released = [asyncio.Event() for _ in range(3)]

    async def script(request: gateway_pb2.ChatRequest) -> Events:
        for at, event in enumerate(released):
            await event.wait()
            yield text(f"piece {at} ")
        yield done("piece 0 piece 1 piece 2 ")

    gateway.script = script
    released[0].set()
    pieces: list[str] = []
    async with asyncio.timeout(60):
        stream = await client.chat.completions.create(model="m", messages=ASK, stream=True)
        async for chunk in stream:
            if chunk.choices[0].delta.content:
                pieces.append(chunk.choices[0].delta.content)
                if len(pieces) < 3:
                    released[len(pieces)].set()  # only what has arrived lets the next one go
    assert pieces == ["piece 0 ", "piece 1 ", "piece 2 "]


async def test_a_stream_has_one_id_the_role_first_and_usage_only_when_asked(
    gateway: ScriptedGateway, client: AsyncOpenAI
) -> None:
    gateway.script = answering(text("The "), text("answer"), done("The answer"))
    stream = await client.chat.completions.create(model="m", messages=ASK, stream=True)
    chunks = [chunk async for chunk in stream]
    assert len({chunk.id for chunk in chunks}) == 1
    roles = [chunk.choices[0].delta.role for chunk in chunks]
    assert roles == ["assistant", None, None, None]
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None, None, None, "stop"]
    assert all(chunk.usage is None for chunk in chunks)
    stream = await client.chat.completions.create(
        model="m", messages=ASK, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == 16
    assert all(chunk.usage is None for chunk in chunks[:-1])


async def test_the_last_event_of_a_stream_is_done(base_url: str) -> None:
    body = {"messages": ASK, "model": "m", "stream": True}
    async with httpx2.AsyncClient(timeout=60) as http:
        answer = await http.post(f"{base_url}/sessions/{KEY}/v1/chat/completions", json=body)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.text.endswith("data: [DONE]\n\n")


async def test_tool_calls_stream_as_deltas_that_the_helper_joins(
    gateway: ScriptedGateway, client: AsyncOpenAI
) -> None:
    gateway.script = answering(
        call_piece(0, "", "call_00Ab", "calculator"),
        call_piece(0, ARGUMENTS[:9]),
        call_piece(0, ARGUMENTS[9:]),
        call_piece(1, "{}", "call_01Ab", "clock"),
        done(calls=TWO_CALLS),
    )
    async with client.chat.completions.stream(model="m", messages=ASK, tools=TOOLS) as stream:
        final = await stream.get_final_completion()
    message = final.choices[0].message
    assert final.choices[0].finish_reason == "tool_calls"
    assert message.tool_calls is not None
    assert [entry.id for entry in message.tool_calls] == ["call_00Ab", "call_01Ab"]
    assert [entry.function.arguments for entry in message.tool_calls] == [ARGUMENTS, "{}"]


async def test_a_replayed_answer_without_deltas_streams_its_message(
    gateway: ScriptedGateway, client: AsyncOpenAI
) -> None:
    gateway.script = answering(done(" Let me.", calls=TWO_CALLS, reasoning="Hm."))
    async with client.chat.completions.stream(model="m", messages=ASK, tools=TOOLS) as stream:
        final = await stream.get_final_completion()
    message = final.choices[0].message
    assert message.content == " Let me."
    assert message.tool_calls is not None
    assert [entry.function.name for entry in message.tool_calls] == ["calculator", "clock"]
    assert message.model_extra == {"reasoning_content": "Hm."}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_n_choices_are_asked_for_at_once_and_keep_their_index(
    gateway: ScriptedGateway, client: AsyncOpenAI, *, stream: bool
) -> None:
    async def script(request: gateway_pb2.ChatRequest) -> Events:
        for at in reversed(range(request.choices)):  # in any order
            for event in (text(f"choice {at}"), done(f"choice {at}")):
                event.choice_index = at
                yield event

    gateway.script = script
    async with asyncio.timeout(60):
        answer: Any = await client.chat.completions.create(
            model="m", messages=ASK, n=3, stream=stream
        )
        found: dict[int, str] = {}
        if stream:
            async for chunk in answer:
                choice = chunk.choices[0]
                found[choice.index] = found.get(choice.index, "") + (choice.delta.content or "")
        else:
            found = {choice.index: choice.message.content for choice in answer.choices}
            assert answer.usage.completion_tokens == 15
            assert answer.usage.prompt_tokens == 11
    assert found == {at: f"choice {at}" for at in range(3)}
    assert len(gateway.requests) == 1


async def test_comments_fill_the_silence_and_the_sdk_skips_them(gateway: ScriptedGateway) -> None:
    seen = asyncio.Event()
    gateway.script = waiting(seen.wait, [], [text("late"), done("late")])
    body = {"messages": ASK, "model": "m", "stream": True}
    async with asyncio.timeout(60), serving(gateway) as address:
        config = SidecarConfig(gateway=address, keep_alive_ms=50)
        async with sidecar_of(config) as url:
            base = f"{url}/sessions/{KEY}/v1"
            async with (
                httpx2.AsyncClient(timeout=60) as http,
                http.stream("POST", f"{base}/chat/completions", json=body) as answer,
            ):
                lines = answer.aiter_lines()
                while await anext(lines) != ": keep-alive":
                    continue
                seen.set()
                assert [line async for line in lines][-2] == "data: [DONE]"
            seen.clear()
            asyncio.get_running_loop().call_later(0.2, seen.set)
            async with AsyncOpenAI(base_url=base, api_key="static", max_retries=0) as client:
                stream = await client.chat.completions.create(model="m", messages=ASK, stream=True)
                contents = [chunk.choices[0].delta.content async for chunk in stream]
            assert [content for content in contents if content] == ["late"]


async def test_models_and_health_are_served_under_both_prefixes(
    base_url: str, client: AsyncOpenAI
) -> None:
    assert [model.id async for model in client.models.list()] == ["policy"]
    async with httpx2.AsyncClient(base_url=base_url, timeout=60) as http:
        assert (await http.get("/v1/models")).json()["data"][0]["id"] == "policy"
        for path in ("/healthz", f"/sessions/{KEY}/healthz"):
            answer = await http.get(path)
            assert (answer.status_code, answer.json()) == (200, {"status": "ok"})
