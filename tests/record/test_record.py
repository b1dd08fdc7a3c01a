"""The record as files: lossless, and read by what people read Parquet with."""

import json
import runpy
import sys
from dataclasses import fields
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollmesh.batches import rows_of
from rollmesh.client import Client, SessionResult, SubscribeOptions
from rollmesh.record import name_of, read_sessions
from rollmesh.runtime import number_of
from rollmesh.runtime.config import ConfigError
from rollmesh.runtime.errors import InvalidFieldError, SessionDamagedError
from rollmesh.v1 import collector_pb2 as pb, sampling_pb2, session_pb2, trajectory_pb2
from tests.collector.records import (
    add_columns,
    record,
    tree_record,
    with_images,
    with_messages,
)
from tests.meshes import Mesh, scripted_mesh
from tests.record.readers import read_by

pytest.importorskip("pyarrow")
from pyarrow import parquet

from rollmesh.record import (
    LATE_TABLES as LATE,
    PARTS,
    TABLES,
    Tables,
    Writer,
    read_records,
    read_session,
    read_stored,
    tables_of,
)

DAY_MS = 86_400_000
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
RULES = [("add", f"I add.\n{CALL}"), ("<tool_response>\n3\n</tool_response>", "It is 3.")]
NUMBER = {"type": "number"}
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {"type": "object", "properties": {"a": NUMBER}},
        },
    }
]


def whole(session: session_pb2.SessionRecord) -> session_pb2.SessionRecord:
    """The session with what gateways always write."""
    session.purpose = session_pb2.SESSION_PURPOSE_TRAIN
    session.capture = session.capture or session_pb2.CAPTURE_TOKENS
    for one in session.trajectories:
        one.lineage_source = trajectory_pb2.LINEAGE_SOURCE_RULE
        one.lineage_rule = trajectory_pb2.LINEAGE_RULE_FINAL_ANSWER
    for node in session.tree.nodes:
        node.lineage_source = trajectory_pb2.LINEAGE_SOURCE_RULE
        node.lineage_rule = trajectory_pb2.LINEAGE_RULE_QUOTED_ANSWER
    return session


def every_kind() -> list[session_pb2.SessionRecord]:
    """Sessions with everything that a record holds."""
    sampled, columns, text = record("sampled", "g", 1, 2), record("columns"), record("text")
    turn = sampled.trajectories[0].segments[1]
    turn.sampling.temperature, turn.sampling.seed = 0.7, -(2**40)
    turn.sampling.logit_bias[3] = 0.1
    turn.finish_reason = sampling_pb2.FINISH_REASON_STOP
    turn.prompt_crc32, turn.reward = 2**32 - 1, 0.25
    turn.begun_unix_ms, turn.ended_unix_ms = 2**41, 2**41 + 9
    turn.engine_id = sampled.trajectories[0].version_spans[0].engine_id = "engine-0"
    turn.model_request_ids.append("request-7")
    sampled.trajectories[0].version_spans[0].policy_version = 3 * 10**12 + 17
    sampled.trajectories[0].version_spans[0].adapter = "adapter"
    sampled.numerics.add(
        id="n", backend="vllm", tensor_parallel=2, logprobs=sampling_pb2.LOGPROBS_MODE_SAMPLED
    )
    sampled.edges.add(source_node_ids=[2]).edge.type = "subagent_call"
    sampled.metadata["task"] = "é 7"
    sampled.opened_unix_ms, sampled.closed_unix_ms = DAY_MS, 2 * DAY_MS + 7
    sampled.budgets_spent.append(session_pb2.BUDGET_KIND_TIME)
    sampled.tokenizer_sha256, sampled.template_sha256 = "aa", "bb"
    sampled.origin.kind, sampled.origin.continued = session_pb2.ORIGIN_KIND_TOKENS, True
    sampled.origin.nodes.add(session_id="first", node_id=2, tokens=2)
    sampled.run_id, sampled.model, sampled.reward_timeout_ms = "run", "policy", 5
    add_columns(columns.trajectories[0])
    text.capture = session_pb2.CAPTURE_TEXT
    del text.trajectories[0].segments[0]
    text.trajectories[0].segments[0].start = text.trajectories[0].segments[0].end = 0
    for name in ("tokens", "version_spans"):
        text.trajectories[0].ClearField(name)
    text.trajectories[0].tokens.SetInParent()
    lost = session_pb2.SessionRecord(
        session_id="lost", abandoned="no room", outcome=session_pb2.SESSION_OUTCOME_LOST
    )
    pictured = with_images(record("pictured"), b"cat", b"dog")
    found = [sampled, columns, text, lost, pictured, tree_record("tree")]
    return [whole(one) for one in (*found, with_messages(record("messages")))]


