"""Every Python block of the pages runs: against a mesh where it talks to one, else against the
signatures of what it calls."""

import ast
import asyncio
import inspect
import json
import os
import sys
import warnings
from collections.abc import Awaitable, Callable, Iterator
from contextlib import chdir, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, create_autospec, patch

import numpy as np
import pytest
from openai import AsyncOpenAI

from rollmesh.batches import pad, rows_of
from rollmesh.client import (
    MeshAddresses,
    Retries,
    Session,
    SubscribeOptions,
    register_runner,
)
from rollmesh.integrations.harbor import HarborRunner, HarborTrialRunner, ServedTrials, task_of
from rollmesh.integrations.trl import MeshRollouts
from rollmesh.v1 import collector_pb2, router_pb2, session_pb2, trajectory_pb2
from tests.collector.records import record
from tests.docs.chat_page import CHECK, SETUP
from tests.docs.pages import Block, blocks
from tests.docs.test_first_agent import PROGRAM as FIRST_AGENT
from tests.meshes import Mesh, delivered
from tests.models import make_tokenizer_dir
from tests.ray.test_joining import SNIPPET as ON_RAY
from tests.record.readers import read_by
from tests.trainers.test_transfer_queue import SNIPPET as WITH_A_QUEUE

GROUP = 8
ADDRESSES = MeshAddresses(router="-", gateway="-", collector="-", sidecar="-")


class Model:
    """What a trainer trains. The scripted engine takes any weights."""

    def state_dict(self) -> dict[str, Any]:
        return {"weight": np.zeros(4, np.float32)}


async def agent(prompt: str, session: Session) -> float:
    async with AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as openai:
        await openai.chat.completions.create(
            model="policy", messages=[{"role": "user", "content": prompt}]
        )
    return 1.0


