"""What the stream of an answer contains, to the first request and to its retries."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollmesh.gateway import Session
from rollmesh.v1 import gateway_pb2
from tests.gateway.live import Cut, LiveMesh
from tests.messages import chat_in, said
from tests.waiting import until

TIMEOUT_S = 180
TOKENS = gateway_pb2.ReturnOptions(token_ids=True, logprobs=True, top_logprobs=1)


async def asked(mesh: LiveMesh, **fields: Any) -> gateway_pb2.ChatRequest:
    """Opens a session. Returns a request in it."""
    opened = await mesh.stub.CreateSession(gateway_pb2.CreateSessionRequest())
    return chat_in(opened, said("q"), **fields)


async def streamed(
    mesh: LiveMesh, request: gateway_pb2.ChatRequest
) -> dict[int, list[gateway_pb2.StreamChatResponse]]:
    """Returns the responses of a stream, by choice."""
    found: dict[int, list[gateway_pb2.StreamChatResponse]] = {}
    call = mesh.stub.StreamChat(gateway_pb2.StreamChatRequest(chat=request), timeout=TIMEOUT_S)
    async for response in call:
        found.setdefault(response.choice_index, []).append(response)
    return found


def check(responses: list[gateway_pb2.StreamChatResponse]) -> gateway_pb2.ChatAnswer:
    """Checks the stream of a choice. Returns its answer."""
    kinds = [response.WhichOneof("event") for response in responses]
    assert (kinds[0], kinds[-1]) == ("begun", "done")
    done = responses[-1].done
    assert responses[0].begun.answer_id == done.answer_id
    deltas = [one.delta for one in responses if one.HasField("delta")]
    assert kinds.count("delta") == len(deltas) == len(kinds) - 2 - kinds.count("prompt")
    assert "".join(one.content for one in deltas) == done.message.content[0].text
    assert [one.prompt_tokens for one in deltas if one.prompt_tokens] == [done.prompt_tokens]
    assert deltas[0].prompt_tokens
    return done


def check_tokens(
    responses: list[gateway_pb2.StreamChatResponse], done: gateway_pb2.ChatAnswer
) -> None:
    deltas = [one.delta for one in responses if one.HasField("delta")]
    ids = b"".join(one.tokens.token_ids_u32le for one in deltas)
    assert len(np.frombuffer(ids, "<u4")) == done.completion_tokens
    assert sum(len(one.tokens.texts) for one in deltas) == done.completion_tokens


async def test_a_stream_begins_with_its_id_and_ends_with_the_answer(mesh: LiveMesh) -> None:
    request = await asked(mesh)
    first = check((await streamed(mesh, request))[0])
    request.retry_count = 1
    again = check((await streamed(mesh, request))[0])
    assert (again.answer_id, again.message) == (first.answer_id, first.message)


async def test_tokens_of_a_stream_that_come_together_are_sent_together(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    async with LiveMesh(tmp_path, tokenizer_dir, tokens_per_second=200) as mesh:
        counts: list[int] = []
        for interval_ms in (0, 1_000):
            await mesh.start_gateway(stream_interval_ms=interval_ms)
            responses = (await streamed(mesh, await asked(mesh, returns=TOKENS)))[0]
            check_tokens(responses, check(responses))
            counts.append(sum(one.HasField("delta") for one in responses))
    each, together = counts
    assert each > 10  # of 24 tokens
    assert together <= 3  # the first, and the rest


async def test_the_prompt_is_sent_once_and_each_choice_has_its_tokens(mesh: LiveMesh) -> None:
    request = await asked(mesh, choices=3, returns=TOKENS)
    for retry_count in range(2):  # while they are sampled, and of the stored answers
        request.retry_count = retry_count
        choices = await streamed(mesh, request)
        prompts = [
            one.prompt for all_ in choices.values() for one in all_ if one.HasField("prompt")
        ]
        assert len(prompts) == 1
        answers = [check(choices[index]) for index in range(3)]
        assert len({one.answer_id for one in answers}) == 3
        for index, done in enumerate(answers):
            check_tokens(choices[index], done)
            assert len(prompts[0].token_ids_u32le) == 4 * done.prompt_tokens


async def test_a_stream_that_joins_an_unstreamed_turn_has_its_tokens_too(mesh: LiveMesh) -> None:
    request = await asked(mesh, returns=TOKENS)
    cut = Cut(0, "waits")
    mesh.cuts.append(cut)
    async with asyncio.timeout(TIMEOUT_S), asyncio.TaskGroup() as tasks:
        whole = asyncio.ensure_future(chat(mesh, request))
        session = mesh.gateway.session(request.session_id)
        await until(lambda: bool(session.in_flight))
        (turn,) = session.in_flight
        retry = gateway_pb2.ChatRequest()
        retry.CopyFrom(request)
        retry.retry_count = 1
        joined = tasks.create_task(streamed(mesh, retry))
        await until(lambda: turn.joins == 2)
        cut.gate.set()
        (answer,) = (await whole).answers
        responses = (await joined)[0]
    assert check(responses).answer_id == answer.answer_id
    check_tokens(responses, answer)


async def chat(mesh: LiveMesh, request: gateway_pb2.ChatRequest) -> gateway_pb2.ChatResponse:
    return await mesh.stub.Chat(request, timeout=TIMEOUT_S)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_cancels_all_choices(mesh: LiveMesh, *, stream: bool) -> None:
    request = await asked(mesh, choices=2)
    mesh.cuts += [Cut(0, "waits"), Cut(0, "waits")]
    async with asyncio.timeout(TIMEOUT_S):
        if stream:
            call = mesh.stub.StreamChat(gateway_pb2.StreamChatRequest(chat=request))
        else:
            call = mesh.stub.Chat(request)  # type: ignore[assignment]
        session: Session = mesh.gateway.session(request.session_id)
        await until(lambda: len(session.in_flight) == 2)
        call.cancel()
        await until(lambda: not session.in_flight)
    assert not session.turns
    assert not session.tree.turns
