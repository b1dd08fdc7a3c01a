"""Trials of Harbor without a server."""

import asyncio
import json
import os
import sys
from asyncio.subprocess import PIPE, Process
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rollmesh.client import Session, SessionResult
from rollmesh.integrations.harbor import (
    HarborRolloutError,
    HarborTrialRunner,
    decode_of,
    write_details,
)
from rollmesh.v1 import session_pb2
from tests.collector.records import record
from tests.harbor.connecting import ASKED, RULES, trained
from tests.harbor.reading import check_written
from tests.harbor.serving import PYTHON, make_task, server_side
from tests.harbor.test_runner import FOLDERS, rolled
from tests.meshes import Mesh, scripted_mesh
from tests.record.test_atif import told, user
from tests.waiting import until

LONG = partial(pytest.param, marks=pytest.mark.long)  # a trial is a process that imports Harbor


@pytest.fixture
def sandboxes(tmp_path: Path) -> Path:
    """The folder of the sandboxes."""
    folder = tmp_path / "sandboxes"
    folder.mkdir()
    return folder


def settings_of(folder: Path, **kwargs: Any) -> dict[str, Any]:
    agent = {
        "import_path": "agents:Asking",
        "model_api_format": "openai_chat_completions",
        "kwargs": kwargs,
    }
    return {
        "python": str(PYTHON),
        "folder": str(folder / "trials"),
        "agent": agent,
        "environment": FOLDERS,
        "env": server_side(folder / "sandboxes"),
    }


async def test_trials_without_a_server_are_a_group_with_the_verifiers_rewards(
    tmp_path: Path, tokenizer_dir: Path, sandboxes: Path
) -> None:
    runner = HarborTrialRunner(**settings_of(tmp_path, turns=2))
    task = make_task(tmp_path / "tasks" / "one", ASKED)
    async with scripted_mesh(tmp_path / "mesh", tokenizer_dir, RULES) as mesh:
        async with mesh.client() as client:
            (group,) = await rolled(client, [task], runner=runner, n=2)
            sessions = await trained(client, 2)
    assert [(one.outcome, one.reward) for one in group.sessions] == [("COMPLETED", 0.75)] * 2
    for session in sessions:
        assert session.turns == 2
        assert session.metadata["harbor_reward.speed"] == "2"
        config = (tmp_path / "trials" / session.session_id / "config.json").read_text()
        assert session.session_id in config
    assert not list(sandboxes.glob("harbor-*"))


@pytest.mark.long
@pytest.mark.parametrize("is_written_by_agent", [True, LONG(False)])
async def test_harbor_and_its_viewer_read_back_the_sampled_tokens(
    tmp_path: Path, tokenizer_dir: Path, sandboxes: Path, *, is_written_by_agent: bool
) -> None:
    settings = settings_of(tmp_path, turns=2, own_trajectory=is_written_by_agent)
    runner = HarborTrialRunner(**settings, tokenizer=tokenizer_dir)
    task = make_task(tmp_path / "tasks" / "one", ASKED)
    async with scripted_mesh(tmp_path / "mesh", tokenizer_dir, RULES) as mesh:
        async with mesh.client() as client:
            await rolled(client, [task], runner=runner, n=1)
            (session,) = await trained(client, 1)
    folder = tmp_path / "trials" / session.session_id
    name = "trajectory.sampled.json" if is_written_by_agent else "trajectory.json"
    (result, shown, files), document = await check_written(session, folder, name)
    written = json.loads((folder / "agent" / "trajectory.json").read_text())
    assert shown == written  # the agent's own, if there is one
    assert f"agent/{name}" in [one["path"] for one in files]
    assert result["agent_result"]["rollout_details"]
    assert document["extra"]["rollmesh"]["reward"] == 0.75
    assert not list(folder.rglob("*.part"))
    before = {one: one.read_bytes() for one in folder.rglob("*") if one.is_file()}
    write_details(session, folder, decode_of(tokenizer_dir))
    assert {one: one.read_bytes() for one in folder.rglob("*") if one.is_file()} == before


