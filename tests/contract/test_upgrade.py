"""Processes of an earlier commit and of today in one mesh: what the promise of upgrades is about.

Unlike the stubs of `test_former_release`, the earlier half is its real code. Routers and collectors
are of today, as docs/availability.md has them upgraded first.
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from rollmesh.chat import Tokenizer
from tests.contract.former_code import FormerCode, former_code
from tests.meshes import Mesh, write_script
from tests.processes import run_to_end

pytestmark = pytest.mark.long
SERVICES = ("router", "collector", "engine", "gateway", "sidecar")
UPGRADED_LAST = ("engine", "gateway", "sidecar", "trainer")
PROGRAM = Path(__file__).with_name("trainer_program.py")
RULES = [("What is 2 + 2?", "4"), ("Thanks.", "You are welcome.")]


@pytest.fixture(scope="module")
def former(tmp_path_factory: pytest.TempPathFactory) -> FormerCode:
    return former_code(tmp_path_factory.mktemp("former"))


@pytest.fixture
async def mesh(tmp_path: Path, tokenizer_dir: Path) -> AsyncIterator[Mesh]:
    """Addresses and flags of a mesh, of which nothing runs yet."""
    write_script(tmp_path / "script.json", Tokenizer(tokenizer_dir), RULES)
    async with AsyncExitStack() as stack:
        yield Mesh(tmp_path, tokenizer_dir, stack)


async def train(mesh: Mesh, version: int, former: FormerCode | None) -> dict[str, Any]:
    """Runs the trainer's program. Returns what it wrote."""
    addresses = {name: mesh.address(name) for name in SERVICES if name != "engine"}
    output, _ = await run_to_end(
        *(sys.executable, PROGRAM, json.dumps(addresses), str(version)),
        cwd=mesh.folder,
        env=former.environment if former else None,
        limit_s=150,
    )
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    return found


@pytest.mark.parametrize(
    "old", [*([one] for one in UPGRADED_LAST[1:]), UPGRADED_LAST], ids="+".join
)
async def test_a_mesh_works_while_it_is_upgraded(
    old: list[str], mesh: Mesh, former: FormerCode
) -> None:
    async def start(service: str) -> None:
        if service not in old:
            await mesh.start(service)
            return
        flags = mesh.flags(service)
        await mesh.stack.enter_async_context(former.running(service, mesh.folder, flags))

    for together in (SERVICES[:2], SERVICES[2:]):
        async with asyncio.TaskGroup() as tasks:
            for service in together:
                tasks.create_task(start(service))
    trainer = former if "trainer" in old else None
    first = await train(mesh, 1, trainer)
    assert first["said"] == ["4", "You are welcome."]
    assert (first["reward"], first["versions"]) == (0.5, [1])
    await mesh.start("engine", port=0, engine_id="further")  # one of today joins: it scales
    second = await train(mesh, 2, trainer)
    assert second == {**first, "versions": [2]}
