"""A relay: agents call it, and sidecars that they cannot reach answer over tunnels."""

import asyncio
import hashlib
import io
import json
import random
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import uvicorn
from anthropic import AsyncAnthropic
from openai import APIConnectionError, APIStatusError

from rollmesh.chat import Tokenizer
from rollmesh.client import Client, Session
from rollmesh.internal.v1 import tunnels_pb2
from rollmesh.mesh import DialOut
from rollmesh.runtime.errors import RemoteError
from rollmesh.sidecar import RelayConfig, RelayService
from tests.faults.proxy import Proxy, proxy_to
from tests.fleets import gateway_fleet
from tests.locks import Locks
from tests.meshes import Mesh, delivered, until_free, until_sampled, write_script
from tests.processes import ServiceProcess
from tests.trial_certificates import copy_certificates
from tests.waiting import until, until_says

SAID, REPLY = "plain", "The answer is 42, and there is more to say about it than one may think."
ASK: dict[str, Any] = {"model": "policy", "messages": [{"role": "user", "content": SAID}]}
STREAM = {"stream": True}


@asynccontextmanager
async def hidden_mesh(
    folder: Path, model: Path, sidecars: int = 1, *, grace_ms: int = 10_000, **engine: object
) -> AsyncIterator[tuple[Mesh, list[Proxy]]]:
    """A mesh whose sidecars dial a relay, each through a proxy."""
    write_script(folder / "script.json", Tokenizer(model), [(SAID, REPLY)])
    async with AsyncExitStack() as stack:
        mesh = Mesh(folder, model, stack)
        await start_relay(mesh, grace_ms=grace_ms)
        links = [
            await stack.enter_async_context(proxy_to(mesh.address("relay")))
            for _ in range(sidecars)
        ]
        for together in (("router", "collector"), ("engine", "gateway")):
            async with asyncio.TaskGroup() as tasks:
                for service in together:
                    tasks.create_task(mesh.start(service, **engine if service == "engine" else {}))
        for at, link in enumerate(links):
            await start_sidecar(mesh, at, link.address)
        yield mesh, links


async def start_relay(mesh: Mesh, **flags: object) -> ServiceProcess:
    ports = {name: mesh.address(name).rpartition(":")[2] for name in ("relay", "agents")}
    flags = {"port": ports["relay"], "http_port": ports["agents"], **flags}
    return await mesh.run("cli.relay", "relay", **flags)


async def start_sidecar(mesh: Mesh, at: int, relay: str, **flags: object) -> ServiceProcess:
    flags = {"gateway": mesh.address("gateway"), "port": 0, "relay": relay, **flags}
    return await mesh.run("sidecar", f"sidecar-{at}", **flags)


def far_url(mesh: Mesh, session: Session) -> str:
    """The base URL that an agent far away is given. It has the key."""
    return f"http://{mesh.address('agents')}/sessions/{session.api_key}/v1"


def cut(link: Proxy) -> None:
    with link.cut():
        pass


async def waits_at(relay: ServiceProcess) -> bool:
    """Whether a request waits at a relay without sidecars. It was started with `metrics_port`."""
    return any((await relay.samples("rollmesh_bytes_in_flight")).values())


async def half_open(link: Proxy, _client: Client, _version: int) -> None:
    link.silence()


async def cut_beside_a_push(link: Proxy, client: Client, version: int) -> None:
    with link.cut():
        await client.push_weights({"w": np.zeros(4, np.float32)}, version)


