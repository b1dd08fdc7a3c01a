"""Which share of the sampled tokens is trained if seats of groups are lost, under each policy.

    make bench-groups

Each session has four turns at a real mesh with a scripted engine. In 5 % of the attempts the
sandbox fails after the second turn, by fixed seeds. One rollout without refills feeds a consumer of
each policy, and one with refills a consumer of whole groups. A share is the tokens with a loss mask
of 1 in the rows of the groups that the consumer received, over all sampled tokens of the rollout,
those of lost attempts included. `*_expected` is the arithmetic, with p = 0.05 and n = 8:

    sampled, of a seat's full session    (1 - p) + p / 2
    whole groups                         (1 - p)^n
    at least 4 of 8, or without the seat (1 - p), but for groups with fewer
    refilled k times                     1 - p^(k + 1) of the seats, for p / 2 more each time

The last line of the output is one JSON object.
"""

import argparse
import asyncio
import json
import random
import tempfile
from collections import Counter
from math import comb
from pathlib import Path

from openai import AsyncOpenAI

from benchmarks.harness.systems import make_model, running_mesh
from rollmesh.batches import rows_of
from rollmesh.client import (
    Client,
    Delivery,
    GroupOutcome,
    InfrastructureError,
    Retries,
    Session,
    SubscribeOptions,
    Subscription,
    rollout_groups,
)
from rollmesh.v1 import collector_pb2

_GROUPS = 50
_SIZE, _LEAST = 8, 4
_FAILURES = 0.05
_TURNS, _LAST_OF_LOST = 4, 2
_REFILLS = 2
_POLICIES = {
    "whole": collector_pb2.GroupPolicy(whole=True),
    "at_least_4": collector_pb2.GroupPolicy(min_samples=_LEAST),
    "drop": None,
}


class Agents:
    """Agents with turns of equal length, of which some lose their sandbox."""

    def __init__(self, seed: int) -> None:
        """Takes the seed of the losses."""
        self._dice = random.Random(seed)
        self._openai = AsyncOpenAI(base_url="http://sessions.have.their.own", api_key="-")

    async def __call__(self, prompt: str, session: Session) -> float:
        """Runs one attempt. Raises InfrastructureError in 5 % of them."""
        turns = _LAST_OF_LOST if self._dice.random() < _FAILURES else _TURNS
        messages = [{"role": "user", "content": prompt}]
        openai = self._openai.with_options(base_url=session.base_url, api_key=session.api_key)
        for _ in range(turns):
            answer = await openai.chat.completions.create(
                model="policy",
                messages=messages,  # type: ignore[arg-type]
                max_tokens=8,
            )
            said = answer.choices[0].message.content or ""
            messages += [{"role": "assistant", "content": said}]
            messages += [{"role": "user", "content": "go on"}]
        if turns < _TURNS:
            raise InfrastructureError("the sandbox is gone")
        return float(len(session.session_id))


def tokens(deliveries: list[Delivery]) -> int:
    """Returns the number of tokens that a trainer trains of deliveries."""
    rows = rows_of(deliveries, missing_reward="leave_out")
    return sum(int(row.trajectory.loss_mask.sum()) for row in rows)


async def received(groups: Subscription, outcomes: list[GroupOutcome]) -> list[Delivery]:
    """Returns what a consumer receives of the groups of a rollout."""
    found = []
    async for delivery in groups.until(outcomes):
        await groups.acknowledge(delivery)
        found.append(delivery)
    return found


async def sampled(sessions: Subscription, count: int) -> tuple[int, Counter[str]]:
    """Returns the sampled tokens of the next sessions, and the sessions by outcome."""
    total, outcomes = 0, Counter[str]()
    for _ in range(count):
        delivery = await anext(sessions)
        (session,) = delivery.sessions
        outcomes[session.outcome] += 1
        total += sum(int(one.loss_mask.sum()) for one in session.trajectories)
        await sessions.acknowledge(delivery)
    return total, outcomes


async def rolled(
    client: Client, count: int, seed: int, refill: int
) -> tuple[list[GroupOutcome], int]:
    """Rolls out groups. Returns their outcomes and the number of attempts."""
    prompts = [f"group {at}" for at in range(count)]
    async with rollout_groups(
        client,
        prompts,
        runner=Agents(seed),
        n=_SIZE,
        refill=refill,
        retries=Retries(delay_s=0.01),
        progress=False,
    ) as groups:
        outcomes = [group async for group in groups]
    return outcomes, sum(one.attempts for group in outcomes for one in group.sessions)


def expected() -> dict[str, float]:
    """Returns the shares by arithmetic."""
    p, n, cost = _FAILURES, _SIZE, _LAST_OF_LOST / _TURNS
    seat = (1 - p) + p * cost
    some = sum(j * comb(n, j) * (1 - p) ** j * p ** (n - j) for j in range(_LEAST, n + 1)) / n
    filled = 1 - p ** (_REFILLS + 1)
    lost = sum(p**k for k in range(1, _REFILLS + 2))
    return {
        "whole": (1 - p) ** n / seat,
        "at_least_4": some / seat,
        "drop": (1 - p) / seat,
        "refill": filled**n / (filled + lost * cost),
    }


async def measured(client: Client, count: int, seed: int) -> dict[str, float]:
    """Returns the shares, and the shares of groups that were trained, as they are."""
    found: dict[str, float] = {}
    shares, end = "{}_share", collector_pb2.Position(end=collector_pb2.LOG_END_LATEST)
    async with client.subscribe("sessions", unit="session", credits=64) as sessions:
        outcomes, attempts = await rolled(client, count, seed, refill=0)
        total, ends = await sampled(sessions, attempts)
        found["lost_sessions"] = ends["LOST"] / attempts
        for name, policy in _POLICIES.items():
            async with client.subscribe(name, options=SubscribeOptions(groups=policy)) as groups:
                came = await received(groups, outcomes)
            found[shares.format(name)] = tokens(came) / total
            found[f"{name}_groups"] = len(came) / count
        options = SubscribeOptions(groups=_POLICIES["whole"], start=end)
        async with client.subscribe("refill", options=options) as groups:
            await asyncio.sleep(1)  # the consumer starts at the end
            outcomes, attempts = await rolled(client, count, seed + 1, refill=_REFILLS)
            came = await received(groups, outcomes)
        total, ends = await sampled(sessions, attempts)
        found["refill_share"] = tokens(came) / total
        found["refill_groups"] = len(came) / count
        found["refilled_sessions"] = ends["LOST"] / attempts
    return found


async def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, default=_GROUPS)
    parser.add_argument("--seed", type=int, default=7)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-groups-") as name:
        folder = Path(name)
        make_model(folder)
        async with running_mesh(folder) as mesh:
            found = await measured(mesh.client, given.groups, given.seed)
    for policy, share in expected().items():
        print(f"{policy:12} {share:.3f} by arithmetic, {found[f'{policy}_share']:.3f} measured")
        found[f"{policy}_expected"] = share
    rounded = {key: round(value, 4) for key, value in found.items()}
    print(json.dumps(rounded | {"groups": given.groups, "size": _SIZE, "failures": _FAILURES}))


if __name__ == "__main__":
    asyncio.run(main())