@pytest.mark.long
@pytest.mark.parametrize(
    ("details", "record_messages"), [(True, True), LONG(True, False), LONG(False, True)]
)
async def test_a_trial_without_a_tokenizer_has_documents_if_sessions_record_messages(
    tmp_path: Path, tokenizer_dir: Path, sandboxes: Path, *, details: bool, record_messages: bool
) -> None:
    runner = HarborTrialRunner(**settings_of(tmp_path, turns=1), details=details)
    task = make_task(tmp_path / "tasks" / "one", ASKED)
    async with scripted_mesh(tmp_path / "mesh", tokenizer_dir, RULES) as mesh:
        async with mesh.client() as client:
            shape: dict[str, Any] = {"record_messages": record_messages, "export": "tree"}
            (group,) = await rolled(client, [task], runner=runner, n=1, **shape)
    folder = tmp_path / "trials" / group.sessions[0].session_id
    result = json.loads((folder / "result.json").read_text())
    assert bool((result["agent_result"] or {}).get("rollout_details")) == details
    document = folder / "agent" / "trajectory.json"
    assert document.exists() == (details and record_messages)
    if document.exists():
        said = [one["message"] for one in json.loads(document.read_text())["steps"]]
        assert said == [ASKED, "The answer is 42."]


def test_a_session_without_tokens_has_no_details_of_them(tmp_path: Path) -> None:
    record = session_pb2.SessionRecord(session_id="one", capture=session_pb2.CAPTURE_TEXT)
    record.trajectories.add(trajectory_id="one-1").segments.add(node_id=1, sampled=True)
    result = tmp_path / "result.json"
    result.write_text('{"agent_result": {"rollout_details": []}}')  # the agent's own
    write_details(SessionResult.from_proto(record), tmp_path)
    assert result.read_text() == '{"agent_result": {"rollout_details": []}}'


@pytest.mark.parametrize("text", ['{"extra": null}', '{"extra": 5}', "[" * 100_000])
def test_a_document_of_any_form_that_the_agent_left_stays(tmp_path: Path, text: str) -> None:
    (tmp_path / "result.json").write_text('{"agent_result": null}')
    (tmp_path / "agent").mkdir()
    (tmp_path / "agent" / "trajectory.json").write_text(text)
    session = told(record("one"), [user("Hi")], [{"role": "assistant", "content": "One."}])
    write_details(SessionResult.from_proto(session), tmp_path)
    assert (tmp_path / "agent" / "trajectory.json").read_text() == text
    written = json.loads((tmp_path / "agent" / "trajectory.sampled.json").read_text())
    assert written["session_id"] == "one"


@pytest.mark.parametrize("linked", ["images", f"images/{'a' * 64}.png.part"])
def test_a_link_that_the_agent_left_is_not_written_through_and_a_pipe_not_read(
    tmp_path: Path, linked: str
) -> None:
    outside, folder = tmp_path / "outside", tmp_path / "trial"
    outside.write_text("kept")
    link = folder / "agent" / linked
    (folder / "agent").mkdir(parents=True)
    (folder / "result.json").write_text('{"agent_result": null}')
    os.mkfifo(folder / "agent" / "trajectory.json")
    (folder / "agent" / ".trajectory.sampled.json.part").symlink_to(outside)
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(tmp_path if linked == "images" else outside)
    session = told(record("one"), [user("Hi")], [{"role": "assistant", "content": "One."}])
    session.images.add(sha256="a" * 64, media_type="image/png", data=b"drawn")
    write_details(SessionResult.from_proto(session), folder)
    assert outside.read_text() == "kept"
    assert sorted(tmp_path.iterdir()) == [outside, folder]
    assert (folder / "agent" / "images" / f"{'a' * 64}.png").read_bytes() == b"drawn"
    written = json.loads((folder / "agent" / "trajectory.sampled.json").read_text())
    assert written["session_id"] == "one"


