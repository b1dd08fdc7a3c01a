"""Stores of another release: the service that is given one says what to do and changes nothing."""

import sqlite3
from contextlib import closing
from pathlib import Path

from tests.meshes import delivered, scripted_mesh
from tests.processes import run_refused

STORES = {
    "collector": "collector.sqlite",
    "gateway": "journal.sqlite",
}


def files_of(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.suffix != ".lock"
    }


def set_version(path: Path, step: int) -> int:
    with closing(sqlite3.connect(path)) as connection:
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        connection.execute(f"PRAGMA user_version = {version + step}")
    return int(version)


async def test_stores_of_earlier_and_later_releases_are_refused_untouched(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    async with scripted_mesh(tmp_path, tokenizer_dir) as mesh, mesh.client() as client:
        async with client.session() as session:
            await mesh.openai(session).chat.completions.create(
                model="policy", messages=[{"role": "user", "content": "hello"}]
            )
        await delivered(client, session)
        for name in ("sidecar", "gateway", "collector"):
            await mesh.processes[name].kill()  # their files are as a crash leaves them
    for service, name in STORES.items():
        folder = tmp_path / service
        for step, writer in ((-1, "an earlier"), (2, "a later")):
            version = set_version(folder / name, step) + step
            before = files_of(folder)
            model = {"model_path": tokenizer_dir} if service == "gateway" else {}
            code, said = await run_refused(service, data_dir=folder, port=0, **model)
            assert code == 1, said
            assert f"{folder / name} has version {version}, this release needs " in said
            assert f"written by {writer} release: `rollmesh {service} --data-dir={folder}`" in said
            assert files_of(folder) == before
