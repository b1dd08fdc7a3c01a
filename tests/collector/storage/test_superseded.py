"""Sessions that were tried again: kept and delivered by session, no part of their group."""

import asyncio
import tempfile
from pathlib import Path

from hypothesis import given, settings, strategies as st

from rollmesh.v1 import collector_pb2, session_pb2
from tests.collector.collectors import GROUP, SESSION, TIMEOUT_S, stub_at, subscribing
from tests.collector.records import record

SIZE = 3


def attempt(place: int, number: int, last: int) -> session_pb2.SessionRecord:
    found = record(f"{place}-{number}", "g", place, SIZE)
    found.superseded = number < last
    return found


@settings(max_examples=15)
@given(tries=st.lists(st.integers(0, 2), min_size=SIZE, max_size=SIZE), data=st.data())
def test_a_group_is_whole_with_the_sessions_that_count_in_whatever_order_all_come(
    tries: list[int], data: st.DataObject
) -> None:
    records = [
        attempt(place, number, last)
        for place, last in enumerate(tries)
        for number in range(last + 1)
    ]
    arriving = data.draw(st.permutations(records))
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(_check(arriving, tries, Path(folder)))


async def _check(arriving: list[session_pb2.SessionRecord], tries: list[int], folder: Path) -> None:
    async with stub_at(folder) as stub:
        missing = set(range(SIZE))
        for one in arriving:
            request = collector_pb2.IngestRequest(sessions=[one])
            await stub.Ingest(request, timeout=TIMEOUT_S)
            missing -= set() if one.superseded else {one.sample_index}
            stats = await stub.GetStats(collector_pb2.GetStatsRequest(), timeout=TIMEOUT_S)
            assert stats.complete_groups == (not missing)
            assert stats.open_groups == (0 < len(missing) < SIZE)
        stats = await stub.GetStats(collector_pb2.GetStatsRequest(), timeout=TIMEOUT_S)
        assert stats.sessions == len(arriving)
        async with subscribing(stub, "groups", GROUP, credits_=1) as stream:
            (group,) = await stream.deliveries(1)
        counting = [f"{place}-{last}" for place, last in enumerate(tries)]
        assert [session.session_id for session in group.sessions] == counting
        async with subscribing(stub, "sessions", SESSION, credits_=len(arriving)) as stream:
            delivered = await stream.delivered(len(arriving))
        assert delivered == [one.session_id for one in arriving]
