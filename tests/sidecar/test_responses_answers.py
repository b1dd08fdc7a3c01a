"""The events of a response, as the published SDK and Codex take them."""

import asyncio
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from rollmesh.runtime.errors import EngineLostError
from rollmesh.v1 import gateway_pb2
from tests.sidecar.scripted_gateway import (
    ScriptedGateway,
    answering,
    call,
    call_piece,
    done,
    failing,
    text,
    waiting,
)

CUSTOM: Any = {"type": "custom", "name": "patch"}
SEALED: Any = {"include": ["reasoning.encrypted_content"]}


def thought(content: str) -> gateway_pb2.StreamChatResponse:
    return gateway_pb2.StreamChatResponse(delta=gateway_pb2.ChatDelta(reasoning_content=content))


async def events(client: AsyncOpenAI, **fields: Any) -> list[Any]:
    stream = await client.responses.create(model="policy", input="Hi", stream=True, **fields)
    return [event async for event in stream]


async def helped(client: AsyncOpenAI, **fields: Any) -> Any:
    async with client.responses.stream(model="policy", input="Hi", **fields) as stream:
        return await stream.get_final_response()


async def test_the_sequence_of_events_is_complete(
    gateway: ScriptedGateway, client: AsyncOpenAI
) -> None:
    gateway.script = answering(
        thought("H"),
        thought("m."),
        text("Te"),
        text("xt."),
        call_piece(0, '{"a"', "c0", "f"),
        call_piece(0, ":1}"),
        done("Text.", reasoning="Hm.", calls=[call("c0", "f", '{"a":1}')]),
    )
    found = await events(client, **SEALED)
    assert [event.type.removeprefix("response.") for event in found] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.delta",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    assert [event.sequence_number for event in found] == list(range(len(found)))
    response = found[-1].response
    added = [one.item.id for one in found if one.type == "response.output_item.added"]
    ended = [one.item for one in found if one.type == "response.output_item.done"]
    assert (
        added
        == [one.id for one in response.output]
        == ["rs_answer-1", "msg_answer-1", "fc_answer-1_0"]
    )
    assert ended == response.output
    assert response.output[0].encrypted_content
    assert (response.usage.input_tokens, response.usage.output_tokens) == (11, 5)
    whole = await client.responses.create(model="policy", input="Hi", **SEALED)
    assert whole.output == response.output
    assert (whole.id, whole.usage) == (response.id, response.usage)
    assert await helped(client) is not None


async def test_nothing_is_done_before_its_turn_is_committed(
    gateway: ScriptedGateway, client: AsyncOpenAI
) -> None:
    # Codex keeps an item and runs a call once it is done, and takes neither back.
    seen, go_on = list[str](), asyncio.Event()
    before = [text("Text."), call_piece(0, "{}", "c0", "f"), call_piece(1, "{}", "c1", "f")]
    calls = [call("c0", "f", "{}"), call("c1", "f", "{}")]
    gateway.script = waiting(go_on.wait, before, [done("Text.", calls=calls)])
    stream = await client.responses.create(model="policy", input="Hi", stream=True)
    async for event in stream:
        seen.append(event.type)
        if seen.count("response.function_call_arguments.delta") == 2 and not go_on.is_set():
            assert not [kind for kind in seen if kind.endswith(".done")]
            go_on.set()
    assert seen.count("response.output_item.done") == 3


async def test_a_failure_in_the_stream_is_raised_and_does_not_look_complete(
    gateway: ScriptedGateway, client: AsyncOpenAI
) -> None:
    gateway.script = failing(EngineLostError("the engine went away"), text("Half"))
    found = list[str]()

    async def read() -> None:
        async for event in await client.responses.create(model="m", input="Hi", stream=True):
            found.append(event.type)

    with pytest.raises(openai.APIError) as caught:
        await read()
    assert (caught.value.code, caught.value.message) == ("engine_lost", "the engine went away")
    assert "response.completed" not in found
    assert "response.output_item.done" not in found
    with pytest.raises(openai.APIError):
        await helped(client)


async def test_a_failure_before_the_first_delta_has_its_status(
    gateway: ScriptedGateway, client: AsyncOpenAI
) -> None:
    gateway.script = failing(EngineLostError("the engine went away"))
    for stream in (False, True):
        with pytest.raises(openai.InternalServerError) as caught:
            await client.responses.create(model="m", input="Hi", stream=stream)
        assert caught.value.response.headers["retry-after"] == "1"


async def test_an_answer_without_deltas_is_streamed_from_its_end(
    gateway: ScriptedGateway, client: AsyncOpenAI
) -> None:
    gateway.script = answering(done("Text.", reasoning="Hm.", calls=[call("c0", "f", "{}")]))
    response = await helped(client)
    assert [one.type for one in response.output] == ["reasoning", "message", "function_call"]
    gateway.script = answering(done())
    response = await helped(client)
    assert [one.content[0].text for one in response.output] == [""]


async def test_text_after_a_call_is_an_item_of_its_own(
    gateway: ScriptedGateway, client: AsyncOpenAI
) -> None:
    gateway.script = answering(
        text("A"),
        call_piece(0, "{}", "c0", "f"),
        text("B"),
        done("AB", calls=[call("c0", "f", "{}")]),
    )
    response = await helped(client)
    assert [one.id for one in response.output] == [
        "msg_answer-1",
        "fc_answer-1_0",
        "msg_answer-1_1",
    ]
    assert response.output_text == "AB"


async def test_the_input_of_a_custom_tool_is_decoded(
    gateway: ScriptedGateway, client: AsyncOpenAI
) -> None:
    sampled = '{"input": "a\\nb"}'
    gateway.script = answering(
        call_piece(0, sampled[:9], "c0", "patch"),
        call_piece(0, sampled[9:]),
        done(calls=[call("c0", "patch", sampled)]),
    )
    found = await events(client, tools=[CUSTOM])
    (delta,) = [one for one in found if one.type == "response.custom_tool_call_input.delta"]
    item = found[-1].response.output[0]
    assert (delta.delta, item.input, item.id) == ("a\nb", "a\nb", "ctc_answer-1_0")
    assert (await helped(client, tools=[CUSTOM])).output[0] == item


async def test_arguments_that_are_no_input_are_passed_on_and_known_again(
    gateway: ScriptedGateway, client: AsyncOpenAI
) -> None:
    sampled = '{"patch":  "a"}'
    gateway.script = answering(done(calls=[call("c0", "patch", sampled)]))
    item: Any = (await client.responses.create(model="m", input="Hi", tools=[CUSTOM])).output[0]
    assert item.input == sampled
    await client.responses.create(model="m", input=[item.to_dict()], tools=[CUSTOM])
    (message,) = gateway.requests[-1].messages
    assert message.tool_calls[0].arguments_json == sampled


async def test_a_response_repeats_its_request(
    gateway: ScriptedGateway, client: AsyncOpenAI
) -> None:
    fields: Any = {"metadata": {"a": "b"}, "instructions": "Be.", "tools": [CUSTOM]}
    for found in (
        await client.responses.create(model="m", input="Hi", **fields),
        (await events(client, **fields))[-1].response,
    ):
        assert (found.metadata, found.instructions) == ({"a": "b"}, "Be.")
        assert found.tools[0].to_dict() == CUSTOM
        assert (found.parallel_tool_calls, found.tool_choice, found.store) == (True, "auto", True)
