"""The Claude agent SDK as published, which has Claude Code in it: tools, hooks, a sub-agent."""

from collections import Counter
from pathlib import Path

import pytest

from tests.agents import dialogues
from tests.agents.processes import ENVIRONMENT, Outside, run_agent
from tests.agents.trajectories import check_main, delivered
from tests.meshes import Mesh

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.skipif(
        not list(ENVIRONMENT.glob("lib/*/site-packages/claude_agent_sdk")),
        reason="claude-agent-sdk is not installed: run `make .venv-agents/.ready`",
    ),
]
TOOL = "mcp__math__calculator"


async def test_a_conversation_with_a_tool_and_a_hook_is_one_exact_trajectory(
    agents_mesh: Mesh, outside: Outside, tmp_path: Path
) -> None:
    questions = (dialogues.QUESTION, dialogues.LAST)
    async with agents_mesh.client() as client:
        async with client.session() as session:
            end = await run_agent("claude_sdk", session, outside, tmp_path, "client", *questions)
        result = await delivered(client, session)
    assert end["answers"] == [dialogues.ANSWER, dialogues.FAREWELL]
    assert end["used"] == [TOOL] * 3
    assert end["streamed"] == f" I will compute.{dialogues.ANSWER}{dialogues.FAREWELL}"
    (first, _, second, answer), last = dialogues.SDK[:4], dialogues.FAREWELL
    check_main(agents_mesh, result, [first[1], second[1], answer[1], last])


@pytest.mark.long
async def test_a_query_and_its_sub_agent_are_told_apart_and_nothing_drifts(
    agents_mesh: Mesh, outside: Outside, tmp_path: Path
) -> None:
    async with agents_mesh.client() as client:
        async with client.session() as session:
            end = await run_agent(
                "claude_sdk", session, outside, tmp_path, "query", dialogues.QUESTION
            )
        result = await delivered(client, session)
    assert end["answers"] == [dialogues.COUNTED]
    assert end["used"] == [TOOL, "Agent", TOOL]
    found = Counter((one.lineage, one.turns) for one in result.trajectories)
    assert found == {("MAIN", 3): 1, ("SUB_AGENT", 2): 1}
