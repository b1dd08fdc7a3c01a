"""A store that the release before wrote, whose own consumer logs were filled by every ingest.

`store_of_version_8.sql` holds groups of three: f and g, of which the consumer `own` (two samples,
or one after a second) has settled f and was sent g, and h, which waits with one session.
"""

import sqlite3
from pathlib import Path

from rollmesh.v1 import collector_pb2 as pb
from tests.collector.stores import Reader, fill, group, sqlite_store

DUMP = Path(__file__).with_name("store_of_version_8.sql")


async def test_a_store_of_the_release_before_opens_and_delivers_each_group_once(
    tmp_path: Path,
) -> None:
    connection = sqlite3.connect(tmp_path / "collector.sqlite")
    connection.execute("PRAGMA page_size = 16384")
    connection.executescript(DUMP.read_text())
    connection.execute("PRAGMA user_version = 8")
    connection.close()
    async with sqlite_store(tmp_path) as store:
        own = Reader(store, await store.consumer("own"))
        await store.tick(200)
        assert await own.take() == [("g", 2, ["g0", "g1"])]
        assert await own.settle("g") == ["g"]
        assert await store.tick(1100)
        assert await own.take_all(1100) == ["h"]
        shared = Reader(store, await store.consumer("all"))
        assert await shared.take_all() == ["f"]
        await fill(store, group("g", 2), now_ms=1200)
        assert await shared.take_all() == ["g"]
        assert await own.fetch(now_ms=1200) == []
        entries, _ = await store.filtered("own", 10, "")
        surplus = pb.FILTER_REASON_SURPLUS
        assert [(one.delivery_id, one.session_id, one.reason) for one in entries] == [
            ("f", "f2", surplus),
            ("g", "g2", surplus),
        ]
        standing = await store.standing("own")
        assert (standing.acknowledged, standing.ready) == (3, 0)
