from collections.abc import AsyncIterator
from typing import Any

import pytest

from rollmesh.client import (
    AgentRunner,
    Client,
    MeshAddresses,
    RolloutSummary,
    SampleOutcome,
    Session,
    rollout,
)
from tests.sidecar.scripted_gateway import ScriptedGateway, serving


def addresses_of(*, gateway: str = "", router: str = "") -> MeshAddresses:
    return MeshAddresses(router=router, gateway=gateway, collector="", sidecar="127.0.0.1:7080")


async def length(prompt: str, session: Session) -> float:
    """A runner whose reward is the prompt's length."""
    assert session.session_id
    return float(len(prompt))


async def one_sample(
    client: Client, runner: AgentRunner, prompt: str = "p", **settings: Any
) -> tuple[RolloutSummary, SampleOutcome]:
    """Rolls out one prompt once. Returns the summary and what became of the sample."""
    seen: list[SampleOutcome] = []
    summary = await rollout(client, [prompt], runner=runner, n=1, on_sample=seen.append, **settings)
    (outcome,) = seen
    return summary, outcome


@pytest.fixture
async def gateway() -> ScriptedGateway:
    return ScriptedGateway()


@pytest.fixture
async def address(gateway: ScriptedGateway) -> AsyncIterator[str]:
    async with serving(gateway) as address:
        yield address


@pytest.fixture
async def client(address: str) -> AsyncIterator[Client]:
    async with Client(addresses_of(gateway=address)) as client:
        yield client