def shared_prefix() -> session_pb2.SessionRecord:
    """A session with two answers to one turn, which the first trajectory trains."""
    session = whole(record("shared"))
    other = session.trajectories.add()
    other.CopyFrom(session.trajectories[0])
    other.trajectory_id, other.leaf_node_id = "shared-2", 2
    other.segments[1].trained = False
    other.segments[1].reasons.append(trajectory_pb2.FIDELITY_REASON_SHARED_PREFIX)
    other.tokens.loss_mask_u8 = bytes(6)
    return session


def write(folder: Path, *sessions: session_pb2.SessionRecord) -> None:
    with Writer(folder) as writer:
        for one in sessions:
            writer.add(one)
        writer.commit()


def test_the_files_have_everything_of_a_session(tmp_path: Path) -> None:
    sessions = [*every_kind(), shared_prefix()]
    write(tmp_path, *sessions)
    found = {one.session_id: one for one in read_records(tmp_path)}
    assert found == {one.session_id: one for one in sessions}
    days = [path.name for path in (tmp_path / "sessions").iterdir()]
    assert sorted(days) == ["date=1970-01-01", "date=1970-01-03"]
    (one,) = read_sessions(tmp_path, since=date(1970, 1, 2))
    assert one.session_id == "sampled"


@pytest.mark.parametrize("most", ["rows", "tokens"])
def test_a_file_that_is_written_in_pieces_is_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: str
) -> None:
    monkeypatch.setattr(
        f"rollmesh.record.files._PIECE_{most.upper()}", 12 if most == "tokens" else 4
    )
    sessions = [whole(record(f"{at}")) for at in range(8)]  # of two nodes and six tokens each
    write(tmp_path, *sessions)
    assert list(read_records(tmp_path)) == sessions
    (path,) = tmp_path.glob("nodes/*/*.parquet")
    groups = parquet.ParquetFile(path).metadata
    assert [groups.row_group(at).num_rows for at in range(groups.num_row_groups)] == [4] * 4
    (path,) = tmp_path.glob("sessions/*/*.parquet")
    assert [read_session(path, one.session_id) for one in sessions] == sessions


def test_one_session_is_read_from_its_file_as_all_are(tmp_path: Path) -> None:
    sessions = [*every_kind(), shared_prefix()]
    write(tmp_path, *sessions)
    sessions[0].reward = 5.0
    write(tmp_path, sessions[0])
    files = list(tmp_path.glob("sessions/*/*.parquet"))
    assert len(files) == 2
    for one in sessions:
        found = [read_session(file, one.session_id) for file in files]
        assert [each for each in found if each is not None] == [one]


def test_a_session_without_the_files_of_its_nodes_is_an_error(tmp_path: Path) -> None:
    write(tmp_path, *every_kind())
    (path,) = tmp_path.glob("nodes/date=1970-01-03/*.parquet")
    path.unlink()
    with pytest.raises(SessionDamagedError, match=r"nodes.* is missing"):
        list(read_records(tmp_path))
    damaged: list[str] = []
    rest = list(read_sessions(tmp_path, damaged=damaged))
    assert "sampled" not in {one.session_id for one in rest}
    assert len(rest) == len(every_kind()) - 1
    assert len(damaged) == 1
    assert f"{path} is missing" in damaged[0]


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    write(tmp_path, *every_kind())
    (path,) = tmp_path.glob("trajectories/date=1970-01-03/*.parquet")
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(SessionDamagedError, match=f"{path} cannot be read"):
        list(read_records(tmp_path))


