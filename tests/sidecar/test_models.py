"""What becomes of the model's name in a request, through the published SDK."""

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from rollmesh.runtime.config import ConfigError
from rollmesh.sidecar import SidecarConfig
from tests.sidecar.scripted_gateway import KEY, ScriptedGateway, serving, sidecar_of

ASK: list[Any] = [{"role": "user", "content": "What is 6 x 7?"}]
BOTH_FORMS = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


@pytest.fixture
async def strict(gateway: ScriptedGateway) -> AsyncIterator[AsyncOpenAI]:
    """The SDK at a sidecar that refuses what the gateway does not serve."""
    async with serving(gateway) as address:
        config = SidecarConfig(gateway=address, unknown_models="refuse")
        async with (
            sidecar_of(config) as url,
            AsyncOpenAI(
                base_url=f"{url}/sessions/{KEY}/v1", api_key="static", max_retries=0
            ) as client,
        ):
            yield client


@BOTH_FORMS
async def test_a_model_that_is_not_served_is_not_found_where_that_is_asked_for(
    strict: AsyncOpenAI, gateway: ScriptedGateway, *, stream: bool
) -> None:
    with pytest.raises(openai.NotFoundError) as refused:
        await strict.chat.completions.create(model="gpt-9", messages=ASK, stream=stream)
    error = refused.value
    assert (error.code, error.param, error.type) == (
        "model_not_found",
        "model",
        "invalid_request_error",
    )
    assert "'gpt-9'" in str(error)
    assert "'policy'" in str(error)
    assert not gateway.requests


@BOTH_FORMS
@pytest.mark.parametrize("model", ["policy", "", None])
async def test_the_model_that_is_served_and_none_are_answered(
    strict: AsyncOpenAI, gateway: ScriptedGateway, *, stream: bool, model: Any
) -> None:
    answer: Any = await strict.chat.completions.create(model=model, messages=ASK, stream=stream)
    if stream:
        async for _ in answer:
            pass
    assert len(gateway.requests) == 1


async def test_a_model_that_came_with_another_gateway_is_served(
    strict: AsyncOpenAI, gateway: ScriptedGateway
) -> None:
    await strict.chat.completions.create(model="policy", messages=ASK)
    gateway.model = "next"
    answer = await strict.chat.completions.create(model="next", messages=ASK)
    assert answer.model == "next"


def test_another_way_with_unknown_models_is_refused_at_start() -> None:
    with pytest.raises(ConfigError, match="unknown_models: is 'drop'; give one of take, refuse"):
        SidecarConfig(unknown_models="drop")
