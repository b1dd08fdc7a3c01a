"""Gateways that serve agents in their own process."""

import asyncio
import json
import os
import resource
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from rollmesh.chat import Tokenizer
from rollmesh.client import Client, MeshAddresses, Session
from rollmesh.mesh import journal_of
from rollmesh.runtime.rpc import open_channel
from rollmesh.v1 import router_pb2, router_pb2_grpc
from tests.collector.postgres_server import postgres_database
from tests.faults.slow_agent import slow_agent
from tests.lazily import anthropic, genai
from tests.meshes import Mesh, delivered, scripted_mesh, until_free
from tests.processes import ServiceProcess
from tests.waiting import until

SAID: list[Any] = [{"role": "user", "content": "What is 6 times 7?"}]
RULES = [("What is 6 times 7?", "The answer is 42.")]
TIMEOUT_S = 300
FEW_FILES = 256


def _settings(mesh: Mesh, name: str) -> dict[str, object]:
    return {
        "port": 0,
        "gateway_id": name,
        "router": mesh.address("router"),
        "collector": mesh.address("collector"),
        "data_dir": mesh.folder / name,
        "model_path": mesh.model,
    }


async def _run(mesh: Mesh, name: str, **flags: object) -> ServiceProcess:
    """Runs a gateway whose HTTP has the address that the mesh has for `agents-of-NAME`."""
    port = mesh.address(f"agents-of-{name}").rpartition(":")[2]
    return await mesh.run("cli.gateway", name, http=port, **_settings(mesh, name) | flags)


@asynccontextmanager
async def gateway(mesh: Mesh, name: str, relay: str = "") -> AsyncIterator[tuple[Any, int]]:
    """Runs `rollmesh gateway --http 0`. Yields the process and the port of its HTTP."""
    settings = _settings(mesh, name)
    arguments = [f"--{one.replace('_', '-')}={value}" for one, value in settings.items()]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "rollmesh.cli", "gateway", "--http", "0", *arguments),
        env=os.environ | ({"ROLLMESH_SIDECAR_RELAY": relay} if relay else {}),
        stdout=asyncio.subprocess.PIPE,
        preexec_fn=_few_files,
    )
    try:
        assert process.stdout is not None
        http = json.loads((await process.stdout.readline()).removeprefix(b"HTTP "))
        assert (await process.stdout.readline()).startswith(b"READY ")
        yield process, http["port"]
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def _few_files() -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (FEW_FILES, hard))


def _client(mesh: Mesh, *more: str) -> Client:
    addresses = {name: mesh.address(name) for name in ("router", "collector", *more)}
    return Client(MeshAddresses(**addresses))


async def _homes(mesh: Mesh) -> dict[str, str]:
    """The gateway of each journal."""
    async with open_channel(mesh.address("router")) as channel:
        stub = router_pb2_grpc.RouterServiceStub(channel)
        response = await stub.ListGateways(router_pb2.ListGatewaysRequest(), timeout=60)
    return {
        journal_id: one.gateway_id
        for one in response.gateways
        for journal_id in {one.journal_id, *(each.journal_id for each in one.journals)}
    }


async def _on(mesh: Mesh, client: Client, gateway_id: str) -> Session:
    """Opens a session on a gateway."""
    while True:
        session = await client.open_session(client.session_request())
        if (await _homes(mesh)).get(journal_of(session.session_id)) == gateway_id:
            return session


async def turns(client: openai.AsyncOpenAI, messages: list[Any]) -> list[str]:
    """The answer to the same question whole and streamed."""
    whole = await client.chat.completions.create(model="policy", messages=messages)
    stream = await client.chat.completions.create(model="policy", messages=messages, stream=True)
    pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
    return [whole.choices[0].message.content or "", "".join(pieces)]


