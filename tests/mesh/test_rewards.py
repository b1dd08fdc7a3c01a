"""Rewards and rollouts through a whole mesh of real processes."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from rollmesh.client import (
    Client,
    CommandRunner,
    Delivery,
    Episode,
    Retries,
    Rewards,
    Session,
    SessionResult,
    rollout,
    sync,
)
from rollmesh.runtime.errors import InvalidFieldError
from tests.meshes import Mesh, delivered, scripted_mesh
from tests.waiting import until, until_says

pytestmark = pytest.mark.asyncio(loop_scope="module")
RULES = [("plain", "The answer is 42."), ("more", "It is 43.")]
AGENT = """
import json, os, sys
from openai import OpenAI
sample = json.load(sys.stdin)
answer = OpenAI(max_retries=0).chat.completions.create(
    model=os.environ["OPENAI_MODEL"], messages=[{"role": "user", "content": sample["ask"]}]
)
if sample.get("mark"):
    open(sample["mark"], "a").write(f"{os.getpid()}\\n")
while sample.get("mark") and not os.path.exists(sample["go"]):
    import time; time.sleep(0.01)
print(json.dumps({"reward": 1.0, "turn_rewards": {answer.id: 0.5}}))
"""


@pytest_asyncio.fixture(loop_scope="module")
async def client(shared: Mesh) -> AsyncIterator[Client]:
    async with shared.client() as client:
        yield client


@pytest_asyncio.fixture(loop_scope="module")
async def mesh(tmp_path: Path, tokenizer_dir: Path) -> AsyncIterator[Mesh]:
    """Of one test alone: it sees what the whole mesh counts."""
    async with scripted_mesh(tmp_path, tokenizer_dir, RULES) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def only(mesh: Mesh) -> AsyncIterator[Client]:
    async with mesh.client() as client:
        yield client


async def ask(mesh: Mesh, session: Session, *said: str) -> Any:
    """Asks with the last of what was said. The others are the conversation before it."""
    roles = ("user", "assistant")
    messages: list[Any] = [{"role": roles[at % 2], "content": text} for at, text in enumerate(said)]
    agent = mesh.openai(session)
    return await agent.chat.completions.create(model="policy", messages=messages)


async def taken(client: Client, unit: Any, count: int) -> list[Delivery]:
    async with client.subscribe(f"by-{unit}", unit=unit) as found, asyncio.timeout(60):
        return [await anext(found) for _ in range(count)]


def turn_rewards(session: SessionResult) -> list[float | None]:
    segments = [segment for one in session.trajectories for segment in one.segments]
    assert not any(segment.HasField("reward") for segment in segments if not segment.sampled)
    return [
        segment.reward if segment.HasField("reward") else None
        for segment in segments
        if segment.sampled
    ]


async def test_rewards_of_turns_and_trajectories_are_where_the_trainer_looks(
    shared: Mesh, client: Client
) -> None:
    async with client.session() as session:
        first = await ask(shared, session, "plain")
        text = first.choices[0].message.content
        left = await ask(shared, session, "plain", text, "more")
        right = await ask(shared, session, "plain", text, "plain")
        session.rewards = Rewards(
            1.0, trajectories={left.id: 0.25}, turns={first.id: 0.5, right.id: -1.0}
        )
    found = await delivered(client, session)
    assert found.reward == 1.0
    assert [trajectory.reward for trajectory in found.trajectories] == [0.25, None]
    assert turn_rewards(found) == [0.5, None, 0.5, -1.0]


@pytest.mark.parametrize(
    ("rewards", "text"),
    [
        pytest.param(Rewards(turns={99: 1.0}), "node 99 is not a turn", id="no node"),
        pytest.param(Rewards(turns={2: 1.0}), "node 2 is not a turn", id="the agent's own message"),
        pytest.param(Rewards(turns={"chatcmpl-x-2": 1.0}), "answer of session", id="another's"),
        pytest.param(Rewards(trajectories={"x-2": 1.0}), "no trajectory 'x-2'", id="no trajectory"),
        pytest.param(Rewards(session=float("nan")), "nan is not a finite", id="not a number"),
    ],
)
async def test_a_reward_of_an_unknown_turn_is_refused_and_loses_nothing(
    shared: Mesh, client: Client, rewards: Rewards, text: str
) -> None:
    session = await client.open_session(client.session_request())
    first = await ask(shared, session, "plain")
    session.rewards = rewards
    with pytest.raises(InvalidFieldError, match=text):
        await client.close_session(session)
    assert not session.closed
    second = await ask(shared, session, "plain", first.choices[0].message.content, "more")
    session.rewards = Rewards(turns={second.id: 1.0})
    await client.close_session(session)
    found = await delivered(client, session)
    assert turn_rewards(found) == [None, 1.0]


async def test_a_reward_function_sees_the_conversation(shared: Mesh, client: Client) -> None:
    opened: list[Session] = []

    async def run(sample: str, session: Session) -> str:
        opened.append(session)
        first = await ask(shared, session, sample)
        await ask(shared, session, sample, first.choices[0].message.content, "more")
        return "ready"

    seen: list[Episode] = []

    def score(episode: Episode) -> Rewards:
        seen.append(episode)
        last = episode.transcript.last
        assert last is not None
        return Rewards(session=2.0, turns={last.answer_id: 3.0})

    summary = await rollout(client, ["plain"], runner=run, n=1, reward=score)
    assert (summary.counts, summary.mean_reward) == ({"COMPLETED": 1}, 2.0)
    (episode,) = seen
    assert (episode.sample, episode.result) == ("plain", "ready")
    said = [(message["role"], message["content"]) for message in episode.transcript.messages()]
    assert said == [
        ("user", "plain"),
        ("assistant", "The answer is 42."),
        ("user", "more"),
        ("assistant", "It is 43."),
    ]
    assert [turn.finish_reason for turn in episode.transcript.turns] == ["STOP", "STOP"]
    assert [turn.lineage for turn in episode.transcript.turns] == ["MAIN", "MAIN"]
    found = await delivered(client, *opened)
    assert turn_rewards(found) == [None, 3.0]


async def test_a_group_is_whole_with_the_attempts_that_count_after_agents_were_killed(
    only: Client, tmp_path: Path
) -> None:
    mark, go = tmp_path / "mark", tmp_path / "go"
    sample = {"ask": "plain", "mark": str(mark), "go": str(go)}
    runner = CommandRunner(argv=[sys.executable, "-c", AGENT])
    retries = Retries(tries=2, delay_s=0.01)
    async with only.subscribe("by-session", unit="session"):
        pass  # from now on the collector keeps superseded sessions, which no group has
    async with asyncio.timeout(100), asyncio.TaskGroup() as tasks:
        work = rollout(only, [sample], runner=runner, n=2, retries=retries)
        running = tasks.create_task(work)
        await until_says(mark, "\n", times=2)
        for pid in mark.read_text().split()[:2]:
            os.kill(int(pid), signal.SIGKILL)
        go.touch()
    summary = running.result()
    assert (summary.counts, summary.retries) == ({"COMPLETED": 2}, 2)
    (group,) = await taken(only, "group", 1)
    assert [session.sample_index for session in group.sessions] == [0, 1]
    assert {session.outcome for session in group.sessions} == {"COMPLETED"}
    assert [turn_rewards(session) for session in group.sessions] == [[0.5], [0.5]]

    async def counted() -> bool:  # sessions of the killed agents arrive by themselves
        stats = await only.stats()
        return (stats.sessions, stats.complete_groups, stats.open_groups) == (4, 1, 0)

    await until(counted)
    single = [delivery.sessions[0] for delivery in await taken(only, "session", 4)]
    superseded = [session for session in single if session.superseded]
    assert sorted(session.sample_index for session in superseded) == [0, 1]
    assert {session.outcome for session in superseded} == {"LOST"}


async def test_the_sync_client_rolls_out_scores_and_shows_transcripts(shared: Mesh) -> None:
    runner = CommandRunner(argv=[sys.executable, "-c", AGENT])

    def work() -> tuple[list[float | None], dict[str, int], int]:
        with sync.Client(shared.addresses) as client:
            with client.rollout_groups(
                [{"ask": "plain"}, {"ask": "more"}],
                runner=runner,
                n=2,
                reward=lambda episode: float(len(episode.transcript.turns)),
            ) as groups:
                rewards = [session.reward for group in groups for session in group.sessions]
            with client.session() as session:
                turns = client.transcript(session).turns
                session.rewards = Rewards(session=1.0)
            return rewards, groups.summary.counts, len(turns)

    async with asyncio.timeout(100):
        rewards, counts, turns = await asyncio.to_thread(work)
    assert (rewards, counts, turns) == ([1.0] * 4, {"COMPLETED": 4}, 0)


async def arrived(client: Client) -> Any:
    stats = await client.stats()
    return stats if stats.sessions else None


@pytest.mark.parametrize("in_time", [True, False], ids=["in time", "never"])
async def test_a_session_waits_for_rewards_that_come_later(
    mesh: Mesh, only: Client, *, in_time: bool
) -> None:
    session = await only.open_session(only.session_request())
    answer = await ask(mesh, session, "plain")
    await only.close_session(session, reward_timeout_ms=60_000 if in_time else 1)
    if in_time:
        stats = await until(lambda: arrived(only))
        assert stats.waiting_for_rewards == 1
        node = int(answer.id.rpartition("-")[2])
        await only.set_rewards(session.session_id, reward=1.0, turn_rewards={node: 0.5})
    found = await delivered(only, session)
    assert (found.reward, turn_rewards(found)) == ((1.0, [0.5]) if in_time else (None, [None]))
    assert (await only.stats()).reward_timeouts == (0 if in_time else 1)


async def streamed_ids(agent: Any, *, n: int = 1, **fields: Any) -> list[str]:
    """Ids of the answers of a stream by choice. Every chunk carries the first one's."""
    messages: list[Any] = [{"role": "user", "content": "plain"}]
    ids: dict[int, str] = {}
    shared = set()
    stream = await agent.chat.completions.create(
        model="policy", messages=messages, stream=True, n=n, **fields
    )
    async for chunk in stream:
        shared.add(chunk.id)
        for choice in chunk.choices:
            named: Any = getattr(choice, "answer_id", None)  # in the first chunk and in the last
            assert ids.setdefault(choice.index, named) == (named or ids[choice.index])
    assert shared == {ids[0]}
    return [ids[at] for at in range(n)]


