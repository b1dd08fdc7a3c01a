"""Codex as published, from npm's registry: twelve turns, two sub-agents at once, a compaction.

It speaks in two ways. For a model that it does not know, it offers functions, and starts several
calls and sub-agents at once. For a model of its own catalogue it offers one tool that runs code,
and adds its tools by an item of the input.
"""

import json
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from examples.demo.audit import Audit
from rollmesh.client import Session
from tests import meshes
from tests.agents.dialogues import call, result
from tests.agents.processes import Outside
from tests.agents.programs import installed, mesh_that_thinks, run_program

PROGRAM = "@openai/codex-linux-x64/vendor/x86_64-unknown-linux-musl/bin/codex"
CONFIG = """
model = "{model}"
model_provider = "mesh"
model_context_window = 200000
model_auto_compact_token_limit = {limit}

[model_providers.mesh]
name = "mesh"
base_url = "{base_url}"
env_key = "MESH_KEY"
wire_api = "responses"
"""
THOUGHT = "<think>\nI begin.\n</think>\n\n I begin.\n\n"
BOTH = "until [ -e a ] && [ -e b ]; do sleep 0.1; done; echo step 4 | tee last"
LONG = "seq 1 6000; echo step 10 | tee last"
LAST = "It is done."
SUMMARY = "They did ten steps."
SUMMARISE = "seamlessly continue the work.\n"
"""How the request for a summary ends."""
DONE = ("The first is done.", "The second is done.")


def printed(text: str) -> str:
    """The end of a prompt whose last message is the output of a command."""
    return result(f"{text}\n")


def task(shell: str) -> list[tuple[str, str]]:
    """The steps of the main line and those of its sub-agents, each with the command's form.

    A step is in the file `last` too: what sub-agents say comes between two steps, at any time.
    """

    def run(command: str) -> str:
        arguments = json.dumps({"cmd": command})
        if shell == "exec_command":
            return call(arguments, shell)
        code = f"const r = await tools.exec_command({arguments});\ntext(r.output);"
        return call(json.dumps({"input": code}), shell)

    def step(number: int) -> str:
        return run(f"echo  step {number} | tee last")

    steps = [(printed(f"step {at}"), step(at + 1)) for at in (*range(4, 9), 10, 11)]
    return [
        ("Please begin.", f"{THOUGHT}{step(1)}"),
        (printed("step 1"), run("true") + "\n" + step(2) if shell == "exec_command" else step(2)),
        (printed("step 2"), step(3)),
        *steps,
        (printed("step 9"), run(LONG)),
        (SUMMARISE, SUMMARY),
        (SUMMARY, run("cat last")),
        (printed("step 12"), LAST),
        ("Do the first.", f"{THOUGHT}{run('touch a; echo sub a')}"),
        (printed("sub a"), DONE[0]),
        ("Do the second.", run("touch b; echo sub b")),
        (printed("sub b"), DONE[1]),
        ("</subagent_notification>", run("cat last")),
        *((f"Payload:\n{said}", run("cat last")) for said in DONE),
        ('"}\n</tool_response>', run(BOTH)),
    ]


def spawn(message: str, **fields: str) -> str:
    tool = "collaboration__spawn_agent" if fields else "multi_agent_v1__spawn_agent"
    return call(json.dumps({"message": message, **fields}), tool)


FUNCTIONS = [
    (printed("step 3"), spawn("Do the first.") + "\n" + spawn("Do the second.")),
    *task("exec_command"),
]
CODE = [
    (printed("step 3"), spawn("Do the first.", task_name="first", fork_turns="none")),
    (
        result('{"task_name":"/root/first"}'),
        spawn("Do the second.", task_name="second", fork_turns="all"),
    ),
    *task("functions__exec"),
]


async def run_codex(
    program: Path, session: Session, outside: Outside, home: Path, model: str, limit: int
) -> str:
    """Runs Codex with a configuration of its own. Returns what it said last."""
    config = CONFIG.format(model=model, limit=limit, base_url=session.base_url)
    (home / "config.toml").write_text(config)
    command = (program, "exec", "--skip-git-repo-check", "Please begin.")
    approved = "--dangerously-bypass-approvals-and-sandbox"  # there is nobody to ask
    settings = {"CODEX_HOME": str(home), "MESH_KEY": session.api_key}
    return await run_program((*command, approved), home, outside, settings)


@pytest.mark.long
@pytest.mark.timeout(1500)
@pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed")
@pytest.mark.parametrize(
    ("model", "rules", "limit", "lineages"),
    [
        pytest.param(
            "policy",
            FUNCTIONS,
            40_000,
            # Its summary is asked for without tools, so it is a conversation of its own.
            {"MAIN": 1, "SUB_AGENT": 2, "COMPACTION": 2},
            id="functions",
        ),
        pytest.param(
            "gpt-6-sol",
            CODE,
            52_000,
            # Its summary goes on from the main line.
            {"MAIN": 1, "SUB_AGENT": 2, "COMPACTION": 1},
            id="code",
        ),
    ],
)
async def test_codex_its_sub_agents_and_its_compaction_are_trained_exactly_as_sampled(
    tmp_path: Path,
    model: str,
    rules: Sequence[tuple[str, str]],
    limit: int,
    lineages: dict[str, int],
) -> None:
    (home := tmp_path / "home").mkdir()
    (folder := tmp_path / "codex").mkdir()
    program = await installed("codex", PROGRAM, folder)
    async with mesh_that_thinks(tmp_path, rules) as mesh, mesh.client() as client:
        async with Outside.listening() as outside, client.session() as session:
            said = await run_codex(program, session, outside, home, model, limit)
        delivered = await meshes.delivered(client, session)
    assert said == LAST
    audit = Audit()
    audit.received([delivered])
    assert (audit.drift_tokens, audit.duplicated) == (0, 0)
    assert sum(audit.trained.values()) == delivered.turns
    assert Counter(one.lineage for one in delivered.trajectories) == lineages
    (main,) = (one for one in delivered.trajectories if one.lineage == "MAIN")
    assert main.turns >= 10
    assert set(main.reasons) <= {"EXACT", "TEMPLATE_REWRITE"}
