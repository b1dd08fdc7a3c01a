"""Logs of Inspect: read by the package inspect_ai."""

import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from rollmesh.record import write_log
from rollmesh.v1 import session_pb2
from tests.collector.records import record, tree_record, with_images
from tests.record.readers import read_by
from tests.record.test_atif import STRANGE, strange, told, user

_READ = """
import json
from inspect_ai.log import read_eval_log
log = read_eval_log("log.json")
header = read_eval_log("log.json", header_only=True)
assert header.eval.task == log.eval.task
assert header.results.total_samples == log.results.total_samples == 3
print(json.dumps({
    "task": log.eval.task,
    "mean": log.results.scores[0].metrics["mean"].value,
    "samples": [one.model_dump(mode="json", exclude_none=True) for one in log.samples],
}))
"""


async def given(*records: session_pb2.SessionRecord) -> AsyncIterator[session_pb2.SessionRecord]:
    for one in records:
        yield one


def spoken() -> session_pb2.SessionRecord:
    """A session with an image, reasoning, a call with its result, and a malformed call."""
    one = with_images(record("spoken", "g", 1, 2), b"cat")
    one.run_id, one.model, one.reward = "run", "policy", 0.5
    one.opened_unix_ms, one.closed_unix_ms = 1_000, 3_500
    url = {"url": f"sha256:{one.images[0].sha256}"}
    shown = [{"type": "text", "text": "See"}, {"type": "image_url", "image_url": url}]
    named = {"look": '{"at": 1}', "see": '{"at": '}
    calls = [
        {"id": f"call-{name}", "type": "function", "function": {"name": name, "arguments": given_}}
        for name, given_ in named.items()
    ]
    answer = {"content": None, "reasoning_content": "Hm.", "tool_calls": calls}
    return told(one, [user("Hi") | {"content": shown}], [{"role": "assistant", **answer}])


async def test_inspect_reads_sessions_as_samples(tmp_path: Path) -> None:
    plain = told(record("plain"), [user("Hi")], [{"role": "assistant", "content": "One."}])
    plain.reward, plain.outcome = 1.0, session_pb2.SESSION_OUTCOME_FAILED
    records = tree_record("no messages"), spoken(), plain, strange()
    done = await write_log(given(*records), tmp_path / "log.json")
    assert done == (4, 3, 1)
    log = json.loads(read_by(_READ, tmp_path))
    assert (log["task"], log["mean"]) == ("run", 0.5)
    first, second, third = log["samples"]
    *broken, whole = third["messages"][1]["tool_calls"]
    assert [one["parse_error"] for one in broken] == [f"no object: {one}" for one in STRANGE[:-1]]
    assert whole["arguments"] == {"at": "\0é"}
    assert [(one["id"], one["epoch"], one["uuid"]) for one in (first, second)] == [
        ("g", 2, "spoken"), ("plain", 1, "plain"),
    ]  # fmt: skip
    asked, called = first["messages"]
    assert [part["type"] for part in asked["content"]] == ["text", "image"]
    assert asked["content"][1]["image"] == "data:image/png;base64,Y2F0"
    assert called["content"][0]["reasoning"] == "Hm."
    look, see = called["tool_calls"]
    assert (look["function"], look["arguments"], look.get("parse_error")) == (
        "look", {"at": 1}, None,
    )  # fmt: skip
    assert (see["arguments"], see["parse_error"]) == ({}, 'no object: {"at": ')
    assert [one["content"] for one in first["input"]] == [asked["content"]]
    assert first["model_usage"]["policy"]["output_tokens"] == 4
    assert first["scores"]["reward"]["value"] == 0.5
    assert first["total_time"] == 2.5
    assert first["metadata"]["rollmesh"]["trained_tokens"] == 4
    assert (second["output"]["completion"], second["error"]["message"]) == ("One.", "FAILED")


async def test_samples_of_one_seat_in_two_runs_have_different_ids(tmp_path: Path) -> None:
    attempts = [record(name, "g", 1, 2) for name in ("first", "second", "again")]
    for run, one in zip(("a", "b", "b"), attempts, strict=True):
        one.run_id, one.superseded = run, one.session_id == "second"
        told(one, [user("Hi")], [{"role": "assistant", "content": run}])
    await write_log(given(*attempts), tmp_path / "log.json")
    samples = json.loads((tmp_path / "log.json").read_text())["samples"]
    assert [(one["id"], one["epoch"], one["uuid"]) for one in samples] == [
        ("g", 2, "first"), ("second", 1, "second"), ("again", 1, "again"),
    ]  # fmt: skip


def test_the_command_writes_a_log_of_a_record(tmp_path: Path) -> None:
    from rollmesh.record import Writer

    with Writer(tmp_path / "record") as writer:
        writer.add(spoken())
        writer.commit()
    command: list[Any] = [sys.executable, "-m", "rollmesh.cli", "export", "--format", "inspect"]
    command += ["--record", tmp_path / "record", "--to", tmp_path / "log.json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.startswith("1 sessions, 1 samples")
    (sample,) = json.loads((tmp_path / "log.json").read_text())["samples"]
    assert sample["uuid"] == "spoken"
    command[-1] = tmp_path / "log.jsonl"
    assert subprocess.run(command, capture_output=True, timeout=60, check=False).returncode == 2
