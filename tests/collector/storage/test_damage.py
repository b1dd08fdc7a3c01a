"""Damage in a store: what it hits is set aside and listed, and everything else goes on."""

import os
from pathlib import Path

import grpc
import pytest

from rollmesh.v1 import collector_pb2 as pb, session_pb2
from tests.collector.collectors import GROUP, TIMEOUT_S, ingest_all, stub_at, subscribing
from tests.collector.damage import damaged_store
from tests.collector.records import record
from tests.collector.storage.test_array_files import long_record


def damaged(caplog: pytest.LogCaptureFixture) -> set[str]:
    """Returns the sessions that the log calls damaged."""
    found = [entry for entry in caplog.records if "damaged" in entry.getMessage()]
    return {getattr(entry, "fields", {}).get("session_id", "") for entry in found}


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
@pytest.mark.parametrize(
    ("field", "data"),
    [
        pytest.param("head", b"\xff", id="a-head-that-is-no-message"),
        pytest.param("head", b"", id="an-empty-head"),
        pytest.param("arrays", b"\xff", id="arrays-that-are-none"),
        pytest.param("arrays", b"", id="no-arrays"),
    ],
)
async def test_a_damaged_session_is_set_aside_and_the_others_are_delivered(
    tmp_path: Path, kind: str, field: str, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        damaged_store(kind, tmp_path) as (settings, damage),
        stub_at(tmp_path, **settings) as stub,
    ):
        await ingest_all(stub, "a", "b", "c")
        await damage(field, data)
        for consumer in ("first", "second"):
            async with subscribing(stub, consumer, credits_=2) as stream:
                assert await stream.delivered(2) == ["a", "c"]
                await stream.acknowledge("a", "c")
                await stream.acknowledged()
            listed = await stub.ListFiltered(pb.ListFilteredRequest(consumer=consumer))
            (entry,) = listed.entries
            assert (entry.delivery_id, entry.reason) == ("b", pb.FILTER_REASON_DAMAGED)
            assert [part.session_id for part in entry.removed] == ["b"]
        (count,) = (await stub.GetStats(pb.GetStatsRequest())).consumers[0].filtered
        assert (count.reason, count.units) == (pb.FILTER_REASON_DAMAGED, 1)
        assert damaged(caplog) == {"b"}


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
async def test_a_group_with_a_damaged_session_is_set_aside_whole(tmp_path: Path, kind: str) -> None:
    async with (
        damaged_store(kind, tmp_path) as (settings, damage),
        stub_at(tmp_path, **settings) as stub,
    ):
        for group, names in (("g", "ab"), ("h", "cd")):
            sessions = [record(name, group, at, 2) for at, name in enumerate(names)]
            await stub.Ingest(pb.IngestRequest(sessions=sessions), timeout=TIMEOUT_S)
        await damage("head", b"\xff")
        async with subscribing(stub, unit=GROUP, credits_=1) as stream:
            assert await stream.delivered(1) == ["h"]
        (entry,) = (await stub.ListFiltered(pb.ListFilteredRequest(consumer="trainer"))).entries
        assert (entry.delivery_id, entry.reason) == ("g", pb.FILTER_REASON_DAMAGED)
        assert [part.session_id for part in entry.removed] == ["b"]


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
async def test_reading_all_sessions_names_the_damaged_one(tmp_path: Path, kind: str) -> None:
    async with (
        damaged_store(kind, tmp_path) as (settings, damage),
        stub_at(tmp_path, **settings) as stub,
    ):
        await ingest_all(stub, "a", "b", "c")
        await damage("head", b"\xff")
        read = [one async for one in stub.ReadSessions(pb.ReadSessionsRequest())]
        assert [one.session.session_id for one in read] == ["a", "", "c"]
        assert [one.damaged_session_id for one in read] == ["", "b", ""]
        only = stub.ReadSessions(pb.ReadSessionsRequest(session_id="b"))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await only.read()
        assert caught.value.code() is grpc.StatusCode.DATA_LOSS
        rewards = session_pb2.SessionRewards(reward=1.0)
        request = pb.SetRewardsRequest(session_id="b", rewards=rewards, request_id="r")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.SetRewards(request, timeout=TIMEOUT_S)
        assert caught.value.code() is grpc.StatusCode.DATA_LOSS


@pytest.mark.parametrize("left", [pytest.param(100, id="cut"), pytest.param(None, id="gone")])
async def test_a_session_whose_file_is_damaged_is_set_aside(
    tmp_path: Path, left: int | None
) -> None:
    async with stub_at(tmp_path) as stub:
        for names in ("ab", "cd"):
            sessions = [long_record(name) for name in names]
            await stub.Ingest(pb.IngestRequest(sessions=sessions), timeout=TIMEOUT_S)
        if left is None:
            (tmp_path / "arrays" / "1").unlink()
        else:
            os.truncate(tmp_path / "arrays" / "1", left)
        async with subscribing(stub, credits_=2) as stream:
            assert await stream.delivered(2) == ["c", "d"]


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
async def test_a_consumer_whose_settings_are_damaged_holds_up_nobody(
    tmp_path: Path, kind: str
) -> None:
    samples = pb.GroupPolicy(samples=1)
    async with damaged_store(kind, tmp_path) as (settings, damage):
        async with stub_at(tmp_path, **settings) as stub:
            async with subscribing(stub, "b", GROUP, groups=samples) as stream:
                await stream.opened()
        await damage("settings", b"\xff")
        async with stub_at(tmp_path, **settings) as stub:
            await ingest_all(stub, "a")
            async with subscribing(stub, "other", credits_=1) as stream:
                assert await stream.delivered(1) == ["a"]
            async with subscribing(stub, "b", GROUP, groups=samples, credits_=1) as stream:
                assert await stream.delivered(1) == ["a"]


@pytest.mark.parametrize("name", ["lost+found", "7", "notes.txt", "٣", "007"])
async def test_foreign_files_beside_the_arrays_stay_and_do_no_harm(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    foreign = tmp_path / "arrays" / name
    if name == "notes.txt":
        foreign.parent.mkdir()
        foreign.write_text("mine")
    else:
        foreign.mkdir(parents=True)
    async with stub_at(tmp_path) as stub:
        for names in ("ab", "cd"):
            sessions = [long_record(one) for one in names]
            await stub.Ingest(pb.IngestRequest(sessions=sessions), timeout=TIMEOUT_S)
        async with subscribing(stub, credits_=4) as stream:
            assert await stream.delivered(4) == ["a", "b", "c", "d"]
    assert foreign.exists()
    assert len([entry for entry in caplog.records if "other files" in entry.getMessage()]) == 1