async def test_agents_of_each_protocol_are_answered_whole_and_streamed(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    async with hidden_mesh(tmp_path, tokenizer_dir) as (mesh, _):
        url = f"http://{mesh.address('agents')}"
        told = {"router": mesh.address("router"), "gateway": "", "advertise": url}
        await start_sidecar(mesh, 1, mesh.address("relay"), **told)
        async with (
            Client(replace(mesh.addresses, sidecar="")) as client,
            client.session() as session,
        ):
            assert session.base_url == far_url(mesh, session)
            agent = mesh.agent(session.base_url, "placeholder")
            whole = await agent.chat.completions.create(**ASK)
            assert whole.choices[0].message.content == REPLY
            stream = await agent.chat.completions.create(**ASK, stream=True)
            texts = [one.choices[0].delta.content or "" async for one in stream]
            assert ("".join(texts), len(texts) > 3) == (REPLY, True)
            response = await agent.responses.create(model="policy", input=SAID)
            assert response.output_text == REPLY
            root = far_url(mesh, session).removesuffix("/v1")
            async with AsyncAnthropic(base_url=root, api_key="x", max_retries=0) as other:
                messages: Any = ASK["messages"]
                async with other.messages.stream(
                    model="policy", max_tokens=99, messages=messages
                ) as events:
                    assert await events.get_final_text() == REPLY
            assert [one.id async for one in agent.models.list()] == [session.model]
        found = await delivered(client, session)
        assert len(found.trajectories) == 4
        assert [set(one.reasons) for one in found.trajectories] == [{"EXACT"}] * 4


@pytest.mark.parametrize(
    "fails", [pytest.param(half_open, marks=pytest.mark.long), cut_beside_a_push]
)
async def test_a_stream_goes_on_after_its_link_has_failed(
    tmp_path: Path, tokenizer_dir: Path, fails: Callable[[Proxy, Client, int], Awaitable[None]]
) -> None:
    async with hidden_mesh(tmp_path, tokenizer_dir, tokens_per_second=6) as (mesh, (link,)):
        async with mesh.client() as client, client.session() as session:
            agent = mesh.agent(far_url(mesh, session), "placeholder")
            stream = await agent.chat.completions.create(**ASK, stream=True)
            pieces, text = aiter(stream), ""
            for version, said in enumerate(("The", "The answer is 42"), 1):
                while not text.startswith(said):
                    text += (await anext(pieces)).choices[0].delta.content or ""
                await fails(link, client, version)
            async with asyncio.timeout(60):
                text += "".join([one.choices[0].delta.content or "" async for one in pieces])
            assert text == REPLY
        (trajectory,) = (await delivered(client, session)).trajectories
        is_pushed = fails is cut_beside_a_push  # no request was repeated
        assert set(trajectory.reasons) == ({"MIXED_VERSIONS"} if is_pushed else {"EXACT"})
        sampled = Tokenizer(tokenizer_dir).encode(f"{REPLY}<|im_end|>").tolist()
        assert trajectory.token_ids[trajectory.prompt_tokens :].tolist() == sampled


@pytest.mark.long
async def test_tokens_are_joined_after_the_first_and_a_cut_meanwhile_loses_none(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    async with hidden_mesh(tmp_path, tokenizer_dir, 0, tokens_per_second=12) as (mesh, _):
        link = await mesh.stack.enter_async_context(proxy_to(mesh.address("relay")))
        await start_sidecar(mesh, 0, link.address, relay_join_ms=60_000)
        async with (
            mesh.client() as client,
            client.session() as session,
            aiohttp.ClientSession() as http,
            http.post(f"{far_url(mesh, session)}/chat/completions", json=ASK | STREAM) as answer,
        ):
            pieces = answer.content.iter_any()
            first = await anext(pieces)
            cut(link)
            async with asyncio.timeout(30):
                others = [one async for one in pieces]
            events = [
                one.removeprefix(b"data: ") for one in b"".join([first, *others]).split(b"\n\n")
            ]
            chunks = [json.loads(one)["choices"] for one in events if one.startswith(b"{")]
            text = "".join([one[0]["delta"].get("content") or "" for one in chunks if one])
            assert (text, events[-2:]) == (REPLY, [b"[DONE]", b""])
            assert len(first.split(b"\n\n")) < 4
            assert len(others) < len(chunks) / 2
        (trajectory,) = (await delivered(client, session)).trajectories
        assert (trajectory.turns, set(trajectory.reasons)) == (1, {"EXACT"})


async def test_each_answer_is_delivered_once_when_sidecars_and_the_relay_are_killed(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    async with hidden_mesh(tmp_path, tokenizer_dir, 2, tokens_per_second=20) as (mesh, links):
        async with mesh.client() as client:
            for killed in ("sidecar-0", "relay"):
                async with client.session() as session:
                    agent = mesh.agent(far_url(mesh, session), "placeholder", max_retries=8)
                    asking = asyncio.ensure_future(agent.chat.completions.create(**ASK))
                    await until_sampled(client)
                    await mesh.processes[killed].kill()
                    if killed == "relay":
                        await start_relay(mesh)
                    else:
                        await start_sidecar(mesh, 0, links[0].address)
                    answer = await asking
                    assert answer.choices[0].message.content == REPLY
                (trajectory,) = (await delivered(client, session)).trajectories
                assert sum(trajectory.loss_mask) == len(
                    Tokenizer(tokenizer_dir).encode(f"{REPLY}<|im_end|>")
                )


@pytest.mark.long
async def test_a_wrong_key_with_a_large_body_is_refused_as_by_a_sidecar(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    async with hidden_mesh(tmp_path, tokenizer_dir) as (mesh, _):
        url = f"http://{mesh.address('agents')}/v1/chat/completions"
        large = {**ASK, "messages": [{"role": "user", "content": "x" * 8_000_000}]}
        async with aiohttp.ClientSession(headers={"Authorization": "Bearer rmk-1-2"}) as http:
            for _ in range(5):
                async with http.post(url, data=io.BytesIO(json.dumps(large).encode())) as answer:
                    assert answer.status in {401, 404}
                    assert (await answer.json())["error"]["code"] != "no_sidecar"


@pytest.mark.long
async def test_a_relay_that_stops_completes_its_answers_and_its_successor_gets_the_tunnels(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    flags: dict[str, Any] = {"grace_ms": 90_000, "tokens_per_second": 4}
    async with hidden_mesh(tmp_path, tokenizer_dir, **flags) as (mesh, (link,)):
        async with mesh.client() as client, client.session() as session:
            agent = mesh.agent(far_url(mesh, session), "placeholder")
            stream = await agent.chat.completions.create(**ASK, stream=True)
            pieces = aiter(stream)
            text = (await anext(pieces)).choices[0].delta.content or ""
            async with asyncio.timeout(80), asyncio.TaskGroup() as tasks:  # less than its grace
                stopping = tasks.create_task(mesh.processes["relay"].terminate())

                async def takes_no_more() -> bool:
                    with suppress(APIConnectionError):
                        await agent.models.list()
                        return False
                    return True

                await until(takes_no_more)
                cut(link)
                text += "".join([one.choices[0].delta.content or "" async for one in pieces])
            assert (text, stopping.result()) == (REPLY, 0)
            await start_relay(mesh, grace_ms=1_000)
            assert (await agent.chat.completions.create(**ASK)).choices

            # An answer that takes longer than the grace is given to a retry.
            asking = asyncio.ensure_future(agent.chat.completions.create(**ASK, seed=1))
            await until_sampled(client)
            assert await mesh.processes["relay"].terminate() == 0
            with pytest.raises(APIStatusError) as refusal:
                await asking
            assert (refusal.value.status_code, refusal.value.code) == (503, "stopping")
            assert int(refusal.value.response.headers["retry-after"]) >= 1
            await start_relay(mesh)
            again = {"x-stainless-retry-count": "1"}
            answer = await agent.chat.completions.create(**ASK, seed=1, extra_headers=again)
            assert answer.choices[0].message.content == REPLY
            assert await mesh.processes["sidecar-0"].terminate() == 0
        assert (await delivered(client, session)).turns == 3


@pytest.mark.long
async def test_a_sidecar_serves_the_agents_of_two_relays_of_which_one_is_killed(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    async with hidden_mesh(tmp_path, tokenizer_dir, 0, tokens_per_second=12) as (mesh, _):
        ports = {name: mesh.address(name).rpartition(":")[2] for name in ("other", "door")}
        await mesh.run("cli.relay", "other", port=ports["other"], http_port=ports["door"])
        await start_sidecar(mesh, 0, f"{mesh.address('relay')},{mesh.address('other')}")
        async with mesh.client() as client, client.session() as first, client.session() as second:
            near, far = far_url(mesh, first), far_url(mesh, second)
            other = far.replace(mesh.address("agents"), mesh.address("door"))
            streams = [
                await mesh.agent(url, "placeholder").chat.completions.create(**ASK, stream=True)
                for url in (near, other)
            ]
            stays, breaks = (aiter(one) for one in streams)
            text = (await anext(stays)).choices[0].delta.content or ""
            await anext(breaks)
            await mesh.processes["other"].kill()
            with pytest.raises(APIConnectionError):
                async for _ in breaks:
                    pass
            again = {"x-stainless-retry-count": "1"}
            agent = mesh.agent(far, "placeholder")
            answer = await agent.chat.completions.create(**ASK, extra_headers=again)
            assert answer.choices[0].message.content == REPLY
            text += "".join([one.choices[0].delta.content or "" async for one in stays])
            assert text == REPLY
            for session in (first, second):
                await client.close_session(session)
                (trajectory,) = (await delivered(client, session)).trajectories
                assert trajectory.turns == 1
                sampled = Tokenizer(tokenizer_dir).encode(f"{REPLY}<|im_end|>").tolist()
                assert trajectory.token_ids[trajectory.prompt_tokens :].tolist() == sampled


@pytest.mark.long
async def test_an_answer_is_given_once_though_its_gateway_is_killed_while_its_link_is_cut(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    async with gateway_fleet(tmp_path, tokenizer_dir, [(SAID, REPLY)], 1500) as fleet:
        mesh = fleet.mesh
        await start_relay(mesh)
        link = await mesh.stack.enter_async_context(proxy_to(mesh.address("relay")))
        found = {"router": mesh.address("router"), "gateway": "", "takeover_wait_ms": 120_000}
        await start_sidecar(mesh, 0, link.address, **found)
        await mesh.restart("engine", tokens_per_second=12)
        session = await fleet.session_at("gateway-1")
        agent = mesh.agent(far_url(mesh, session), "placeholder")
        asking = asyncio.ensure_future(agent.chat.completions.create(**ASK))
        await until_sampled(fleet.client)
        with link.cut():
            await mesh.processes["gateway-1"].kill()
        answer = await asking
        assert answer.choices[0].message.content == REPLY
        await fleet.client.close_session(session)
        result = (await fleet.results(1))[session.session_id]
        assert (result.turns, len(result.trajectories)) == (1, 1)


@pytest.mark.long
async def test_of_two_agents_with_one_key_one_leaves_while_the_link_is_cut_and_the_other_goes_on(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    async with hidden_mesh(tmp_path, tokenizer_dir, tokens_per_second=6) as (mesh, (link,)):
        async with mesh.client() as client, client.session() as session:
            stays, leaves = [
                await mesh.agent(far_url(mesh, session), "placeholder").chat.completions.create(
                    **ASK, stream=True
                )
                for _ in range(2)
            ]
            pieces = aiter(stays)
            first = await anext(pieces)
            stayed, text = first.id, first.choices[0].delta.content or ""
            left = (await anext(aiter(leaves))).id
            with link.cut():
                await leaves.close()
                refused = link.refused
                await until(lambda: link.refused > refused)
            async for one in pieces:
                text += one.choices[0].delta.content or ""
                stayed = one.id
            assert text == REPLY
            await until_free(client)
        found = await delivered(client, session)
        assert (found.turns, stayed != left) == (1, True)
        (trajectory,) = found.trajectories
        assert set(trajectory.reasons) == {"EXACT"}
        sampled = Tokenizer(tokenizer_dir).encode(f"{REPLY}<|im_end|>").tolist()
        assert trajectory.token_ids[trajectory.prompt_tokens :].tolist() == sampled


@pytest.mark.long
async def test_a_relay_is_killed_while_its_sidecar_drains_and_the_answer_is_given_once(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    async with hidden_mesh(tmp_path, tokenizer_dir, tokens_per_second=12) as (mesh, (link,)):
        async with mesh.client() as client, client.session() as session:
            agent = mesh.agent(far_url(mesh, session), "placeholder", max_retries=20)
            asking = asyncio.ensure_future(agent.chat.completions.create(**ASK))
            await until_sampled(client)
            async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
                draining = tasks.create_task(mesh.processes["sidecar-0"].terminate())
                await mesh.processes["relay"].kill()
            assert draining.result() == 0
            await start_relay(mesh)
            await start_sidecar(mesh, 0, link.address)
            answer = await asking
            assert answer.choices[0].message.content == REPLY
        found = await delivered(client, session)
        assert found.turns == 1
        (trajectory,) = found.trajectories
        sampled = Tokenizer(tokenizer_dir).encode(f"{REPLY}<|im_end|>").tolist()
        assert trajectory.token_ids[trajectory.prompt_tokens :].tolist() == sampled


async def test_a_relay_without_a_sidecar_waits_and_then_refuses(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    async with hidden_mesh(tmp_path, tokenizer_dir, 0) as (mesh, _):
        await mesh.processes["relay"].kill()
        await start_relay(mesh, sidecar_wait_ms=300)
        async with mesh.client() as client, client.session() as session:
            agent = mesh.agent(far_url(mesh, session), "placeholder")
            with pytest.raises(APIStatusError) as refusal:
                await agent.chat.completions.create(**ASK)
            assert refusal.value.status_code == 503
            assert refusal.value.code == "no_sidecar"
            assert int(refusal.value.response.headers["retry-after"]) >= 1
            await mesh.processes["relay"].kill()
            relay = await start_relay(mesh, metrics_port=0)
            asking = asyncio.ensure_future(agent.chat.completions.create(**ASK))
            await until(lambda: waits_at(relay))
            assert await mesh.processes["relay"].terminate() == 0
            with pytest.raises(APIStatusError) as refusal:
                await asking
            assert (refusal.value.status_code, refusal.value.code) == (503, "stopping")
            await start_relay(mesh, max_body_bytes=1_000)
            with pytest.raises(APIStatusError) as refusal:
                await agent.chat.completions.create(**ASK, user="x" * 1_000)
            assert refusal.value.status_code == 413
            asking = asyncio.ensure_future(agent.chat.completions.create(**ASK))
            await start_sidecar(mesh, 0, mesh.address("relay"))
            assert (await asking).choices[0].message.content == REPLY


async def test_only_sidecars_with_an_accepted_token_have_tunnels_and_agents_see_the_certificate(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    locks, certificates = Locks(tmp_path / "locks"), tmp_path / "certificates"
    copy_certificates(certificates)
    async with hidden_mesh(tmp_path, tokenizer_dir, 0, tokens_per_second=20) as (mesh, _):
        await mesh.processes["relay"].kill()
        relay = await start_relay(
            mesh,
            metrics_port=0,
            tokens_dir=locks.folder / "accepted",
            https_certificate_file=certificates / "sidecar.crt",
            https_key_file=certificates / "sidecar.key",
            sidecar_wait_ms=1_000,
        )
        tls = ssl.create_default_context(cafile=certificates / "ca.crt")
        async with mesh.client() as client, client.session() as session:
            url = far_url(mesh, session).replace("http:", "https:")
            async with aiohttp.ClientSession() as http:
                for role, status in (("gateway", 503), ("sidecar", 200)):
                    token = locks.token_file(role)
                    await start_sidecar(mesh, 0, mesh.address("relay"), token_file=token)
                    answer = await http.post(f"{url}/chat/completions", json=ASK, ssl=tls)
                    assert answer.status == status
                    body = await answer.json()
                assert body["choices"][0]["message"]["content"] == REPLY
                accepted = locks.folder / "accepted" / "sidecar"
                async with http.post(
                    f"{url}/chat/completions", json=ASK | STREAM, ssl=tls
                ) as answer:
                    begin = await answer.content.readany()
                    accepted.write_text("n" * 32)  # the tunnel's token is removed
                    locks.token_file("sidecar").write_text("n" * 32)
                    log = tmp_path / "sidecar-0" / "sidecar.log"
                    await until_says(log, "not accepted any longer")
                    assert (begin + await answer.read()).endswith(b"data: [DONE]\n\n")

                async def unknown() -> float:
                    counts = await relay.samples("rollmesh_rpcs_total")
                    return sum(counts[one] for one in counts if '"UNAUTHENTICATED"' in one)

                before = await unknown()
                accepted.write_text("")

                async def is_ended() -> bool:
                    return await unknown() > before

                await until(is_ended)
                async with http.get(f"{url}/models", ssl=tls) as answer:
                    assert answer.status == 503


class Far:
    """A sidecar that answers nothing, at a relay in this process."""

    def __init__(self) -> None:
        self.written: asyncio.Queue[tunnels_pb2.AttachResponse] = asyncio.Queue()
        self.leaves = asyncio.Event()

    async def write(self, message: tunnels_pb2.AttachResponse) -> None:
        if self.leaves.is_set():
            raise ConnectionResetError
        self.written.put_nowait(message)

    async def messages(self, tunnel: str = "") -> AsyncIterator[tunnels_pb2.AttachRequest]:
        yield tunnels_pb2.AttachRequest(caller_id="far", tunnel=tunnel)
        await self.leaves.wait()

    async def dial(self, service: RelayService, tunnel: str = "") -> None:
        context: Any = self
        await service.Attach(self.messages(tunnel), context)


async def test_agents_are_refused_by_a_full_tunnel_and_after_its_last_call_broke_off(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("rollmesh.sidecar.relay.RESUME_S", 2.0)
    monkeypatch.setattr("rollmesh.mesh.tunnels._BEAT_S", 1.5)
    service, far = RelayService(RelayConfig(http_port=0)), Far()
    async with asyncio.timeout(60), service.running(""), aiohttp.ClientSession() as http:
        url = f"http://127.0.0.1:{json.loads(capsys.readouterr().out[5:])['port']}/v1/models"
        calling = asyncio.ensure_future(far.dial(service))
        tunnel = (await far.written.get()).tunnel
        asking = asyncio.ensure_future(http.get(url))
        while not (await far.written.get()).frame.data:
            pass
        for _ in range(2):  # messages of a tunnel that is up for longer than one is resumed
            assert not (await far.written.get()).frame.connection
        monkeypatch.setattr("rollmesh.mesh.tunnels.MOST_CONNECTIONS", 1)
        async with http.get(url) as answer:
            error = (await answer.json())["error"]
            assert (answer.status, error["code"]) == (429, "overloaded")
            assert "has 1024 requests; try again, or start more sidecars" in error["message"]
            assert int(answer.headers["retry-after"]) >= 1
        far.leaves.set()
        with pytest.raises(RemoteError):
            await calling
        monkeypatch.setattr("rollmesh.sidecar.relay.RESUME_S", 0.0)
        with pytest.raises(ConnectionResetError):
            await far.dial(service, tunnel)
        async with await asking as answer:
            assert (answer.status, (await answer.json())["error"]["code"]) == (503, "no_sidecar")


@asynccontextmanager
async def hashing(relay: str) -> AsyncIterator[list[int]]:
    """A server that dials the relay. It hashes what it is sent, or sends `SIZE` bytes.

    Yields the number of bytes that have passed, as a list of one.
    """
    passed = [0]

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        digest = hashlib.sha256()
        more = scope["method"] == "PUT"
        while more:
            message = await receive()
            digest.update(message["body"])
            passed[0] += len(message["body"])
            more = message["more_body"]
        if scope["method"] == "GET":
            for part in parts():
                await send({"type": "http.response.body", "body": part, "more_body": True})
                passed[0] += len(part)
        await send({"type": "http.response.body", "body": digest.hexdigest().encode()})

    server = uvicorn.Server(uvicorn.Config(app, port=0, lifespan="off", log_level="error"))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(server.serve([listener]))
            dialled = DialOut("hashing", f"127.0.0.1:{listener.getsockname()[1]}", relay)
            async with dialled.held():
                await dialled.wait_first()
                yield passed
            server.should_exit = True


SIZE, PART = 24 * 1024 * 1024, 96_000


def parts() -> list[bytes]:
    source = random.Random(7)
    return [source.randbytes(PART) for _ in range(SIZE // PART)]


@pytest.mark.parametrize("method", ["PUT", "GET"])
async def test_bytes_arrive_once_and_in_order_however_often_their_link_is_cut(
    tmp_path: Path, tokenizer_dir: Path, method: str
) -> None:
    async with AsyncExitStack() as stack:
        mesh = Mesh(tmp_path, tokenizer_dir, stack)
        await start_relay(mesh)
        link = await stack.enter_async_context(proxy_to(mesh.address("relay")))
        passed = await stack.enter_async_context(hashing(link.address))
        http = await stack.enter_async_context(aiohttp.ClientSession())
        expected = hashlib.sha256(b"".join(parts()))
        content = b"".join(parts()) if method == "PUT" else None
        url = f"http://{mesh.address('agents')}/anything"

        async def ask() -> bytes:
            async with http.request(method, url, data=content and io.BytesIO(content)) as answer:
                body: bytes = await answer.read()
                return body

        asking = asyncio.ensure_future(ask())
        cuts = 0
        for at in range(SIZE // 12, SIZE, SIZE // 12):

            async def has_passed(size: int = at) -> bool:
                return passed[0] >= size or asking.done()

            await until(has_passed)
            cuts += not asking.done()
            cut(link)
        received = await asking
        if method == "PUT":
            assert received.decode() == expected.hexdigest()
        else:
            assert received.startswith(b"".join(parts()))
            assert len(received) == SIZE // PART * PART + 64
        assert cuts >= 8
