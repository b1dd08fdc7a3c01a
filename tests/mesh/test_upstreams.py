"""Agents of every protocol on a model that is served elsewhere, and what is recorded of it."""

import asyncio
import json
import math
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio
from anthropic import AsyncAnthropic

from rollmesh.batches import TextSessionError, rows_of
from rollmesh.client import Budget, SessionResult, Start, SubscribeOptions
from rollmesh.runtime.errors import InvalidFieldError
from rollmesh.runtime.rpc import open_channel
from rollmesh.v1 import collector_pb2, collector_pb2_grpc, session_pb2
from tests.collector.collectors import SESSION, create_or_update
from tests.lazily import genai
from tests.meshes import Mesh, scripted_mesh
from tests.processes import ServiceProcess

pytest.importorskip("aiohttp")
from tests.upstreams import KEY, Server, upstream

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore:Inheritance class AiohttpClientSession"),
]
MODEL = "elsewhere"
TOOLS: Any = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
HI: Any = [{"role": "user", "content": "hi"}]
ALL = [session_pb2.CAPTURE_TOKENS, session_pb2.CAPTURE_LOGPROBS, session_pb2.CAPTURE_TEXT]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[Server]:
    async with upstream() as serving:
        yield serving


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(
    tmp_path_factory: pytest.TempPathFactory, tokenizer_dir: Path, server: Server
) -> AsyncIterator[Mesh]:
    """A mesh with a gateway of each kind."""
    folder = tmp_path_factory.mktemp("mesh")
    (folder / "key").write_text(f"{KEY}\n")
    async with scripted_mesh(folder, tokenizer_dir, [("hi", "Hello.")]) as mesh:
        await start(mesh, server)
        await mesh.processes["sidecar"].kill()
        await mesh.start("sidecar", gateway="", router=mesh.address("router"))
        yield mesh


async def start(mesh: Mesh, server: Server, **flags: Any) -> ServiceProcess:
    """Starts the gateway of the model that is served elsewhere."""
    return await mesh.run(
        "gateway",
        "upstream",
        router=mesh.address("router"),
        collector=mesh.address("collector"),
        data_dir=mesh.folder / "upstream",
        gateway_id="upstream",
        port=mesh.address("upstream").rpartition(":")[2],
        model=MODEL,
        upstream=server.url,
        upstream_key_file=mesh.folder / "key",
        **flags,
    )


async def read(client: Any, session: Any, name: str) -> SessionResult:
    """What a consumer that takes everything gets of a session."""
    options = SubscribeOptions(filter=collector_pb2.DeliveryFilter(captures=ALL), messages=True)
    async with (
        client.subscribe(name, unit="session", options=options) as deliveries,
        asyncio.timeout(60),
    ):
        async for delivery in deliveries:
            await deliveries.acknowledge(delivery)
            (result,) = delivery.sessions
            if result.session_id == session.session_id:
                return result  # type: ignore[no-any-return]
    raise AssertionError("it did not come")


