from collections.abc import AsyncIterator

import pytest
from openai import AsyncOpenAI

from rollmesh.sidecar import SidecarConfig
from tests.sidecar.scripted_gateway import KEY, ScriptedGateway, serving, sidecar_of


@pytest.fixture
async def gateway() -> ScriptedGateway:
    return ScriptedGateway()


@pytest.fixture
async def base_url(gateway: ScriptedGateway) -> AsyncIterator[str]:
    """Address of a sidecar in front of `gateway`."""
    async with serving(gateway) as address:
        config = SidecarConfig(gateway=address, max_body_bytes=200_000)
        async with sidecar_of(config) as url:
            yield url


@pytest.fixture
async def client(base_url: str) -> AsyncIterator[AsyncOpenAI]:
    """The published SDK, pointed at a session's path. No retries unless a test asks."""
    async with AsyncOpenAI(
        base_url=f"{base_url}/sessions/{KEY}/v1", api_key="static", max_retries=0
    ) as client:
        yield client


@pytest.fixture
async def big_url(gateway: ScriptedGateway) -> AsyncIterator[str]:
    """Address of a sidecar in front of `gateway` that takes bodies of any usual size."""
    async with serving(gateway) as address, sidecar_of(SidecarConfig(gateway=address)) as url:
        yield url
