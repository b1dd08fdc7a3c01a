"""A mesh of today with programs of the last release in it: as the contract has them, they work.

Routers, collectors and engines are upgraded first, so they are of today. Trainers, sidecars and
gateways may each be of the last release.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from rollmesh.client import Client, MeshAddresses
from rollmesh.runtime.rpc import open_channel
from tests.contract.former import FormerPeer, former
from tests.meshes import Mesh, delivered, scripted_mesh
from tests.processes import running
from tests.waiting import until

RULES = [("What is 2 + 2?", "4"), ("Thanks.", "You are welcome.")]
_LIMIT_S = 60.0


@pytest.fixture
async def mesh(tmp_path: Path, tokenizer_dir: Path) -> AsyncIterator[Mesh]:
    async with scripted_mesh(tmp_path, tokenizer_dir, RULES) as mesh:
        yield mesh


@asynccontextmanager
async def stubs(mesh: Mesh) -> AsyncIterator[dict[str, Any]]:
    """Stubs of the last release for every gRPC service of a mesh."""
    services = {
        "router": "RouterService",
        "gateway": "GatewayService",
        "engine": "EngineService",
        "collector": "CollectorService",
    }
    async with AsyncExitStack() as stack:
        channels = {
            name: await stack.enter_async_context(open_channel(mesh.address(name)))
            for name in services
        }
        found = {name: former().stub(channels[name], services[name]) for name in services}
        internal = {"members": "MembershipService", "leases": "LeaseService"}
        yield found | {
            name: former().stub(channels["router"], service) for name, service in internal.items()
        }


def said(role: str, text: str) -> Any:
    parts = [former().ContentPart(text=text)]
    return former().ChatMessage(role=former().number("Role", f"ROLE_{role}"), content=parts)


def ids(data: bytes) -> list[int]:
    return [int(one) for one in np.frombuffer(data, "<u4")]


async def read_session(collector: Any, consumer: str, session_id: str) -> Any:
    """Returns what a trainer of the last release is delivered of a session."""
    old = former()
    unit = old.number("DeliveryUnit", "DELIVERY_UNIT_SESSION")
    wanted = old.Consumer(name=consumer, unit=unit)
    start = old.Position(end=old.number("LogEnd", "LOG_END_EARLIEST"))
    request = old.CreateConsumerRequest(consumer=wanted, start=start, request_id="create")
    await collector.CreateConsumer(request, timeout=_LIMIT_S)
    stream = collector.Subscribe(timeout=_LIMIT_S)
    await stream.write(old.SubscribeRequest(hello=old.SubscribeHello(consumer=consumer)))
    await stream.write(old.SubscribeRequest(grant=old.GrantCredits(credits=8)))
    while True:
        part = await stream.read()
        assert part is not grpc.aio.EOF
        if part.WhichOneof("part") != "delivery":
            continue
        delivery_ids = [part.delivery.delivery_id]
        done = old.AcknowledgeDeliveries(delivery_ids=delivery_ids)
        await stream.write(old.SubscribeRequest(acknowledge=done))
        (session,) = part.delivery.sessions
        if session.session_id == session_id:
            break
    while part.WhichOneof("part") != "acknowledged":
        part = await stream.read()
    assert list(part.acknowledged.delivery_ids) == delivery_ids
    stream.cancel()
    return session


async def test_a_trainer_opens_a_session_takes_turns_and_is_delivered_its_trajectory(
    mesh: Mesh,
) -> None:
    old = former()
    async with stubs(mesh) as at, asyncio.timeout(_LIMIT_S):
        opened = await at["gateway"].CreateSession(
            old.CreateSessionRequest(request_id="task-7", metadata={"task": "7"})
        )
        key = {"session_id": opened.session_id, "session_key": opened.session_key}
        returns = old.ReturnOptions(token_ids=True, logprobs=True)
        messages = [said("USER", "What is 2 + 2?")]
        answered = await at["gateway"].Chat(
            old.ChatRequest(**key, messages=messages, returns=returns)
        )
        (first,) = answered.answers
        assert first.message.content[0].text == "4"
        messages += [first.message, said("USER", "Thanks.")]
        ask = old.ChatRequest(**key, messages=messages, returns=returns)
        events = [one async for one in at["gateway"].StreamChat(old.StreamChatRequest(chat=ask))]
        text = "".join(one.delta.content for one in events if one.WhichOneof("event") == "delta")
        (last,) = [one.done for one in events if one.WhichOneof("event") == "done"]
        assert text == last.message.content[0].text == "You are welcome."
        outcome = old.number("SessionOutcome", "SESSION_OUTCOME_COMPLETED")
        rewards = old.SessionRewards(reward=1.0)
        closed = await at["gateway"].CloseSession(
            old.CloseSessionRequest(**key, outcome=outcome, rewards=rewards)
        )
        record = await read_session(at["collector"], "old-trainer", opened.session_id)
    (trajectory,) = record.trajectories
    assert [trajectory.trajectory_id] == list(closed.trajectory_ids)
    assert (record.metadata["task"], record.reward, record.turns) == ("7", 1.0, 2)
    mask = np.frombuffer(trajectory.tokens.loss_mask_u8, np.uint8).astype(bool)
    sampled = np.array(ids(trajectory.tokens.token_ids_u32le))[mask].tolist()
    deltas = [one.delta.tokens for one in events if one.WhichOneof("event") == "delta"]
    answers = (first.tokens, *deltas)
    assert sampled == [one for tokens in answers for one in ids(tokens.token_ids_u32le)]
    logprobs = b"".join(tokens.logprobs_f32le for tokens in answers)
    assert np.frombuffer(trajectory.tokens.logprobs_f32le, "<f4")[mask].tobytes() == logprobs


async def test_a_trainer_controls_engines_and_reads_lists(mesh: Mesh, tmp_path: Path) -> None:
    old = former()
    joining = {"router": mesh.address("router")}
    async with (
        running("sidecar", tmp_path, **joining),
        stubs(mesh) as at,
        asyncio.timeout(_LIMIT_S),
    ):
        mode = old.number("PauseMode", "PAUSE_MODE_KEEP")
        paused = await at["router"].ControlEngines(
            old.ControlEnginesRequest(pause={"mode": mode}, request_id="pause")
        )
        assert [(one.engine_id, one.status.code) for one in paused.results] == [("engine-0", 0)]
        assert (await at["engine"].GetInfo(old.GetInfoRequest())).paused
        await at["router"].ControlEngines(old.ControlEnginesRequest(resume={}, request_id="resume"))
        # The sidecar is listed too, as a kind that the last release does not know.
        known = {old.number("ReplicaKind", f"REPLICA_KIND_{one}") for one in ("ENGINE", "GATEWAY")}
        kinds: dict[str, int] = {}

        async def others_are_listed() -> bool:
            listed = await at["router"].ListReplicas(old.ListReplicasRequest())
            kinds.update({one.hello.replica_id: one.hello.kind for one in listed.replicas})
            return bool(set(kinds.values()) - known)

        await until(others_are_listed)
        assert {kinds["engine-0"], kinds["gateway-0"]} == known
        stats = await at["collector"].GetStats(old.GetStatsRequest())
        assert stats.sessions == 0


async def test_a_gateway_registers_leases_generates_and_hands_a_session_over(mesh: Mesh) -> None:
    old = former()
    async with stubs(mesh) as at, asyncio.timeout(_LIMIT_S):
        hello = old.ReplicaHello(
            replica_id="old-gateway",
            kind=old.number("ReplicaKind", "REPLICA_KIND_GATEWAY"),
            address="127.0.0.1:9",
            model="policy",
            instance_id="1",
        )
        registered = at["members"].Register()
        await registered.write(old.RegisterRequest(hello=hello))
        assert (await registered.read()).router_id
        await registered.write(old.RegisterRequest(load=old.ReplicaLoad(live_sessions=1)))
        leases = at["leases"].Dispatch()
        own = old.DispatchHello(gateway_id="old-gateway", model="policy")
        await leases.write(old.DispatchRequest(hello=own))
        wanted = old.AcquireLease(lease_id="lease-1", session_id="s-1")
        await leases.write(old.DispatchRequest(acquire=wanted))
        granted = await answer_of(leases, "lease-1")
        assert granted.grant.address == mesh.address("engine")
        prompt = np.arange(10, 20, dtype="<u4").tobytes()
        request = old.GenerateRequest(
            request_id="g-1", session_id="s-1", token_ids_u32le=prompt, model="policy"
        )
        generations = at["engine"].Generations()
        begin = old.BeginGeneration(
            number=1, request=old.StreamedGenerate(generate=request, max_chunk_tokens=8)
        )
        await generations.write(old.GenerationsRequest(begin=[begin]))
        await generations.done_writing()
        frames = [frame async for message in generations for frame in message.frames]
        chunks = [frame.answer for frame in frames if frame.HasField("answer")]
        sampled = b"".join(one.token_ids_u32le for one in chunks)
        logprobs = b"".join(one.logprobs_f32le for one in chunks)
        assert len(sampled) == len(logprobs) > 0
        assert chunks[-1].finish.prompt_tokens == 10
        done = old.ReleaseLease(lease_id="lease-1")
        await leases.write(old.DispatchRequest(releases=[done]))
        record = record_of("s-1", prompt, sampled, logprobs, chunks[-1].finish.version_spans)
        kept = await at["collector"].Ingest(old.IngestRequest(sessions=[record]))
        assert list(kept.duplicates) == [False]
        again = await at["collector"].Ingest(old.IngestRequest(sessions=[record]))
        assert list(again.duplicates) == [True]
        async with mesh.client() as client, client.subscribe("new", unit="session") as sessions:
            (session,) = (await anext(sessions)).sessions
        (trajectory,) = session.trajectories
        assert trajectory.token_ids.astype("<u4").tobytes() == prompt + sampled
        leases.cancel()
        registered.cancel()


async def answer_of(leases: Any, lease_id: str) -> Any:
    """Returns the answer to a request for a lease. A gateway ignores what it does not know."""
    while True:
        answer = await leases.read()
        assert answer is not grpc.aio.EOF
        if answer.lease_id == lease_id:
            return answer


def record_of(
    session_id: str, prompt: bytes, sampled: bytes, logprobs: bytes, version_spans: Any
) -> Any:
    """Returns a session with one turn, as a gateway of the last release hands it over."""
    old = former()
    asked, answered = len(prompt) // 4, len(sampled) // 4
    tokens = old.TokenArrays(
        token_ids_u32le=prompt + sampled,
        logprobs_f32le=bytes(len(prompt)) + logprobs,
        loss_mask_u8=bytes(asked) + b"\x01" * answered,
    )
    role = {name: old.number("Role", f"ROLE_{name}") for name in ("USER", "ASSISTANT")}
    exact = old.number("FidelityReason", "FIDELITY_REASON_EXACT")
    trajectory = old.Trajectory(
        trajectory_id=f"{session_id}-2",
        session_id=session_id,
        leaf_node_id=2,
        lineage=old.number("Lineage", "LINEAGE_MAIN"),
        tokens=tokens,
        prompt_tokens=asked,
        segments=[
            old.TrajectorySegment(start=0, end=asked, node_id=1, role=role["USER"]),
            old.TrajectorySegment(
                start=asked,
                end=asked + answered,
                node_id=2,
                role=role["ASSISTANT"],
                sampled=True,
                trained=True,
                reasons=[exact],
                engine_id="engine-0",
            ),
        ],
        reasons=[exact],
        turns=1,
    )
    for span in version_spans:
        trajectory.version_spans.add(
            start=span.start + asked, end=span.end + asked, policy_version=span.policy_version
        )
    return old.SessionRecord(
        session_id=session_id,
        outcome=old.number("SessionOutcome", "SESSION_OUTCOME_COMPLETED"),
        trajectories=[trajectory],
        opened_unix_ms=1,
        closed_unix_ms=2,
        turns=1,
    )


async def test_a_sidecar_of_the_last_release_serves_a_mesh_of_today(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    async with AsyncExitStack() as stack:
        mesh = Mesh(tmp_path, tokenizer_dir, stack)
        await mesh.start("router")
        await mesh.start("collector")
        gateway = await stack.enter_async_context(FormerPeer(mesh.address("gateway")).serving())
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(mesh.start("engine"))
            tasks.create_task(mesh.start("gateway"))
        await mesh.start("sidecar", gateway=gateway.address)
        addresses = MeshAddresses(
            router=mesh.address("router"),
            collector=mesh.address("collector"),
            sidecar=mesh.address("sidecar"),
        )
        async with Client(addresses) as client:
            async with client.session() as session:
                answers = [
                    await mesh.openai(session).chat.completions.create(
                        model="policy", messages=[{"role": "user", "content": text}]
                    )
                    for text in ("hello", "and again")
                ]
            record = await delivered(client, session)
    usage = [one.usage for one in answers]
    assert sum(one.completion_tokens for one in usage if one) == sum(
        int(one.loss_mask.sum()) for one in record.trajectories
    )
    assert gateway.calls["Chat"] >= 2