async def test_every_protocol_streams_and_calls_tools(mesh: Mesh, server: Server) -> None:
    async with mesh.client_of("router") as client:
        async with client.session(model=MODEL) as session:
            agent = mesh.openai(session)
            chat = await agent.chat.completions.create(model=MODEL, messages=HI, temperature=0.25)
            assert (chat.choices[0].message.content, chat.choices[0].finish_reason) == (
                "You said hi.",
                "stop",
            )
            assert chat.usage is not None
            assert (chat.usage.prompt_tokens, chat.usage.completion_tokens) == (7, 5)
            sent = server.seen[-1]
            assert sent == {
                "model": MODEL, "messages": HI, "temperature": 0.25, "stream": False,
            }  # fmt: skip
            called = await agent.chat.completions.create(
                model=MODEL, messages=HI, tools=TOOLS, stream=True, max_tokens=9
            )
            parts = [one.choices[0] async for one in called if one.choices]
            calls: dict[int, list[str]] = {}
            for part in parts:
                for call in part.delta.tool_calls or ():
                    assert call.function is not None
                    known = calls.setdefault(call.index, [call.id or "", "", ""])
                    known[1] += call.function.name or ""
                    known[2] += call.function.arguments or ""
            assert calls == {
                0: ["call_0", "add", '{"at": 0}'],
                1: ["call_1", "add", '{"at": 1}'],
            }
            assert parts[-1].finish_reason == "tool_calls"
            assert server.seen[-1]["max_tokens"] == 9
            response = await agent.responses.create(model=MODEL, input="hi")
            assert (response.output_text, response.status) == ("You said hi.", "completed")
            async with agent.responses.stream(model=MODEL, input="long") as events:
                kinds = [event.type async for event in events]
                assert kinds[-1] == "response.incomplete"
            base = session.base_url.removesuffix("/v1")
            async with AsyncAnthropic(base_url=base, api_key="x", max_retries=0) as claude:
                fields: Any = {"model": MODEL, "max_tokens": 64, "messages": HI}
                message = await claude.messages.create(**fields)
                assert [one.text for one in message.content if one.type == "text"] == [
                    "You said hi."
                ]
                async with claude.messages.stream(**fields) as texts:
                    assert await texts.get_final_text() == "You said hi."
            options = genai.types.HttpOptions(base_url=base)
            google: Any = genai.Client(api_key=session.api_key, http_options=options).aio
            content = await google.models.generate_content(model=MODEL, contents="hi")
            assert content.text == "You said hi."
        result = await read(client, session, "every")
    assert (result.capture, result.turns, result.model) == ("TEXT", 7, MODEL)
    with pytest.raises(TextSessionError, match="recorded TEXT and has no token ids"):
        rows_of([result])


async def test_a_conversation_is_recorded_as_text_over_a_kill(mesh: Mesh, server: Server) -> None:
    async with mesh.client_of("router") as client:
        async with client.session(model=MODEL) as session:
            agent = mesh.openai(session, max_retries=5)
            first = await agent.chat.completions.create(model=MODEL, messages=HI, tools=TOOLS)
            said = first.choices[0].message
            await mesh.processes["upstream"].kill()
            await start(mesh, server)
            messages = [
                *HI,
                said.model_dump(exclude_none=True),
                {"role": "tool", "content": "3", "tool_call_id": "call_0"},
                {"role": "tool", "content": "4", "tool_call_id": "call_1"},
            ]
            last = await agent.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS)
            assert last.choices[0].message.content == "You said 4."
            assert [one["role"] for one in server.seen[-1]["messages"]] == [
                "user", "assistant", "tool", "tool",
            ]  # fmt: skip
            session.reward = 1.0
        result = await read(client, session, "kill")
    (trajectory,) = result.trajectories
    assert (len(trajectory.token_ids), trajectory.turns, trajectory.lineage) == (0, 2, "MAIN")
    assert [one.trained for one in trajectory.segments] == [True, True]
    assert trajectory.segments[0].engine_id == "big-2026"
    found = result.conversation(trajectory)
    assert found is not None
    assert found.tools == TOOLS
    assert [one["role"] for one in found.messages] == [
        "user", "assistant", "tool", "tool", "assistant",
    ]  # fmt: skip
    assert found.messages[1]["reasoning_content"] == "I call."


async def test_a_consumer_of_tokens_never_gets_text_not_even_in_a_group(mesh: Mesh) -> None:
    async with mesh.client_of("router") as client:
        sessions = []
        for index, model in enumerate((MODEL, "policy")):
            async with client.session(
                model=model, group_id="mixed", sample_index=index, group_size=2
            ) as session:
                sessions.append(session)
                await mesh.openai(session).chat.completions.create(model=model, messages=HI)
        async with client.session(model="policy", group_id="tokens") as session:
            await mesh.openai(session).chat.completions.create(model="policy", messages=HI)
        async with client.subscribe("tokens") as groups, asyncio.timeout(60):
            delivery = await anext(groups)  # the first that is not filtered
            assert delivery.group_id == "tokens"
        filtered = [one for one in await client.filtered("tokens") if one.group_id == "mixed"]
        assert [one.reason for one in filtered] == [collector_pb2.FILTER_REASON_CAPTURE]
        async with client.subscribe("plain", unit="session") as plain, asyncio.timeout(60):
            (only,) = (await anext(plain)).sessions
            assert (only.session_id, only.capture) == (sessions[1].session_id, "TOKENS")


