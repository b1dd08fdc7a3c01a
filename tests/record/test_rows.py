"""Sessions as rows of one file, and `rollmesh export` as people run it."""

import hashlib
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from rollmesh.collector import join, read_head, split
from rollmesh.record import rows_of, sft_rows_of, write_rows
from rollmesh.runtime.config import ConfigError
from rollmesh.runtime.rpc import open_channel
from rollmesh.v1 import collector_pb2 as pb, collector_pb2_grpc, session_pb2, trajectory_pb2
from tests.collector.collectors import TIMEOUT_S, create_or_update, ingest_all
from tests.collector.records import (
    add_columns,
    record,
    tree_record,
    with_images,
    with_messages,
)
from tests.processes import ServiceProcess, run_to_its_code, running
from tests.record.test_atif import STRANGE, strange


@pytest.fixture
async def collector(tmp_path: Path) -> AsyncIterator[ServiceProcess]:
    async with running("collector", tmp_path, port=0, data_dir=tmp_path / "data") as process:
        async with open_channel(process.address) as channel:
            stub: Any = collector_pb2_grpc.CollectorServiceStub(channel)
            await ingest_all(stub, "a", "b")
            for one in (record("c", "g", 0, 2), record("late", "a", 0, 1)):
                await stub.Ingest(pb.IngestRequest(sessions=[one]), timeout=TIMEOUT_S)
            rules = pb.DeliveryFilter(metadata={"of": "nobody"})
            await create_or_update(stub, name="nobody", unit=pb.DELIVERY_UNIT_SESSION, filter=rules)
        yield process


def export(
    collector: ServiceProcess, to: Path, *words: str, form: str = "rows"
) -> subprocess.CompletedProcess[str]:
    flags = ("--to", str(to), "--format", form, "--collector", collector.address)
    return subprocess.run(
        [sys.executable, "-m", "rollmesh.cli", "export", *flags, *words],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
async def test_columns_are_stored_and_exported(tmp_path: Path, suffix: str) -> None:
    one = record("columns")
    add_columns(one.trajectories[0])
    head, arrays = split(session_pb2.SessionRecord.FromString(one.SerializeToString()))
    assert join(read_head("columns", head), b"".join(arrays)) == one

    async def sessions() -> AsyncIterator[session_pb2.SessionRecord]:
        yield one

    path = tmp_path / f"out.{suffix}"
    await write_rows(sessions(), path)
    if suffix == "jsonl":
        (row,) = [json.loads(line) for line in path.read_text().splitlines()]
    else:
        (row,) = pytest.importorskip("pyarrow.parquet").read_table(path).to_pylist()
    assert row["sampling_support"] == [[], [], [2, 9], [], [], []]
    experts = [list(range(6 * at, 6 * at + 6)) for at in range(4)]
    assert row["routed_experts"] == [*experts[:3], None, experts[3], None]
    assert row["routed_experts_shape"] == [3, 2]


async def test_export_writes_a_row_for_each_trajectory(
    collector: ServiceProcess, tmp_path: Path
) -> None:
    path = tmp_path / "out.jsonl"
    done = export(collector, path)
    assert done.stdout.startswith("4 sessions, 4 trajectories"), done.stderr
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["session_id"] for row in rows] == ["a", "b", "c", "late"]
    (expected,) = rows_of(record("a"))
    assert rows[0] == expected
    assert rows[0]["token_ids"] == [0, 1, 2, 3, 4, 5]
    assert rows[0]["policy_versions"] == [-1, -1, 0, 0, 0, 0]
    assert rows[0]["loss_mask"] == [False, False, True, True, True, True]
    one = export(collector, path, "--session", "b")
    assert one.stdout.startswith("1 sessions")
    missing = export(collector, path, "--session", "x")
    assert (missing.returncode, "no session 'x'" in missing.stderr) == (1, True)
    assert [json.loads(line)["session_id"] for line in path.read_text().splitlines()] == ["b"]
    assert not list(tmp_path.glob("*.part"))  # nor is there half a file
    wrong = export(collector, tmp_path / "out.csv")
    assert (wrong.returncode, ".jsonl or .parquet" in wrong.stderr) == (2, True)
    nobody = export(collector, path, "--consumer", "nobody")
    assert nobody.stdout.startswith("0 sessions"), nobody.stderr
    unknown = export(collector, path, "--consumer", "x")
    assert (unknown.returncode, "'x' is not known" in unknown.stderr) == (1, True)


def test_a_row_names_the_rule_that_labelled_its_branch() -> None:
    session = record("a")
    assert [row["lineage_rule"] for row in rows_of(session)] == [None]
    session.trajectories[0].lineage_rule = trajectory_pb2.LINEAGE_RULE_TITLE_TOOL
    assert [row["lineage_rule"] for row in rows_of(session)] == ["TITLE_TOOL"]


async def test_an_export_has_the_sessions_and_texts_that_were_asked_for(
    collector: ServiceProcess, tmp_path: Path, tokenizer_dir: Path
) -> None:
    path, texts = tmp_path / "chosen.jsonl", ("--tokenizer", str(tokenizer_dir))
    done = export(collector, path, "--group-id", "g", *texts)
    assert done.stdout.startswith("1 sessions, 1 trajectories"), done.stderr
    row = json.loads(path.read_text())
    assert row["session_id"] == "c"
    assert row["text"].endswith(row["sampled_texts"][-1])
    wrong = export(collector, path, "--tokenizer", str(tmp_path / "none"))
    assert (wrong.returncode, "tokenizer.json" in wrong.stderr) == (2, True)
    folder = export(collector, path, form="record")
    assert (folder.returncode, "is a file; give a folder" in folder.stderr) == (2, True)


