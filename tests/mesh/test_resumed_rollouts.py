"""A rollout whose process was killed goes on in another process, through a whole mesh."""

import asyncio
import json
import os
import signal
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import numpy as np

from rollmesh.client import (
    Client,
    Delivery,
    GroupOutcome,
    SampleOutcome,
    Session,
    SessionResult,
    Subscription,
    rollout_groups,
)
from rollmesh.v1 import collector_pb2
from tests.forks import Forked
from tests.mesh.dying_rollout import PROMPTS, SEED, first_of, turn
from tests.meshes import Mesh
from tests.waiting import until

WEIGHTS = {"w": np.zeros(1, np.float32)}
STALE = collector_pb2.FILTER_REASON_STALE_RUN


async def killed(mesh: Mesh, run_id: str = "") -> tuple[dict[str, Any], dict[str, str]]:
    """Runs the program until only sessions that hang are open, and kills it.

    Returns its state, and the prompts of these sessions by id.
    """

    async def only_they_are_open() -> bool:
        return {one.session_id for one in await client.open_sessions()} == hanging.keys()

    arguments = [json.dumps(asdict(mesh.addresses)), *([run_id] if run_id else [])]
    process = await Forked.start("tests.mesh.dying_rollout", arguments, mesh.folder / "rollout.log")
    state: dict[str, Any] = {}
    hanging: dict[str, str] = {}
    try:
        async with asyncio.timeout(120):
            while not state or len(hanging) < 3:
                line = (await process.stdout.readline()).decode()
                assert line, (mesh.folder / "rollout.log").read_text()
                name, _, rest = line.partition(" ")
                if name == "STATE":
                    state = json.loads(rest)
                elif name == "HANGS":
                    prompt, session_id = rest.split()
                    hanging[session_id] = prompt
        async with mesh.client() as client:
            await until(only_they_are_open)
    finally:
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
        await process.wait()
        process.close()
    return state, hanging


class Agent:
    """Counts its sessions by prompt."""

    def __init__(self) -> None:
        self.ran: list[str] = []

    async def __call__(self, prompt: str, session: Session) -> float:
        self.ran.append(prompt)
        await turn(session, first_of(prompt))
        return 1.0


class ResumingAgent(Agent):
    """Its work goes on elsewhere: here, with a second turn."""

    def __init__(self, client: Client) -> None:
        super().__init__()
        self.client = client

    async def resume(self, prompt: str, session: Session) -> float:
        transcript = await self.client.transcript(session)
        await turn(session, [*transcript.messages(), *first_of("And then?")])
        return 2.0


async def resumed(client: Client, agent: Agent, **settings: Any) -> list[GroupOutcome]:
    async with rollout_groups(client, PROMPTS, runner=agent, n=2, **settings) as groups:
        return [group async for group in groups]


def seats_of(ended: list[GroupOutcome]) -> set[tuple[str, int, str, int]]:
    return {
        (one.group_id, one.sample_index, one.session_id, one.attempts)
        for group in ended
        for one in group.sessions
    }


async def taken(groups: Subscription, ended: list[GroupOutcome]) -> list[Delivery]:
    found = [one async for one in groups.until(ended, timeout_s=60)]
    await groups.acknowledge(*found)
    return found


async def test_a_killed_rollout_goes_on_in_its_groups_and_repeats_no_session_that_ended(
    mesh: Mesh,
) -> None:
    state, hanging = await killed(mesh)
    assert (state["taken"], state["running"], state["seed"]) == (3, [1, 2], SEED)
    await mesh.restart("gateway")
    agent = Agent()
    async with (
        mesh.client() as client,
        client.subscribe("trainer") as groups,
        client.subscribe("all", unit="session") as sessions,  # first: it keeps the superseded ones
    ):
        ended = await resumed(client, agent, resume=state)
        assert sorted(agent.ran) == ["begun", "begun", "half"]
        attempts = {one.sample: sorted(seat.attempts for seat in one.sessions) for one in ended}
        assert attempts == {"half": [1, 2], "begun": [2, 2]}
        for delivery in await taken(groups, ended):
            assert [one.outcome for one in delivery.sessions] == ["COMPLETED"] * 2
            assert [one.reward for one in delivery.sessions] == [1.0, 1.0]
            assert not hanging.keys() & {one.session_id for one in delivery.sessions}
        async with asyncio.timeout(60):
            every = {
                one.session_id: one for _ in range(9) for one in (await anext(sessions)).sessions
            }
        assert {one for one in every if every[one].superseded} == hanging.keys()
        assert {every[one].outcome for one in hanging} == {"LOST"}

        again = await resumed(client, agent, resume=state)  # of the same state: nothing is run
        assert len(agent.ran) == 3
        assert seats_of(again) == seats_of(ended)


