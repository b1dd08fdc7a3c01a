"""Adapters as policies of sessions: the newest, pinned and named revisions, and several at once."""

from collections.abc import AsyncIterator
from typing import Any

import anthropic
import numpy as np
import openai
import pytest

from rollmesh.client import AdapterChoice, Client, Session, SessionResult
from rollmesh.runtime.codec import name_of
from rollmesh.runtime.errors import AdapterUnknownError, InvalidFieldError
from rollmesh.v1 import collector_pb2, trajectory_pb2
from tests.engine.engines import CONFIG
from tests.meshes import Mesh, delivered
from tests.waiting import until

ROOM = 5
ENGINES = ("second", "third")
FIRST = {"router": {"max_adapter_lag": 1}}
MIXED = trajectory_pb2.FIDELITY_REASON_MIXED_POLICIES


MESH = {"first": FIRST, "max_adapters": ROOM}


@pytest.fixture
async def client(mesh: Mesh) -> AsyncIterator[Client]:
    async with mesh.client() as client:
        yield client


async def push(client: Client, name: str, version: int) -> None:
    await client.push_adapter({"w": np.zeros(4, np.float32)}, name, version, CONFIG)


async def ask(mesh: Mesh, session: Session, text: str, model: str = "policy", **more: Any) -> Any:
    messages: Any = [{"role": "user", "content": text}]
    return await mesh.openai(session).chat.completions.create(
        model=model, messages=messages, **more
    )


def policies(result: SessionResult) -> list[tuple[str, int]]:
    """The policy of each turn, in the order of the turns."""
    found = {}
    for trajectory in result.trajectories:
        for run in trajectory.segments:
            if run.sampled:
                (found[run.node_id],) = {
                    (one.adapter, one.policy_version)
                    for one in trajectory.version_spans
                    if run.start < one.end and one.start < run.end
                }
    return [found[node] for node in sorted(found)]


async def held(client: Client) -> list[tuple[str, int]]:
    """The revisions that the engine holds."""
    replicas = (await client.replicas()).replicas
    (engine,) = [one.hello for one in replicas if one.hello.max_adapters]
    return [(one.adapter.name, one.adapter.version) for one in engine.load.adapters]


@pytest.mark.long
async def test_each_turn_has_the_newest_revision(mesh: Mesh, client: Client) -> None:
    await push(client, "math", 1)
    async with client.session(adapters=["math"]) as session:
        assert [(one.name, one.version) for one in session.adapters] == [("math", 0)]
        await ask(mesh, session, "one")
        await push(client, "math", 5)
        await ask(mesh, session, "two")
    async with client.session() as base:
        await ask(mesh, base, "one")
    assert policies(await delivered(client, session)) == [("math", 1), ("math", 5)]
    assert policies(await delivered(client, base)) == [("", 0)]


async def test_a_pinned_revision_stays_until_its_session_ends(mesh: Mesh, client: Client) -> None:
    pinned = AdapterChoice(name="math", pinned=True)
    await push(client, "math", 1)
    async with client.session(adapters=[pinned]) as session:
        assert [(one.name, one.version) for one in session.adapters] == [("math", 1)]
        await ask(mesh, session, "one")
        for version in (2, 3, 4):
            await push(client, "math", version)
        await until(lambda: _holds(client, ("math", 1), ("math", 3), ("math", 4)))
        await ask(mesh, session, "two")
        await mesh.restart("gateway")
        await ask(mesh, session, "three")
        await mesh.restart("router", **FIRST["router"])
        await push(client, "math", 5)
        await mesh.restart("engine", max_adapters=ROOM)
        await ask(mesh, session, "four")
    assert policies(await delivered(client, session)) == [("math", 1)] * 4
    await until(lambda: _holds(client, ("math", 4), ("math", 5)))


async def _holds(client: Client, *revisions: tuple[str, int]) -> bool:
    return await held(client) == list(revisions)


async def test_a_push_that_needs_more_room_because_of_sessions_says_how_much(
    mesh: Mesh, client: Client
) -> None:
    sessions = []
    for version in (1, 2, 3, 4):
        await push(client, "math", version)
        request = client.session_request(adapters=[AdapterChoice(name="math", version=version)])
        sessions.append(await client.open_session(request))
    await until(lambda: _holds(client, *(("math", version) for version in (1, 2, 3, 4))))
    await push(client, "math", 5)
    with pytest.raises(InvalidFieldError) as refused:
        await push(client, "math", 6)
    assert refused.value.metadata["needed"] == "6"
    await client.close_session(sessions[0])  # one of the remedies that the error names
    await until(lambda: _takes(client, 6))
    for session in sessions[1:]:
        await client.close_session(session)


