"""Published SDKs and agents in Harbor's sandboxes, unmodified: exact trajectories by each API."""

import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from examples.demo.audit import Audit
from rollmesh.client import Client, SessionResult
from tests.agents import dialogues
from tests.agents.dialogues import call, result
from tests.agents.processes import ENVIRONMENT
from tests.agents.programs import CONTEXT, installed
from tests.agents.trajectories import check_main
from tests.harbor.connecting import connected, trained
from tests.harbor.serving import Harbor, harbor_server
from tests.meshes import Mesh, scripted_mesh
from tests.models import make_thinking_dir
from tests.paths import ROOT

pytestmark = [
    pytest.mark.skipif(not (ENVIRONMENT / ".ready").exists(), reason="make .venv-agents/.ready"),
]
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
SCRIPTS = ROOT / "tests" / "agents" / "scripts"
QUESTIONS = [dialogues.QUESTION, dialogues.LAST]
SDKS = [
    ("openai_chat", "message"),
    ("openai_chat", "helper"),
    ("openai_agents", "whole", "responses"),
    ("openai_agents", "streamed", "responses"),
    ("anthropic_messages", "message"),
    ("anthropic_messages", "helper"),
]


def program(script: str, *arguments: str) -> dict[str, Any]:
    """An agent that runs a script in the sandbox, with the packages of agents."""
    python = str(ENVIRONMENT / "bin" / "python")
    return {
        "import_path": "agents:Program",
        "model_name": "openai/policy",
        "model_api_format": "openai_chat_completions",
        "n_concurrent": 2,
        "kwargs": {
            "command": [python, "-P", str(SCRIPTS / f"{script}.py"), *arguments, *QUESTIONS],
            "env": {"OPENAI_AGENTS_DISABLE_TRACING": "1"},
        },
    }


@asynccontextmanager
async def thinking(
    folder: Path, rules: list[tuple[str, str]], context: int = 32_768, programs: str = ""
) -> AsyncIterator[tuple[Mesh, Harbor, Client]]:
    """Runs a mesh whose model thinks, a server and a connector."""
    model = make_thinking_dir(folder / "model", context)
    async with (
        scripted_mesh(folder / "mesh", model, rules) as mesh,
        harbor_server(folder / "harbor", programs=programs) as harbor,
        mesh.client() as client,
        connected(client, harbor.url, "training-1"),
    ):
        yield mesh, harbor, client


@pytest.mark.long
async def test_the_sdks_of_all_apis_train_exactly_from_sandboxes(tmp_path: Path) -> None:
    async with thinking(tmp_path, dialogues.RULES) as (mesh, harbor, client):
        agents = [program(*one) for one in SDKS]
        task = [harbor.task("one", "Compute.")]
        job = await harbor.submit_agents("training-1", task, agents)
        rollouts = await harbor.ended(job)
        said = [json.loads(one.read_text()) for one in harbor.folder.glob("data/**/said")]
        sessions = await trained(client, len(SDKS))
    assert [one["error_type"] for one in rollouts] == [None] * len(SDKS)
    assert said == [[dialogues.ANSWER, dialogues.FAREWELL]] * len(SDKS)
    # Agents with other settings are other policies of a task: each is a group.
    assert len({one.group_id for one in sessions}) == len(SDKS)
    for session in sessions:
        assert (session.reward, session.outcome) == (0.75, "COMPLETED")
        check_main(mesh, session, [reply for _, reply in dialogues.CHAT])
    check_drift(sessions)


LAST = "It is done."
MINI = [
    ("anything\n```", call('{"command": "echo done > done.txt"}', "bash")),
    (result('"output": ""\n}'), call(f'{{"command": "{SUBMIT}"}}', "bash")),
]


@pytest.mark.long
async def test_mini_swe_agent_as_harbor_runs_it_is_one_exact_trajectory(tmp_path: Path) -> None:
    programs = str(ENVIRONMENT / "bin")
    async with thinking(tmp_path, MINI, programs=programs) as (mesh, harbor, client):
        agent = published("mini-swe-agent", "openai/policy", "openai_chat_completions")
        job = await harbor.submit_agents("training-1", [harbor.task("one", "Mark it.")], [agent])
        (rollout,) = await harbor.ended(job)
        (session,) = await trained(client, 1)
    assert rollout["error_type"] is None
    assert (session.reward, session.outcome) == (0.75, "COMPLETED")
    check_main(mesh, session, [reply for _, reply in MINI])
    check_drift([session])


BEGIN = "Please begin."
WORDS = ("first", "second", "done")
MARK = "echo WORD | tee WORD.txt"
ENDINGS = (  # of first prompts
    BEGIN,
    f'"{BEGIN}"',
    # Claude Code's lists of skills and of agents, and a reminder of it and of Kimi Code
    "review: Complete a security review of the pending changes on the current branch",
    "so they run concurrently.",
    "ignore if not applicable.\n",
    "on whether to proceed.\n</system-reminder>",
)
RESULTS = (  # of a command that prints a word
    "WORD\n",
    "WORD",
    "WORD\nError: (none)\nExit Code: 0\nSignal: (none)\nProcess Group PGID: (none)",
    "WORD\n<shellId: AT completed with exit code 0>",
)


