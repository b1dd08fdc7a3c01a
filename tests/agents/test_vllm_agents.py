"""Published agents against vLLM itself: a small policy of random weights, cut by its limit.

It writes rubbish, characters cut in half among it, and no calls: each agent takes its words, echoes
them, and asks again. What the engine sampled is in the next prompt all the same.
"""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from rollmesh.client import Session, SessionResult
from tests.agents.processes import Outside, run_agent
from tests.agents.trajectories import delivered
from tests.meshes import Mesh
from tests.models import torch_logprobs

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.asyncio(loop_scope="session"),
]
QUESTIONS = ("What is 12 plus 30?", "Use the tools.", "I am not sure.")
AGENTS = [
    ("openai_chat", ("message",)),
    ("openai_chat", ("accumulated",)),
    ("openai_agents", ("streamed", "chat")),
    ("langgraph_react", ("whole", "")),
]
# What the policy may do: be cut by the limit, sample the mark of a call, or sample a text by other
# tokens than the tokenizer would cut it into.
REASONS = {"EXACT", "LENGTH_CUT", "MALFORMED_TOOL_CALL", "TEMPLATE_REWRITE"}


def check(model: Path, result: SessionResult) -> None:
    """Asserts one trajectory, all of it trained that was sampled, with the log-probs of torch."""
    agent = result.metadata["agent"]
    (trajectory,) = result.trajectories
    assert (trajectory.lineage, trajectory.turns) == ("MAIN", len(QUESTIONS)), agent
    assert set(trajectory.reasons) <= REASONS, agent
    sampled = sum(s.end - s.start for s in trajectory.segments if s.sampled)
    assert trajectory.loss_mask.sum() == sampled
    rows = torch_logprobs(model, trajectory.token_ids)
    chosen = rows[np.arange(len(rows) - 1), trajectory.token_ids[1:]]
    trained = trajectory.loss_mask[1:]
    assert np.abs(chosen - trajectory.logprobs[1:])[trained].max() < 1e-3


async def test_every_agent_and_vllm_leave_one_exact_trajectory(
    vllm_mesh: Mesh, model_dir: Path, tmp_path: Path
) -> None:
    sessions: list[Session] = []
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
            sessions.append(session)
            assert len(answers) == len(QUESTIONS)

        async with asyncio.TaskGroup() as group:
            for at, (script, arguments) in enumerate(AGENTS):
                group.create_task(run(at, script, arguments))
        for session in sessions:
            check(model_dir, await delivered(client, session))
