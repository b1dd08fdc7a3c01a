"""Published agents against vLLM itself: a small policy of random weights, cut by its limit.

It writes rubbish, characters cut in half among it, and no calls: each agent takes its words, echoes
them, and asks again. What the engine sampled is in the next prompt all the same.
"""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
import torch
from transformers import Qwen3ForCausalLM

from rollmesh.client import SessionResult
from tests.agents.processes import Outside, run_agent
from tests.agents.trajectories import audited
from tests.meshes import Mesh, scripted_mesh

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="module"),
]
QUESTIONS = ("What is 12 plus 30?", "Use the tools.", "I am not sure.")
AGENTS = [
    ("openai_chat", ("message",)),
    ("openai_chat", ("accumulated",)),
    ("openai_agents", ("streamed",)),
    ("langgraph_react", ("whole", "")),
]
# What the policy may do: be cut by the limit, sample the mark of a call, or sample a text by other
# tokens than the tokenizer would cut it into.
REASONS = {"EXACT", "LENGTH_CUT", "MALFORMED_TOOL_CALL", "TEMPLATE_REWRITE"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def vllm_mesh(
    tmp_path_factory: pytest.TempPathFactory, model_dir: Path
) -> AsyncIterator[Mesh]:
    """One for all, because a start takes half a minute."""
    folder = tmp_path_factory.mktemp("vllm-mesh")
    async with scripted_mesh(
        folder,
        model_dir,
        backend="vllm",
        max_context_tokens=2048,
        model_path=model_dir,
        dtype="float32",
        enforce_eager=True,
    ) as running:
        yield running


def check(model: Path, result: SessionResult) -> None:
    """Asserts one trajectory, all of it trained that was sampled, with the log-probs of torch."""
    agent = result.metadata["agent"]
    (trajectory,) = result.trajectories
    assert (trajectory.lineage, trajectory.turns) == ("MAIN", len(QUESTIONS)), agent
    assert set(trajectory.reasons) <= REASONS, agent
    sampled = sum(s.end - s.start for s in trajectory.segments if s.sampled)
    assert trajectory.loss_mask.sum() == sampled
    network = Qwen3ForCausalLM.from_pretrained(model, dtype=torch.float32)
    ids = torch.tensor(trajectory.token_ids.astype(np.int64))
    with torch.no_grad():
        found = torch.log_softmax(network(ids[None]).logits[0].float(), -1)
    chosen = found[:-1].gather(1, ids[1:, None]).squeeze(1).numpy()
    trained = trajectory.loss_mask[1:]
    assert np.abs(chosen - trajectory.logprobs[1:])[trained].max() < 1e-3


async def test_every_agent_and_vllm_leave_one_exact_trajectory(
    vllm_mesh: Mesh, model_dir: Path, tmp_path: Path
) -> None:
    async with vllm_mesh.client() as client:

        async def run(at: int, script: str, arguments: tuple[str, ...]) -> None:
            folder = tmp_path / str(at)
            folder.mkdir()
            sampling = {"max_tokens": 24, "seed": at}
            async with (
                Outside.listening() as outside,
                client.session(sampling=sampling, metadata={"agent": script}) as session,
            ):
                answers = await run_agent(script, session, outside, folder, *arguments, *QUESTIONS)
            assert len(answers) == len(QUESTIONS)

        async with asyncio.TaskGroup() as group:
            for at, (script, arguments) in enumerate(AGENTS):
                group.create_task(run(at, script, arguments))
        async with client.subscribe("trainer", unit="session") as deliveries, asyncio.timeout(60):
            results = [(await anext(deliveries)).sessions[0] for _ in AGENTS]
    for result in results:
        check(model_dir, audited(result))