async def run(block: Block, names: dict[str, Any]) -> None:
    """Runs an unchanged block, which may use `await` at its top level."""
    code = compile(block.text, block.name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    outcome = eval(code, names)  # noqa: S307 - our own pages
    if inspect.iscoroutine(outcome):
        await outcome


async def readme(block: Block, mesh: Mesh) -> None:
    """A script of its own, with the mesh's addresses as its argument."""
    line = json.dumps(asdict(mesh.addresses))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", block.text, line), stdout=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(120):
        output, _ = await process.communicate()
    summary, *rows = output.decode().splitlines()
    assert (process.returncode, summary.split(",")[0]) == (0, f"completed {2 * GROUP}")
    assert len(rows) == 2 * GROUP


async def first_session(block: Block, mesh: Mesh) -> None:
    """A script of its own, with the addresses of the page's mesh."""
    text = block.text
    for name, port in (("router", 71), ("gateway", 72), ("collector", 73), ("sidecar", 80)):
        text = text.replace(f"127.0.0.1:{port}00", getattr(mesh.addresses, name))
    assert "127.0.0.1:7100" not in text
    names: dict[str, Any] = {}
    await asyncio.to_thread(exec, compile(text, block.name, "exec"), names)
    trajectory = names["trajectory"]
    assert trajectory.loss_mask.any()
    assert len(trajectory.token_ids) == len(trajectory.loss_mask) == len(trajectory.logprobs)


async def an_agent(block: Block, mesh: Mesh) -> None:
    names: dict[str, Any] = {}
    await run(block, names)
    async with mesh.client() as client, client.session() as session:
        assert await names["my_agent"]("Hi", session) == 1.0


async def delivery(block: Block, mesh: Mesh) -> None:
    async with mesh.client() as client:
        for index in range(GROUP):
            async with client.session(
                group_id="g", sample_index=index, group_size=GROUP
            ) as session:
                session.reward = await agent("a", session) + index
        names = {
            "SubscribeOptions": SubscribeOptions,
            "pb": collector_pb2,
            "trajectory_pb2": trajectory_pb2,
            "client": client,
            "steps": 1,
        }
        await run(block, names)
        (consumer,) = (await client.stats()).consumers
        assert consumer.acknowledged == 1


async def checkpoint(block: Block, mesh: Mesh) -> None:
    async with mesh.client() as client, client.subscribe("trainer"):
        names: dict[str, Any] = {"client": client}
        await run(block, names)
        assert await client.load_state_dict(names["state"]) == 0


async def messages(block: Block, mesh: Mesh) -> None:
    async with mesh.client() as client:
        async with client.session(record_messages=True) as session:
            await agent("a", session)
        names: dict[str, Any] = {"client": client, "SubscribeOptions": SubscribeOptions}
        await run(block, names)
        assert [one["role"] for one in names["found"].messages] == ["user", "assistant"]


async def siblings(block: Block, mesh: Mesh) -> None:
    async with mesh.client() as client:
        async with client.session(record_messages=True) as session:
            await agent("a", session)
        await delivered(client, session)
        names: dict[str, Any] = {"client": client, "session_id": session.session_id, "node_id": 1}
        exec("from openai import AsyncOpenAI\nfrom rollmesh.client import Group, rollout", names)  # noqa: S102
        await run(block, names)
        result = await delivered(client, names["session"])
        assert result.origin is not None
        assert result.origin.continued


async def atif(block: Block, folder: Path) -> None:
    step = {"step_id": 1, "source": "user", "message": "Hi."}
    document = {"schema_version": "ATIF-v1.8", "agent": {}, "steps": [step]}
    path = folder / "trajectory.json"
    path.write_text(json.dumps(document))
    text = block.text.replace('"trajectory.json"', repr(str(path)))
    names: dict[str, Any] = {"json": json, "Path": Path}
    exec("from rollmesh.client import start_of_atif", names)  # noqa: S102
    await run(replace(block, text=text.replace("=4", "=1")), names)
    assert names["start"].messages == [{"role": "user", "content": "Hi."}]


async def record_rows(block: Block, folder: Path) -> None:
    pytest.importorskip("pyarrow")
    written(folder)
    names: dict[str, Any] = {}
    with chdir(folder):
        await run(block, names)
    assert names["row"].reward == 3.0


async def record_reader(block: Block, folder: Path) -> None:
    """Pandas and datasets are in this environment, and others where the readers are."""
    pytest.importorskip("pyarrow")
    written(folder)
    if "duckdb" in block.text:
        assert "2.0" in read_by(block.text, folder)
        return
    pytest.importorskip("datasets")
    with chdir(folder), patch.dict(os.environ, HF_DATASETS_CACHE=str(folder)):
        await run(block, {})


def written(folder: Path) -> None:
    """Writes a record of two sessions."""
    from rollmesh.record import Writer

    with Writer(folder / "record") as writer:
        for one in (record("a", "g", 1, 4), record("b", "g", 3, 4)):
            writer.add(one)
        writer.commit()


async def saved_checkpoint(block: Block, mesh: Mesh) -> None:
    async with mesh.client() as client:
        async with client.session() as session:
            session.reward = await agent("a", session)
        options = SubscribeOptions(filter=collector_pb2.DeliveryFilter(ungrouped=True))
        async with client.subscribe("trainer", options=options) as groups:
            deliveries = [await anext(groups)]
            names = {"client": client, "groups": groups, "deliveries": deliveries}
            await run(block, {**names, "model": Model(), "step": 1})


async def resumed(block: Block, mesh: Mesh) -> None:
    async with mesh.client() as client:
        await client.push_weights(Model().state_dict(), 1)
        async with client.subscribe("trainer"):
            state = await client.state_dict("trainer")
        await client.push_weights(Model().state_dict(), 9)
        saved = {"model": Model().state_dict(), "step": 1, "mesh": state}
    async with mesh.client() as client:
        names: dict[str, Any] = {"client": client, "saved": saved}
        await run(block, names)
        assert names["again"] == 0
        assert await client.policy_version() == 1


async def resumed_rollout(block: Block, mesh: Mesh) -> None:
    async with mesh.client() as client, client.subscribe("trainer") as subscription:
        names: dict[str, Any] = {"client": client, "subscription": subscription, "tasks": ["a"]}
        names |= {"agent": agent, "saved": {"job": "job"}, "name": str}
        exec("from rollmesh.client import rollout_groups", names)  # noqa: S102
        await run(block, names)
        assert [one.group_id for one in names["deliveries"]] == ["a"]


async def rollout_state(block: Block, mesh: Mesh) -> None:
    async with mesh.client() as client, client.subscribe("trainer"):
        names: dict[str, Any] = {"client": client, "samples": ["a"], "saved": {}, "agent": agent}
        exec("from rollmesh.client import rollout_groups", names)  # noqa: S102
        async with names["rollout_groups"](client, ["a"], runner=agent, n=8) as groups:
            await run(block, {**names, "groups": groups})


async def everything(block: Block, mesh: Mesh) -> None:
    async with mesh.client() as client:
        names = {"SubscribeOptions": SubscribeOptions, "collector_pb2": collector_pb2}
        await run(block, {**names, "client": client})


async def runners(block: Block, mesh: Mesh) -> None:
    register_runner("coder", agent)
    async with mesh.client() as client:
        names = {
            "client": client,
            "dataset": ["a"],
            "Retries": Retries,
            "score": lambda episode: 2.0,
        }
        exec("from rollmesh.client import rollout_groups", names)  # noqa: S102
        await run(block, names)
    assert names["groups"].summary.mean_reward == 2.0  # type: ignore[attr-defined]


async def trainer_loop(block: Block, mesh: Mesh) -> None:
    names = {
        "addresses": mesh.addresses,
        "prompts": ["a"],
        "run_agent": agent,
        "model": Model(),
        "version": 1,
        "device": "cpu",
    }
    await run(block, names)
    assert len(names["advantages"]) == GROUP  # type: ignore[arg-type]


async def teacher(block: Block, mesh: Mesh) -> None:
    async with mesh.client() as client:
        async with client.session() as session:
            session.reward = await agent("a", session)
        deliveries = [await delivered(client, session)]
    names = {"addresses": mesh.addresses, "deliveries": deliveries, "teacher": "policy"}
    await run(block, names)
    # The scripted model scores its own answers as it sampled them.
    assert names["reverse_kl"] == 0


async def alarms(block: Block, mesh: Mesh) -> None:
    async with mesh.client() as client, client.subscribe("trainer"):
        await client.state_dict("trainer")  # waits for the consumer
        async with client.session() as session:
            session.reward = await agent("a", session)
        deliveries = [await delivered(client, session)]
        logprobs = pad(rows_of(deliveries)).logprobs
        names: dict[str, Any] = {"addresses": mesh.addresses, "deliveries": deliveries}
        names |= {"logprobs": logprobs, "version": 0, "step": 3, "loss": 0.5}
        await run(block, names | {"entropy": np.ones(4)})
        (step,) = await client.steps("trainer")
    assert (step.metrics["kl"], step.metrics["entropy_mean"]) == (0, 1)


async def evaluation(block: Block, mesh: Mesh) -> None:
    async def run_agent(task: str, session: Session) -> float:
        await agent(task, session)
        return 1.0

    names: dict[str, Any] = {"addresses": mesh.addresses, "run_agent": run_agent}
    names["tasks"] = ["a", "b"]
    here = Path.cwd()
    os.chdir(mesh.folder)
    try:
        await run(block, names)
    finally:
        os.chdir(here)
    assert names["share"].value == 1
    assert len((mesh.folder / "results.jsonl").read_text().splitlines()) == 8


async def verl_runner(block: Block, folder: Path) -> None:
    names: dict[str, Any] = {"AsyncOpenAI": AsyncOpenAI}
    await run(block, names)
    await names["run"]({"raw_prompt": []}, Session("id", "key", "http://127.0.0.1:1/v1"))


async def trl_trainer(block: Block, folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TRL has not been told of this vLLM yet
        from trl import GRPOTrainer  # it imports torch and vLLM

        trainer = create_autospec(GRPOTrainer)
    names = {
        "MeshRollouts": create_autospec(MeshRollouts),
        "GRPOTrainer": trainer,
        "addresses": ADDRESSES,
        "runner": agent,
    }
    await run(block, names)
    trainer.return_value.train.assert_called_once()


async def nccl(block: Block, folder: Path) -> None:
    with _patched("rollmesh.client.sync.Client") as client:
        replicas = client.return_value.replicas.return_value
        replicas.replicas, replicas.models = [], [router_pb2.ModelWeights(model="policy")]
        factory = "vllm.distributed.weight_transfer.WeightTransferTrainerFactory.trainer_init"
        with _patched(factory) as init, _patched("torch.distributed.get_rank", return_value=0):
            names = {
                "addresses": ADDRESSES,
                "tensor_parallel": 2,
                "pipeline_parallel": 1,
                "host": "127.0.0.1",
                "port": 1,
                "model": Model(),
                "step": 1,
            }
            exec("import torch", names)  # noqa: S102
            await run(block, names)
            init.return_value.send_weights.assert_called_once()


async def chat(block: Block, folder: Path) -> None:
    names: dict[str, Any] = {"model_path": str(make_tokenizer_dir(folder))}
    exec(SETUP, names)  # noqa: S102
    await run(block, names)
    exec(CHECK, names)  # noqa: S102


async def scorer(block: Block, folder: Path) -> None:
    names: dict[str, Any] = {}
    await run(block, names)
    session = session_pb2.SessionRecord(metadata={"passed": "yes"})
    assert names["score"](session).reward == 1.0


async def harbor_samples(block: Block, folder: Path) -> None:
    with patch("rollmesh.client.rollout", AsyncMock()) as rolled:
        await run(block, {"key": "key"})
    assert rolled.await_args is not None
    assert isinstance(rolled.await_args.kwargs["runner"], HarborRunner)
    assert all(map(task_of, rolled.await_args.args[1]))


async def harbor_of_verl(block: Block, folder: Path) -> None:
    names: dict[str, Any] = {"HarborRunner": HarborRunner, "key": "key"}
    await run(block, names)
    assert isinstance(names["codex"], HarborRunner)


async def harbor_trials(block: Block, folder: Path) -> None:
    rolled = AsyncMock()
    names = {
        "HarborTrialRunner": HarborTrialRunner,
        "Retries": Retries,
        "rollout": rolled,
        "client": None,
    }
    await run(block, names)
    assert rolled.await_args is not None
    assert isinstance(rolled.await_args.kwargs["runner"], HarborTrialRunner)


async def harbor_served(block: Block, folder: Path) -> None:
    make_tokenizer_dir(folder / "path" / "to" / "model")
    with chdir(folder):
        await run(block, {"HarborRunner": HarborRunner, "ServedTrials": ServedTrials, "key": "key"})


@contextmanager
def _patched(name: str, **settings: Any) -> Iterator[Any]:
    with patch(name, autospec=True, **settings) as stand_in:
        yield stand_in


WITH_MESH: dict[str, Callable[[Block, Mesh], Awaitable[None]]] = {
    "README.md python 1": readme,
    "docs/agents.md python 1": an_agent,
    "docs/alarms.md python 1": alarms,
    "docs/delivery.md python 1": delivery,
    "docs/delivery.md python 2": checkpoint,
    "docs/delivery.md python 3": messages,
    "docs/evaluation.md python 1": evaluation,
    "docs/getting-started.md python 1": first_session,
    "docs/import.md python 1": siblings,
    "docs/resume.md python 1": saved_checkpoint,
    "docs/resume.md python 2": resumed,
    "docs/resume.md python 3": resumed_rollout,
    "docs/resume.md python 4": rollout_state,
    "docs/resume.md python 5": everything,
    "docs/runners.md python 1": runners,
    "docs/trainers.md python 1": trainer_loop,
    "docs/trainers.md python 2": teacher,
}
ALONE: dict[str, Callable[[Block, Path], Awaitable[None]]] = {
    "docs/chat.md python 1": chat,
    "docs/import.md python 2": atif,
    "docs/harbor.md python 1": harbor_samples,
    "docs/harbor.md python 2": harbor_of_verl,
    "docs/harbor.md python 3": harbor_trials,
    "docs/harbor.md python 4": harbor_served,
    "docs/operations.md python 1": scorer,
    "docs/record.md python 1": record_reader,
    "docs/record.md python 2": record_reader,
    "docs/record.md python 3": record_reader,
    "docs/record.md python 4": record_rows,
    "docs/trainers.md python 3": trl_trainer,
    "docs/trainers.md python 4": nccl,
    "docs/verl.md python 1": verl_runner,
}


def shown(cases: dict[str, Any]) -> list[Block]:
    return [block for block in blocks("python") if block.name in cases]


@pytest.mark.parametrize("block", shown(WITH_MESH), ids=lambda block: block.name)
async def test_a_snippet_does_with_a_mesh_as_its_page_says(block: Block, mesh: Mesh) -> None:
    await WITH_MESH[block.name](block, mesh)


@pytest.mark.parametrize("block", shown(ALONE), ids=lambda block: block.name)
async def test_a_snippet_calls_what_there_is(block: Block, tmp_path: Path) -> None:
    await ALONE[block.name](block, tmp_path)


def test_every_snippet_is_tested() -> None:
    tested = {*WITH_MESH, *ALONE, ON_RAY, WITH_A_QUEUE, FIRST_AGENT}
    assert {block.name for block in blocks("python")} == tested