def test_a_session_whose_image_is_missing_is_read_without_it(tmp_path: Path) -> None:
    pictured = with_images(record("pictured"), b"cat", b"dog")
    write(tmp_path, pictured, record("other"))
    (tmp_path / "images" / f"{pictured.images[0].sha256}.png").unlink()
    with pytest.raises(SessionDamagedError, match="session pictured: images: one cannot be read"):
        list(read_records(tmp_path))
    damaged: list[str] = []
    assert [one.session_id for one in read_records(tmp_path, damaged=damaged)] == ["other"]
    assert len(damaged) == 1
    (path,) = tmp_path.glob("sessions/*/*.parquet")
    found = read_session(path, "pictured")
    assert found is not None
    assert [one.data for one in found.images] == [b"", b"dog"]
    assert found.trajectories[0].images == pictured.trajectories[0].images


def annotation(name: str, *values: float, of: str = "sampled-1") -> pb.Annotation:
    return pb.Annotation(
        name=name, trajectory_id=of, values_f32le=np.array(values, "<f4").tobytes()
    )


def test_the_last_annotation_of_a_name_counts(tmp_path: Path) -> None:
    session, other = every_kind()[0], record("other")
    first = [annotation("advantages", 1, 2), annotation("logprobs", np.nan, -1)]
    with Writer(tmp_path) as writer:
        writer.add(session)
        writer.add(other)
        writer.change(session, first)
        assert len(writer.commit()) == 7  # two days, and no rewards
        writer.change(session, [annotation("advantages", 3, 4), first[1]])
        assert [one.split("/")[0] for one in writer.commit()] == ["annotations"]
        writer.change(session, [annotation("advantages", 3, 4), first[1]])
        assert writer.is_empty
    found = {one.session.session_id: one.annotations for one in read_stored(tmp_path, [])}
    assert found == {"sampled": [annotation("advantages", 3, 4), first[1]], "other": []}
    assert len(list(read_records(tmp_path))) == 2


def taught(model: str, version: int, top_k: int = 0) -> pb.TrajectoryScores:
    """Scores of the four sampled tokens."""
    values = np.arange(4 * max(top_k, 1))
    scores = trajectory_pb2.TeacherScores(
        model=model,
        policy_version=number_of(3, version),
        start=2,
        logprobs_f32le=(-values[:4] / 3).astype("<f4").tobytes(),
    )
    if top_k:
        scores.top_ids_u32le = values.astype("<u4").tobytes()
        scores.top_logprobs_f32le = (-values / 7).astype("<f4").tobytes()
    return pb.TrajectoryScores(trajectory_id="sampled-1", scores=scores)


@pytest.mark.parametrize("table", ["annotations", "scores", "rewards"])
def test_a_damaged_file_of_late_values_costs_nothing_of_other_days(
    tmp_path: Path, table: str
) -> None:
    session, other = every_kind()[0], record("other")
    with Writer(tmp_path) as writer:
        for one in (session, other, record("too")):
            writer.add(one)
            writer.commit()
        session.reward = 0.25
        for one in (session, other):
            of = one.trajectories[0].trajectory_id
            writer.change(one, [annotation("advantages", 1, of=of)], [taught("a", 1)])
        other.reward = 0.75
        writer.change(other)
        writer.commit()
    (path,) = tmp_path.glob(f"{table}/date=1970-01-03/*.parquet")
    path.write_bytes(path.read_bytes()[:-9])
    damaged: list[str] = []
    found = {one.session.session_id: one for one in read_stored(tmp_path, damaged)}
    assert len(damaged) == 1
    assert f"{path} cannot be read" in damaged[0]
    assert found["other"].session.reward == 0.75
    assert [len(found["other"].annotations), len(found["other"].scores)] == [1, 1]
    if table == "rewards":  # the last ones of this day are not known
        assert found.keys() == {"other", "too"}
        with pytest.raises(SessionDamagedError, match=f"{path} cannot be read"):
            list(read_records(tmp_path))
    else:
        assert found["sampled"] == (session, [], [])


