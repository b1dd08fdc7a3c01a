"""Runs a mesh on this machine for the duration of a block."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from rollmesh.client import MeshAddresses

_START_TIMEOUT_S = 900
_STOP_TIMEOUT_S = 60

_MESH = """\
[mesh]
data_dir = "{data}"
sidecars = 0  # agents call the gateway

[engine]
backend = "vllm"
dtype = "float32"
enforce_eager = true
max_context_tokens = {context}
lease_capacity = 128
logprobs = "{logprobs}"
max_adapters = {adapters}
"""
_MODEL = """
[[model]]
name = "{name}"
model_path = "{path}"
"""


@asynccontextmanager
async def running_mesh(
    folder: Path,
    model: Path,
    context: int,
    logprobs: str = "raw",
    adapters: int = 0,
    teacher: Path | None = None,
) -> AsyncIterator[MeshAddresses]:
    """Runs `rollmesh up` with real vLLM. Yields the addresses of the services.

    Args:
        folder: For its data and logs.
        model: Folder of the policy.
        context: Longest context, tokens.
        logprobs: Of which distribution the log-probabilities are.
        adapters: Number of adapter revisions for which the engine has room.
        teacher: Folder of a further model, "teacher". None if there is none.
    """
    config = folder / "mesh.toml"
    data = folder / "mesh"
    settings = {"context": context, "logprobs": logprobs, "adapters": adapters}
    models = {"policy": model} | ({"teacher": teacher} if teacher is not None else {})
    tables = [_MODEL.format(name=name, path=path) for name, path in models.items()]
    config.write_text(_MESH.format(data=data, **settings) + "".join(tables))
    with (folder / "up.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "rollmesh.cli",
            "up",
            "--view=0",
            f"--config={config}",
            f"--start-timeout={_START_TIMEOUT_S}",
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
        )
    try:
        yield await _addresses(process, folder)
    finally:
        if process.returncode is None:
            process.terminate()
        async with asyncio.timeout(_STOP_TIMEOUT_S):
            await process.wait()


async def _addresses(process: asyncio.subprocess.Process, folder: Path) -> MeshAddresses:
    assert process.stdout is not None
    async with asyncio.timeout(_START_TIMEOUT_S):
        async for line in process.stdout:
            if line.startswith(b"UP "):
                found = line.decode().removeprefix("UP ")
                print(f"viewer: http://{json.loads(found)['view']}/", flush=True)
                return MeshAddresses.from_json(found)
    raise RuntimeError(f"the mesh did not come up; see {folder}/mesh/logs and {folder}/up.log")
