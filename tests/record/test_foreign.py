"""Records that other programs write: what fits is read, and the rest is an error with its place."""

import asyncio
import json
import re
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeAlias

import httpx2
import pytest

from rollmesh.runtime.errors import SessionDamagedError
from rollmesh.v1 import session_pb2
from tests.collector.records import record, tree_record, with_messages
from tests.processes import running, started
from tests.waiting import until

pytest.importorskip("pyarrow")
import pyarrow as arrow
from pyarrow import parquet

from rollmesh.record import Writer, read_records, read_session

Rows: TypeAlias = dict[str, list[dict[str, Any]]]
Change: TypeAlias = Callable[[Rows], object]


def said(name: str) -> session_pb2.SessionRecord:
    return with_messages(record(name))


def text(name: str) -> session_pb2.SessionRecord:
    """A session without token ids: a question, its answer, and the turn's trajectory."""
    session = said(name)
    session.capture = session_pb2.CAPTURE_TEXT
    (one,) = session.trajectories
    del one.segments[0]
    one.segments[0].start = one.segments[0].end = one.prompt_tokens = 0
    one.segments[0].trained = False
    one.ClearField("version_spans")
    one.ClearField("tokens")
    one.tokens.SetInParent()
    return session


def all_of(table: str, **values: Any) -> Change:
    return lambda rows: [row.update(values) for row in rows[table]]


def without(table: str, *names: str) -> Change:
    return lambda rows: [row.pop(name, None) for row in rows[table] for name in names]


def twice(table: str) -> Change:
    return lambda rows: rows[table].extend([dict(row) for row in rows[table]])


def each(table: str, change: Callable[[dict[str, Any]], object]) -> Change:
    return lambda rows: [change(row) for row in rows[table]]


def every(*changes: Change) -> Change:
    return lambda rows: [change(rows) for change in changes]


def fewest(rows: Rows) -> None:
    kept = {"session_id", "outcome", "node_id", "messages", "parent_node_id", "trajectory_id"}
    kept |= {"leaf_node_id", "path", "sampled"}
    for row in (one for of in rows.values() for one in of):
        for name in set(row) - kept:
            del row[name]


def far(rows: Rows) -> None:
    all_of("sessions", opened_unix_ms=-(2**60), closed_unix_ms=2**60)(rows)
    all_of("nodes", begun_unix_ms=2**60, ended_unix_ms=2**60)(rows)


EDGE = {"source_request_id": None, "target_request_id": "b", "type": "telepathy"}
EDGES = [EDGE | {"source_node_ids": [77], "target_node_ids": None}]
READ: dict[str, tuple[Callable[[str], session_pb2.SessionRecord], Change]] = {
    "empty-messages": (text, all_of("nodes", messages="")),
    "null-messages": (text, all_of("nodes", messages=None)),
    "fewest-columns": (text, fewest),
    "no-rewards": (said, every(*(without(one, "reward") for one in ("sessions", "nodes")))),
    "edges": (said, all_of("sessions", edges=EDGES)),
    "dates": (said, far),
    "trajectory-ids": (said, all_of("trajectories", trajectory_id="the main one")),
    "metadata": (said, all_of("sessions", metadata='{"a": 1, "b": null, "c": {"d": []}}')),
}
"""Sessions that are shown and exported."""


def spans(row: dict[str, Any], **values: int) -> None:
    row["spans"] = [span | values for span in row["spans"]]


def beyond(row: dict[str, Any]) -> None:
    row["path"] = [visit | {"node_id": visit["node_id"] + 50} for visit in row["path"]]


