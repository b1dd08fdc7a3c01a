"""Two models in one mesh: each has its sessions, engines, weights and trainer. Nothing crosses."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import openai
import pytest
import pytest_asyncio

from rollmesh.client import Client, Session, SubscribeOptions, rollout
from rollmesh.runtime.errors import InvalidFieldError
from rollmesh.v1 import collector_pb2, router_pb2
from tests.meshes import delivered
from tests.several_models import ANSWERS, JUDGE, POLICY, QUESTION, Fleet, two_models
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")
ASK: list[Any] = [{"role": "user", "content": QUESTION}]
MODELS = pytest.mark.parametrize("model", [POLICY, JUDGE], ids=["policy", "judge"])
OTHER = {POLICY: JUDGE, JUDGE: POLICY}
TENSORS = {"w": np.zeros(1, np.float32)}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    async with two_models(tmp_path_factory.mktemp("models")) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def client(fleet: Fleet) -> AsyncIterator[Client]:
    async with fleet.client() as opened:
        yield opened


async def test_every_model_of_the_mesh_is_listed_and_no_other_is_found(
    fleet: Fleet, client: Client
) -> None:
    async with client.session(model=POLICY) as session:
        agent = fleet.openai(session)
        assert [one.id async for one in agent.models.list()] == [JUDGE, POLICY]
        found = await agent.models.retrieve(JUDGE)
        assert (found.id, found.object) == (JUDGE, "model")
        with pytest.raises(openai.NotFoundError, match="'gpt-9' does not exist") as unknown:
            await agent.models.retrieve("gpt-9")
        assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")


@MODELS
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_request_may_name_the_sessions_model_none_or_one_that_is_not_there(
    fleet: Fleet, client: Client, model: str, *, stream: bool
) -> None:
    async with client.session(model=model) as session:
        assert session.model == model
        agent = fleet.openai(session)
        for name in (model, "", "claude-haiku-4-5"):
            answer: Any = await agent.chat.completions.create(
                model=name, messages=ASK, stream=stream
            )
            if stream:
                chunks = [one async for one in answer]
                said = "".join(one.choices[0].delta.content or "" for one in chunks)
                named = chunks[0].model
            else:
                said, named = answer.choices[0].message.content, answer.model
            assert (said, named) == (ANSWERS[model], name or model)


@MODELS
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_request_never_reaches_another_model_of_the_mesh(
    fleet: Fleet, client: Client, model: str, *, stream: bool
) -> None:
    async with client.session(model=model) as session:
        agent = fleet.openai(session)
        with pytest.raises(openai.NotFoundError, match="the session is one of") as refused:
            await agent.chat.completions.create(model=OTHER[model], messages=ASK, stream=stream)
        assert refused.value.code == "model_not_found"
        assert not (await client.transcript(session)).turns


async def test_a_session_names_its_model_where_there_are_several(client: Client) -> None:
    with pytest.raises(InvalidFieldError, match=f"model: is empty; give one of {JUDGE}, {POLICY}"):
        await client.open_session(client.session_request())
    with pytest.raises(InvalidFieldError, match="model: 'gpt-9' is not served"):
        await client.open_session(client.session_request(model="gpt-9"))


async def test_each_trainer_gets_the_sessions_of_its_model_alone(
    fleet: Fleet, client: Client
) -> None:
    async def agent(_: Any, session: Session) -> float:
        await fleet.openai(session).chat.completions.create(model=session.model, messages=ASK)
        return 1.0

    async with asyncio.TaskGroup() as tasks:
        for model in (POLICY, JUDGE):
            tasks.create_task(
                rollout(client, ["sample"], runner=agent, n=3, model=model, progress=False)
            )
    for model in (POLICY, JUDGE):
        options = SubscribeOptions(filter=collector_pb2.DeliveryFilter(model=model))
        async with client.subscribe(f"of {model}", unit="group", options=options) as groups:
            async with asyncio.timeout(60):
                delivery = await anext(groups)
        assert [one.model for one in delivery.sessions] == [model] * 3
        for session in delivery.sessions:
            (trajectory,) = session.trajectories
            sampled = trajectory.token_ids[trajectory.loss_mask]
            assert sampled.tolist() == fleet.sampled_ids(model)
    left_out = await client.filtered(f"of {POLICY}")
    ungrouped = collector_pb2.FILTER_REASON_UNGROUPED  # sessions of other tests
    reasons = {one.reason for one in left_out} - {ungrouped}
    assert reasons == {collector_pb2.FILTER_REASON_MODEL}


async def versions(client: Client) -> dict[str, tuple[int, bool]]:
    """The target version of each model, and whether its engine is fenced."""
    response = await client.replicas()
    fenced = {
        one.hello.model: one.fenced
        for one in response.replicas
        if one.hello.kind == router_pb2.REPLICA_KIND_ENGINE
    }
    return {one.model: (one.target_policy_version, fenced[one.model]) for one in response.models}


async def test_weights_of_one_model_never_fence_the_other(fleet: Fleet, client: Client) -> None:
    async with client.session(model=POLICY) as one, client.session(model=JUDGE) as other:
        for version, model in ((1, POLICY), (5, JUDGE), (2, POLICY), (6, JUDGE)):
            if version == 2:
                await fleet.start("router")
                await fleet.start(f"engine {JUDGE}")  # it has no weights. The router has them
            await client.push_weights(TENSORS, version, model=model)
            assert await client.policy_version(model) == version
            for session in (one, other):
                answer = await fleet.openai(session).chat.completions.create(
                    model=session.model, messages=ASK
                )
                assert answer.choices[0].message.content == ANSWERS[session.model]
        assert await versions(client) == {POLICY: (2, False), JUDGE: (6, False)}
        with pytest.raises(InvalidFieldError, match=f"{JUDGE}, {POLICY}"):
            await client.push_weights(TENSORS, 9)
    for session, expected in ((one, [1, 1, 2, 2]), (other, [0, 5, 5, 6])):
        stored = await delivered(client, session)
        assert stored.model == session.model
        got = [one.policy_versions[one.loss_mask] for one in stored.trajectories]
        assert [set(one.tolist()) for one in got] == [{version} for version in expected]


async def test_a_model_without_a_gateway_is_still_another_one(fleet: Fleet, client: Client) -> None:
    async with client.session(model=POLICY) as session:
        await fleet.processes[f"gateway {JUDGE}"].kill()
        agent = fleet.openai(session)

        async def is_gone() -> bool:
            return [one.id async for one in agent.models.list()] == [POLICY]

        await until(is_gone)
        await fleet.start("sidecar")  # it has never heard of the judge's gateway
        with pytest.raises(openai.NotFoundError, match="another model of this mesh"):
            await agent.chat.completions.create(model=JUDGE, messages=ASK)
        await fleet.start(f"gateway {JUDGE}")