def test_a_record_is_exported_as_its_collector_was(
    collector: ServiceProcess, tmp_path: Path
) -> None:
    pytest.importorskip("pyarrow")
    folder, paths = tmp_path / "record", [tmp_path / f"{at}.jsonl" for at in range(2)]
    first, second = (export(collector, folder, form="record") for _ in range(2))
    assert (first.returncode, second.returncode) == (0, 0), first.stderr
    assert second.stdout.startswith("4 sessions")
    assert len(list(folder.rglob("sessions/*/*.parquet"))) == 1  # the second added none
    export(collector, paths[0])
    done = export(collector, paths[1], "--record", str(folder))
    assert done.stdout.startswith("4 sessions, 4 trajectories"), done.stderr
    ours, theirs = (
        [json.loads(line) | {"lineage_source": "RULE"} for line in path.read_text().splitlines()]
        for path in paths
    )
    assert ours == theirs
    wrong = export(collector, paths[1], "--record", str(folder), "--consumer", "nobody")
    assert (wrong.returncode, "a record has none" in wrong.stderr) == (2, True)


def test_a_tree_has_a_row_of_messages_for_each_leaf() -> None:
    tree = tree_record("a")
    told = with_messages(record("a"))
    tree.messages.MergeFrom(told.messages)
    tree.contexts.MergeFrom(told.contexts)
    data = b'[{"role": "assistant", "content": "y"}]'
    tree.messages.add(node_id=3, parent_node_id=1, data=data, data_bytes=len(data))
    first, second = sft_rows_of(tree)
    assert [first["trajectory_id"], second["trajectory_id"]] == ["a-2", "a-3"]
    assert [one["content"] for one in second["messages"]] == ["x", "y"]
    assert (first["input_ids"], first["assistant_masks"]) == ([0, 1, 2, 3], [0, 0, 0, 1])
    assert (second["input_ids"], second["assistant_masks"]) == ([0, 1, 4, 5], [0, 0, 0, 1])


async def test_datasets_reads_messages_whose_calls_no_json_has(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")

    async def given() -> AsyncIterator[session_pb2.SessionRecord]:
        yield strange()
        yield with_messages(record("a"))

    path = tmp_path / "sft.jsonl"
    assert await write_rows(given(), path, sft=True) == (2, 2, 0)
    read = datasets.load_dataset(
        "json", data_files=str(path), split="train", cache_dir=str(tmp_path / "cache")
    )
    calls = read[0]["messages"][1]["tool_calls"]
    assert [one["function"]["arguments"] for one in calls] == [*STRANGE[:-1], {"at": "\0é"}]


async def sessions() -> AsyncIterator[session_pb2.SessionRecord]:
    rewarded = record("a")
    rewarded.trajectories[0].segments[1].reward = 0.5
    rewarded.trajectories[0].segments[1].sampling.temperature = 0.5
    rewarded.metadata["task"] = "7"
    yield rewarded
    yield record("b")


async def test_parquet_holds_the_same_rows(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    assert await write_rows(sessions(), tmp_path / "out.parquet") == (2, 2, 0)
    rows = parquet.read_table(tmp_path / "out.parquet").to_pylist()
    expected = [row async for session in sessions() for row in rows_of(session)]
    assert rows == expected
    assert rows[0]["turn_rewards"] == [{"node_id": 2, "end": 6, "reward": 0.5}]
    (sampled,) = rows[0]["turn_sampling"]
    assert (sampled["node_id"], sampled["end"]) == (2, 6)
    assert json.loads(sampled["sampling"]) == {"temperature": 0.5}


async def test_images_are_exported_once_beside_the_rows_that_name_them(tmp_path: Path) -> None:
    async def shown() -> AsyncIterator[session_pb2.SessionRecord]:
        yield with_images(record("a"), b"cat", b"dog")
        yield with_images(record("b"), b"cat")

    names = [hashlib.sha256(data).hexdigest() for data in (b"cat", b"dog")]
    await write_rows(shown(), tmp_path / "out.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [one["sha256"] for row in rows for one in row["images"]] == [*names, names[0]]
    assert rows[0]["images"][1] == {"sha256": names[1], "start": 1, "tokens": 1}
    found = {path.name: path.read_bytes() for path in (tmp_path / "out.jsonl.images").iterdir()}
    assert found == {f"{names[0]}.png": b"cat", f"{names[1]}.png": b"dog"}


async def test_parquet_without_pyarrow_names_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match="pyarrow"):
        await write_rows(sessions(), tmp_path / "out.parquet")


async def test_export_writes_spans_and_sends_them_to_a_url(
    collector: ServiceProcess, tmp_path: Path
) -> None:
    receivers = pytest.importorskip("tests.receivers")
    path = tmp_path / "spans.jsonl"
    done = export(collector, path, form="otel")
    assert (done.returncode, done.stderr) == (0, "")
    assert len(path.read_text().splitlines()) == 4
    flags = ("--format", "otel", "--session", "a", "--collector", collector.address)
    with receivers.http_receiver() as receiver:
        sent = await run_to_its_code(
            *(sys.executable, "-m", "rollmesh.cli", "export", "--to", receiver.url, *flags),
            cwd=Path.cwd(),
            env=None,
            limit_s=60,
        )
    assert sent == (0, f"2 spans: {receiver.url}\n", "")
    assert [one.name for one in receiver.spans] == ["invoke_agent", "chat"]
    wrong = ("--to", "http://127.0.0.1:1", *flags[2:])
    code, _, told = await run_to_its_code(
        *(sys.executable, "-m", "rollmesh.cli", "export", *wrong),
        cwd=Path.cwd(),
        env=None,
        limit_s=60,
    )
    assert code == 2
    assert "give a path, or --format otel" in told