async def _takes(client: Client, version: int) -> bool:
    try:
        await push(client, "math", version)
    except InvalidFieldError:
        return False
    return True


async def test_policies_that_no_router_retains_are_refused_by_name(
    mesh: Mesh, client: Client
) -> None:
    await push(client, "math", 1)
    wrong: list[tuple[Any, str]] = [
        (["code"], "'code' is not retained"),
        ([AdapterChoice(name="math", version=2)], "version 2 of 'math' is not retained"),
    ]
    for adapters, problem in wrong:
        with pytest.raises(AdapterUnknownError, match=problem):
            await client.open_session(client.session_request(adapters=adapters))
    for adapters in (
        ["math", "math"],
        [f"a{number}" for number in range(17)],
        [AdapterChoice(name="math", version=1, pinned=True)],
        [AdapterChoice(version=1)],
        [AdapterChoice(name="math", version=-1)],
    ):
        with pytest.raises(InvalidFieldError, match="adapters"):
            await client.open_session(client.session_request(adapters=adapters))


async def test_two_policies_of_one_session_are_trained_once_each_by_their_own_trainers(
    mesh: Mesh, client: Client
) -> None:
    await push(client, "planner", 3)
    await push(client, "coder", 8)
    async with client.session(adapters=["planner", "coder", ""]) as session:
        planned = await ask(mesh, session, "plan", model="planner")
        echo = {"role": "assistant", "content": planned.choices[0].message.content}
        messages: Any = [
            {"role": "user", "content": "plan"},
            echo,
            {"role": "user", "content": "code"},
        ]
        agent = mesh.openai(session)
        coded = await agent.chat.completions.create(model="coder", messages=messages)
        assert coded.model == "coder"
        await agent.chat.completions.create(model="planner", messages=messages)
        await agent.chat.completions.create(model="policy", messages=messages)
        # An equal request to another policy is another sample, and an equal one is its retry.
        again = await agent.chat.completions.create(
            model="coder", messages=messages, extra_headers={"x-stainless-retry-count": "1"}
        )
        assert again.id == coded.id
    all_of_it = await delivered(client, session)
    assert policies(all_of_it) == [("planner", 3), ("coder", 8), ("planner", 3), ("", 0)]
    assert any("MIXED_POLICIES" in one.reasons for one in all_of_it.trajectories)
    trained: list[tuple[str, tuple[str, int], int]] = []
    for name in ("planner", "coder", ""):
        found = await delivered(client, session, adapters=[name])
        for trajectory in found.trajectories:
            for run in trajectory.segments:
                mask = trajectory.loss_mask[run.start : run.end]
                assert mask.any() == run.trained
                others = run.sampled and MIXED in run.reasons
                assert not (others and run.trained)
                if run.trained:
                    (policy,) = {
                        (one.adapter, one.policy_version)
                        for one in trajectory.version_spans
                        if run.start < one.end and one.start < run.end
                    }
                    trained.append((name, policy, run.node_id))
    assert [(name, policy) for name, policy, _ in trained] == [
        ("planner", ("planner", 3)),
        ("planner", ("planner", 3)),
        ("coder", ("coder", 8)),
        ("", ("", 0)),
    ]
    assert len({node for *_, node in trained}) == 4


@pytest.mark.long
async def test_a_consumer_of_another_policy_gets_nothing_of_a_session(
    mesh: Mesh, client: Client
) -> None:
    await push(client, "math", 1)
    async with client.session(adapters=["math"]) as session:
        await ask(mesh, session, "one")
    async with client.session() as base:
        await ask(mesh, base, "one")
    await delivered(client, base, adapters=[""])
    (stats,) = (await client.stats()).consumers
    assert {
        name_of(collector_pb2.FilterReason.DESCRIPTOR, one.reason): (one.units, one.trajectories)
        for one in stats.filtered
    } == {"ADAPTER": (0, 1), "NOTHING_LEFT": (1, 0)}


@pytest.mark.long
async def test_an_agent_that_names_an_adapter_of_others_is_told_so(
    mesh: Mesh, client: Client
) -> None:
    await push(client, "math", 1)
    async with client.session() as session:
        with pytest.raises(openai.BadRequestError, match="no policy of this session"):
            await ask(mesh, session, "one", model="math")
        await ask(mesh, session, "one")


