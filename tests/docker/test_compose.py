"""`docker compose up`: an agent and a trainer outside of the containers."""

import asyncio
import json
import os
import re
import subprocess
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from examples.demo.audit import Audit
from examples.demo.tasks import SYSTEM_PROMPT, TOOLS, make_tasks, run_tool
from examples.trainer_grpc_only import read_groups, summarise
from rollmesh.client import Client, Delivery
from tests.docker.compose import Project

# The first test builds images and waits for the policy and for vLLM.
pytestmark = [pytest.mark.docker, pytest.mark.timeout(3600)]
_SAMPLES, _MAX_TURNS = 8, 3
# The policy uses the tool two times in three. What it likes best is to use it.
_GREEDY = {"temperature": 0.0}


@dataclass(slots=True)
class Run:
    """A session as the agent saw it."""

    session_id: str
    answer_ids: list[str] = field(default_factory=list)
    tool_results: list[str] = field(default_factory=list)
    answer: str = ""


async def solve(agent: AsyncOpenAI, question: str, run: Run) -> None:
    """An agent as anyone would write it: ask, run the tools, tell their results, ask again."""
    messages: list[Any] = [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": question},
    ]
    tools: Any = TOOLS
    for _ in range(_MAX_TURNS):
        reply = await agent.chat.completions.create(model="policy", messages=messages, tools=tools)
        message = reply.choices[0].message
        run.answer_ids.append(reply.id)
        run.answer = message.content or ""
        if not message.tool_calls:
            return
        messages.append(message)
        for call in message.tool_calls:
            assert call.type == "function"
            result = run_tool(call.function.name, call.function.arguments)
            run.tool_results.append(result)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


async def run_group(client: Client) -> list[Run]:
    """Runs the agent on some questions, all sessions of one group at a time."""
    group_id = uuid.uuid4().hex

    async def run(sample_index: int, question: str) -> Run:
        async with (
            client.session(
                group_id=group_id,
                sample_index=sample_index,
                group_size=_SAMPLES,
                sampling=_GREEDY,
            ) as session,
            AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as agent,
        ):
            result = Run(session.session_id)
            await solve(agent, question, result)
            session.reward = float(bool(result.tool_results))
        return result

    async with asyncio.timeout(300), asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(run(at, task.question))
            for at, task in enumerate(make_tasks(_SAMPLES, seed=7))
        ]
    return [task.result() for task in tasks]


async def next_group(client: Client) -> Delivery:
    """Reads and acknowledges a group, as a trainer does."""
    async with client.subscribe("trainer", unit="group") as groups, asyncio.timeout(60):
        delivery = await anext(groups)
        await groups.acknowledge(delivery)
    return delivery


def assert_exact(runs: list[Run], delivery: Delivery) -> None:
    """All sessions came, whole, with arrays that agree, and no answer's tokens are amiss."""
    assert [s.session_id for s in delivery.sessions] == [run.session_id for run in runs]
    audit = Audit(answered={id_ for run in runs for id_ in run.answer_ids})
    audit.received(delivery.sessions)
    assert (audit.lost, audit.duplicated, audit.drift_tokens) == (0, 0, 0)
    for run, session in zip(runs, delivery.sessions, strict=True):
        assert (session.outcome, session.reward) == ("COMPLETED", float(bool(run.tool_results)))
        assert session.turns == len(run.answer_ids)
        for trajectory in session.trajectories:
            mask, logprobs = trajectory.loss_mask, trajectory.logprobs
            assert len(trajectory.token_ids) == len(mask) == len(logprobs)
            assert mask.any()
            assert (logprobs[mask] <= 0).all()
            assert set(trajectory.policy_versions[mask].tolist()) == {0}


async def test_an_agent_uses_its_tool_and_a_trainer_gets_the_exact_tokens(
    project: Project,
) -> None:
    async with Client(project.addresses()) as client:
        runs = await run_group(client)
        delivery = await next_group(client)
    # A tool-calling session: the call, its result, and an answer that tells it.
    assert any(result in run.answer for run in runs for result in run.tool_results)
    assert_exact(runs, delivery)


async def test_a_trainer_with_the_stubs_alone_gets_the_next_group(project: Project) -> None:
    async with Client(project.addresses()) as client:
        runs = await run_group(client)
    collector = f"{project.ip(project.containers('collector')[0])}:7300"
    token = Path(project.addresses().token_file).read_text().strip()
    (sessions,) = await asyncio.to_thread(read_groups, collector, "trainer", 1, token)
    assert [session.session_id for session in sessions] == [run.session_id for run in runs]
    assert summarise([sessions])["sessions"] == _SAMPLES


SMALL = ("router-1", "collector", "gateway", "sidecar")
MOST_BYTES = 250_000_000
BASE_BYTES = 126_000_000
"""Of python:3.11-slim. A stand-in for it may be larger."""


@pytest.mark.parametrize("service", SMALL)
def test_an_image_is_small(project: Project, service: str) -> None:
    base = os.environ.get("BASE_IMAGE", "python:3.11-slim")
    image = inspected(project.containers(service)[0])["Config"]["Image"]
    own = inspected(image)["Size"] - inspected(base)["Size"]
    assert 0 < own < MOST_BYTES - BASE_BYTES


def test_a_container_may_write_to_its_volumes_alone(project: Project) -> None:
    for service in (*project.counts, "tokens", "policy"):
        container = project.containers(service)[0]
        found = inspected(container)
        host = found["HostConfig"]
        assert host["ReadonlyRootfs"], service
        assert (host["CapDrop"], host["CapAdd"], host["Privileged"]) == (["ALL"], None, False)
        assert host["SecurityOpt"] == ["no-new-privileges:true"], service
        assert found["Config"]["User"] == "rollmesh"
        assert host["Init"], service
    for service in project.counts:
        container = project.containers(service)[0]
        status = inside(container, "cat /proc/1/status")
        assert re.search(r"^Uid:\s+10001\s+10001\s", status, re.MULTILINE), service
        assert re.search(r"^CapEff:\s+0+$", status, re.MULTILINE), service
        assert re.search(r"^NoNewPrivs:\s+1$", status, re.MULTILINE), service
        for folder in ("/", "/app", "/venv", "/etc"):
            said = inside(container, f"touch {folder}/x 2>&1 || true")
            assert "Read-only file system" in said, (service, folder)
        assert inside(container, "touch /tmp/x && echo done") == "done\n"


def inspected(name: str) -> dict[str, Any]:
    """What Docker knows of a container or an image."""
    (found,) = json.loads(subprocess.check_output(["docker", "inspect", name]))
    return dict(found)


def inside(container: str, command: str) -> str:
    """Runs a shell command in a container. Returns what it printed."""
    return subprocess.check_output(["docker", "exec", container, "sh", "-c", command], text=True)


async def test_sigterm_is_a_clean_end_and_volumes_keep_unacknowledged_sessions(
    project: Project,
) -> None:
    async with Client(project.addresses()) as client:
        runs = await run_group(client)
    assert all(codes == {0} for codes in project.stop().values())
    project.up()
    async with Client(project.addresses()) as client:
        assert_exact(runs, await next_group(client))
        again = await run_group(client)
        assert_exact(again, await next_group(client))
