"""Engines that dial out: turns and pushes reach them over connections that fail as networks do."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from rollmesh.chat import Tokenizer
from rollmesh.client import Client
from rollmesh.internal.v1 import tunnels_pb2, tunnels_pb2_grpc
from rollmesh.mesh import (
    DialOut,
    EngineClients,
    Failover,
    Generation,
    LeaseClient,
    Membership,
    Order,
    Tunnels,
)
from rollmesh.runtime.access import write_private
from rollmesh.runtime.errors import InvalidFieldError, RemoteError, RollmeshError
from rollmesh.runtime.rpc import (
    RpcInterceptor,
    open_channel,
    tunnel_address,
    tunnel_target,
    typed_errors,
)
from rollmesh.v1 import engine_pb2, router_pb2, sampling_pb2
from tests.engine.engines import CONFIG
from tests.faults.proxy import Proxy, proxy_to
from tests.locks import Locks
from tests.meshes import Mesh, delivered, scripted_mesh, write_script
from tests.processes import running
from tests.router.routers import running_router
from tests.trial_certificates import copy_certificates
from tests.waiting import until

RULES = [("plain", "The answer is 42, and there is more to say about it than one may think.")]
(SAID, REPLY) = RULES[0]
ASK: dict[str, Any] = {"model": "policy", "messages": [{"role": "user", "content": SAID}]}
ENGINE, GATEWAY = router_pb2.REPLICA_KIND_ENGINE, router_pb2.REPLICA_KIND_GATEWAY


@asynccontextmanager
async def far_mesh(
    folder: Path, model: Path, **engine: object
) -> AsyncIterator[tuple[Mesh, list[Proxy]]]:
    """A mesh whose engine dials the router and the gateway, each through a proxy."""
    write_script(folder / "script.json", Tokenizer(model), RULES)
    async with AsyncExitStack() as stack:
        mesh = Mesh(folder, model, stack)
        links = [
            await stack.enter_async_context(proxy_to(mesh.address(one)))
            for one in ("router", "gateway")
        ]
        await mesh.start("router", missed_reports=2)
        far = {"router": links[0].address, "dial_out": True, **engine}
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(mesh.start("collector"))
            tasks.create_task(mesh.start("engine", **far))
            tasks.create_task(mesh.start("gateway", advertise=links[1].address))
            tasks.create_task(mesh.start("sidecar"))
        yield mesh, links


def cut(links: list[Proxy]) -> None:
    for link in links:
        with link.cut():
            pass


def half_open(links: list[Proxy]) -> None:
    for link in links:
        link.silence()


@pytest.mark.parametrize("fails", [cut, pytest.param(half_open, marks=pytest.mark.long)])
@pytest.mark.parametrize("near", [False, True])
async def test_an_answer_outlives_its_connection(
    tmp_path: Path, tokenizer_dir: Path, fails: Callable[[list[Proxy]], None], near: bool
) -> None:
    """Another engine continues it, or the same one after it has dialled again."""
    async with far_mesh(tmp_path, tokenizer_dir, tokens_per_second=4) as (mesh, links):
        async with mesh.client() as client:
            async with client.session() as session:
                agent = mesh.openai(session)
                stream = await agent.chat.completions.create(**ASK, stream=True)
                pieces = aiter(stream)
                text = ""
                while not text.startswith("The"):
                    text += (await anext(pieces)).choices[0].delta.content or ""
                if near:
                    await mesh.start("engine", port=0, engine_id="near", tokens_per_second=0)
                fails(links)
                async with asyncio.timeout(25):  # other connections are given up after 30 s
                    text += "".join([one.choices[0].delta.content or "" async for one in pieces])
                assert text == REPLY
            (trajectory,) = (await delivered(client, session)).trajectories
        assert "MIGRATED" in trajectory.reasons
        sampled = Tokenizer(tokenizer_dir).encode(f"{REPLY}<|im_end|>").tolist()
        assert trajectory.token_ids[trajectory.prompt_tokens :].tolist() == sampled


async def test_tunnels_return_after_a_restart_at_either_end(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    async with far_mesh(tmp_path, tokenizer_dir) as (mesh, links):
        flags: dict[str, dict[str, object]] = {
            "router": {"grace_ms": 60_000},
            "gateway": {"advertise": links[1].address, "grace_ms": 60_000},
            "engine": {"router": links[0].address, "dial_out": True},
        }
        async with mesh.client() as client, client.session() as session:
            agent = mesh.openai(session, max_retries=8)
            for service, own in flags.items():
                await mesh.restart(service, **own)

                async def is_there() -> bool:
                    found = [one.hello for one in (await client.replicas()).replicas]
                    return any(
                        one.kind == ENGINE and one.load.tunnels == ["gateway-0"] for one in found
                    )

                await until(is_there)
                answer = await agent.chat.completions.create(**ASK)
                assert answer.choices[0].message.content == REPLY
                for result in await client.pause_engines() + await client.resume_engines():
                    assert not result.status.code, result.status.message
        async with asyncio.timeout(30):  # no tunnel holds up an end
            assert await mesh.processes["gateway"].terminate() == 0
            assert await mesh.processes["router"].terminate() == 0


async def test_pushes_and_scores_go_through_tunnels_with_tokens_and_tls(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    copy_certificates(tmp_path / "certs")
    locks = Locks(tmp_path / "tokens")
    common: dict[str, object] = {
        "tls_ca_file": tmp_path / "certs" / "ca.crt",
        "tls_server_name": "rollmesh",
    }

    def tls(role: str) -> dict[str, object]:
        files = {"tls_certificate_file": f"{role}.crt", "tls_key_file": f"{role}.key"}
        return common | {name: tmp_path / "certs" / file for name, file in files.items()}

    tokens = {"tls_client_certificates": False}
    first = {one: tls(one) | tokens for one in ("router", "collector", "gateway")}
    first["sidecar"] = dict(common)  # agents call it over HTTP
    engine = {**tls("engine"), **tokens, "dial_out": True, "max_adapters": 2}
    async with scripted_mesh(
        tmp_path, tokenizer_dir, RULES, first=first, locks=locks, **engine
    ) as mesh:
        addresses = replace(
            mesh.addresses, **{name: str(value) for name, value in tls("trainer").items()}
        )
        async with Client(addresses) as client:
            (replica,) = [
                one.hello for one in (await client.replicas()).replicas if one.hello.kind == ENGINE
            ]
            assert replica.address == "tunnel:engine-0"
            (pushed,) = await client.push_weights({"w": np.zeros(600_000, np.float32)}, 1)
            assert not pushed.status.code, pushed.status.message
            await client.push_adapter({"w": np.zeros(4, np.float32)}, "math", 1, CONFIG)
            ids = np.arange(2, 3_000, dtype=np.uint32) % 90 + 2
            scores = await client.score(ids, top_k=64)
            assert (scores.engine_id, scores.policy_version) == ("engine-0", 1)
            assert scores.logprobs[1:].tolist() == pytest.approx((ids[1:] % 97 / -50).tolist())
            with pytest.raises(InvalidFieldError, match=r"^top_k: is 257; give at most") as caught:
                await client.score(ids, top_k=257)
            assert caught.value.field == "top_k"
            async with client.session(adapters=["math"]) as session:
                agent = mesh.openai(session)
                answer = await agent.chat.completions.create(**ASK)
                assert answer.choices[0].message.content == REPLY


LONG = " ".join(f"Word {at}." for at in range(200))


@pytest.mark.long
async def test_an_engine_whose_token_is_removed_loses_its_tunnels_and_another_goes_on(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    locks = Locks(tmp_path / "tokens")
    accepted = locks.folder / "accepted" / "engine"
    write_private(tmp_path, {"near.token": b"n" * 32, "both": b"", "only": b"n" * 32})
    (tmp_path / "both").write_text(f"{accepted.read_text()}\n{'n' * 32}\n")
    (tmp_path / "both").replace(accepted)
    async with scripted_mesh(
        tmp_path, tokenizer_dir, [("plain", LONG)], locks=locks, dial_out=True, tokens_per_second=2
    ) as mesh:
        async with mesh.client() as client:
            async with client.session() as session:
                agent = mesh.openai(session)
                pieces = aiter(await agent.chat.completions.create(**ASK, stream=True))
                text = ""
                while not text.startswith("Word"):
                    text += (await anext(pieces)).choices[0].delta.content or ""
                near = {"token_file": tmp_path / "near.token", "engine_id": "near", "port": 0}
                await mesh.start("engine", **near, tokens_per_second=0)
                (tmp_path / "only").replace(accepted)
                text += "".join([one.choices[0].delta.content or "" async for one in pieces])
                assert text == LONG
                again = await agent.chat.completions.create(**ASK, seed=1)
                assert again.choices[0].message.content == LONG
            first, second = (await delivered(client, session)).trajectories
        spans = [[one.engine_id for one in row.path.version_spans] for row in (first, second)]
        assert spans == [["engine-0", "near"], ["near"]]
        assert "MIGRATED" in first.reasons
        sampled = Tokenizer(tokenizer_dir).encode(f"{LONG}<|im_end|>").tolist()
        assert first.token_ids[first.prompt_tokens :].tolist() == sampled


# One process at one of the ends.


@asynccontextmanager
async def gateway_here(router: str) -> AsyncIterator[Proxy]:
    """A gateway of this process, `g`, which has tunnels and nothing else, behind a proxy."""
    server = grpc.aio.server(interceptors=[RpcInterceptor()])
    taken = Tunnels()
    tunnels_pb2_grpc.add_TunnelServiceServicer_to_server(taken, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with proxy_to(f"127.0.0.1:{port}") as link:
            hello = router_pb2.ReplicaHello(
                replica_id="g", kind=GATEWAY, address=link.address, model="policy"
            )
            async with Membership(router, hello, router_pb2.ReplicaLoad) as member:
                await member.wait_registered()
                yield link
    finally:
        taken.end()
        await server.stop(0)


@pytest.mark.long
async def test_a_slow_link_carries_256_generations_and_a_cut_loses_none(tmp_path: Path) -> None:
    tokens, count = 48, 256

    def order(number: int) -> Order:
        request = engine_pb2.GenerateRequest(
            token_ids_u32le=np.array([5, 6, 7 + number], "<u4").tobytes(),
            sampling=sampling_pb2.SamplingParams(max_tokens=tokens),
        )
        return Order(Generation(request), f"s{number}", 1, 0, 60_000, 120_000, is_sent=lambda: True)

    async with AsyncExitStack() as stack:
        router = await stack.enter_async_context(running_router(tmp_path))
        link = await stack.enter_async_context(gateway_here(router.address))
        flags = {"backend": "scripted", "reply_tokens": tokens, "tokens_per_second": 12}
        await stack.enter_async_context(
            running("engine", tmp_path / "e", router=router.address, dial_out=True, **flags)
        )
        leases = await stack.enter_async_context(LeaseClient(router.address, "g"))
        engines = EngineClients(30_000)
        stack.push_async_callback(engines.close)
        migrated: list[None] = []
        failover = Failover(
            leases, engines, on_loss=lambda: None, on_migration=lambda: migrated.append(None)
        )
        orders = [order(number) for number in range(count)]

        async def generate(one: Order) -> None:
            async with aclosing(failover.run(one)) as runs:
                async for _ in runs:
                    pass

        async def fail() -> None:
            async def all_sample() -> bool:
                return all(one.generation.taken > 4 for one in orders)

            await until(all_sample)
            cut([link])

        with link.delayed(0.1):
            async with asyncio.timeout(120), asyncio.TaskGroup() as tasks:
                for one in orders:
                    tasks.create_task(generate(one))
                tasks.create_task(fail())
        assert len(migrated) >= count
        for one in orders:
            assert one.generation.taken == len(one.generation.token_ids()) == tokens
        whole = [order(number) for number in range(4)]
        for cut_one, one in zip(orders, whole, strict=False):
            await generate(one)
            assert cut_one.generation.token_ids().tolist() == one.generation.token_ids().tolist()


async def test_a_connection_whose_reader_is_slow_holds_up_no_other(tmp_path: Path) -> None:
    flooded, block = 0, bytes(range(256)) * 256

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Sends without end, or what it reads."""
        nonlocal flooded
        floods = await reader.readexactly(1) == b"f"
        with suppress(ConnectionError):  # the other end has left
            while data := block if floods else await reader.read(65_536):
                writer.write(data)
                await writer.drain()
                flooded += len(data) * floods
        writer.close()

    async with AsyncExitStack() as stack:
        router = await stack.enter_async_context(running_router(tmp_path))
        await stack.enter_async_context(gateway_here(router.address))
        listening = await asyncio.start_server(serve, "127.0.0.1", 0)
        stack.callback(listening.close)
        server = "{}:{}".format(*listening.sockets[0].getsockname())
        dialled = asyncio.Event()
        ends = DialOut("e", server, router.address, dialled.set, "policy")
        staying = asyncio.ensure_future(ends.stay())
        stack.callback(staying.cancel)
        async with asyncio.timeout(60):
            while ends.gateways != ["g"]:
                dialled.clear()
                await dialled.wait()
            path = tunnel_target(tunnel_address("e")).removeprefix("unix:")
            slow, flood = await asyncio.open_unix_connection(path)
            flood.write(b"f")
            reader, echo = await asyncio.open_unix_connection(path)
            echo.write(b"e")
            for _ in range(64):
                echo.write(block)
                assert await reader.readexactly(len(block)) == block
            assert flooded < 12 * 1024 * 1024  # the window, and buffers of the system
            for _ in range(512):
                assert await slow.readexactly(len(block)) == block
            echo.close()
            flood.close()