async def test_an_answer_moves_to_another_engine_with_its_revision(
    mesh: Mesh, client: Client
) -> None:
    await push(client, "math", 1)
    slow = {"tokens_per_second": 10, "reply_tokens": 80, "max_adapters": ROOM}
    for name in ENGINES:
        await mesh.run(
            "engine", name, **mesh.flags("engine") | {"port": 0, "engine_id": name, **slow}
        )
    await mesh.processes["engine"].terminate()
    async with client.session(adapters=["math"]) as session:
        answer = await ask(mesh, session, "one", stream=True)
        async for chunk in answer:
            if chunk.choices and chunk.choices[0].delta.content:
                break
        await push(client, "math", 2)
        replicas = (await client.replicas()).replicas
        (address,) = [one.hello.address for one in replicas if one.leases]
        (name,) = [name for name in ENGINES if mesh.processes[name].address == address]
        await mesh.processes[name].kill()
        async for _ in answer:
            pass
        await ask(mesh, session, "two", max_tokens=2)
    result = await delivered(client, session)
    assert policies(result) == [("math", 1), ("math", 2)]
    assert {"MIGRATED"} <= {reason for one in result.trajectories for reason in one.reasons}
    assert not any("MIXED_VERSIONS" in one.reasons for one in result.trajectories)


@pytest.mark.long
async def test_an_adapter_may_not_have_the_name_of_a_model(mesh: Mesh, client: Client) -> None:
    with pytest.raises(InvalidFieldError, match="'policy' is a model's name"):
        await push(client, "policy", 1)


async def test_every_protocol_chooses_a_policy_by_the_model(mesh: Mesh, client: Client) -> None:
    await push(client, "planner", 3)
    await push(client, "coder", 8)
    async with client.session(adapters=["planner", "coder"]) as session:
        claude = anthropic.AsyncAnthropic(
            base_url=session.base_url.removesuffix("/v1"), api_key=session.api_key, max_retries=0
        )
        async with claude:
            said = await claude.messages.create(
                model="coder", max_tokens=8, messages=[{"role": "user", "content": "one"}]
            )
        assert said.model == "coder"
        agent = mesh.openai(session)
        response = await agent.responses.create(model="coder", input="two", max_output_tokens=8)
        again = await agent.responses.create(
            model="planner", previous_response_id=response.id, input="three", max_output_tokens=8
        )
        assert (response.model, again.model) == ("coder", "planner")
        streamed = await ask(mesh, session, "four", model="coder", stream=True)
        assert {chunk.model async for chunk in streamed} == {"coder"}
        await ask(mesh, session, "five", model="gpt-4o")  # as many agents have it built in
    found = [name for name, _ in policies(await delivered(client, session))]
    assert found == ["coder", "coder", "planner", "coder", "planner"]


@pytest.mark.long
async def test_a_sidecar_that_asks_the_router_knows_adapters_and_no_other_names(
    mesh: Mesh, client: Client
) -> None:
    flags = {"gateway": "", "router": mesh.address("router"), "unknown_models": "refuse"}
    sidecar = await mesh.run("sidecar", "routed", port=0, **flags)
    await push(client, "coder", 8)
    async with client.session(adapters=["", "coder"]) as session:
        url = f"http://{sidecar.address}/sessions/{session.api_key}/v1"
        messages: Any = [{"role": "user", "content": "one"}]
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as agent:
            said = await agent.chat.completions.create(model="coder", messages=messages)
            assert said.model == "coder"
            with pytest.raises(openai.NotFoundError):
                await agent.chat.completions.create(model="gpt-4o", messages=messages)
    assert policies(await delivered(client, session)) == [("coder", 8)]


@pytest.mark.long
async def test_a_revision_that_an_operator_unloads_ends_turns_by_name_and_loses_none(
    mesh: Mesh, client: Client
) -> None:
    await push(client, "math", 1)
    pinned = AdapterChoice(name="math", pinned=True)
    async with client.session(adapters=[pinned, ""]) as session:
        await ask(mesh, session, "one", model="math")
        await client.unload_adapter("math")
        with pytest.raises(openai.APIStatusError, match="version 1 of 'math' is not retained"):
            await ask(mesh, session, "two", model="math")
        await ask(mesh, session, "two", model="policy")
    assert policies(await delivered(client, session)) == [("math", 1), ("", 0)]