REFUSED: dict[str, tuple[Callable[[str], session_pb2.SessionRecord], Change, str]] = {
    "tokens-none": (said, all_of("nodes", token_ids=[], logprobs=[], loss_mask=[], spans=[],
                                 scaffold_tokens=0), "token_ids: of node 1"),
    "logprobs-none": (record, all_of("nodes", logprobs=None), "logprobs: of node 1"),
    "logprobs-nan": (record, each("nodes", lambda row: row.update(
        logprobs=[float("nan") for _ in row["logprobs"]])), "logprobs_f32le: has nan"),
    "logprobs-null": (record, each("nodes", lambda row: row.update(
        logprobs=[None for _ in row["logprobs"]])), "logprobs_f32le: has nan"),
    "mask-none": (record, without("nodes", "loss_mask"), "loss_mask: of node 1"),
    "reward-infinite": (said, all_of("sessions", reward=float("inf")), "reward: inf"),
    "nodes-none": (record, lambda rows: rows["nodes"].clear(), "path: of"),
    "trajectories-none": (record, lambda rows: rows["trajectories"].clear(), "trajectories: "),
    "parents-none": (said, all_of("nodes", parent_node_id=None), "path: of"),
    "parents-unknown": (said, all_of("nodes", parent_node_id=99), "parent_node_id: of node 1"),
    "parents-itself": (text, all_of("nodes", parent_node_id=1), "parent_node_id: of node 1"),
    "parents-later": (tree_record, lambda rows: rows["nodes"].reverse(), "parent_node_id: of"),
    "path-unknown": (record, each("trajectories", beyond), "path: of"),
    "reasons": (record, all_of("trajectories", reasons=["NEW"]), "FidelityReason: has no 'NEW'"),
    "lineage": (record, all_of("nodes", role="UNKNOWN_x"), "Role: has no"),
    "layout": (record, all_of("sessions", layout="DAG"), "layout: is 'DAG'"),
    "numbers": (record, all_of("sessions", sample_index=2**40), "sample_index: "),
    "token-ids": (record, all_of("nodes", token_ids=[-1, -1]), "token_ids: "),
    "versions": (record, each("nodes", lambda row: spans(row, policy_version=-5)), "spans: of"),
    "spans": (record, each("nodes", lambda row: spans(row, end=1000)), "spans: of node 2"),
    "scaffold": (record, all_of("nodes", scaffold_tokens=1000), "scaffold_tokens: of node 1"),
    "node-twice": (said, twice("nodes"), "node_id: 1 is there twice"),
    "path-twice": (said, twice("trajectories"), "path: node 2 is trained in two"),
    "messages": (said, all_of("nodes", messages="hello"), "messages: of node 1: is no JSON"),
    "message-parts": (said, all_of("nodes", messages='["x"]'), "messages: of node 1"),
    "roles": (said, all_of("nodes", messages='[{"content": "x"}]'), "one has no role"),
    "message-infinite": (said, all_of("nodes", messages='[{"role": "user", "x": 1e400}]'),
                         "messages: of node 1: is no JSON: 1e400"),
    "contexts": (said, all_of("sessions", contexts=["[]"]), "contexts: [0]"),
    "context-nan": (said, all_of("sessions", contexts=['{"tools": [{"least": NaN}]}']),
                    "contexts: [0]: is no JSON: NaN"),
    "context-none": (said, all_of("sessions", contexts=[]), "context_index"),
    "metadata-list": (record, all_of("sessions", metadata="[1]"), "metadata: is no JSON object"),
    "sampling": (record, all_of("nodes", sampling='{"heat": 1}'), "sampling: of node 2"),
    "image": (record, all_of("sessions", images=[
        {"sha256": "../../_lock", "media_type": ""}]), "images: one cannot be read"),
}  # fmt: skip
"""Sessions that are left out, with the field that the error names."""
SHOWN = {"logprobs-nan", "logprobs-null", "reward-infinite", "roles", "context-none", "image"}
"""Those that the viewer shows nevertheless."""


def write(folder: Path, session: session_pb2.SessionRecord, change: Change) -> Path:
    """Writes a session as another program may. Returns its file of `sessions`."""
    before = set(folder.glob("sessions/*/*.parquet"))
    with Writer(folder) as writer:
        writer.add(session)
        writer.commit()
    (path,) = set(folder.glob("sessions/*/*.parquet")) - before
    paths = {
        table: folder / table / path.parent.name / path.name
        for table in ("sessions", "trajectories", "nodes")
    }
    rows = {table: parquet.ParquetFile(one).read().to_pylist() for table, one in paths.items()}
    change(rows)
    for table, one in paths.items():
        found = arrow.Table.from_pylist(rows[table] or [{"session_id": "other"}])  # types as found
        parquet.write_table(found.replace_schema_metadata({"rollmesh.record": "1"}), one)
    return path


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_wrong_with_a_session_is_said_with_its_file_and_field(
    tmp_path: Path, name: str
) -> None:
    make, change, field = REFUSED[name]
    path = write(tmp_path, make(name), change)
    damaged: list[str] = []
    assert list(read_records(tmp_path, damaged=damaged)) == []
    (line,) = damaged
    assert (path.name in line, field in line) == (True, True), line
    with pytest.raises(SessionDamagedError, match=path.name):
        list(read_records(tmp_path))


def test_an_image_names_no_file_outside_the_record(tmp_path: Path) -> None:
    secret, folder = b"not an image", tmp_path / "record"
    (folder / "images").mkdir(parents=True)
    (tmp_path / "secret").write_bytes(secret)
    named = [{"sha256": "../../secret", "media_type": ""}]
    path = write(folder, record("outside"), all_of("sessions", images=named))
    assert (folder / "images" / "../../secret").read_bytes() == secret
    with pytest.raises(SessionDamagedError, match="images: one cannot be read"):
        list(read_records(folder))
    shown = read_session(path, "outside")
    assert shown is not None
    assert secret not in shown.SerializeToString()


def test_columns_of_other_types_are_read(tmp_path: Path) -> None:
    """The program has 64-bit numbers, large texts and categories."""
    path = write(tmp_path, said("wide"), lambda _: None)
    for table in ("sessions", "trajectories", "nodes"):
        one = tmp_path / table / path.parent.name / path.name
        found = parquet.ParquetFile(one).read()
        for at, column in enumerate(found.schema):
            if column.name in ("outcome", "role"):
                found = found.set_column(at, column.name, found[at].dictionary_encode())
            elif column.type == arrow.string():
                found = found.set_column(at, column.name, found[at].cast(arrow.large_string()))
        parquet.write_table(found.replace_schema_metadata({"rollmesh.record": "1"}), one)
    (read,) = read_records(tmp_path)
    assert read == read_session(path, "wide")
    assert [one.data for one in read.messages] == [one.data for one in said("wide").messages]
    assert read.trajectories[0].tokens == said("wide").trajectories[0].tokens