def test_scores_of_teachers_are_kept_by_model_and_width(tmp_path: Path) -> None:
    session = every_kind()[0]
    given = [taught("a", 1), taught("a", 1, 3), taught("b", 2)]
    with Writer(tmp_path) as writer:
        writer.add(session)
        writer.change(session, (), given)
        writer.commit()
        writer.change(session, (), [taught("a", 7), *given[1:]])
        writer.commit()
    copy = tmp_path / "copy"
    with Writer(copy) as writer:
        for one in read_stored(tmp_path, []):
            writer.add(one.session)
            writer.change(*one)
        writer.commit()
    (tmp_path / "_index.sqlite").unlink()
    with Writer(tmp_path) as writer:
        writer.change(session, (), [taught("a", 7), *given[1:]])
        assert writer.is_empty
    (kept,) = read_stored(copy, [])
    assert kept.session == session
    assert list(kept.scores) == [taught("a", 7), *given[1:]]


def test_an_index_made_again_knows_late_values(tmp_path: Path) -> None:
    session, values = every_kind()[0], [annotation("advantages", np.nan, 2)]
    strange = np.array([0xFFC00001, 0x7F800001], "<u4").tobytes()  # NaN of other bits
    values.append(pb.Annotation(name="nan", trajectory_id="sampled-1", values_f32le=strange))
    write(tmp_path, session)
    session.reward = 5.0
    session.trajectories[0].segments[1].reward = -1.0
    with Writer(tmp_path) as writer:
        writer.change(session, values)
        writer.place = "7"
        writer.commit()
    with Writer(tmp_path) as writer:
        assert writer.place == "7"
    (tmp_path / "_index.sqlite").unlink()
    with Writer(tmp_path) as writer:
        assert writer.place == ""
        writer.change(session, values)
        assert writer.is_empty
    assert list(read_records(tmp_path)) == [session]


def test_the_last_value_counts_though_the_clock_was_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = every_kind()[0]
    write(tmp_path, session)
    for at, now_ms in enumerate((3 * DAY_MS, 2 * DAY_MS, 2 * DAY_MS - 1, DAY_MS)):
        monkeypatch.setattr("rollmesh.runtime.clock.unix_ms", lambda now_ms=now_ms: now_ms)
        with Writer(tmp_path) as writer:
            for value in (at, at + 0.5):
                session.reward = value
                writer.change(session, [annotation("advantages", value)])
            writer.commit()
        (kept,) = read_stored(tmp_path, [])
        assert (kept.session.reward, kept.annotations) == (value, [annotation("advantages", value)])
        (tmp_path / "_index.sqlite").unlink()  # made again of the files
        with Writer(tmp_path) as writer:
            writer.change(session, kept.annotations)
            assert writer.is_empty
    for table in ("rewards", "annotations"):
        rows = [
            each["recorded_unix_ms"]
            for path in sorted(tmp_path.glob(f"{table}/*/*.parquet"))
            for each in parquet.read_table(path, partitioning=None).to_pylist()
        ]
        assert len(set(rows)) == 8
        assert rows == sorted(rows)


def test_a_delivery_is_older_than_rewards_that_were_read(tmp_path: Path) -> None:
    session = every_kind()[0]
    before = session_pb2.SessionRecord.FromString(session.SerializeToString())
    session.reward = 5.0
    with Writer(tmp_path) as writer:
        writer.add(before)
        writer.change(session, ())
        writer.add(before)
        writer.commit()
        writer.add(before)
        assert writer.is_empty
    assert list(read_records(tmp_path)) == [session]


def test_a_session_that_parquet_cannot_hold_is_set_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tables(session: session_pb2.SessionRecord) -> Tables:
        found = tables_of(session)
        return found._replace(session=found.session | {"turns": 2**40 if found.nodes else 0})

    poison, lost = record("poison"), session_pb2.SESSION_OUTCOME_LOST
    fine = session_pb2.SessionRecord(session_id="fine", outcome=lost)
    monkeypatch.setattr("rollmesh.record.files.tables_of", tables)
    write(tmp_path, fine, poison)
    assert [one.session_id for one in read_records(tmp_path)] == ["fine"]
    assert (tmp_path / "_set_aside" / "poison.binpb").read_bytes() == poison.SerializeToString()
    assert {path.parts[-3] for path in tmp_path.glob("*/*/*.parquet")} == {"sessions"}


