"""What a prompt costs, and what ended an answer: facts that protocols of agents must state."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from rollmesh.client import Session
from rollmesh.runtime.rpc import open_channel, typed_errors
from rollmesh.v1 import chat_pb2, gateway_pb2, gateway_pb2_grpc
from tests.meshes import Mesh

pytestmark = pytest.mark.asyncio(loop_scope="module")
RULES = [
    ("plain", "  The answer is 42. \n"),
    ("again", "Still 42."),
    ("stop here", "one two three four"),
]


@asynccontextmanager
async def gateway(mesh: Mesh) -> AsyncIterator[Any]:
    async with open_channel(mesh.address("gateway")) as channel:
        with typed_errors():
            yield gateway_pb2_grpc.GatewayServiceStub(channel)


def said(role: chat_pb2.Role.ValueType, text: str) -> chat_pb2.ChatMessage:
    return chat_pb2.ChatMessage(role=role, content=[chat_pb2.ContentPart(text=text)])


def user(text: str) -> chat_pb2.ChatMessage:
    return said(chat_pb2.ROLE_USER, text)


def chat(session: Session, *messages: chat_pb2.ChatMessage, **fields: Any) -> Any:
    return gateway_pb2.ChatRequest(
        session_id=session.session_id, session_key=session.api_key, messages=messages, **fields
    )


async def test_a_prompt_is_counted_as_it_will_be_sampled_from_and_nothing_is_kept(
    shared: Mesh,
) -> None:
    async with shared.client() as client, client.session() as session, gateway(shared) as stub:
        tree = gateway_pb2.GetSessionRequest(session_id=session.session_id)
        request = chat(session, user("plain"))
        for _ in range(2):
            before = (await stub.GetSession(tree)).nodes
            counted = await stub.CountTokens(gateway_pb2.CountTokensRequest(chat=request))
            assert (await stub.GetSession(tree)).nodes == before
            (answer,) = (await stub.Chat(request)).answers
            assert (counted.prompt_tokens, counted.is_lower_bound) == (answer.prompt_tokens, False)
            # The sampled turn counts as its own tokens, which no text would give again.
            request = chat(session, user("plain"), answer.message, user("again"))


@pytest.mark.parametrize(("words", "is_lower_bound"), [(2100, False), (90_000, True)])
async def test_a_prompt_that_exceeds_the_context_is_counted_and_exceeds_it(
    shared: Mesh, words: int, *, is_lower_bound: bool
) -> None:
    async with shared.client() as client, client.session() as session, gateway(shared) as stub:
        request = gateway_pb2.CountTokensRequest(chat=chat(session, user("word " * words)))
        counted = await stub.CountTokens(request)
        most = (await stub.GetGatewayInfo(gateway_pb2.GetGatewayInfoRequest())).max_context_tokens
    assert counted.prompt_tokens > most
    assert counted.is_lower_bound == is_lower_bound


async def test_an_answer_names_the_stop_string_that_ended_it_also_in_a_replay(
    shared: Mesh,
) -> None:
    async with shared.client() as client, client.session() as session, gateway(shared) as stub:
        for retries in (0, 1):
            request = chat(session, user("stop here"), stop=["four", " three"], retry_count=retries)
            (answer,) = (await stub.Chat(request)).answers
            assert answer.stop == " three"
        (answer,) = (await stub.Chat(chat(session, user("plain"), stop=["none"]))).answers
        assert not answer.stop