def test_a_session_that_is_there_twice_is_read_once(tmp_path: Path) -> None:
    path = write(tmp_path, said("one"), twice("sessions"))
    damaged: list[str] = []
    assert len(list(read_records(tmp_path, damaged=damaged))) == 1
    assert damaged == [f"record: {path}: session one: session_id: is there twice"]


def test_a_file_without_a_version_is_refused_with_the_remedy(tmp_path: Path) -> None:
    path = write(tmp_path, said("one"), lambda _: None)
    parquet.write_table(parquet.read_table(path).replace_schema_metadata(None), path)
    with pytest.raises(Exception, match=r"has no metadata rollmesh.record; write the version, 1"):
        list(read_records(tmp_path))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("foreign") / "record"
    for name, (make, change) in READ.items():
        write(folder, make(name), change)
    for name, (make, change, _) in REFUSED.items():
        write(folder, make(name), change)
    return folder


@asynccontextmanager
async def viewer(folder: Path, to: Path) -> AsyncIterator[httpx2.AsyncClient]:
    async with (
        running("view", to, record=folder) as process,
        httpx2.AsyncClient(base_url=f"http://127.0.0.1:{process.port}", timeout=60) as http,
    ):
        yield http


async def test_the_viewer_shows_a_session_or_says_what_is_wrong(
    folder: Path, tmp_path: Path
) -> None:
    async with viewer(folder, tmp_path) as http:

        async def is_read() -> bool:
            notes = " ".join((await http.get("/api/choices")).json()["notes"])
            return "more files" not in notes and "are left out" in notes

        await until(is_read)
        for name in (*READ, *REFUSED):
            answer = await http.get("/api/session", params={"id": name})
            shown = answer.json()
            if name in (*READ, *SHOWN):
                assert (name, answer.status_code, shown.get("session_id")) == (name, 200, name)
            else:
                assert (name, answer.status_code) in ((name, 404), (name, 503))
                assert not re.search(r"\b500\b", shown["error"])
        empty = (await http.get("/api/session?id=empty-messages")).json()
        assert [(one["node_id"], one["messages"]) for one in empty["nodes"]] == [(1, []), (2, [])]
        null = (await http.get("/api/session?id=null-messages")).json()
        assert [(one["node_id"], one["role"]) for one in null["nodes"]] == [(2, "ASSISTANT")]


TARGETS = {
    **dict.fromkeys(("rows", "sft", "otel"), "out.jsonl"),
    "inspect": "out.json",
    **dict.fromkeys(("atif", "record"), "out"),
}


@pytest.mark.parametrize("form", TARGETS)
async def test_every_export_writes_what_fits_and_names_the_rest(
    folder: Path, tmp_path: Path, form: str
) -> None:
    if form == "otel":
        pytest.importorskip("opentelemetry.exporter.otlp.proto.common")
    to = tmp_path / TARGETS[form]
    async with started("record.export", tmp_path, record=folder, to=to, format=form) as process:
        assert await process.exit_code() == 1
    told = (tmp_path / "record.export.log").read_text()
    assert "Traceback" not in told
    for field in (field for _, _, field in REFUSED.values()):
        assert field in told
    lacks = {"empty-messages", "null-messages"} if form in ("sft", "atif", "inspect") else set()
    assert set(exported(form, to)) == set(READ) - lacks


async def test_spans_with_content_have_messages_alone(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.common")
    to = tmp_path / "out.jsonl"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "rollmesh.record.export"),
        *(f"--record={folder}", f"--to={to}", "--format=otel", "--content"),
        stderr=asyncio.subprocess.PIPE,
    )
    _, told = await asyncio.wait_for(process.communicate(), 120)
    assert process.returncode == 1
    assert b"Traceback" not in told
    assert set(exported("otel", to)) == set(READ)


def exported(form: str, to: Path) -> Iterator[str]:
    """Yields the sessions of an export."""
    if form == "record":
        yield from (one.session_id for one in read_records(to))
    elif form == "otel":
        for line in to.read_text().splitlines():
            (span, *_) = json.loads(line)["resourceSpans"][0]["scopeSpans"][0]["spans"]
            yield from (
                one["value"]["stringValue"]
                for one in span["attributes"]
                if one["key"] == "gen_ai.conversation.id"
            )
    elif form == "atif":
        yield from (json.loads(one.read_text())["session_id"] for one in to.glob("*.json"))
    elif form == "inspect":
        yield from (one["uuid"] for one in json.loads(to.read_text())["samples"])
    else:
        yield from (json.loads(line)["session_id"] for line in to.read_text().splitlines())