async def test_the_upstream_fails_as_an_engine_does(mesh: Mesh, server: Server) -> None:
    async with mesh.client_of("router") as client:
        async with client.session(model=MODEL, budget=Budget(sampled_tokens=12)) as session:
            agent = mesh.openai(session)

            async def ask(text: str, **fields: Any) -> Any:
                messages: Any = [{"role": "user", "content": text}]
                return await agent.chat.completions.create(model=MODEL, messages=messages, **fields)

            server.failures += [(429, {}), (503, {"error": {"message": "busy"}})]
            assert (await ask("one")).choices[0].message.content == "You said one."
            server.failures.append((429, {}))
            server.retry_after = "9" * 400
            once = agent.with_options(max_retries=0)
            with pytest.raises(openai.RateLimitError) as busy:
                await once.chat.completions.create(model=MODEL, messages=HI)
            assert busy.value.response.headers["retry-after"] == "120"
            too_long = {"error": {"message": "too long", "code": "context_length_exceeded"}}
            server.failures.append((400, too_long))
            with pytest.raises(openai.BadRequestError) as refused:
                await ask("two")
            assert refused.value.code == "context_length_exceeded"
            server.failures.append((400, {"error": {"message": "no such parameter"}}))
            with pytest.raises(openai.BadRequestError, match="no such parameter"):
                await ask("three")
            server.cuts = 1
            stream = await ask("four", stream=True)
            with pytest.raises(openai.APIError, match="upstream"):
                assert [one async for one in stream]
            old = {"error": {"message": "Use 'max_completion_tokens' instead of 'max_tokens'."}}
            server.failures.append((400, old))
            assert (await ask("five", max_tokens=3)).usage.completion_tokens == 5
            assert (server.seen[-1]["max_completion_tokens"], "max_tokens" in server.seen[-1]) == (
                3, False,
            )  # fmt: skip
            with pytest.raises(openai.BadRequestError, match="served elsewhere"):
                await ask("six", logprobs=True)
            await ask("seven")
            sent = server.seen[-1]  # the rest of the budget
            assert sent.keys() == {"model", "messages", "stream", "max_completion_tokens"}
            assert sent["max_completion_tokens"] == 2
            final = await ask("eight")
            assert "the budget of sampled tokens is spent" in final.choices[0].message.content
        assert (await read(client, session, "failing")).turns == 3


def answer(usage: Any = None, finish: str = "stop", **message: Any) -> tuple[int, dict[str, Any]]:
    choice = {"message": {"role": "assistant", **message}, "finish_reason": finish}
    return 200, {"model": "big-2026", "choices": [choice], "usage": usage}


async def test_a_long_answer_beside_the_work_is_no_probe(mesh: Mesh, server: Server) -> None:
    async with mesh.client_of("router") as client:
        async with client.session(model=MODEL) as session:
            agent, most = mesh.openai(session), {"completion_tokens": 1}
            for text, used in (("work", None), ("long", None), ("quota", most), ("unknown", {})):
                finish = "stop" if text == "work" else "length"
                if used is not None:
                    server.failures.append(answer(used, finish, content="some words"))
                asked: Any = [{"role": "user", "content": text}]
                await agent.chat.completions.create(model=MODEL, messages=asked)
        result = await read(client, session, "lengths")
    found = [(one.lineage, one.segments[0].trained) for one in result.trajectories]
    assert found == [("MAIN", True), ("ROOT", True), ("AUXILIARY", False), ("ROOT", True)]


