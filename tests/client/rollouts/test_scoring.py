import asyncio
import threading
from typing import Any

import numpy as np
import pytest

from rollmesh.client import (
    Client,
    Episode,
    RewardCalls,
    Rewards,
    SampleOutcome,
    Session,
    TimeLimits,
    Transcript,
    read_rewards,
    rollout,
)
from rollmesh.runtime.errors import InvalidFieldError
from rollmesh.v1 import chat_pb2, gateway_pb2, sampling_pb2, session_pb2, trajectory_pb2
from tests.client.conftest import one_sample
from tests.sidecar.scripted_gateway import ScriptedGateway


@pytest.fixture
async def gateway() -> ScriptedGateway:
    """One whose sessions can be shown. Nothing was said in them."""
    gateway = ScriptedGateway()

    async def show(request: Any, context: Any) -> gateway_pb2.GetSessionResponse:
        return gateway_pb2.GetSessionResponse(
            session=gateway_pb2.OpenSession(session_id=request.session_id)
        )

    gateway.GetSession = show  # type: ignore[method-assign]
    return gateway


async def answer(sample: Any, session: Session) -> str:
    return f"answer to {sample}"


async def score(client: Client, reward: Any, **settings: Any) -> SampleOutcome:
    _, outcome = await one_sample(client, answer, "q", reward=reward, **settings)
    return outcome


async def test_a_plain_reward_function_runs_in_a_thread_and_sees_the_result(
    client: Client,
) -> None:
    threads: list[str] = []

    def reward(episode: Any) -> float:
        threads.append(threading.current_thread().name)
        return float(len(episode.result))

    outcome = await score(client, reward)
    assert (outcome.reward, outcome.result) == (11.0, "answer to q")
    assert threads == ["rollmesh-reward"]


async def test_an_asynchronous_reward_function_runs_on_the_loop(client: Client) -> None:
    loop = asyncio.get_running_loop()

    async def reward(episode: Any) -> float:
        assert asyncio.get_running_loop() is loop
        return 0.5

    class Callable:
        async def __call__(self, episode: Any) -> float:
            return 0.75

    assert (await score(client, reward)).reward == 0.5
    assert (await score(client, Callable())).reward == 0.75


async def test_no_more_threads_score_at_once_than_allowed() -> None:
    running, most, counting = 0, 0, threading.Lock()
    two = threading.Barrier(2, timeout=60)

    def reward(episode: Any) -> float:
        nonlocal running, most
        with counting:
            running += 1
            most = max(most, running)
        two.wait()  # passes only when two score at a time
        with counting:
            running -= 1
        return 1.0

    scorer, empty = RewardCalls(reward, timeout_s=60, threads=2), gateway_pb2.GetSessionResponse()
    episode = Episode("q", Session("s", "", ""), None, Transcript.from_proto(empty))
    async with asyncio.TaskGroup() as tasks:
        scores = [tasks.create_task(scorer(episode)) for _ in range(6)]
    assert [score.result() for score in scores] == [1.0] * 6
    assert most == 2


async def test_a_reward_function_that_hangs_in_its_thread_is_given_up(client: Client) -> None:
    release = threading.Event()

    def reward(episode: Any) -> float:
        release.wait()
        return 1.0

    try:
        outcome = await score(client, reward, limits=TimeLimits(reward_s=0.05))
    finally:
        release.set()
    assert (outcome.outcome, outcome.error_type) == ("FAILED", "RewardTimeLimitError")


async def test_a_reward_function_over_its_time_fails_its_session_alone(
    gateway: ScriptedGateway, client: Client
) -> None:
    async def reward(episode: Any) -> float:
        if episode.session.session_id == "5e550001":
            await asyncio.Event().wait()
        return 1.0  # in one step: no machine is too slow for it

    summary = await rollout(
        client, ["q"], runner=answer, n=3, reward=reward, limits=TimeLimits(reward_s=0.05)
    )
    assert summary.counts == {"COMPLETED": 2, "FAILED": 1}
    assert summary.errors == {"RewardTimeLimitError": 1}
    outcomes = [closed.outcome for closed in gateway.closed]
    assert outcomes.count(session_pb2.SESSION_OUTCOME_FAILED) == 1


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        pytest.param(ZeroDivisionError(), "ZeroDivisionError", id="an error"),
        pytest.param(TimeoutError(), "TimeoutError", id="a timeout of its own"),
        pytest.param(SystemExit(1), "RuntimeError", id="an exit"),
        pytest.param(StopIteration(), "RuntimeError", id="an iterator without a value"),
    ],
)
async def test_a_reward_function_that_fails_fails_its_session(
    client: Client, error: BaseException, kind: str
) -> None:
    def reward(episode: Any) -> float:
        raise error

    outcome = await score(client, reward)
    assert (outcome.outcome, outcome.error_type, outcome.reward) == ("FAILED", kind, None)