async def test_a_runner_with_resume_takes_the_open_sessions_and_their_turns_go_on(
    mesh: Mesh,
) -> None:
    state, hanging = await killed(mesh)
    async with mesh.client() as client, client.subscribe("trainer") as groups:
        agent = ResumingAgent(client)
        ended = await resumed(client, agent, resume=state)
        assert agent.ran == []
        for delivery in await taken(groups, ended):
            for one in delivery.sessions:
                went_on = one.session_id in hanging
                assert (one.reward, one.turns) == ((2.0, 2) if went_on else (1.0, 1))
                assert len(one.trajectories) == 1
                assert one.metadata.get("attempt") is None


async def test_sessions_that_ended_are_given_to_the_trainer_again(mesh: Mesh) -> None:
    await killed(mesh, "run")
    given: dict[tuple[str, int], tuple[str, list[int]]] = {}

    async def keep(outcome: SampleOutcome, session: SessionResult) -> None:
        seat = outcome.group_id, outcome.sample_index
        assert seat not in given
        assert (outcome.session_id, outcome.reward) == (session.session_id, session.reward)
        given[seat] = session.session_id, session.trajectories[0].token_ids.tolist()

    agent = Agent()
    settings: dict[str, Any] = {"run_id": "run", "on_session": keep, "consumer": "trainer"}
    async with mesh.client() as client:
        ended = await resumed(client, agent, resume=True, **settings)
        assert sorted(agent.ran) == ["begun", "begun", "half"]
        assert len(given) == 6
        assert {one.outcome for group in ended for one in group.sessions} == {"COMPLETED"}
        first = dict(given)
        given.clear()
        await resumed(client, agent, resume=True, **settings)  # the trainer lost them once more
        assert (len(agent.ran), given) == (3, first)

        async def fails(outcome: SampleOutcome, session: SessionResult) -> None:
            raise ValueError("no room")

        settings["on_session"] = fails
        failed = await resumed(client, agent, resume=True, **settings)
        assert {one.error for group in failed for one in group.sessions} == {"ValueError: no room"}


async def test_groups_of_an_abandoned_run_are_rolled_out_again_in_a_run_of_their_own(
    mesh: Mesh,
) -> None:
    async with mesh.client() as client:
        await client.push_weights(WEIGHTS, 5)
        async with client.subscribe("trainer"):
            saved = await client.state_dict("trainer")
        await client.push_weights(WEIGHTS, 6)
        await killed(mesh, "run")
        for own, begun in (("run~1", "run"), ("run~2", "run~1")):
            await client.open_run(5, state=saved)
            await client.load_state_dict(saved)
            await client.push_weights(WEIGHTS, 5)
            agent = ResumingAgent(client)
            async with client.subscribe("trainer") as groups:
                ended = await resumed(client, agent, run_id="run", resume=True)
                runs = {one.sample: one.run_id for one in ended}
                # The last group had only open sessions, so its seats were free in the first run.
                assert runs == {"whole": own, "half": own, "begun": begun}
                assert sorted(agent.ran) == sorted(PROMPTS * 2)
                found = await taken(groups, ended)
                assert sorted(one.group_id for one in found) == [f"run-{at}" for at in range(3)]
                for delivery in found:
                    versions = {
                        int(one.trajectories[0].policy_versions.max()) for one in delivery.sessions
                    }
                    assert versions == {5}
                    assert not delivery.partial
                filtered = await until(lambda: client.filtered("trainer"))
            assert {one.removed[0].reason for one in filtered} == {STALE}