def test_an_export_counts_sessions_that_parquet_cannot_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def tables(session: session_pb2.SessionRecord) -> Tables:
        found = tables_of(session)
        return found._replace(session=found.session | {"turns": -1})

    given, to = str(tmp_path / "given"), str(tmp_path / "to")
    write(tmp_path / "given", record("poison"))
    monkeypatch.setattr("rollmesh.record.files.tables_of", tables)
    monkeypatch.setattr(sys, "argv", ["export", "--record", given, "--to", to])
    with pytest.raises(SystemExit, match=r"^1$"):
        runpy.run_module("rollmesh.record.export", run_name="__main__")
    said = capsys.readouterr()
    assert said.out.startswith("0 sessions, 0 files")
    assert "1 sessions cannot be written" in said.err


def test_a_batch_that_parquet_cannot_hold_leaves_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tables(session: session_pb2.SessionRecord) -> Tables:
        found = tables_of(session)
        return found._replace(session=found.session | {"turns": -1})

    monkeypatch.setattr("rollmesh.record.files.tables_of", tables)
    write(tmp_path, *every_kind())
    assert len(list((tmp_path / "_set_aside").glob("*.binpb"))) == len(every_kind())
    assert not list(tmp_path.rglob("*.parquet"))
    monkeypatch.undo()
    sessions = every_kind()  # again, with a release that can, and with other rewards
    for one in sessions:
        if one.HasField("reward"):
            one.reward = 7.0
    write(tmp_path, *sessions)
    with Writer(tmp_path) as writer:
        for one in every_kind():
            writer.change(one)
        writer.commit()
    assert {one.session_id: one for one in read_records(tmp_path)} == {
        one.session_id: one for one in every_kind()
    }


def test_every_field_of_the_protocol_has_a_column() -> None:
    """A new field needs a column, or a line here that says why it has none."""
    node = {one.name for one in TABLES["nodes"]} | {
        *("start", "end", "parent_index"),  # by the tokens and `parent_node_id`
    }
    path = node | {one.name for one in TABLES["trajectories"]} | {"segments", "tokens"}
    path |= {"version_spans", "teacher"}  # the table `scores` has those of all teachers
    session = {one.name for one in TABLES["sessions"]} | {"trajectories", "tree", "messages"}
    tables: dict[Any, set[str]] = {
        trajectory_pb2.TrajectoryNode: node,
        trajectory_pb2.TrajectorySegment: node,
        trajectory_pb2.Trajectory: path,
        trajectory_pb2.TrajectoryTree: path | {"nodes"},
        session_pb2.SessionRecord: session,
    }
    for message, known in tables.items():
        assert set(message.DESCRIPTOR.fields_by_name) <= known, message.DESCRIPTOR.name


def write_as_before(
    monkeypatch: pytest.MonkeyPatch, folder: Path, *sessions: session_pb2.SessionRecord
) -> None:
    """Writes the files of an earlier release."""
    new = {"begun_unix_ms", "ended_unix_ms", "lineage_rule"}
    with monkeypatch.context() as patch:
        for table in PARTS:
            patch.setitem(TABLES, table, [one for one in TABLES[table] if one.name not in new])
        write(folder, *sessions)


