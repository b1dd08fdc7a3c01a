"""The contract from another language: stubs that are generated, and no SDK."""

import asyncio
import json
import shutil
from pathlib import Path

import pytest

from tests.meshes import scripted_mesh
from tests.paths import ROOT

SOURCES = ROOT / "tests" / "contract" / "typescript"
REPLIES = [("What is 6 plus 7?", "It is 13."), ("And now?", "Still 13.")]


async def run(folder: Path, *command: str) -> str:
    """Runs a command to its end; returns what it printed."""
    process = await asyncio.create_subprocess_exec(
        *command, cwd=folder, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(300):
        out, err = await process.communicate()
    assert process.returncode == 0, f"{command}: {out.decode()} {err.decode()}"
    return out.decode()


async def registry_answers(folder: Path) -> bool:
    process = await asyncio.create_subprocess_exec(
        "npm", "view", "typescript", "version", cwd=folder, stdout=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(120):
            out, _ = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
        return False
    return process.returncode == 0 and bool(out)


def built_program(tmp_path: Path) -> Path:
    """Copies the program; what is built of it stays out of the tree."""
    folder = tmp_path / "typescript"
    names = ("package.json", "package-lock.json", "tsconfig.json", "buf.gen.yaml", "main.ts")
    folder.mkdir()
    for name in names:
        shutil.copy(SOURCES / name, folder / name)
    return folder


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed")
async def test_a_typescript_program_chats_and_reads_its_trajectory(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    folder = built_program(tmp_path)
    if not await registry_answers(folder):
        pytest.skip("npm's registry does not answer")
    # Not `ci`: the lock has the binaries of one platform only.
    await run(folder, "npm", "install", "--ignore-scripts", "--no-audit", "--no-fund")
    buf = "node_modules/.bin/buf"
    await run(folder, buf, "generate", str(ROOT / "protos"), "--template", "buf.gen.yaml")
    await run(folder, "npx", "tsc")
    async with scripted_mesh(tmp_path / "mesh", tokenizer_dir, REPLIES) as mesh:
        addresses = mesh.addresses.gateway, mesh.addresses.collector
        seen = json.loads(await run(folder, "node", "build/main.js", *addresses))
    assert seen["service"] == "rollmesh.v1.GatewayService"
    assert seen["apiRevision"] >= 1
    assert (seen["first"], seen["streamed"]) == ("It is 13.", "Still 13.")
    assert seen["closed"] == seen["read"] != []
    assert (seen["reward"], seen["turns"]) == (1, 2)
    assert seen["tokens"] == seen["logprobs"] == seen["mask"] > seen["trained"] > 0
