"""Traces of turns: what real services send to a receiver of OTLP, and what a bad one costs."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from openai import BadRequestError

from rollmesh.client import Client, Session
from tests.meshes import Mesh, delivered, scripted_mesh
from tests.receivers import (
    Receiver,
    SentSpan,
    grpc_receiver,
    hanging_receiver,
    http_receiver,
)
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")
SERVICES = ("router", "collector", "gateway", "sidecar")
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2]}}\n</tool_call>'
RULES = [
    ("plain", f"I add.\n{CALL}"),
    ("<tool_response>\n3\n</tool_response>", "It is 3."),
    ("long", "One after the other, many words follow each other here until the end of it."),
]
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {"type": "object", "properties": {"a": {"type": "number"}}},
        },
    }
]
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@asynccontextmanager
async def traced(folder: Path, model: Path, url: str, **settings: Any) -> AsyncIterator[Mesh]:
    """A mesh that sends traces. `settings` lack the prefix."""
    flags = {"traces_endpoint": url, **{f"traces_{k}": v for k, v in settings.items()}}
    first: dict[str, Any] = dict.fromkeys(SERVICES, flags)
    async with scripted_mesh(folder, model, RULES, first=first, **flags) as mesh:
        yield mesh


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def both(
    tmp_path_factory: pytest.TempPathFactory, tokenizer_dir: Path
) -> AsyncIterator[dict[str, tuple[Mesh, Receiver]]]:
    """A mesh without content by gRPC, and one with content by HTTP, and a key."""
    folder = tmp_path_factory.mktemp("traced")
    keys = folder / "headers"
    keys.write_text("# a key\nauthorization: Bearer abc\n")
    keys.chmod(0o600)
    async with AsyncExitStack() as stack:
        by_grpc = await stack.enter_async_context(grpc_receiver())
        by_http = stack.enter_context(http_receiver())
        plain = traced(folder / "grpc", tokenizer_dir, by_grpc.url, protocol="grpc")
        told = traced(folder / "http", tokenizer_dir, by_http.url, content=True, headers_file=keys)
        meshes = [await stack.enter_async_context(one) for one in (plain, told)]
        yield {"grpc": (meshes[0], by_grpc), "http": (meshes[1], by_http)}


async def ask(
    agent: Any, messages: list[Any], *, stream: bool, headers: dict[str, str] | None = None
) -> Any:
    """Returns the message of one answer, or its chunks."""
    request: Any = {"model": "policy", "messages": messages, "tools": TOOLS, "temperature": 0.5}
    if not stream:
        answer = await agent.chat.completions.create(**request, extra_headers=headers)
        return answer.choices[0].message
    chunks = await agent.chat.completions.create(**request, stream=True, extra_headers=headers)
    return [chunk async for chunk in chunks]


def named(spans: list[SentSpan], name: str) -> SentSpan:
    (found,) = [one for one in spans if one.name == name]
    return found


@pytest.mark.parametrize("protocol", ["grpc", "http"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_turn_is_one_trace_through_all_services(
    both: dict[str, tuple[Mesh, Receiver]], protocol: str, *, stream: bool
) -> None:
    mesh, receiver = both[protocol]
    async with mesh.client() as client:
        async with client.session(group_id="g", group_size=2, run_id="r") as session:
            agent = mesh.openai(session)
            await ask(agent, [{"role": "user", "content": "plain"}], stream=stream)
            session.reward = 0.5
        await delivered(client, session)
    spans = await receiver.of_session(
        session.session_id,
        *("POST /v1/chat/completions", "chat policy", "lease", "generate"),
        *("invoke_agent", "ingest"),
    )
    door = named(spans, "POST /v1/chat/completions")
    chat, lease = named(spans, "chat policy"), named(spans, "lease")
    generate = named(spans, "generate")
    turn = {one.trace_id for one in (door, chat, lease, generate)}
    assert turn == {door.trace_id}
    assert (door.parent_id, chat.parent_id) == ("", door.span_id)
    assert lease.parent_id == generate.parent_id == chat.span_id
    assert [one.service for one in (door, chat, lease, generate)] == [
        "rollmesh-sidecar", "rollmesh-gateway", "rollmesh-router", "rollmesh-engine"
    ]  # fmt: skip
    assert [one.kind for one in (door, chat, lease, generate)] == [2, 3, 2, 2]
    assert all(one.nanoseconds >= 0 and not one.is_error for one in spans)
    said = chat.attributes
    assert said["gen_ai.operation.name"] == "chat"
    assert said["gen_ai.provider.name"] == "rollmesh"
    assert said["gen_ai.conversation.id"] == session.session_id
    assert (said["gen_ai.request.model"], said["gen_ai.response.model"]) == ("policy", "policy")
    assert (said["gen_ai.request.temperature"], said["gen_ai.request.stream"]) == (0.5, stream)
    assert said["gen_ai.response.finish_reasons"] == ["tool_calls"]
    assert said["gen_ai.response.id"] == f"chatcmpl-{session.session_id}-{said['rollmesh.node.id']}"
    assert said["gen_ai.usage.input_tokens"] == generate.attributes["rollmesh.prompt_tokens"]
    assert said["gen_ai.usage.output_tokens"] == generate.attributes["rollmesh.sampled_tokens"]
    assert 0 <= said["gen_ai.response.time_to_first_chunk"] * 1e9 <= chat.nanoseconds
    assert (said["rollmesh.policy.version"], said["rollmesh.policy.run"]) == (0, 0)
    assert (said["rollmesh.run.id"], said["rollmesh.group.id"]) == ("r", "g")
    assert said["rollmesh.fidelity.reasons"] == ["sampling_changed"]
    assert said["rollmesh.migrations"] == 0
    assert said["rollmesh.request.id"] == door.attributes["rollmesh.request.id"]
    engine = generate.attributes["rollmesh.engine.id"]
    assert said["rollmesh.engine.ids"] == [lease.attributes["rollmesh.engine.id"]] == [engine]
    assert lease.attributes["rollmesh.queue.wait_ms"] == 0
    assert door.attributes["http.response.status_code"] == 200
    # The end of the session has a trace of its own.
    root, ingest = named(spans, "invoke_agent"), named(spans, "ingest")
    assert root.trace_id == ingest.trace_id != door.trace_id
    assert (root.parent_id, ingest.parent_id) == ("", root.span_id)
    assert chat.links == [root.span_id]
    assert (root.service, ingest.service) == ("rollmesh-gateway", "rollmesh-collector")
    for one in (root, ingest):
        assert (one.attributes["rollmesh.reward"], one.attributes["rollmesh.turns"]) == (0.5, 1)
        assert one.attributes["rollmesh.outcome"] == "completed"
    has_key = [one.get("authorization") == "Bearer abc" for one in receiver.headers]
    assert set(has_key) == {protocol == "http"}


async def test_messages_and_tools_are_sent_only_with_content(
    both: dict[str, tuple[Mesh, Receiver]],
) -> None:
    sent: dict[str, SentSpan] = {}
    said: Any = None
    for protocol, (mesh, receiver) in both.items():
        async with mesh.client() as client, client.session() as session:
            agent = mesh.openai(session)
            messages: list[Any] = [{"role": "user", "content": "plain"}]
            said = await ask(agent, messages, stream=False)
            messages += [
                said.model_dump(exclude_none=True),
                {"role": "tool", "content": "3", "tool_call_id": said.tool_calls[0].id},
            ]
            await ask(agent, messages, stream=False)

            def answered(receiver: Receiver = receiver, id_: str = session.session_id) -> Any:
                chats = [
                    one
                    for one in receiver.spans
                    if one.name == "chat policy" and one.attributes["gen_ai.conversation.id"] == id_
                ]
                return chats if len(chats) == 2 else None

            sent[protocol] = (await until(answered))[-1]
    names = ("gen_ai.input.messages", "gen_ai.output.messages", "gen_ai.tool.definitions")
    assert not sent["grpc"].attributes.keys() & set(names)
    given, answer, tools = (json.loads(sent["http"].attributes[name]) for name in names)
    call = said.tool_calls[0]
    assert given == [
        {"role": "user", "parts": [{"type": "text", "content": "plain"}]},
        {
            "role": "assistant",
            "parts": [
                {"type": "text", "content": said.content},
                {
                    "type": "tool_call",
                    "id": call.id,
                    "name": "add",
                    "arguments": {"a": 1, "b": [2]},
                },
            ],
        },
        {
            "role": "tool",
            "parts": [{"type": "tool_call_response", "id": call.id, "response": "3"}],
        },
    ]
    assert answer == [
        {
            "role": "assistant",
            "parts": [{"type": "text", "content": "It is 3."}],
            "finish_reason": "stop",
        }
    ]
    assert tools == [{"type": "function", **TOOLS[0]["function"]}]


async def test_the_trace_of_an_agent_goes_on_unless_the_agent_left_it_out(
    both: dict[str, tuple[Mesh, Receiver]],
) -> None:
    mesh, receiver = both["grpc"]
    silent = PARENT.replace("0af765", "0bf765").removesuffix("01") + "00"
    async with mesh.client() as client, client.session() as session:
        agent, messages = mesh.openai(session), [{"role": "user", "content": "long"}]
        await ask(agent, messages, stream=False, headers={"traceparent": silent})
        await ask(agent, messages, stream=False, headers={"traceparent": "00-no-01"})
        await ask(agent, messages, stream=False, headers={"traceparent": PARENT})

        def sent() -> list[SentSpan]:
            found = [one for one in receiver.spans if one.trace_id == PARENT.split("-")[1]]
            return found if len(found) == 4 else []

        spans = await until(sent)
    assert named(spans, "POST /v1/chat/completions").parent_id == PARENT.split("-")[2]
    assert silent.split("-")[1] not in {one.trace_id for one in receiver.spans}
    doors = [
        one
        for one in receiver.spans
        if one.name.startswith("POST")
        and one.attributes["gen_ai.conversation.id"] == session.session_id
    ]
    assert len(doors) == 2


async def test_a_failed_turn_says_why(both: dict[str, tuple[Mesh, Receiver]]) -> None:
    mesh, receiver = both["grpc"]
    async with mesh.client() as client, client.session() as session:
        agent = mesh.openai(session)
        with pytest.raises(BadRequestError, match="context length"):
            await agent.chat.completions.create(
                model="policy", messages=[{"role": "user", "content": "x " * 200_000}]
            )
        spans = await receiver.of_session(session.session_id, "chat policy")
        spans = await receiver.of_session(session.session_id, "POST /v1/chat/completions")
    chat, door = named(spans, "chat policy"), named(spans, "POST /v1/chat/completions")
    assert (chat.is_error, door.is_error) == (True, False)
    assert chat.attributes["error.type"] == door.attributes["error.type"]
    assert door.attributes["http.response.status_code"] == 400


async def test_turns_beyond_the_ratio_send_nothing(tmp_path: Path, tokenizer_dir: Path) -> None:
    with http_receiver() as receiver:
        async with traced(tmp_path, tokenizer_dir, receiver.url, ratio=0) as mesh:
            async with mesh.client() as client:
                async with client.session() as session:
                    agent = mesh.openai(session)
                    for headers in ({}, {"traceparent": PARENT}):
                        await ask(
                            agent, [{"role": "user", "content": "plain"}], stream=False,
                            headers=headers,
                        )  # fmt: skip
                await delivered(client, session)
            for service in (*SERVICES, "engine"):
                assert await mesh.processes[service].terminate() == 0
        assert receiver.headers == []


async def has_tokens(client: Client, session: Session) -> bool:
    """Returns whether the gateway has tokens of a turn that is sampled."""
    tree = await client.open_session_tree(session.session_id)
    return any(turn.sampled_tokens for turn in tree.running)


async def test_the_trace_of_a_turn_whose_engine_dies_shows_the_migration(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    with http_receiver() as receiver:
        first: dict[str, Any] = {one: {"traces_endpoint": receiver.url} for one in SERVICES}
        async with scripted_mesh(
            tmp_path, tokenizer_dir, RULES, first=first, fault="engine-mid-stream",
            traces_endpoint=receiver.url, engine_id="dies",
        ) as mesh:  # fmt: skip
            async with mesh.client() as client, client.session() as session:
                agent = mesh.openai(session)
                async with asyncio.TaskGroup() as tasks:
                    messages = [{"role": "user", "content": "long"}]
                    tasks.create_task(ask(agent, messages, stream=True))
                    await mesh.processes["engine"].wait_line("FAULT")
                    await until(partial(has_tokens, client, session))
                    await mesh.processes["engine"].kill()
                    flags = {**mesh.flags("engine"), "port": 0, "engine_id": "lives"}
                    flags["script"] = tmp_path / "script.json"
                    await mesh.run("engine", "lives", **flags, traces_endpoint=receiver.url)
                names = ("chat policy", "generate", "lease", "lease")
                spans = await receiver.of_session(session.session_id, *names)
    chat = named(spans, "chat policy")
    assert chat.attributes["rollmesh.migrations"] == 1
    assert chat.attributes["rollmesh.engine.ids"] == ["dies", "lives"]
    assert chat.attributes["rollmesh.fidelity.reasons"] == ["migrated", "sampling_changed"]
    events = [(name, values.get("rollmesh.engine.id")) for name, values in chat.events]
    assert events == [
        ("rollmesh.first_tokens", None),
        ("rollmesh.engine_lost", "dies"),
        ("rollmesh.migration", "lives"),
    ]
    assert chat.events[2][1]["rollmesh.kept_tokens"] > 0
    leases = [one.attributes["rollmesh.engine.id"] for one in spans if one.name == "lease"]
    assert leases == ["dies", "lives"]
    assert named(spans, "generate").attributes["rollmesh.engine.id"] == "lives"


@pytest.mark.parametrize("protocol", ["grpc", "http"])
async def test_a_receiver_that_hangs_delays_neither_turns_nor_stops(
    tmp_path: Path, tokenizer_dir: Path, protocol: str
) -> None:
    async with hanging_receiver() as url:
        async with traced(tmp_path, tokenizer_dir, url, protocol=protocol) as mesh:
            async with mesh.client() as client, client.session() as session:
                agent = mesh.openai(session)
                async with asyncio.timeout(60):  # an export alone may take ten seconds
                    for _ in range(20):
                        await ask(agent, [{"role": "user", "content": "plain"}], stream=True)
            async with asyncio.timeout(30):
                for service in ("sidecar", "gateway", "engine", "router", "collector"):
                    assert await mesh.processes[service].terminate() == 0
