"""Agents of every protocol go on from a recorded node, with the conversation as they had it.

The model thinks and calls a tool, and the conversation shows images. The agents are the published
packages.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from rollmesh.client import Client, Session, SessionResult, Start
from tests.lazily import anthropic, genai
from tests.mesh.test_images import CAT, DOG, OWL, agent_of
from tests.meshes import Mesh, delivered, scripted_mesh

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore:Inheritance class AiohttpClientSession"),
]
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": 7}}\n</tool_call>'
RULES = [
    ("compute", f"<think>\nI take the tool.\n</think>\n\n I look.\n\n{CALL}"),
    ("</tool_response>", "<think>\nAh.\n</think>\n\n It is a cat. "),
    ("thanks", "<think>\nThey\n\nare kind.\n</think>\n\nYou are welcome."),
    ("plain", "You are welcome."),
]
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"at": {"type": "integer"}}}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def seeing(tmp_path_factory: pytest.TempPathFactory, vision_dir: Path) -> AsyncIterator[Mesh]:
    folder = tmp_path_factory.mktemp("seeing")
    rules = [("compute", CALL), ("</tool_response>", "It is a cat."), ("plain", "Good.")]
    async with scripted_mesh(folder, vision_dir, rules) as mesh:
        yield mesh


async def by_chat(mesh: Mesh, session: Session, history: list[Any], *, stream: bool) -> None:
    tool: Any = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
    agent: Any = mesh.openai(session)
    asked = {"model": "policy", "messages": history, "tools": [tool]}
    if stream:
        async with agent.chat.completions.stream(**asked) as chunks:
            answer: Any = await chunks.get_final_completion()
    else:
        answer = await agent.chat.completions.create(**asked)
    message = answer.choices[0].message
    history.append(message.model_dump(exclude_none=True, exclude={"parsed"}))
    history += [
        {"role": "tool", "tool_call_id": one.id, "content": "seen"}
        for one in message.tool_calls or ()
    ]
    if message.tool_calls:
        for one in history[-2]["tool_calls"]:
            one["function"].pop("parsed_arguments", None)


async def by_responses(mesh: Mesh, session: Session, history: list[Any], *, stream: bool) -> None:
    tool: Any = {"type": "function", "name": "look", "parameters": SCHEMA}
    agent: Any = mesh.openai(session)
    asked = {"model": "policy", "input": history, "tools": [tool]}
    asked["include"] = ["reasoning.encrypted_content"]
    if stream:
        async with agent.responses.stream(**asked) as events:
            answer: Any = await events.get_final_response()
    else:
        answer = await agent.responses.create(**asked)
    items = [one.model_dump(exclude_none=True) for one in answer.output]
    for one in items:
        one.pop("parsed_arguments", None)
    history += items
    history += [
        {"type": "function_call_output", "call_id": one["call_id"], "output": "seen"}
        for one in items
        if one["type"] == "function_call"
    ]


async def by_messages(mesh: Mesh, session: Session, history: list[Any], *, stream: bool) -> None:
    url = session.base_url.removesuffix("/v1")
    asked: Any = {"model": "policy", "max_tokens": 300, "messages": history}
    asked["tools"] = [{"name": "look", "input_schema": SCHEMA}]
    async with anthropic.AsyncAnthropic(base_url=url, api_key="static", max_retries=0) as agent:
        if stream:
            async with agent.messages.stream(**asked) as events:
                answer: Any = await events.get_final_message()
        else:
            answer = await agent.messages.create(**asked)
    history.append({"role": "assistant", "content": answer.content})
    results = [
        {"type": "tool_result", "tool_use_id": one.id, "content": "seen"}
        for one in answer.content
        if one.type == "tool_use"
    ]
    history += [{"role": "user", "content": results}] if results else []


async def by_google(mesh: Mesh, session: Session, history: list[Any], *, stream: bool) -> None:
    del mesh
    options: Any = {"base_url": session.base_url.removesuffix("/v1"), "timeout": 30_000}
    config: Any = {
        "tools": [{"function_declarations": [{"name": "look", "parameters_json_schema": SCHEMA}]}],
        "automatic_function_calling": {"disable": True},
    }
    async with genai.Client(api_key="static", http_options=options).aio as agent:
        asked: Any = {"model": "policy", "contents": history, "config": config}
        if stream:
            chunks = [one async for one in await agent.models.generate_content_stream(**asked)]
        else:
            chunks = [await agent.models.generate_content(**asked)]
    answers: list[Any] = chunks
    parts = [part for one in answers for part in one.candidates[0].content.parts]
    for part in parts:
        part.thought_signature = None  # it is of one session, and refused in another
    history.append({"role": "model", "parts": parts})
    results = [
        {
            "function_response": {
                "name": "look",
                "id": part.function_call.id,
                "response": {"output": "seen"},
            }
        }
        for part in parts
        if part.function_call
    ]
    history += [{"role": "user", "parts": results}] if results else []


PROTOCOLS = {
    "chat": by_chat,
    "responses": by_responses,
    "messages": by_messages,
    "google": by_google,
}


def user(protocol: str, text: str) -> dict[str, Any]:
    if protocol == "google":
        return {"role": "user", "parts": [{"text": text}]}
    return {"role": "user", "content": text}


async def last_of(client: Client, session: Session) -> Start:
    """The start from the last node of a closed session."""
    result = await delivered(client, session)
    return await client.start_at(session.session_id, result.trajectories[0].segments[-1].node_id)


def check(result: SessionResult, start: Start) -> None:
    (row,) = result.trajectories
    size = len(start.token_ids)
    assert row.token_ids[:size].tolist() == start.token_ids.tolist()
    assert (row.turns, row.lineage) == (1, "MAIN")
    assert not row.loss_mask[: row.prompt_tokens].any()
    assert row.loss_mask[row.prompt_tokens :].all()
    assert set(row.reasons) <= {"IMPORTED", "LENIENT_ECHO", "TEMPLATE_REWRITE"}
    assert result.origin is not None
    assert result.origin.continued


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_an_agent_that_resends_its_conversation_continues_the_recorded_ids(
    thinking: Mesh, protocol: str, *, stream: bool
) -> None:
    speak, history = PROTOCOLS[protocol], [user(protocol, "compute")]
    async with thinking.client() as client:
        async with client.session(record_messages=True) as session:
            await speak(thinking, session, history, stream=stream)
            await speak(thinking, session, history, stream=stream)
        start = await last_of(client, session)
        assert sum(one.sampled for one in start.request.nodes) == 2
        history.append(user(protocol, "thanks"))
        async with client.session(start=start) as again:
            await speak(thinking, again, history, stream=stream)
        check(await delivered(client, again), start)


async def test_the_conversation_of_a_start_is_one_for_every_chat_agent(thinking: Mesh) -> None:
    history: list[Any] = [user("messages", "compute")]
    async with thinking.client() as client:
        async with client.session(record_messages=True) as session:
            await by_messages(thinking, session, history, stream=False)
            await by_messages(thinking, session, history, stream=False)
        start = await last_of(client, session)
        assert start.messages[1]["reasoning_content"]
        messages = [*start.messages, user("chat", "thanks")]
        async with client.session(start=start) as again:
            await by_chat(thinking, again, messages, stream=False)
        check(await delivered(client, again), start)


@pytest.mark.parametrize("protocol", ["chat", "responses", "messages"])
async def test_images_of_a_context_are_shown_again(seeing: Mesh, protocol: str) -> None:
    async with seeing.client() as client:
        async with client.session(record_messages=True) as session:
            agent = agent_of(seeing, session, protocol)
            await agent.ask(CAT, "compute")
            await agent.give(DOG)
        start = await last_of(client, session)
        assert len(start.request.images) == 2
        opened = client.session_request(start=start, request_id=f"images {protocol}")
        again = await client.open_session(opened)
        await seeing.restart("gateway")
        other = agent_of(seeing, again, protocol)
        other.history = [*agent.history]
        await other.ask(OWL, "plain")
        await client.close_session(again)
        result = await delivered(client, again)
        check(result, start)
        (row,) = result.trajectories
        assert len(row.images) == len(result.images) == 3
        earlier = (await client.stored_session(session.session_id)).trajectories[0].images
        assert [*row.images[:2]] == [*earlier]
        broken = await client.start_at(session.session_id, start.request.nodes[-1].node_id)
        broken.request.images[0].data += b"x"
        with pytest.raises(Exception, match=r"start\.images\[0\]\.data"):
            await client.open_session(client.session_request(start=broken))
        if protocol == "chat":
            async with client.session(start=start) as shown:
                messages = [*start.messages, user("chat", "plain")]
                await by_chat(seeing, shown, messages, stream=False)
            check(await delivered(client, shown), start)
