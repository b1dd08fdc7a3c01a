"""Files at rest: everything that services write is for its owner alone."""

import os
from pathlib import Path

import numpy as np

from tests.mesh.protocols.test_openai import ask, user
from tests.meshes import delivered, scripted_mesh

WRITTEN = {"journal.sqlite", "journal.sqlite-wal", "journal.sqlite-shm", "journal.sqlite.lock"}
SERVICES = ("router", "gateway", "collector")


def open_to_others(folder: Path) -> list[Path]:
    return [
        path
        for service in SERVICES
        for path in (folder / service, *(folder / service).rglob("*"))
        if path.stat().st_mode & 0o077
    ]


async def test_journals_stores_and_weights_are_for_their_owner(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    former = os.umask(0)
    try:
        async with scripted_mesh(tmp_path, tokenizer_dir) as mesh:
            async with mesh.client() as client:
                async with client.session() as session:
                    await ask(mesh.openai(session), user("hello"))
                await delivered(client, session)
                await client.push_weights({"w": np.zeros(4, np.float32)}, 1)
            assert open_to_others(tmp_path) == []
            written = {path.name for path in tmp_path.rglob("*")}
            assert written >= WRITTEN
            assert {Path(name).suffix for name in written} >= {".safetensors", ".sqlite"}
            for path in tmp_path.rglob("journal.sqlite*"):  # as an earlier release left them
                path.chmod(0o644)
            await mesh.processes["gateway"].kill()
            await mesh.restart("gateway")
            assert open_to_others(tmp_path) == []
    finally:
        os.umask(former)
