"""The page for a first agent, typed from its first line to its last."""

import asyncio
import sys
from pathlib import Path

from tests.docs.pages import blocks
from tests.paths import ROOT

PAGE = "docs/first-agent.md"
PROGRAM = f"{PAGE} python 1"
_LIMIT_S = 200.0


def block(language: str) -> str:
    (text,) = (one.text for one in blocks(language) if one.page == PAGE)
    return text


async def run(*words: str | Path) -> str:
    process = await asyncio.create_subprocess_exec(
        sys.executable, *words, cwd=ROOT, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate()
    assert process.returncode == 0
    return output.decode()


async def test_a_newcomer_sees_an_agent_call_a_tool_on_a_scripted_engine(tmp_path: Path) -> None:
    (tmp_path / "script.json").write_text(block("json"))
    (tmp_path / "mesh.toml").write_text(block("toml"))
    async with asyncio.timeout(_LIMIT_S):
        await run("-m", "examples.tiny_model", tmp_path / "model", "--no-weights")
        mesh = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "rollmesh.cli", "up", "--config", "mesh.toml"),
            cwd=tmp_path,
            stdout=asyncio.subprocess.PIPE,
        )
        try:
            assert mesh.stdout is not None
            line = b""
            async for line in mesh.stdout:
                if line.startswith(b"UP "):
                    break
            output = await run("-c", block("python"), line.decode().removeprefix("UP "))
        finally:
            mesh.terminate()
            await mesh.communicate()
    assert output.splitlines()[0] == "The answer is 42."
    assert output.splitlines()[1].startswith("2 turns, ")