class Published(NamedTuple):
    """An agent of Harbor's, the lock of its program, and how it is told to run a command."""

    model: str
    api: str
    lock: str
    program: str
    tool: str
    arguments: dict[str, Any]

    def rules(self) -> list[tuple[str, str]]:
        """The ends of the prompts of a task, and the replies to them."""
        arguments = json.dumps(self.arguments)
        first, *others = [call(arguments.replace("WORD", word), self.tool) for word in WORDS]
        begun = [(ending, first) for ending in ENDINGS]
        return begun + [
            (result(ending.replace("WORD", word).replace("AT", str(at))), reply)
            for at, (word, reply) in enumerate(zip(WORDS, [*others, LAST], strict=True))
            for ending in RESULTS
        ]


CHAT, RESPONSES = "openai_chat_completions", "openai_responses"
MESSAGES, GOOGLE = "anthropic_messages", "google_generate_content"
SHELL = {"command": MARK, "description": "Marks"}
PACKAGES = {
    "codex": Published(
        "openai/policy",
        RESPONSES,
        "codex",
        "@openai/codex-linux-x64/vendor/x86_64-unknown-linux-musl/bin/codex",
        "exec_command",
        {"cmd": MARK},
    ),
    "claude-code": Published(
        "anthropic/policy",
        MESSAGES,
        "claude_code",
        "@anthropic-ai/claude-code-linux-x64/claude",
        "Bash",
        SHELL,
    ),
    # Its base URL lacks the version.
    "opencode": Published(
        "anthropic/policy", MESSAGES, "opencode", "opencode-linux-x64/bin/opencode", "bash", SHELL
    ),
    "copilot-cli": Published(
        "openai/policy", CHAT, "copilot", ".bin/copilot", "bash", {**SHELL, "mode": "sync"}
    ),
    # What its commands print is followed by the number of a process.
    "gemini-cli": Published(
        "google/policy",
        GOOGLE,
        "gemini_cli",
        ".bin/gemini",
        "write_file",
        {"file_path": "WORD.txt", "content": "WORD"},
    ),
    "kimi-code": Published(
        "openai/policy", CHAT, "kimi_code", ".bin/kimi", "Bash", {"command": MARK}
    ),
    "pi": Published("openai/policy", CHAT, "pi", ".bin/pi", "bash", {"command": MARK}),
    "qwen-coder": Published(
        "openai/policy",
        CHAT,
        "qwen_code",
        ".bin/qwen",
        "run_shell_command",
        {**SHELL, "is_background": False},
    ),
}


@pytest.mark.long
@pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed")
@pytest.mark.parametrize("name", PACKAGES)
async def test_a_packaged_agent_as_harbor_runs_it_trains_exactly(tmp_path: Path, name: str) -> None:
    agent = PACKAGES[name]
    (folder := tmp_path / "npm").mkdir()
    program = await installed(agent.lock, agent.program, folder)
    programs = str(program.parent)
    async with thinking(tmp_path, agent.rules(), CONTEXT, programs) as (_, harbor, client):
        task = [harbor.task("one", BEGIN)]
        asked = [published(name, agent.model, agent.api)]
        job = await harbor.submit_agents("training-1", task, asked)
        (rollout,) = await harbor.ended(job)
        (session,) = await trained(client, 1)
    assert rollout["error_type"] is None
    check_task(session)


TURNS = 4
KEYS = json.dumps({"keystrokes": "echo done > done.txt\n", "duration": 0.1})
STEP = f'{{"analysis": "", "plan": "", "commands": [{KEYS}], "task_complete": false}}'


@pytest.mark.long
@pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")
async def test_terminus_2_in_the_process_of_harbor_trains_exactly(tmp_path: Path) -> None:
    async with thinking(tmp_path, [("", STEP)], CONTEXT) as (mesh, harbor, client):
        agent = published("terminus-2", "openai/policy", CHAT)
        agent["kwargs"] = {"max_turns": TURNS, "record_terminal_session": False}
        task = [harbor.task("one", BEGIN)]
        job = await harbor.submit_agents("training-1", task, [agent])
        (rollout,) = await harbor.ended(job)
        (session,) = await trained(client, 1)
    assert rollout["error_type"] is None
    check_task(session)
    check_main(mesh, session, [STEP] * TURNS)


def check_task(session: SessionResult) -> None:
    """Asserts that a task is done, of one main conversation."""
    assert (session.reward, session.outcome) == (0.75, "COMPLETED")
    assert [one.turns for one in session.trajectories if one.lineage == "MAIN"] == [TURNS]
    check_drift([session])


def published(name: str, model: str, api: str) -> dict[str, Any]:
    """An agent of Harbor's, whose program is there already."""
    return {
        "name": name,
        "model_name": model,
        "model_api_format": api,
        "kwargs": {"skip_install": True},
    }


def check_drift(sessions: list[SessionResult]) -> None:
    audit = Audit()
    audit.received(sessions)
    assert (audit.drift_tokens, audit.duplicated) == (0, 0)
    # A title is asked for beside the conversation, and is not trained.
    kept = [one for each in sessions for one in each.trajectories if one.lineage != "AUXILIARY"]
    assert sum(audit.trained.values()) == sum(one.turns for one in kept)
