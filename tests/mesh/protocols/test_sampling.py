"""Agents that send sampling parameters of their own, by the published packages of each protocol."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeAlias

import openai
import pytest
import pytest_asyncio

from rollmesh.client import Session
from tests.lazily import anthropic
from tests.mesh.protocols import test_messages, test_openai, test_responses
from tests.meshes import Mesh, delivered, scripted_mesh

pytestmark = pytest.mark.asyncio(loop_scope="module")
RULES = [("plain", "The answer is 42.")]
Ask: TypeAlias = Callable[..., Awaitable[None]]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(tmp_path_factory: pytest.TempPathFactory, tokenizer_dir: Any) -> AsyncIterator[Mesh]:
    folder, first = tmp_path_factory.mktemp("mesh"), {"gateway": {"metrics_port": 0}}
    async with scripted_mesh(folder, tokenizer_dir, RULES, first=first) as mesh:
        yield mesh


async def by_chat(mesh: Mesh, session: Session, *, stream: bool, **fields: Any) -> None:
    ask = test_openai.streamed if stream else test_openai.ask
    await ask(mesh.openai(session), test_openai.user("plain"), **fields)


async def by_responses(mesh: Mesh, session: Session, *, stream: bool, **fields: Any) -> None:
    await test_responses.ask(mesh.openai(session), "plain", streamed=stream, **fields)


async def by_messages(mesh: Mesh, session: Session, *, stream: bool, **fields: Any) -> None:
    ask = test_messages.streamed if stream else test_messages.ask
    async with test_messages.asking(session) as agent:
        await ask(agent, test_messages.user("plain"), extra_body=fields)  # it has no temperature


every_protocol = pytest.mark.parametrize(
    "ask",
    [
        pytest.param(by_chat, id="chat"),
        pytest.param(by_responses, id="responses"),
        pytest.param(by_messages, id="messages"),
    ],
)
every_form = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


async def turn_of(mesh: Mesh, session: Session) -> tuple[Any, Any]:
    """The one trajectory of a session, and its sampled segment."""
    async with mesh.client() as client:
        (trajectory,) = (await delivered(client, session)).trajectories
    (segment,) = [one for one in trajectory.segments if one.sampled]
    return trajectory, segment


@every_protocol
@every_form
async def test_a_temperature_of_the_agents_own_is_in_the_record(
    mesh: Mesh, ask: Ask, *, stream: bool
) -> None:
    async with mesh.client() as client, client.session(sampling={"top_p": 0.9}) as session:
        await ask(mesh, session, stream=stream, temperature=0)
    trajectory, segment = await turn_of(mesh, session)
    assert trajectory.reasons == ("SAMPLING_CHANGED",)
    assert (segment.sampling.temperature, segment.sampling.HasField("temperature")) == (0.0, True)
    assert segment.sampling.top_p == pytest.approx(0.9)
    assert segment.trained


@every_protocol
@every_form
async def test_an_enforced_session_ignores_it_and_counts_it(
    mesh: Mesh, ask: Ask, *, stream: bool
) -> None:
    metric = 'rollmesh_gateway_ignored_sampling_total{parameter="temperature"}'
    before = (await mesh.processes["gateway"].samples()).get(metric, 0)
    sampling = {"temperature": 0.5}
    async with (
        mesh.client() as client,
        client.session(sampling=sampling, sampling_policy="enforce") as session,
    ):
        await ask(mesh, session, stream=stream, temperature=0)
    trajectory, segment = await turn_of(mesh, session)
    assert trajectory.reasons == ("EXACT",)
    assert segment.sampling.temperature == 0.5
    after = (await mesh.processes["gateway"].samples())[metric]
    assert after - before == 1


@every_protocol
@every_form
async def test_a_session_that_refuses_answers_400_with_the_parameters_name(
    mesh: Mesh, ask: Ask, *, stream: bool
) -> None:
    async with mesh.client() as client, client.session(sampling_policy="refuse") as session:
        with pytest.raises((openai.BadRequestError, anthropic.BadRequestError)) as refused:
            await ask(mesh, session, stream=stream, temperature=0)
        assert "temperature: is 0, and the session enforces 1; leave" in str(refused.value)
        assert getattr(refused.value, "param", "temperature") == "temperature"
        await ask(mesh, session, stream=stream, temperature=1)
    trajectory, _ = await turn_of(mesh, session)
    assert trajectory.reasons == ("EXACT",)


async def test_a_refused_bad_word_is_named_as_the_agent_sent_it(mesh: Mesh) -> None:
    async with mesh.client() as client, client.session(sampling_policy="refuse") as session:
        with pytest.raises(openai.BadRequestError, match="bad_words") as refused:
            await by_chat(mesh, session, stream=False, extra_body={"bad_words": ["no"]})
        assert refused.value.param == "bad_words"


@pytest.mark.parametrize(
    ("policy", "own", "asked", "shown"),
    [
        pytest.param("enforce", {"temperature": 0.7}, {"temperature": 0.1}, (0.7, 1), id="enforce"),
        pytest.param(
            "enforce", {}, {"temperature": 0, "top_p": 0.5}, (1, 1), id="enforce-defaults"
        ),
        pytest.param("agent", {"top_p": 0.9}, {"temperature": 0.1}, (0.1, 0.9), id="agent"),
        pytest.param("agent", {"top_p": 0.9}, {"top_p": 0.123456789}, (1, 0.12345679), id="digits"),
        pytest.param("agent", {}, {}, (1, 1), id="nobody"),
    ],
)
async def test_a_response_has_its_sampling_parameters(
    mesh: Mesh,
    policy: Any,
    own: dict[str, float],
    asked: dict[str, float],
    shown: tuple[float, float],
) -> None:
    async with (
        mesh.client() as client,
        client.session(sampling=own, sampling_policy=policy) as session,
        mesh.openai(session) as agent,
    ):
        ask: Any = agent.responses.create
        whole = await ask(model="policy", input="plain", **asked)
        events = [
            one async for one in await ask(model="policy", input="plain", stream=True, **asked)
        ]
        later = await agent.responses.retrieve(whole.id)
    parts = [one.response for one in events if hasattr(one, "response")]
    assert len(parts) == 3  # created, in progress, completed
    for one in (whole, later, *parts):
        assert (one.temperature, one.top_p) == shown
