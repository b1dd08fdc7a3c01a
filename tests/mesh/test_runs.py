"""Groups of several runs that have the same ids, through a whole mesh of real processes."""

import asyncio

from rollmesh.client import Client, Delivery, Session, Subscription, rollout
from tests.meshes import Mesh

PROMPTS = ["prompt-0", "prompt-1"]


async def agent(prompt: str, session: Session) -> float:
    return float(prompt == PROMPTS[0])


async def roll(client: Client, n: int, prompts: list[str], run_id: str | None = None) -> None:
    summary = await rollout(
        client,
        prompts,
        runner=agent,
        n=n,
        group_id=lambda prompt: f"step-0/{prompt}",
        run_id=run_id,
        progress=False,
    )
    assert dict(summary.counts) == {"COMPLETED": n * len(prompts)}


async def taken(groups: Subscription, count: int) -> list[Delivery]:
    async with asyncio.timeout(60):
        found = [await anext(groups) for _ in range(count)]
        await groups.acknowledge(*found)
    return found


def shapes(deliveries: list[Delivery]) -> list[tuple[str, int]]:
    return sorted((one.group_id, len(one.sessions)) for one in deliveries)


async def test_a_second_run_gives_the_groups_of_the_first_another_size(mesh: Mesh) -> None:
    async with mesh.client() as client, client.subscribe("trainer", unit="group") as groups:
        await roll(client, 4, PROMPTS[:1], "first")
        seat = {"run_id": "first", "group_id": "step-0/prompt-1", "group_size": 4}
        for index in range(2):
            async with client.session(sample_index=index, **seat):  # type: ignore[arg-type]
                pass
        assert shapes(await taken(groups, 1)) == [("step-0/prompt-0", 4)]

        await mesh.restart("collector")
        await mesh.restart("gateway")
        await roll(client, 8, PROMPTS)
        second = await taken(groups, 2)
        assert shapes(second) == [("step-0/prompt-0", 8), ("step-0/prompt-1", 8)]
        (run_id,) = {one.run_id for one in second}
        assert run_id not in {"", "first"}

        for index in range(2, 4):  # the first run continues
            async with client.session(sample_index=index, **seat):  # type: ignore[arg-type]
                pass
        (rest,) = await taken(groups, 1)
        assert (rest.run_id, rest.group_id, len(rest.sessions)) == ("first", "step-0/prompt-1", 4)
        stats = await client.stats()
        assert (stats.sessions, stats.open_groups) == (4 + 4 + 16, 0)
        (consumer,) = stats.consumers
        assert (consumer.acknowledged, list(consumer.filtered)) == (4, [])
