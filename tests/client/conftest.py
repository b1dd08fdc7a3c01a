from collections.abc import AsyncIterator

import pytest

from rollmesh.client import Client
from tests.sidecar.scripted_gateway import ScriptedGateway, serving


@pytest.fixture
async def gateway() -> ScriptedGateway:
    return ScriptedGateway()


@pytest.fixture
async def address(gateway: ScriptedGateway) -> AsyncIterator[str]:
    async with serving(gateway) as address:
        yield address


@pytest.fixture
async def client(address: str) -> AsyncIterator[Client]:
    async with Client(gateway=address, sidecar="127.0.0.1:7080", call_timeout_s=5) as client:
        yield client
