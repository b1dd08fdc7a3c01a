"""A journal belongs to the model whose ids it holds."""

import json
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from rollmesh.client import Session
from rollmesh.gateway import (
    SQLITE_SCHEMA,
    ModelFiles,
    SessionSpec,
    Transaction,
    adopt_model,
    give_up,
    insert_session,
    set_aside,
)
from rollmesh.runtime import SqliteStatements, tokenizer_sha256
from rollmesh.runtime.errors import ModelMismatchError, StoreError
from rollmesh.v1 import gateway_admin_pb2
from tests.meshes import Mesh, scripted_mesh
from tests.processes import run_refused

ASK: list[Any] = [{"role": "user", "content": "hello"}]


def other_tokenizer(model: Path) -> None:
    path = model / "tokenizer.json"
    content = json.loads(path.read_text())
    vocabulary = content["model"]["vocab"]
    one, other = list(vocabulary)[300:302]
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    path.write_text(json.dumps(content))


def other_template(model: Path) -> None:
    path = model / "chat_template.jinja"
    path.write_text(path.read_text() + "{# another #}")


def saved_again(model: Path) -> None:
    """As another release of the library writes the same tokenizer."""
    path = model / "tokenizer.json"
    content = json.loads(path.read_text())
    content["truncation"] = {"max_length": 512}
    merges = content["model"]["merges"]
    assert isinstance(merges[0], list)
    content["model"]["merges"] = [" ".join(pair) for pair in merges]
    path.write_text(json.dumps(content, indent=4))


def copy_of(model: Path, folder: Path, change: Callable[[Path], None]) -> Path:
    copy = Path(shutil.copytree(model, folder / change.__name__))
    change(copy)
    return copy


@pytest.mark.long
async def test_open_sessions_stay_with_the_name_of_their_model(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    """Two models may have one tokenizer, as a policy and a judge made from one base model have."""
    async with scripted_mesh(tmp_path, tokenizer_dir) as mesh, mesh.client() as client:
        with pytest.raises(ModelMismatchError, match="'judge'; this gateway serves 'policy'"):
            await client.open_session(client.session_request(model="judge"))
        session = await client.open_session(client.session_request(model="policy"))
        await mesh.processes["gateway"].kill()
        flags = {"data_dir": tmp_path / "gateway", "model_path": tokenizer_dir}
        code, errors = await run_refused("gateway", model="judge", **flags)
        assert code == 1
        assert "1 open sessions of model 'policy', and this gateway serves 'judge'" in errors
        await mesh.start("gateway")
        await client.close_session(session)


async def say(mesh: Mesh, session: Session, messages: list[Any]) -> Any:
    return await mesh.openai(session).chat.completions.create(model="policy", messages=messages)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        pytest.param(other_tokenizer, "tokenizer", id="tokenizer"),
        pytest.param(other_template, "chat template", id="template", marks=pytest.mark.long),
    ],
)
async def test_open_sessions_are_refused_to_another_model_and_go_on_with_their_own(
    tmp_path: Path, tokenizer_dir: Path, change: Callable[[Path], None], part: str
) -> None:
    other = copy_of(tokenizer_dir, tmp_path, change)
    async with scripted_mesh(tmp_path, tokenizer_dir) as mesh, mesh.client() as client:
        session = await client.open_session(client.session_request())
        answer = await say(mesh, session, ASK)
        await mesh.processes["gateway"].kill()
        code, errors = await run_refused("gateway", data_dir=tmp_path / "gateway", model_path=other)
        assert code == 1
        (sentence,) = [line for line in errors.splitlines() if not line.startswith("{")]
        for said in ("journal.sqlite", "1 open", part, str(other), "another data_dir"):
            assert said in sentence
        await mesh.start("gateway")
        more = [*ASK, answer.choices[0].message, *ASK]
        assert (await say(mesh, session, more)).usage.completion_tokens
        await client.close_session(session)
        await mesh.restart("gateway", model_path=other)  # nothing is open: any model may have it
        async with client.session() as fresh:
            assert (await say(mesh, fresh, ASK)).usage.completion_tokens


def test_a_tokenizer_that_was_saved_again_is_the_same_and_another_is_not(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    ours = tokenizer_sha256(tokenizer_dir)
    assert tokenizer_sha256(copy_of(tokenizer_dir, tmp_path, saved_again)) == ours
    assert tokenizer_sha256(copy_of(tokenizer_dir, tmp_path, other_tokenizer)) != ours


def test_an_open_session_that_was_set_aside_is_refused_to_another_model_too() -> None:
    theirs, others = ModelFiles("a", "t"), ModelFiles("b", "t")
    where = Path("journal.sqlite"), Path("model")
    with closing(sqlite3.connect(":memory:")) as db:
        db.executescript(SQLITE_SCHEMA)
        tx = Transaction(SqliteStatements(db), "journal")
        adopt_model(tx, theirs, *where)
        insert_session(tx, SessionSpec("s", 0))
        set_aside(tx, [gateway_admin_pb2.DeadLetter(session_id="s", message="why")])
        with pytest.raises(StoreError, match="1 open sessions"):
            adopt_model(tx, others, *where)
        give_up(tx, "s")
        adopt_model(tx, others, *where)
