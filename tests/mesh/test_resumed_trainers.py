"""A trainer that goes back to a checkpoint, through a whole mesh of real processes."""

import asyncio
from typing import Any

import numpy as np
import pytest

from rollmesh.client import Client, Session, SubscribeOptions, Subscription
from rollmesh.runtime.errors import RunAbandonedError
from rollmesh.v1 import collector_pb2
from tests.meshes import Mesh

WEIGHTS = {"w": np.zeros(1, np.float32)}
USER = {"role": "user", "content": "Hi"}
EVERYTHING = SubscribeOptions(
    filter=collector_pb2.DeliveryFilter(stale_runs=collector_pb2.STALE_RUNS_KEEP)
)


MESH = {"reply_tokens": 64}


async def turn(mesh: Mesh, session: Session, messages: list[Any]) -> None:
    """Asks for an answer, and adds it to the messages."""
    asked = mesh.openai(session).chat.completions.create(model="policy", messages=messages)
    answer = (await asked).choices[0].message.content
    messages += [{"role": "assistant", "content": answer or ""}, USER]


async def rolled(mesh: Mesh, client: Client) -> str:
    """Runs a session of one turn and returns its id."""
    async with client.session() as session:
        await turn(mesh, session, [USER])
        session.reward = 1.0
    return session.session_id


async def train(deliveries: Subscription, count: int) -> set[str]:
    """Takes and acknowledges deliveries."""
    async with asyncio.timeout(120):
        taken = [await anext(deliveries) for _ in range(count)]
        await deliveries.acknowledge(*taken)
    return {one.delivery_id for one in taken}


async def test_a_restored_trainer_gets_its_own_line_and_nothing_of_the_abandoned_run(
    mesh: Mesh,
) -> None:
    async with mesh.client() as zombie:
        await zombie.push_weights(WEIGHTS, 5)
        async with zombie.subscribe("trainer", unit="session") as old:
            old.report_version(5)
            before = await rolled(mesh, zombie)
            assert await train(old, 1) == {before}
            state = await zombie.state_dict("trainer")
            between = await rolled(mesh, zombie)  # by the version of the checkpoint
            assert await train(old, 1) == {between}
            await zombie.push_weights(WEIGHTS, 6)
            abandoned = await rolled(mesh, zombie)
            spanning = await zombie.open_session(zombie.session_request())
            messages = [USER]
            await turn(mesh, spanning, messages)

            async with mesh.client() as restored:
                run = await restored.open_run(5, state=state)
                assert await restored.load_state_dict(state) == 1
                await restored.push_weights(WEIGHTS, 5)
                with pytest.raises(RunAbandonedError):
                    await zombie.push_weights(WEIGHTS, 7)
                await mesh.restart("router")
                await mesh.restart("engine", reply_tokens=64)
                await turn(mesh, spanning, messages)
                await restored.close_session(spanning)
                own = await rolled(mesh, restored)
                async with restored.subscribe("trainer", unit="session") as new:
                    assert await train(new, 2) == {between, own}
                    with pytest.raises(RunAbandonedError):
                        await anext(old)
                    with pytest.raises(RunAbandonedError):
                        await zombie.push_weights(WEIGHTS, 7)
                async with restored.subscribe(
                    "all", unit="session", options=EVERYTHING
                ) as everything:
                    ids = {before, between, abandoned, spanning.session_id, own}
                    assert await train(everything, 5) == ids

                entries = await restored.filtered("trainer")
                assert {one.delivery_id for one in entries} == {abandoned, spanning.session_id}
                reasons = {one.removed[0].reason for one in entries}
                assert reasons == {collector_pb2.FILTER_REASON_STALE_RUN}
                (trajectory,) = (await restored.stored_session(spanning.session_id)).trajectories
                sampled = trajectory.loss_mask
                told = list(
                    zip(
                        trajectory.policy_runs[sampled].tolist(),
                        trajectory.policy_versions[sampled].tolist(),
                        strict=True,
                    )
                )
                assert list(dict.fromkeys(told)) == [(0, 6), (run.number, 5)]
                assert "MIXED_VERSIONS" in trajectory.reasons
                assert (trajectory.policy_runs[~sampled] == -1).all()


async def test_a_generation_that_goes_on_under_a_new_run_has_tokens_of_both(mesh: Mesh) -> None:
    await mesh.restart("engine", reply_tokens=64, tokens_per_second=10)
    async with mesh.client() as client:
        await client.push_weights(WEIGHTS, 9)
        async with client.session() as session:
            openai = mesh.openai(session)
            stream = await openai.chat.completions.create(
                model="policy", messages=[{"role": "user", "content": "Hi"}], stream=True
            )
            await anext(stream)
            await client.open_run(5)
            await client.push_weights(WEIGHTS, 5)
            async for _ in stream:
                pass
            session.reward = 1.0
        async with client.subscribe("all", unit="session", options=EVERYTHING) as deliveries:
            (result,) = (await anext(deliveries)).sessions
            await deliveries.acknowledge()
        (trajectory,) = result.trajectories
        assert set(trajectory.policy_runs[trajectory.loss_mask].tolist()) == {0, 1}
        assert set(trajectory.policy_versions[trajectory.loss_mask].tolist()) == {9, 5}
        async with client.subscribe("trainer", unit="session") as deliveries:
            own = await rolled(mesh, client)
            assert await train(deliveries, 1) == {own}