async def test_a_reward_that_the_runner_left_in_the_session_stays_where_nothing_is_returned(
    gateway: ScriptedGateway, client: Client
) -> None:
    async def run(sample: Any, session: Session) -> None:
        session.rewards = Rewards(session=1.0, turns={2: 0.5})

    await rollout(client, ["q"], runner=run, n=1)
    rewards = gateway.closed[0].rewards
    assert (rewards.reward, dict(rewards.turn_rewards)) == (1.0, {2: 0.5})


async def test_a_result_that_is_no_reward_fails_with_the_remedy(client: Client) -> None:
    _, outcome = await one_sample(client, answer)
    assert outcome.error_type == "InvalidFieldError"
    assert "give the rollout a reward function" in outcome.error


@pytest.mark.parametrize(
    ("value", "rewards"),
    [
        pytest.param(None, Rewards(), id="nothing"),
        pytest.param(True, Rewards(1.0), id="a bool"),
        pytest.param(np.float32(0.5), Rewards(0.5), id="NumPy's"),
        pytest.param({"text": "x"}, Rewards(), id="a mapping without"),
        pytest.param(
            {"reward": 1, "turn_rewards": {"3": 2}, "trajectory_rewards": {"s-3": 4}},
            Rewards(1.0, {"s-3": 4.0}, {"3": 2.0}),
            id="a mapping",
        ),
    ],
)
def test_rewards_are_read_from_what_runners_return(value: object, rewards: Rewards) -> None:
    assert read_rewards(value) == rewards


@pytest.mark.parametrize("value", ["much", [1], {"reward": "much"}, {"turn_rewards": {"3": None}}])
def test_a_value_that_is_no_reward_is_refused(value: object) -> None:
    with pytest.raises(InvalidFieldError, match="reward"):
        read_rewards(value)


def test_the_last_turn_of_a_transcript_is_not_auxiliary() -> None:
    def node(at: int, parent: int, lineage: str, text: str) -> gateway_pb2.SessionNode:
        return gateway_pb2.SessionNode(
            node_id=at,
            parent_node_id=parent,
            sampled=at % 2 == 0,
            lineage=trajectory_pb2.Lineage.Value(f"LINEAGE_{lineage}"),
            finish_reason=sampling_pb2.FINISH_REASON_STOP,
            messages=[
                chat_pb2.ChatMessage(
                    role=chat_pb2.ROLE_ASSISTANT if at % 2 == 0 else chat_pb2.ROLE_TOOL,
                    content=[chat_pb2.ContentPart(text=text)],
                    tool_calls=[chat_pb2.ToolCall(id="c", name="f", arguments_json="{}")]
                    if at == 2
                    else [],
                    tool_call_id=None if at % 2 == 0 else "c",
                )
            ],
        )

    nodes = [node(1, 0, "MAIN", "a"), node(2, 1, "MAIN", "b"), node(3, 0, "AUXILIARY", "c")]
    nodes.append(node(4, 3, "AUXILIARY", "d"))
    transcript = Transcript.from_proto(
        gateway_pb2.GetSessionResponse(session=gateway_pb2.OpenSession(session_id="s"), nodes=nodes)
    )
    assert transcript.last is not None
    assert transcript.last.answer_id == "chatcmpl-s-2"
    first, second = transcript.messages()
    assert first == {"role": "tool", "content": "a", "tool_call_id": "c"}
    assert second["tool_calls"][0]["function"] == {"name": "f", "arguments": "{}"}
    side = transcript.messages(transcript.turns[1])
    assert [message["content"] for message in side] == ["c", "d"]
    empty = Transcript.from_proto(
        gateway_pb2.GetSessionResponse(session=gateway_pb2.OpenSession(session_id="s"))
    )
    assert (empty.last, empty.messages()) == (None, [])


async def test_a_thread_that_cannot_be_started_holds_no_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scorer = RewardCalls(lambda _: 1.0, timeout_s=60, threads=1)
    empty = gateway_pb2.GetSessionResponse()
    episode = Episode("q", Session("s", "", ""), None, Transcript.from_proto(empty))
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", lambda _: next(iter(())))
        with pytest.raises(RuntimeError):
            await scorer(episode)
    assert await scorer(episode) == 1.0