async def test_every_form_of_an_answer_names_its_turns_for_rewards(
    shared: Mesh, client: Client
) -> None:
    async with client.session() as session:
        agent = shared.openai(session, max_retries=5)
        retry = {"idempotency-key": "one"}
        first = await streamed_ids(agent, extra_headers=retry)
        assert await streamed_ids(agent, extra_headers=retry) == first
        two = await streamed_ids(agent, n=2)
        messages: list[Any] = [{"role": "user", "content": "plain"}]
        async with agent.chat.completions.stream(model="policy", messages=messages) as stream:
            helped = (await stream.get_final_completion()).id
        whole: Any = await agent.chat.completions.create(model="policy", messages=messages, n=2)
        assert whole.id == whole.choices[0].answer_id
        named = [*first, *two, helped, *(choice.answer_id for choice in whole.choices)]
        await shared.restart("gateway")
        assert await streamed_ids(agent, extra_headers=retry) == first
        last = await streamed_ids(agent, extra_headers={"idempotency-key": "two"})
        named += last
        assert len(set(named)) == 7
        session.rewards = Rewards(turns={id_: float(at) for at, id_ in enumerate(named)})
    found = await delivered(client, session)
    rewards = {
        f"chatcmpl-{found.session_id}-{segment.node_id}": segment.reward
        for trajectory in found.trajectories
        for segment in trajectory.segments
        if segment.sampled
    }
    assert rewards == {id_: float(at) for at, id_ in enumerate(named)}
