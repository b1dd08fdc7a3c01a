"""Claude Code as published, from npm's registry: sub-agents at once, a compaction, a small context.

Much of what it says ends with system messages of its own: the model sees these and not the task. So
a program of the task knows how far it is, and the model runs it whenever it does not know.
"""

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest
import pytest_asyncio

from examples.demo.audit import Audit
from rollmesh.client import Session
from tests import meshes
from tests.agents.dialogues import call, result
from tests.agents.processes import Outside
from tests.agents.programs import installed, mesh_that_thinks, run_program

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.long,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed"),
]
PROGRAM = "@anthropic-ai/claude-code-linux-x64/claude"
ENDINGS = (  # of its lists of skills and of agents, and of a reminder
    "review: Complete a security review of the pending changes on the current branch",
    "so they run concurrently.",
    "ignore if not applicable.\n",
)
SUMMARISE = "you will fail the task."
"""How the request for a summary ends."""
THOUGHT = "<think>\nTwo at once.\n</think>\n\n"
WHERE = "if mkdir begun; then echo step 1; elif [ -e joined ]; then cat last; else echo sub; fi"
LAST = "It is done."


def bash(command: str) -> str:
    return call(json.dumps({"command": f"{{ {command}; }} 2>&-", "description": "Runs"}), "Bash")


def agent(description: str) -> str:
    asked = {
        "description": description,
        "prompt": f"Do {description}.",
        "subagent_type": "general-purpose",
    }
    return call(json.dumps(asked), "Agent")


def step(number: int, before: str = "true") -> str:
    return bash(f"{before}; echo  step {number} | tee last")


RULES = [
    *((ending, f"{THOUGHT}{bash(WHERE)}") for ending in ENDINGS),
    (result("step 1"), f"{bash('echo one')}\n{bash('echo  two')}"),
    *((result(last), step(3)) for last in ("one", "two")),  # in the order in which they ended
    (result("step 3"), f"{agent('first')}\n{agent('second')}"),
    (result("sub"), "It is done, as asked."),
    (result("</usage>"), step(4, "touch joined")),
    *((result(f"step {at}"), step(at + 1)) for at in (4, 5, 6, 7, 10, 11)),
    *((result(f"step {at}"), step(at + 1, "seq 1 1200")) for at in (8, 9)),
    (SUMMARISE, "They did nine steps."),
    (result("step 12"), LAST),
]
COMPACTING = {"CLAUDE_CODE_AUTO_COMPACT_WINDOW": "100000", "CLAUDE_AUTOCOMPACT_PCT_OVERRIDE": "88"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return await installed("claude_code", PROGRAM, tmp_path_factory.mktemp("claude"))


async def run_claude(
    program: Path, session: Session, outside: Outside, home: Path, **more: str
) -> str:
    """Runs Claude Code with a base URL and a key. Returns what it printed."""
    settings = {
        "ANTHROPIC_BASE_URL": session.base_url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": session.api_key,
        "DISABLE_AUTOUPDATER": "1",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        **more,
    }
    home.mkdir()
    allowed = ("--model", "policy", "--allowedTools", "Bash,Agent")
    command = (program, "-p", "Please begin.", *allowed)
    return await run_program(command, home, outside, settings)


async def test_its_sub_agents_and_its_compaction_are_trained_exactly_as_they_were_sampled(
    program: Path, tmp_path: Path
) -> None:
    async with mesh_that_thinks(tmp_path, RULES) as mesh, mesh.client() as client:
        async with Outside.listening() as outside, client.session() as session:
            said = await run_claude(program, session, outside, tmp_path / "home", **COMPACTING)
        delivered = await meshes.delivered(client, session)
    assert said == LAST
    audit = Audit()
    audit.received([delivered])
    assert (audit.drift_tokens, audit.duplicated) == (0, 0)
    assert sum(audit.trained.values()) == delivered.turns
    found = Counter(one.lineage for one in delivered.trajectories)
    # Of the two compactions one is the summary, and the other what follows it.
    assert found == {"MAIN": 1, "SUB_AGENT": 2, "COMPACTION": 2}
    (main,) = (one for one in delivered.trajectories if one.lineage == "MAIN")
    assert main.turns >= 10
    assert set(main.reasons) <= {"EXACT", "TEMPLATE_REWRITE"}


async def test_it_asks_for_less_where_its_answers_do_not_fit_into_the_context(
    program: Path, tmp_path: Path
) -> None:
    rules = [(ENDINGS[0], LAST)]
    # Its own prompts have 61,000 tokens, and it asks for 32,000 more.
    async with mesh_that_thinks(tmp_path, rules, 80_000) as mesh, mesh.client() as client:
        async with Outside.listening() as outside, client.session() as session:
            assert await run_claude(program, session, outside, tmp_path / "home") == LAST
        delivered = await meshes.delivered(client, session)
    assert [(one.lineage, one.turns) for one in delivered.trajectories] == [("MAIN", 1)]
