"""Gemini CLI as published, from npm's registry: a task of ten turns with calls at once."""

import json
import shutil
from pathlib import Path

import pytest

from tests.agents import trajectories
from tests.agents.dialogues import call, result
from tests.agents.processes import Outside
from tests.agents.programs import installed, mesh_that_thinks, run_program

PROGRAM = "@google/gemini-cli/bundle/gemini.js"
SETTINGS = {
    "security": {"auth": {"selectedType": "gemini-api-key"}},
    "privacy": {"usageStatisticsEnabled": False},
}
THOUGHT = "<think>\nI begin.\n</think>\n\n I begin.\n\n"
LAST = "It is done."


def write(text: str, path: str = "last.txt") -> str:
    """The call of a tool whose result ends with the text."""
    arguments = json.dumps({"content": text, "file_path": path}, separators=(" ,  ", ":"))
    return call(arguments, "write_file")


def steps() -> list[tuple[str, str]]:
    """The ends of the prompts, and the replies."""
    both = f"{call(json.dumps({'command': 'echo  one'}), 'run_shell_command')}\n{write('step 2')}"
    thought = f"<think>\nMore.\n</think>\n\n{write('step 6')}"
    replies = [
        f"{THOUGHT}{write('step 1')}", both, write("step 3"), f" Soon.\n\n{write('step 4')}",
        write("step 5", "café.txt"), thought, write("step 7"), write("step 8"), write("step 9"),
        LAST,
    ]  # fmt: skip
    prompts = ["Please begin.", *(result(f"step {at}") for at in range(1, len(replies)))]
    return list(zip(prompts, replies, strict=True))


@pytest.mark.long
@pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed")
async def test_gemini_cli_is_one_trajectory_of_the_tokens_that_were_sampled(tmp_path: Path) -> None:
    (home := tmp_path / "home").mkdir()
    (folder := tmp_path / "gemini").mkdir()
    program = await installed("gemini_cli", PROGRAM, folder)
    (home / ".gemini").mkdir()
    (home / ".gemini" / "settings.json").write_text(json.dumps(SETTINGS))
    async with mesh_that_thinks(tmp_path, steps()) as mesh, mesh.client() as client:
        async with Outside.listening() as outside, client.session() as session:
            settings = {
                "GOOGLE_GEMINI_BASE_URL": session.base_url.removesuffix("/v1"),
                "GEMINI_API_KEY": session.api_key,
                "GEMINI_CLI_TRUST_WORKSPACE": "true",
            }
            command = ("node", program, "-p", "Please begin.", "-m", "policy", "--yolo")
            said = await run_program(command, home, outside, settings)
        delivered = await trajectories.delivered(client, session)
    assert said.endswith(LAST)
    asked = ("SAMPLING_CHANGED", "TRUNCATED_SUPPORT")  # it sends a topP and a topK of its own
    trajectories.check_main(mesh, delivered, [reply for _, reply in steps()], *asked)
