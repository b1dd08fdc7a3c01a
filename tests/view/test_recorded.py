"""The viewer of a record: alone, beside a mesh, and with what is damaged in it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest

from rollmesh.runtime.rpc import open_channel
from rollmesh.v1 import collector_pb2 as pb, collector_pb2_grpc, session_pb2
from tests.collector.collectors import TIMEOUT_S, collector_at, ingest, ingest_all
from tests.collector.records import record, with_images, with_messages
from tests.processes import run_refused, running, started
from tests.record.test_atif import strange
from tests.view.browser import CHROMIUM, browser
from tests.waiting import until

pytest.importorskip("pyarrow")
from rollmesh.record import Writer, read_records

OF_MESH = ("mesh", "alarms", "history", "open")


def write(folder: Path, *sessions: session_pb2.SessionRecord) -> None:
    with Writer(folder) as writer:
        for one in sessions:
            writer.add(one)
        writer.commit()


def evaluated(name: str) -> session_pb2.SessionRecord:
    session = record(name)
    session.purpose, session.run_id = session_pb2.SESSION_PURPOSE_EVAL, "judged"
    return session


@asynccontextmanager
async def viewer(folder: Path, **flags: object) -> AsyncIterator[httpx2.AsyncClient]:
    """A viewer of the folder's `record`."""
    async with (
        running("view", folder, record=folder / "record", **flags) as process,
        httpx2.AsyncClient(base_url=f"http://127.0.0.1:{process.port}", timeout=60) as http,
    ):
        yield http


async def get(http: httpx2.AsyncClient, path: str, **query: str) -> Any:
    return (await http.get(f"/api/{path}", params=query)).json()


async def rewards(http: httpx2.AsyncClient) -> dict[str, float]:
    return {one["session_id"]: one["reward"] for one in (await get(http, "sessions"))["rows"]}


async def sessions_are(http: httpx2.AsyncClient, *names: str) -> None:
    async def look() -> bool:
        return sorted(await rewards(http)) == sorted(names)

    await until(look)


async def notes(http: httpx2.AsyncClient) -> str:
    return " ".join((await get(http, "choices"))["notes"])


async def test_a_record_is_shown_without_a_mesh(tmp_path: Path) -> None:
    pictured = with_images(record("../images/.", "g", 0, 2), b"cat")
    said = with_messages(record("said", "g", 1, 2))
    said.messages[0].data = b'[{"role": "user", "content": "sort the shelves"}]'
    drawn = with_images(evaluated("exam"), b"<svg/>")
    drawn.images[0].media_type = "image/svg+xml"  # may hold a script
    write(tmp_path / "record", pictured, said, drawn)
    async with viewer(tmp_path) as http:
        await sessions_are(http, "../images/.", "said", "exam")
        groups = {one["group_id"]: one["sessions"] for one in (await get(http, "groups"))["rows"]}
        assert groups == {"g": 2, "exam": 1}
        assert [one["run_id"] for one in (await get(http, "evaluations"))["rows"]] == ["judged"]
        assert (await get(http, "series"))["points"][0]["sessions"] == 3
        found = (await get(http, "sessions", words="shelv"))["rows"]
        assert [one["session_id"] for one in found] == ["said"]
        shown = await get(http, "session", id="said")
        assert [node["ids"] for node in shown["nodes"]] == [[0, 1], [2, 3, 4, 5]]
        assert shown["nodes"][0]["messages"][0]["content"] == "sort the shelves"
        (image,) = (await get(http, "session", id="../images/."))["images"]
        of = {"session": "../images/."}
        assert (await http.get(f"/api/image/{image['sha256']}", params=of)).content == b"cat"
        hostile = drawn.images[0].sha256
        assert (await http.get(f"/api/image/{hostile}?session=exam")).status_code == 404
        assert (await http.get("/api/session?id=other")).status_code == 404
        for name in OF_MESH:
            answer = await http.get(f"/api/{name}")
            assert (answer.status_code, "no mesh" in answer.json()["error"]) == (404, True)
        assert (await get(http, "choices"))["mesh"] is False


async def test_tools_with_half_a_character_are_shown(tmp_path: Path) -> None:
    write(tmp_path / "record", strange())
    async with viewer(tmp_path) as http:
        await sessions_are(http, "strange")
        (context,) = (await get(http, "session", id="strange"))["contexts"]
        assert context["tools"][0]["function"]["description"] == "half ?"


async def test_files_of_a_running_archive_are_shown_as_they_come(tmp_path: Path) -> None:
    async with (
        collector_at(tmp_path / "collector") as address,
        open_channel(address) as channel,
        started("record.archive", tmp_path, to=tmp_path / "record", collector=address, seconds=1)
        as process,
    ):  # fmt: skip
        await process.wait_line("READY")
        stub: Any = collector_pb2_grpc.CollectorServiceStub(channel)
        async with viewer(tmp_path) as http:
            for names in ("a", "ab"):
                await ingest_all(stub, names[-1])
                await sessions_are(http, *names)
            late = session_pb2.SessionRewards(reward=5.0)
            wanted = pb.SetRewardsRequest(session_id="b", rewards=late, request_id="1")
            await stub.SetRewards(wanted, timeout=TIMEOUT_S)
            own = np.array([0, 0, -1, -2, -3, np.nan], "<f4").tobytes()
            said = pb.Annotation(name="logprobs", trajectory_id="b-1", values_f32le=own)
            asked = pb.AnnotateRequest(session_id="b", annotations=[said])
            await stub.Annotate(asked, timeout=TIMEOUT_S)

            async def changed() -> bool:
                annotated = "logprobs" in (await get(http, "session", id="b")).get(
                    "annotations", ()
                )
                return annotated and await rewards(http) == {"a": 0.0, "b": 5.0}

            await until(changed)
            shown = await get(http, "session", id="b")
            assert shown["reward"] == 5.0
            own_of = {one["node_id"]: one["annotations"]["logprobs"] for one in shown["nodes"]}
            assert own_of == {1: [0, 0], 2: [-1, -2, -3, None]}