def test_files_of_an_earlier_release_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have fewer columns and tables."""
    session = every_kind()[0]
    write_as_before(monkeypatch, tmp_path, session)
    session.trajectories[0].ClearField("lineage_rule")
    turn = session.trajectories[0].segments[1]
    turn.begun_unix_ms = turn.ended_unix_ms = 0
    assert list(read_records(tmp_path)) == [session]
    write(tmp_path, whole(record("other")))
    assert len(list(read_sessions(tmp_path))) == 2


def test_a_shared_node_is_stored_once_and_trained_once() -> None:
    _, trajectories, nodes = tables_of(shared_prefix())
    assert [node["node_id"] for node in nodes] == [1, 2]
    assert nodes[1]["loss_mask"].tolist() == [True] * 4
    paths = [[(one["trained"], one["reasons"]) for one in row["path"]] for row in trajectories]
    assert paths == [[(False, []), (True, [])], [(False, []), (False, ["SHARED_PREFIX"])]]


def test_trajectories_that_do_not_agree_about_a_node_are_refused() -> None:
    session = shared_prefix()
    session.trajectories[1].tokens.token_ids_u32le = bytes(24)
    with pytest.raises(InvalidFieldError, match="node 1 of trajectory shared-2 differs"):
        tables_of(session)


def test_a_folder_holds_a_hundred_sessions_that_were_set_aside(tmp_path: Path) -> None:
    session = shared_prefix()
    session.trajectories[1].tokens.token_ids_u32le = bytes(24)
    with Writer(tmp_path) as writer:
        for at in (*range(100), 0):  # one comes again
            session.session_id = f"poison-{at}"
            writer.add(session)
            writer.commit()
        session.session_id = "poison-100"
        writer.add(session)
        with pytest.raises(InvalidFieldError, match="1 of 1 sessions cannot be written, and 100"):
            writer.commit()
    assert len(list((tmp_path / "_set_aside").glob("*.binpb"))) == 100
    long = [name_of("é" * 128 + end) for end in "ab"]  # ids as names of files
    assert max(map(len, long)) < 255
    assert len(set(long)) == 2


def test_a_session_that_comes_again_adds_only_its_rewards(tmp_path: Path) -> None:
    session = every_kind()[0]
    write(tmp_path, session, session)
    session.reward, session.trajectories[0].reward = 5.0, 0.5
    session.trajectories[0].segments[1].reward = -1.0
    write(tmp_path, session)
    assert list(read_records(tmp_path)) == [session]
    assert len(list(tmp_path.glob("rewards/*/*.parquet"))) == 1
    (tmp_path / "_index.sqlite").unlink()  # made again of the files
    write(tmp_path, session)
    assert list(read_records(tmp_path)) == [session]
    assert len(list(tmp_path.glob("rewards/*/*.parquet"))) == 1


def test_an_index_made_again_knows_the_rewards_of_deliveries(tmp_path: Path) -> None:
    session = every_kind()[0]
    session.trajectories[0].reward = 0.5
    write(tmp_path, session)
    (tmp_path / "_index.sqlite").unlink()
    with Writer(tmp_path) as writer:
        writer.add(session)
        writer.change(session)
        assert writer.is_empty


def test_equal_rewards_in_another_order_add_nothing(tmp_path: Path) -> None:
    session = shared_prefix()
    for at, one in enumerate(session.trajectories):
        one.reward = at
    write(tmp_path, session)
    turned = session_pb2.SessionRecord(session_id=session.session_id, reward=session.reward)
    turned.trajectories.extend(reversed(session.trajectories))
    with Writer(tmp_path) as writer:
        writer.change(turned)
        assert writer.is_empty


def test_a_folder_has_one_writer(tmp_path: Path) -> None:
    with Writer(tmp_path), pytest.raises(ConfigError, match="another process writes"):
        Writer(tmp_path)
    write(tmp_path, record("a"))


def test_a_file_of_a_newer_release_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollmesh.record.schema.VERSION", 2)
    write(tmp_path, record("a"))
    with pytest.raises(InvalidFieldError, match="has version 2, and this release reads 1"):
        list(read_records(tmp_path))


def test_a_cut_batch_leaves_nothing(tmp_path: Path) -> None:
    with Writer(tmp_path) as writer:
        writer.add(record("a"))
        writer.write()
    with Writer(tmp_path) as writer:
        writer.add(record("a"))
        writer.write()
        writer.publish(("nodes", "trajectories"))
    assert len(list(tmp_path.glob("nodes/*/*.parquet"))) == 1
    others = tmp_path / "nodes" / "date=2026-01-01" / "mine.parquet"
    others.parent.mkdir()
    others.write_text("of somebody else")
    write(tmp_path, record("b"))
    assert others.exists()
    others.unlink()
    assert [one.session_id for one in read_records(tmp_path)] == ["b"]
    assert len(list(tmp_path.glob("nodes/*/*.parquet"))) == 1


async def talk(mesh: Mesh, client: Client) -> list[SessionResult]:
    """Holds sessions of both layouts with a branch each, and returns what is delivered."""
    for layout in ("leaves", "tree"):
        async with client.session(
            export=layout, record_messages=True, group_id=layout, metadata={"of": layout}
        ) as session:
            agent = mesh.openai(session)
            asked: list[Any] = [{"role": "user", "content": "add"}]
            answer = await agent.chat.completions.create(
                model="policy", messages=asked, tools=TOOLS
            )
            said = answer.choices[0].message
            assert said.tool_calls
            asked.append(said.model_dump(exclude_none=True))
            asked.append({"role": "tool", "content": "3", "tool_call_id": said.tool_calls[0].id})
            for more in ([], [{"role": "user", "content": "add"}]):
                await agent.chat.completions.create(
                    model="policy", messages=asked + more, tools=TOOLS
                )
            session.reward = 0.5
    wants = SubscribeOptions(messages=True)
    async with client.subscribe("reads", unit="session", options=wants) as deliveries:
        return [(await anext(deliveries)).sessions[0] for _ in range(2)]


async def test_rows_of_the_files_equal_rows_of_deliveries(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    async with (
        scripted_mesh(tmp_path / "mesh", tokenizer_dir, RULES) as mesh,
        mesh.client() as client,
    ):
        delivered = await talk(mesh, client)
        stored = await client.stored_sessions(arrays=True)
    write(tmp_path / "record", *(one.session for one in stored))
    read = list(read_sessions(tmp_path / "record"))
    assert [one.session_id for one in read] == [one.session_id for one in delivered]
    for kept in (each.session for each in stored):
        parts: list[Any] = [part for row in kept.trajectories for part in row.segments]
        for turn in (part for part in [*parts, *kept.tree.nodes] if part.sampled):
            opened, closed = kept.opened_unix_ms, kept.closed_unix_ms
            assert 0 < opened <= turn.begun_unix_ms <= turn.ended_unix_ms <= closed
    leaves = [[one for one in some if one.tree is None] for some in (read, delivered)]
    ours, theirs = (rows_of(some).rows for some in leaves)
    assert len(ours) == len(theirs) == 2
    for one, other in zip(ours, theirs, strict=True):
        assert np.array_equal(one.rewards, other.rewards)
        assert one.session.conversation(one.trajectory) == other.session.conversation(
            other.trajectory
        )
        same(one.trajectory, other.trajectory)
    trees = [one.tree for some in (read, delivered) for one in some if one.tree]
    same(*trees)


def same(one: Any, other: Any) -> None:
    """Compares all fields of two results, arrays by value and type."""
    for field in fields(one):
        ours, theirs = getattr(one, field.name), getattr(other, field.name)
        if isinstance(ours, np.ndarray):
            assert ours.dtype == theirs.dtype, field.name
            assert np.array_equal(ours, theirs, equal_nan=ours.dtype.kind == "f"), field.name
        else:
            assert ours == theirs, field.name


# Readers.

TOKENS = "[0, 1, 2, 3, 4, 5]"
COUNTS = {"sessions": 8, "trajectories": 9, "nodes": 14} | dict.fromkeys(LATE, 2)
"""Rows of each table."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    sessions = [*every_kind(), shared_prefix()]
    write(tmp_path, *sessions)
    with Writer(tmp_path) as writer:
        for value in (1.0, 2.0):
            sessions[0].reward = value + 1
            own = annotation("logprobs", *[-value] * 5, np.nan)
            writer.change(sessions[0], [own], [taught("teacher", int(value), 3)])
            writer.commit()
    return tmp_path