async def test_an_answer_with_half_an_emoji_is_recorded(mesh: Mesh, server: Server) -> None:
    half, function = "cut \ud83d", {"name": "add", "arguments": '{"a": "\udc00"}'}
    calls = [{"id": "c", "type": "function", "function": function}]
    async with mesh.client_of("router") as client:
        async with client.session(model=MODEL) as session:
            agent = mesh.openai(session)
            said = answer(content=half, reasoning_content=half, tool_calls=calls)
            server.failures.append(said)
            whole = await agent.chat.completions.create(model=MODEL, messages=HI, tools=TOOLS)
            assert whole.choices[0].message.content == "cut \ufffd"
        result = await read(client, session, "emoji")
    found = result.conversation(result.trajectories[0])
    assert found is not None
    assert found.messages[1]["reasoning_content"] == "cut \ufffd"
    assert found.messages[1]["tool_calls"][0]["function"]["arguments"] == '{"a": "\ufffd"}'


@pytest.mark.parametrize(
    "said",
    [
        pytest.param(answer({"completion_tokens": -1}, content="a"), id="negative"),
        pytest.param(answer({"prompt_tokens": 2**32}, content="a"), id="large"),
        pytest.param(answer({"prompt_tokens": math.inf}, content="a"), id="infinite"),
        pytest.param(answer([7], content="a"), id="list"),
        pytest.param(
            answer({"prompt_tokens_details": {"cached_tokens": -1}}, content="a"), id="cached"
        ),
        pytest.param(answer(tool_calls=[{"function": {"name": 7}}]), id="name"),
        pytest.param(answer(tool_calls=[{"index": -1, "function": {}}]), id="index"),
    ],
)
async def test_an_answer_of_another_form_is_refused_and_not_recorded(
    mesh: Mesh, server: Server, said: tuple[int, dict[str, Any]]
) -> None:
    async with mesh.client_of("router") as client, client.session(model=MODEL) as session:
        agent = mesh.openai(session)
        server.failures.append(said)
        with pytest.raises(openai.InternalServerError, match="another form of answer"):
            await agent.chat.completions.create(model=MODEL, messages=HI)
        again = await agent.chat.completions.create(model=MODEL, messages=HI)
        assert again.choices[0].message.content == "You said hi."


async def test_a_client_that_leaves_ends_the_call_to_the_upstream(
    mesh: Mesh, server: Server
) -> None:
    async with mesh.client_of("router") as client, client.session(model=MODEL) as session:
        agent = mesh.openai(session)
        server.started.clear()
        messages: Any = [{"role": "user", "content": "wait"}]
        asking = asyncio.ensure_future(
            agent.chat.completions.create(model=MODEL, messages=messages)
        )
        async with asyncio.timeout(60):
            await server.started.wait()
            asking.cancel()
            await server.gone.wait()


async def test_a_session_of_tokens_is_the_upstream_of_a_session_of_text(mesh: Mesh) -> None:
    """As an agent that calls another one. The same conversation is recorded in both forms."""
    async with mesh.client_of("router") as client:
        async with client.session(model="policy", record_messages=True) as inner:
            flags = {"gateway_id": "second", "model": "second", "upstream_model": "policy"}
            port = mesh.address("second").rpartition(":")[2]
            await mesh.run(
                "gateway",
                "second",
                router=mesh.address("router"),
                collector=mesh.address("collector"),
                data_dir=mesh.folder / "second",
                port=port,
                upstream=inner.base_url,
                **flags,
            )
            async with client.session(model="second") as outer:
                agent = mesh.openai(outer)
                answer = await agent.chat.completions.create(model="second", messages=HI, n=2)
                texts = [one.message.content for one in answer.choices]
                stream = await agent.chat.completions.create(
                    model="second", messages=[*HI, *HI], stream=True
                )
                parts = [one.choices[0].delta.content or "" async for one in stream if one.choices]
        text, tokens = await read(client, outer, "outer"), await read(client, inner, "inner")
    assert texts == ["Hello.", "Hello."]
    assert (text.capture, tokens.capture) == ("TEXT", "TOKENS")
    said = [
        sorted(
            json.dumps(found.messages)
            for found in map(result.conversation, result.trajectories)
            if found is not None
        )
        for result in (text, tokens)
    ]
    assert said[0] == said[1]
    assert len(said[0]) == 3
    assert "".join(parts) in said[0][-1]