async def test_agents_are_answered_by_the_asked_gateway_wherever_the_session_is(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    async with (
        asyncio.timeout(TIMEOUT_S),
        scripted_mesh(tmp_path, tokenizer_dir, RULES) as mesh,
        gateway(mesh, "gateway-2", mesh.address("relay")) as (process, port),
        AsyncExitStack() as stack,
    ):
        ports = {name: mesh.address(name).rpartition(":")[2] for name in ("relay", "agents")}
        await mesh.run("cli.relay", "relay", port=ports["relay"], http_port=ports["agents"])
        addresses = MeshAddresses(
            router=mesh.address("router"), collector=mesh.address("collector")
        )
        client = await stack.enter_async_context(Client(addresses))
        limits = Path(f"/proc/{process.pid}/limits").read_text().splitlines()
        (files,) = (line.split() for line in limits if line.startswith("Max open files"))
        assert files[3] == files[4] != str(FEW_FILES)  # for thousands of connections
        sessions = [await client.open_session(client.session_request()) for _ in range(4)]
        assert all(one.base_url.startswith(f"http://127.0.0.1:{port}/") for one in sessions)
        journals = {one.session_id[:8] for one in sessions}
        assert len(journals) == 2  # both gateways have sessions
        for session in sessions:
            agent = mesh.openai(session)
            assert await turns(agent, SAID) == ["The answer is 42."] * 2
            far = session.base_url.replace(f"127.0.0.1:{port}", mesh.address("agents"))
            assert await turns(mesh.agent(far, "none"), SAID) == ["The answer is 42."] * 2
            with pytest.raises(openai.BadRequestError) as refused:
                await agent.chat.completions.create(model="policy", messages=SAID, n=10_000)
            assert refused.value.param == "n"
            session.reward = 1.0
            await client.close_session(session)
            assert len((await delivered(client, session)).trajectories) >= 1
        with pytest.raises((openai.ConflictError, openai.NotFoundError)):
            await turns(mesh.openai(sessions[0]), SAID)
        process.terminate()
        assert await process.wait() == 0


async def _ask(session: Session, said: str) -> dict[str, str]:
    """What the published SDK of each protocol is answered, whole and streamed."""
    root, found = session.base_url.removesuffix("/v1"), dict[str, str]()
    same: Any = {"api_key": session.api_key, "max_retries": 0}
    async with openai.AsyncOpenAI(base_url=session.base_url, **same) as client:
        found["chat"], found["chat streamed"] = await turns(
            client, [{"role": "user", "content": said}]
        )
        response = await client.responses.create(model="policy", input=said)
        found["responses"] = response.output_text
        async with client.responses.stream(model="policy", input=said) as events:
            found["responses streamed"] = (await events.get_final_response()).output_text
    async with anthropic.AsyncAnthropic(base_url=root, **same) as claude:
        fields: Any = {
            "model": "policy",
            "max_tokens": 64,
            "messages": [{"role": "user", "content": said}],
        }
        message = await claude.messages.create(**fields)
        found["messages"] = "".join(one.text for one in message.content if one.type == "text")
        async with claude.messages.stream(**fields) as texts:
            found["messages streamed"] = await texts.get_final_text()
    options: Any = {"base_url": root, "timeout": 60_000}
    async with genai.Client(api_key=session.api_key, http_options=options).aio as google:
        models: Any = google.models
        content = await models.generate_content(model="policy", contents=said)
        found["google"] = content.text
        chunks = await models.generate_content_stream(model="policy", contents=said)
        found["google streamed"] = "".join([one.text or "" async for one in chunks])
    return found


@pytest.mark.filterwarnings("ignore:Inheritance class AiohttpClientSession")
async def test_the_sdk_of_each_protocol_is_answered_and_recorded_exactly(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    async with (
        asyncio.timeout(TIMEOUT_S),
        scripted_mesh(tmp_path, tokenizer_dir, RULES) as mesh,
        _client(mesh) as client,
    ):
        await _run(mesh, "gateway-2")
        for home in ("gateway-2", "gateway-0"):  # the asked one, and another
            session = await _on(mesh, client, home)
            assert mesh.address("agents-of-gateway-2") in session.base_url
            answers = await _ask(session, SAID[0]["content"])
            assert set(answers.values()) == {"The answer is 42."}
            await client.close_session(session)
            trajectories = (await delivered(client, session)).trajectories
            assert sum(one.turns for one in trajectories) == len(answers)
            assert {one.reasons for one in trajectories} == {("EXACT",)}


@pytest.mark.long
async def test_at_a_stop_new_sessions_go_elsewhere_while_running_answers_end(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    rules = [("What is 6 times 7?", "one " * 800)]  # minutes at this pace
    async with (
        asyncio.timeout(TIMEOUT_S),
        scripted_mesh(tmp_path, tokenizer_dir, rules, tokens_per_second=4) as mesh,
        _client(mesh, "sidecar") as client,
        _client(mesh) as other,
    ):
        process = await _run(mesh, "gateway-2", grace_ms=TIMEOUT_S * 1000)
        session = await _on(mesh, other, "gateway-2")
        create: Any = mesh.openai(session).chat.completions.create
        ask = partial(create, model="policy", messages=SAID, stream=True)
        short, long = await ask(max_tokens=8), await ask()
        await anext(aiter(long))
        ending = asyncio.create_task(process.terminate())

        async def has_left() -> bool:
            members = [one.hello for one in (await client.replicas()).replicas]
            return not any(
                one.replica_id == "gateway-2" or one.kind == router_pb2.REPLICA_KIND_SIDECAR
                for one in members
            )

        await until(has_left)
        assert (await _on(mesh, client, "gateway-0")).api_key
        assert [one async for one in short][-1].choices[0].finish_reason == "length"
        await long.close()
        assert await ending == 0
        await until_free(client)


@pytest.mark.long
async def test_a_gateway_that_lost_its_sessions_passes_their_agents_on(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    async with (
        asyncio.timeout(TIMEOUT_S),
        postgres_database() as database,
        scripted_mesh(tmp_path, tokenizer_dir, RULES) as mesh,
        _client(mesh) as client,
    ):
        shared = {"journal": database.url, "journal_lease_ms": 2_000}
        first = await _run(mesh, "gateway-1", **shared)
        session = await _on(mesh, client, "gateway-1")
        ask = partial(mesh.openai(session).chat.completions.create, model="policy")
        answer = await ask(messages=SAID)
        await _run(mesh, "gateway-2", **shared)
        first.freeze()

        async def has_moved() -> bool:
            return (await _homes(mesh)).get(journal_of(session.session_id)) == "gateway-2"

        await until(has_moved)
        first.thaw()
        said: Any = [*SAID, answer.choices[0].message, *SAID]
        again = await ask(messages=said)
        assert again.choices[0].message.content == "The answer is 42."
        await client.close_session(session)
        (trajectory,) = (await delivered(client, session)).trajectories
        assert (trajectory.turns, trajectory.reasons) == (2, ("EXACT",))


async def test_after_a_kill_another_gateway_answers_the_agents_of_its_sessions(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    rules = [*RULES, ("at length", "one " * 400)]  # minutes at this pace
    async with (
        asyncio.timeout(TIMEOUT_S),
        postgres_database() as database,
        scripted_mesh(tmp_path, tokenizer_dir, rules, tokens_per_second=8) as mesh,
        _client(mesh) as client,
    ):
        shared = {"journal": database.url, "journal_lease_ms": 2_000}
        first = await _run(mesh, "gateway-1", **shared)
        session = await _on(mesh, client, "gateway-1")
        at_first = mesh.openai(session)
        answer = await at_first.chat.completions.create(model="policy", messages=SAID)
        said: Any = [*SAID, answer.choices[0].message, {"role": "user", "content": "at length"}]
        await _run(mesh, "gateway-2", **shared)
        long: Any = {"model": "policy", "messages": said, "stream": True}
        stream = aiter(await at_first.chat.completions.create(**long))
        await anext(stream)
        await first.kill()
        with pytest.raises((openai.APIError, httpx2.HTTPError)):
            async for _ in stream:
                pass
        with pytest.raises(openai.APIConnectionError):
            await at_first.chat.completions.create(**long)
        there = session.base_url.replace(
            mesh.address("agents-of-gateway-1"), mesh.address("agents-of-gateway-2")
        )
        # The published client asks again while the journal has no gateway.
        at_second = mesh.agent(there, session.api_key, max_retries=30)
        again = await at_second.chat.completions.create(**long, max_tokens=16)
        chunks = [chunk async for chunk in again]
        assert "".join(one.choices[0].delta.content or "" for one in chunks).startswith("one one")
        assert chunks[-1].choices[0].finish_reason == "length"
        await client.close_session(session)
        (trajectory,) = (await delivered(client, session)).trajectories
        assert (trajectory.turns, trajectory.reasons) == (2, ("LENGTH_CUT",))


@pytest.mark.long
async def test_an_agent_that_does_not_read_holds_up_no_other_and_loses_no_token(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    text = "The answer is 42. " * 8000  # more than a connection holds
    async with (
        asyncio.timeout(TIMEOUT_S),
        scripted_mesh(tmp_path, tokenizer_dir, [*RULES, ("at length", text)]) as mesh,
        _client(mesh) as client,
    ):
        await _run(mesh, "gateway-2", max_context_tokens=131_072)
        session = await _on(mesh, client, "gateway-2")
        ask: Any = [{"role": "user", "content": "at length"}]
        async with slow_agent(session.base_url, session.api_key, messages=ask) as agent:
            await agent.begun()
            other = await _on(mesh, client, "gateway-2")
            for _ in range(3):
                assert await turns(mesh.openai(other), SAID) == ["The answer is 42."] * 2
            await until_free(client)  # the engine waits for no reader
            assert await agent.rest() == (text, True)
        await client.close_session(session)
        (trajectory,) = (await delivered(client, session)).trajectories
        expected = Tokenizer(tokenizer_dir).encode(f"{text}<|im_end|>")
        assert trajectory.token_ids[trajectory.loss_mask].tolist() == expected.tolist()