def test_pandas_reads_it(folder: Path) -> None:
    pandas = pytest.importorskip("pandas")
    nodes = pandas.read_parquet(folder / "nodes")
    (one,) = nodes[(nodes.session_id == "sampled") & nodes.trained].itertuples()
    assert one.token_ids.tolist() == [2, 3, 4, 5]
    assert (one.policy_versions.tolist(), one.policy_runs.tolist()) == ([17] * 4, [3] * 4)
    sessions = pandas.read_parquet(folder / "sessions").set_index("session_id")
    assert sessions.loc["sampled", "reward"] == 1.0
    assert str(sessions.loc["sampled", "date"]) == "1970-01-03"
    scores = pandas.read_parquet(folder / "scores").sort_values("recorded_unix_ms")
    assert (scores.policy_version.tolist(), scores.top_k.tolist()) == ([1, 2], [3, 3])
    assert scores.top_ids.iloc[1].reshape(4, 3).tolist()[1] == [3, 4, 5]


def test_datasets_reads_every_table(folder: Path) -> None:
    datasets = pytest.importorskip("datasets")
    read = {
        table: datasets.load_dataset(
            "parquet", data_dir=str(folder / table), split="train", cache_dir=str(folder / "cache")
        )
        for table in COUNTS
    }
    assert {table: len(rows) for table, rows in read.items()} == COUNTS
    tokens = {(one["session_id"], one["node_id"]): one["token_ids"] for one in read["nodes"]}
    assert tokens["sampled", 2] == [2, 3, 4, 5]