async def test_an_export_for_sft_has_the_text_of_a_consumer_with_captures(
    mesh: Mesh, tmp_path: Path
) -> None:
    async with mesh.client_of("router") as client:
        async with client.session(model=MODEL, metadata={"of": "sft"}) as session:
            agent = mesh.openai(session)
            await agent.chat.completions.create(model=MODEL, messages=HI, tools=TOOLS)
        await read(client, session, "stored")
    async with open_channel(mesh.address("collector")) as channel:
        stub: Any = collector_pb2_grpc.CollectorServiceStub(channel)
        for name, captures in (("text", ALL), ("tokens-only", [])):
            rules = collector_pb2.DeliveryFilter(captures=captures, metadata={"of": "sft"})
            await create_or_update(stub, name=name, unit=SESSION, filter=rules)
    for name, expected in (("text", 1), ("tokens-only", 0)):
        path = tmp_path / f"{name}.jsonl"
        exporting = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "rollmesh.cli", "export", "--format", "sft"),
            *("--collector", mesh.address("collector"), "--to", str(path), "--consumer", name),
        )
        assert await exporting.wait() == 0
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        assert len(rows) == expected
        for row in rows:
            assert row["capture"] == "TEXT"
            assert "input_ids" not in row
            assert row["trained_messages"] == [False, True]
            call = row["messages"][1]["tool_calls"][0]
            assert call["function"]["arguments"] == {"at": 0}


async def test_log_probabilities_are_recorded_and_no_key_is_logged(
    mesh: Mesh, server: Server
) -> None:
    await mesh.processes["upstream"].kill()
    await start(mesh, server, capture="logprobs")
    async with mesh.client_of("router") as client:
        async with client.session(model=MODEL) as session:
            await mesh.openai(session, max_retries=5).chat.completions.create(
                model=MODEL, messages=HI
            )
        result = await read(client, session, "logprobs")
        assert result.capture == "LOGPROBS"
        found = result.conversation(result.trajectories[0])
        assert found is not None
        assert [one["token"] for one in found.messages[1]["logprobs"]["content"]] == [
            "You", "said", "hi.",
        ]  # fmt: skip
        (mesh.folder / "key").write_text("sk-other-secret")
        await mesh.processes["upstream"].kill()
        await start(mesh, server)
        async with client.session(model=MODEL) as session:
            with pytest.raises(openai.InternalServerError, match="upstream_key_file") as refused:
                await mesh.openai(session).chat.completions.create(model=MODEL, messages=HI)
            assert "secret" not in str(refused.value)
    for file in mesh.folder.rglob("*"):
        if file.is_file() and file.name != "key":
            data = file.read_bytes()
            assert KEY.encode() not in data
            assert b"sk-other-secret" not in data


async def test_a_session_on_a_model_elsewhere_starts_from_text_alone(mesh: Mesh) -> None:
    async with mesh.client_of("router") as client:
        start = Start(HI)
        start.request.origin.kind = session_pb2.ORIGIN_KIND_TOKENS
        start.request.origin.nodes.add(session_id="s", node_id=1)
        with pytest.raises(InvalidFieldError, match=r"start\.origin\.kind.*start from TEXT"):
            await client.open_session(client.session_request(model=MODEL, start=start))
        start.request.origin.kind = session_pb2.ORIGIN_KIND_TEXT
        async with client.session(model=MODEL, start=start) as session:
            pass
        assert session.closed
