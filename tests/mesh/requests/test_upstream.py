"""`vllm serve` as the upstream of a gateway: its answers, and its log-probabilities."""

import asyncio
from typing import Any

import pytest
from openai import AsyncOpenAI

from rollmesh.client import SubscribeOptions
from rollmesh.v1 import collector_pb2, session_pb2
from tests.mesh.requests.serve import Servers
from tests.meshes import Mesh

pytestmark = [
    pytest.mark.long,
    pytest.mark.vllm,
    pytest.mark.asyncio(loop_scope="session"),
]
ASKED: Any = [{"role": "user", "content": "What is 2 + 2?"}]
FIELDS: Any = {"messages": ASKED, "temperature": 0, "max_tokens": 12}


async def test_agents_get_the_answers_of_a_real_server_and_its_logprobs_are_recorded(
    vllm_mesh: Mesh, vllm_url: str, servers: Servers
) -> None:
    pytest.importorskip("aiohttp")
    mesh = vllm_mesh
    await mesh.run(
        "gateway",
        "upstream",
        router=mesh.address("router"),
        collector=mesh.address("collector"),
        data_dir=mesh.folder / "upstream",
        gateway_id="upstream",
        port=mesh.address("upstream").rpartition(":")[2],
        model="elsewhere",
        upstream=vllm_url,
        upstream_model="policy",
        capture="logprobs",
    )
    sidecar = await mesh.run("sidecar", "other-sidecar", gateway="", router=mesh.address("router"))
    async with (
        AsyncOpenAI(base_url=vllm_url, api_key="none") as direct,
        mesh.client_of("router") as client,
    ):
        expected = await direct.chat.completions.create(model="policy", **FIELDS, logprobs=True)
        async with client.session(model="elsewhere") as session:
            base_url = f"http://{sidecar.address}/sessions/{session.api_key}/v1"
            agent = mesh.agent(base_url, session.api_key)
            whole = await agent.chat.completions.create(model="elsewhere", **FIELDS)
            stream = await agent.chat.completions.create(model="elsewhere", **FIELDS, stream=True)
            parts = [one.choices[0].delta.content or "" async for one in stream if one.choices]
        options = SubscribeOptions(
            filter=collector_pb2.DeliveryFilter(captures=[session_pb2.CAPTURE_LOGPROBS]),
            messages=True,
        )
        async with (
            client.subscribe("logprobs", unit="session", options=options) as deliveries,
            asyncio.timeout(60),
        ):
            (result,) = (await anext(deliveries)).sessions
    choice = expected.choices[0]
    assert whole.choices[0].message.content == choice.message.content == "".join(parts)
    assert whole.choices[0].finish_reason == choice.finish_reason
    assert whole.usage is not None
    assert expected.usage is not None
    assert whole.usage.total_tokens == expected.usage.total_tokens
    assert choice.logprobs is not None
    tokens = [(one.token, one.logprob) for one in choice.logprobs.content or ()]
    for trajectory in result.trajectories:  # the whole answer and the streamed one
        found = result.conversation(trajectory)
        assert found is not None
        recorded = found.messages[1]["logprobs"]["content"]
        assert [one["token"] for one in recorded] == [token for token, _ in tokens]
        assert [one["logprob"] for one in recorded] == pytest.approx(
            [logprob for _, logprob in tokens], abs=1e-4
        )
    assert len(result.trajectories) == 2