def test_duckdb_joins_the_tokens_of_a_trajectory(folder: Path) -> None:
    said = read_by(
        """
import duckdb
print(duckdb.sql('''
  SELECT flatten(list(n.token_ids ORDER BY v.at)) FROM (
    SELECT session_id, date, unnest(path).node_id AS node_id, generate_subscripts(path, 1) AS at
    FROM read_parquet('trajectories/*/*.parquet', hive_partitioning = true)
    WHERE trajectory_id = 'shared-2') v
  JOIN read_parquet('nodes/*/*.parquet', hive_partitioning = true) n USING (session_id, node_id)
''').fetchall()[0][0])
""",
        folder,
    )
    assert said == TOKENS


def test_duckdb_finds_the_last_annotation_of_a_name(folder: Path) -> None:
    said = read_by(
        """
import duckdb
print(duckdb.sql('''
  SELECT session_id, trajectory_id, name, arg_max("values", recorded_unix_ms)[1]
  FROM read_parquet('annotations/*/*.parquet', hive_partitioning = true) GROUP BY ALL
''').fetchall())
""",
        folder,
    )
    assert said == "[('sampled', 'sampled-1', 'logprobs', -2.0)]"


def test_files_of_two_releases_are_read_as_the_docs_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_as_before(monkeypatch, tmp_path / "old", whole(record("old")))
    write(tmp_path / "old", every_kind()[0])
    with Writer(tmp_path / "new") as writer:
        for one in read_stored(tmp_path / "old", []):
            writer.add(one.session)
        writer.commit()
    program = """
import duckdb, glob, pandas
from polars import concat, scan_parquet
files = sorted(glob.glob("old/nodes/**/*.parquet", recursive=True))
old = concat([scan_parquet(one) for one in files], how="diagonal").collect()
print(old.height, "lineage_rule" in old.columns)
found = duckdb.sql("FROM read_parquet('old/nodes/*/*.parquet', union_by_name = true)")
print(len(found.fetchall()), "lineage_rule" in found.columns)
new = pandas.read_parquet("new/nodes")
print(len(new), "lineage_rule" in new.columns)
"""
    assert read_by(program, tmp_path).splitlines() == ["4 True"] * 3


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(
            """
import json, polars
for table in TABLES:
    read = polars.scan_parquet(f"{table}/**/*.parquet", hive_partitioning=True).collect()
    print(json.dumps([table, read.height, sorted(read.columns)]))
""",
            id="polars",
        ),
        pytest.param(
            """
import json, duckdb
for table in TABLES:
    read = duckdb.sql(
        f"SELECT * FROM read_parquet('{table}/*/*.parquet', hive_partitioning = true)"
    )
    print(json.dumps([table, len(read.fetchall()), sorted(read.columns)]))
""",
            id="duckdb",
        ),
        pytest.param(
            """
import json, pandas
for table in TABLES:
    read = pandas.read_parquet(table)
    print(json.dumps([table, len(read), sorted(read.columns)]))
""",
            id="pandas",
        ),
    ],
)
def test_every_reader_has_every_table_and_column(folder: Path, program: str) -> None:
    said = read_by(f"TABLES = {list(TABLES)}{program}", folder)
    assert [json.loads(line) for line in said.splitlines()] == [
        [table, COUNTS[table], sorted([*(one.name for one in columns), "date"])]
        for table, columns in TABLES.items()
    ]