async def attached(call: Any, *messages: tunnels_pb2.AttachRequest) -> RollmeshError:
    """Sends messages and nothing after them. Returns the error with which the call ends."""
    for message in messages:
        await call.write(message)
    try:
        with typed_errors():
            while await call.read() is not grpc.aio.EOF:
                pass
    except RollmeshError as error:
        return error
    raise AssertionError("the call ended without an error")


async def test_an_engine_that_breaks_the_protocol_or_falls_silent_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_router(tmp_path) as router, gateway_here(router.address) as link:
        async with open_channel(link.address) as channel, asyncio.timeout(60):
            attach = tunnels_pb2_grpc.TunnelServiceStub(channel).Attach
            address, hello = tunnel_address("e"), tunnels_pb2.AttachRequest(caller_id="e")
            error = await attached(attach(), tunnels_pb2.AttachRequest(caller_id="a:b"))
            assert error.metadata["field"] == "caller_id"

            greedy: Any = attach()
            await greedy.write(hello)
            await greedy.read()
            path = tunnel_target(address).removeprefix("unix:")
            _, writer = await asyncio.open_unix_connection(path)
            writer.write(b"opened")
            while not (await greedy.read()).frame.data:
                pass
            data = tunnels_pb2.TunnelFrame(connection=1, data=bytes(1024 * 1024))
            parts = [tunnels_pb2.AttachRequest(frame=data)] * 2
            assert (await attached(greedy, *parts)).metadata["field"] == "data"
            writer.close()

            earlier, later = attach(), attach()
            await earlier.write(hello)
            await earlier.read()
            await later.write(hello)
            assert (await attached(earlier)).reason == "SUPERSEDED"
            assert tunnel_target(address) != f"unix:{path}"
            later.cancel()

            monkeypatch.setattr("rollmesh.mesh.tunnels.SILENCE_S", 0.5)
            assert (await attached(attach(), hello)).reason == "DEADLINE"
            with pytest.raises(RemoteError, match="engine e dials out and has no tunnel"):
                open_channel(address)