@pytest.mark.parametrize("lacking", ["python", "folder"])
async def test_a_trial_whose_process_cannot_start_failed_by_its_infrastructure(
    tmp_path: Path, lacking: str
) -> None:
    (tmp_path / "file").touch()
    missing = str(tmp_path / "file" / "missing")
    settings: dict[str, Any] = {**settings_of(tmp_path), lacking: missing}
    session = Session("one", "key", "http://127.0.0.1:1/sessions/key/v1")
    with pytest.raises(HarborRolloutError, match=r"^the trial did not start: "):
        await HarborTrialRunner(**settings)("/task", session)


async def test_a_trial_that_cannot_begin_fails_with_the_end_of_its_log(
    tmp_path: Path, tokenizer_dir: Path, sandboxes: Path
) -> None:
    runner = HarborTrialRunner(**settings_of(tmp_path))
    async with scripted_mesh(tmp_path / "mesh", tokenizer_dir, RULES) as mesh:
        async with mesh.client() as client:
            (group,) = await rolled(client, ["/there/is/none"], runner=runner, n=1)
    (seat,) = group.sessions
    assert (seat.outcome, seat.error_type) == ("LOST", "HarborRolloutError")
    assert "/there/is/none" in seat.error


_TRAINER = """
import asyncio, json, sys
from rollmesh.client import Client, MeshAddresses, rollout
from rollmesh.client import SessionResult
from rollmesh.integrations.harbor import HarborTrialRunner

async def main(addresses, samples, runner):
    async with Client(MeshAddresses(**addresses)) as client:
        await rollout(client, samples, runner=HarborTrialRunner(**runner), n=2, timeout_s=LIMIT)

asyncio.run(main(*json.load(sys.stdin)))
"""


@pytest.mark.long
async def test_a_trial_whose_trainer_dies_ends_its_sandbox(
    tmp_path: Path, tokenizer_dir: Path, sandboxes: Path
) -> None:
    async with scripted_mesh(tmp_path / "mesh", tokenizer_dir, RULES, tokens_per_second=5) as mesh:
        trainer = await started(mesh, tmp_path, limit_s=600)
        await until(lambda: len(list(sandboxes.glob("harbor-*"))) == 2)
        trainer.kill()
        await trainer.wait()
        await ended(tmp_path, sandboxes)


@pytest.mark.long
async def test_a_trial_whose_time_is_over_ends_its_sandbox(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    async with scripted_mesh(tmp_path / "mesh", tokenizer_dir, RULES, tokens_per_second=5) as mesh:
        # Again with more time, if a busy machine had not made both sandboxes by then.
        for limit_s in (20, 60, 180):
            folder, seen = tmp_path / str(limit_s), set[Path]()
            sandboxes = folder / "sandboxes"
            sandboxes.mkdir(parents=True)
            trainer = await started(mesh, folder, limit_s)
            over = asyncio.ensure_future(trainer.wait())
            while not over.done():
                seen.update(sandboxes.glob("harbor-*"))
                await asyncio.wait([over], timeout=0.1)
            if len(seen) == 2:
                break
        assert len(seen) == 2
        await ended(folder, sandboxes)


async def started(mesh: Mesh, folder: Path, limit_s: float) -> Process:
    """Starts a trainer of two attempts."""
    program = _TRAINER.replace("LIMIT", str(limit_s))
    trainer = await asyncio.create_subprocess_exec(*(sys.executable, "-c", program), stdin=PIPE)
    assert trainer.stdin is not None
    task = make_task(folder / "tasks" / "one", ASKED)
    given = [asdict(mesh.addresses), [task], settings_of(folder, turns=1000)]
    trainer.stdin.write(json.dumps(given).encode())
    trainer.stdin.close()
    return trainer


async def ended(folder: Path, sandboxes: Path) -> None:
    """Waits until both sandboxes are gone. Their trials were cancelled."""
    await until(lambda: not list(sandboxes.glob("harbor-*")))
    results = await until(lambda: _results(folder / "trials", 2))
    assert [one["exception_info"]["exception_type"] for one in results] == ["CancelledError"] * 2


def _results(trials: Path, count: int) -> list[dict[str, Any]]:
    """Returns the results that are whole: Harbor writes them in place."""
    found = []
    for one in trials.glob("*/result.json"):
        with suppress(ValueError):
            found.append(json.loads(one.read_text()))
    return found if len(found) == count else []
