"""A gateway that stops releases every journal that it still has."""

from pathlib import Path

import pytest

from rollmesh.gateway import Journal
from rollmesh.runtime.errors import StoreAwayError
from tests.gateway.journals import sqlite_journal
from tests.gateway.live import LiveMesh


@pytest.mark.parametrize("how", ["is lost meanwhile", "cannot be released"])
async def test_a_journal_does_not_keep_the_next_ones_from_being_released(
    tmp_path: Path, tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    released: list[str] = []
    async with (
        LiveMesh(tmp_path / "mesh", tokenizer_dir) as mesh,
        sqlite_journal(tmp_path) as second,
    ):
        gateway = mesh.all_journals
        await gateway.hold(second)
        lost, last = gateway.registries

        async def release(journal: Journal) -> None:
            if how == "is lost meanwhile":
                gateway._remove(last)  # noqa: SLF001
            if journal is lost.journal:
                raise StoreAwayError("the server is away")
            released.append(journal.journal_id)

        monkeypatch.setattr(type(second), "release", release)
        await gateway.stop()
        assert released == [second.journal_id]
        assert not gateway.registries
