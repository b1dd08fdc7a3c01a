"""What the people who run a mesh see of one session, at every service's `/metrics`."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

from tests.meshes import scripted_mesh, until_free
from tests.paths import ROOT

BOARDS = ROOT / "docker/observability/grafana/dashboards"
SERVICES = ("router", "engine", "collector", "gateway", "sidecar")


def shown_on_boards() -> set[str]:
    """The metrics that Grafana's panels ask for."""
    found: set[str] = set()
    for board in BOARDS.glob("*.json"):
        panels = json.loads(board.read_text())["panels"]
        for target in (target for panel in panels for target in panel["targets"]):
            names = re.findall(r"rollmesh_\w+", target["expr"])
            assert names, target
            found |= {name.removesuffix("_bucket") for name in names}
    return found


async def test_one_session_is_seen_at_every_service(tmp_path: Path, tokenizer_dir: Path) -> None:
    first = {service: {"metrics_port": 0} for service in SERVICES}
    async with scripted_mesh(tmp_path, tokenizer_dir, first=first, metrics_port=0) as mesh:
        async with mesh.client() as client:
            async with client.session() as session:
                messages: list[Any] = [{"role": "user", "content": "hello"}]
                agent = mesh.openai(session, max_retries=8)
                await agent.chat.completions.create(model="policy", messages=messages)
                during = await mesh.processes["gateway"].samples()
            async with client.subscribe("trainer", unit="session") as deliveries:
                async with asyncio.timeout(60):
                    delivery = await anext(deliveries)
                await deliveries.acknowledge(delivery)
            await until_free(client)  # what is given back is on its way
        seen, known = dict[str, float](), set[str]()
        for service in SERVICES:
            seen |= await mesh.processes[service].samples()
            known |= await mesh.processes[service].metrics()
    assert shown_on_boards() <= known
    (trajectory,) = delivery.sessions[0].trajectories
    sampled = sum(trajectory.loss_mask)
    assert during["rollmesh_gateway_open_sessions"] == 1
    assert seen["rollmesh_gateway_open_sessions"] == 0
    assert seen['rollmesh_gateway_turns_total{end="stop"}'] == 1
    assert seen['rollmesh_gateway_tokens_total{kind="sampled"}'] == sampled
    assert seen['rollmesh_engine_tokens_total{kind="sampled"}'] == sampled
    assert seen['rollmesh_engine_generations_total{end="stop"}'] == 1
    assert seen['rollmesh_router_lease_requests_total{answer="granted"}'] == 1
    assert seen["rollmesh_router_leases"] == 0
    assert seen['rollmesh_collector_sessions_total{kind="stored"}'] == 1
    assert seen['rollmesh_collector_acknowledged_total{consumer="trainer"}'] == 1
    assert seen['rollmesh_sidecar_turns_total{protocol="chat",status="200"}'] == 1