async def test_a_session_without_the_file_of_an_image_is_shown(tmp_path: Path) -> None:
    pictured = with_images(record("pictured"), b"cat", b"dog")
    write(tmp_path / "record", pictured)
    cat, dog = (one.sha256 for one in pictured.images)
    (tmp_path / "record" / "images" / f"{cat}.png").unlink()
    async with viewer(tmp_path) as http:
        await sessions_are(http, "pictured")
        shown = await get(http, "session", id="pictured")
        assert [one["bytes"] for one in shown["images"]] == [0, 3]
        assert (await http.get(f"/api/image/{dog}?session=pictured")).content == b"dog"


async def test_a_session_that_the_collector_removed_is_opened_from_the_record(
    tmp_path: Path,
) -> None:
    write(tmp_path / "record", record("removed"), record("both"))
    async with (
        collector_at(tmp_path / "collector") as address,
        open_channel(address) as channel,
        viewer(tmp_path, collector=address, router=address) as http,
    ):
        stub: Any = collector_pb2_grpc.CollectorServiceStub(channel)
        judged = record("both")
        judged.reward = 0.75
        await ingest(stub, judged)
        await ingest_all(stub, "new")
        await sessions_are(http, "removed", "both", "new")

        async def agreed() -> bool:
            return await rewards(http) == {"removed": 0.0, "both": 0.75, "new": 0.0}

        await until(agreed)
        for name, reward in (("removed", 0.0), ("both", 0.75), ("new", 0.0)):
            shown = await get(http, "session", id=name)
            assert (shown["reward"], len(shown["nodes"])) == (reward, 2)
        assert (await get(http, "choices"))["mesh"] is True


async def test_what_cannot_be_read_is_left_out_and_said(tmp_path: Path) -> None:
    folder = tmp_path / "record"
    write(folder, record("whole"))
    write(folder, record("cut"))
    (path,) = set(folder.glob("nodes/*/*.parquet")) - {parts_of(folder, "whole")}
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    async with viewer(tmp_path) as http:

        async def said() -> bool:
            text = await notes(http)
            return "1 files" in text and "sessions/date=1970-01-01" in text

        await until(said)
        await sessions_are(http, "whole")
        path.write_bytes(data)
        await sessions_are(http, "whole", "cut")
        assert await notes(http) == ""
        sessions = parts_of(folder, "whole", "sessions")
        sessions.write_bytes(sessions.read_bytes()[:100])
        broken = await http.get("/api/session?id=whole")
        assert (broken.status_code, "cannot be read" in broken.json()["error"]) == (503, True)
        sessions.unlink()
        assert "cannot be read" in (await get(http, "session", id="whole"))["error"]
        assert (await http.get("/api/session?id=cut")).status_code == 200


def parts_of(folder: Path, session_id: str, table: str = "nodes") -> Path:
    """The file of a table with the rows of a session."""
    from pyarrow import parquet

    return next(
        path
        for path in folder.glob(f"{table}/*/*.parquet")
        if session_id in parquet.read_table(path, columns=["session_id"])["session_id"].to_pylist()
    )


async def test_a_file_of_a_newer_release_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "record", record("known"))
    with monkeypatch.context() as patch:
        patch.setattr("rollmesh.record.schema.VERSION", 99)
        write(tmp_path / "record", record("newer"))
    async with viewer(tmp_path) as http:
        await sessions_are(http, "known")

        async def said() -> bool:
            return "has version 99, and this release reads" in await notes(http)

        await until(said)


async def test_files_that_are_being_written_are_not_shown(tmp_path: Path) -> None:
    folder = tmp_path / "record"
    with Writer(folder) as writer:
        writer.add(record("first"))
        writer.commit()
        writer.add(record("second"))
        writer.write()
        writer.publish(("nodes", "trajectories"))
        async with viewer(tmp_path) as http:
            await sessions_are(http, "first")
            writer.publish(("sessions", "rewards"))
            await sessions_are(http, "first", "second")
            assert len((await get(http, "session", id="second"))["nodes"]) == 2
        assert len(list(read_records(folder))) == 2


async def test_a_folder_that_is_no_record_is_refused(tmp_path: Path) -> None:
    for folder, said in ((tmp_path / "none", "there is no folder"), (tmp_path, "`sessions`")):
        code, errors = await run_refused("view", record=folder, port=0)
        assert (code, "view: record: " in errors, said in errors) == (2, True, True)


@pytest.mark.skipif(not CHROMIUM, reason="chromium is not installed: apt-get install chromium")
async def test_pages_of_a_record_have_no_links_to_a_mesh(tmp_path: Path) -> None:
    write(tmp_path / "record", record("a"), record("b"))
    (tmp_path / "record" / "sessions" / "date=1970-01-02").mkdir()
    (tmp_path / "record" / "sessions" / "date=1970-01-02" / "x.parquet").write_text("none")
    async with viewer(tmp_path) as http, browser(str(http.base_url)) as page:
        await page.open("#/run", "1 files of the record cannot be read")
        links = await page.run("document.querySelector('nav').innerText")
        assert ("Evaluations" in links, "Mesh" in links, "Open" in links) == (True, False, False)
        await page.run("location.hash = '#/session/a'")
        await page.until("document.querySelectorAll('.node').length > 1")
        assert "cannot be read" not in await page.run("document.querySelector('main').innerText")
        assert page.events == []
