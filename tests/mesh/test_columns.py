"""The sampling support and the experts of each token, from the engines to a trainer."""

import asyncio
import json
import sqlite3
import zlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from rollmesh.chat import Tokenizer
from rollmesh.client import Client, Column, ExportForm, Session, SessionResult, Trajectory
from rollmesh.engine import scripted_experts
from rollmesh.runtime.codec import EXPERTS, SUPPORT, experts_column, pack_ids, pack_logprobs
from rollmesh.runtime.errors import InvalidFieldError
from rollmesh.v1 import engine_pb2, gateway_pb2, sampling_pb2, trajectory_pb2
from tests.meshes import Mesh, delivered, scripted_mesh
from tests.router.engines import Answers, noting_engine

RULES = [
    ("plain", "The answer is 42."),
    ("next", "I am not sure."),
    ("other", "Perhaps."),
    ("slow", "word " * 40),
]
BOTH: tuple[Column, ...] = ("routed_experts", "sampling_support")
CUT = {"temperature": 0.7, "top_p": 0.9}


class Talk:
    """An agent that asks, and goes on with each answer."""

    def __init__(self, mesh: Mesh, session: Session, messages: Sequence[Any] = ()) -> None:
        self._create = mesh.openai(session).chat.completions.create
        self._messages = list(messages)

    @property
    def messages(self) -> list[Any]:
        """The conversation so far."""
        return list(self._messages)

    async def begin(self, text: str) -> Any:
        """Returns the stream of an answer."""
        self._messages.append({"role": "user", "content": text})
        return await self._create(model="policy", messages=self._messages, stream=True)

    async def ask(self, text: str, *, stream: bool = False) -> None:
        if stream:
            parts = await self.begin(text)
            said = "".join([one.choices[0].delta.content or "" async for one in parts])
        else:
            self._messages.append({"role": "user", "content": text})
            answer = await self._create(model="policy", messages=self._messages)
            said = answer.choices[0].message.content or ""
        self._messages.append({"role": "assistant", "content": said})

    def back(self) -> None:
        """Forgets the last turn."""
        del self._messages[-2:]


def check(trajectory: Trajectory) -> None:
    """Each token has the rows that the scripted model gave, and the last one has no experts."""
    ids, count = trajectory.token_ids, len(trajectory.token_ids)
    experts, support = trajectory.columns.routed_experts(), trajectory.columns.sampling_support()
    assert experts is not None
    assert support is not None
    assert experts.has_row.tolist() == [True] * (count - 1) + [False]
    assert np.array_equal(experts.rows[:-1], scripted_experts(ids[:-1], 0))
    sampled = trajectory.policy_versions >= 0
    assert np.array_equal(np.diff(support.offsets), 3 * sampled)
    assert np.array_equal(support.values[support.offsets[:-1][sampled]], ids[sampled])


def brought(mesh: Mesh, session: Session) -> list[int]:
    """The number of rows of experts that the journal has for each node beyond its own tokens."""
    with closing(sqlite3.connect(mesh.folder / "gateway" / "journal.sqlite")) as db:
        found = db.execute(
            "SELECT token_ids, token_columns FROM nodes WHERE session_id = ?", (session.session_id,)
        )
        return [
            sum(one.rows for one in read.columns if one.kind == EXPERTS) - len(ids) // 4
            for ids, columns in found
            if (read := sampling_pb2.TokenColumns.FromString(columns))
        ]


MESH = {"rules": RULES}


@pytest.fixture
async def client(mesh: Mesh) -> AsyncIterator[Client]:
    async with mesh.client() as client:
        yield client


async def conversation(mesh: Mesh, client: Client, export: ExportForm) -> SessionResult:
    """What a trainer gets of three turns, a branch after the second one, and two equal samples."""
    async with client.session(columns=BOTH, sampling=CUT, export=export) as session:
        talk = Talk(mesh, session)
        await talk.ask("plain")
        await talk.ask("next", stream=True)
        await mesh.restart("gateway")  # the rows of these turns are in its journal
        await talk.ask("plain")
        talk.back()
        await talk.ask("other")
        async with asyncio.TaskGroup() as tasks:
            for _ in range(2):
                tasks.create_task(Talk(mesh, session, talk.messages).ask("next"))
        found = brought(mesh, session)
    # Only the first token of a sequence has none before it, and nothing came twice.
    assert found == [-1] + [0] * (len(found) - 1)
    return await delivered(client, session)


async def test_each_trajectory_has_the_rows_of_all_its_tokens(mesh: Mesh, client: Client) -> None:
    result = await conversation(mesh, client, "leaves")
    assert len(result.trajectories) == 3
    for trajectory in result.trajectories:
        check(trajectory)
        # However many turns brought them, adjacent rows of one engine are one piece.
        assert [one.kind for one in trajectory.columns.pieces].count(EXPERTS) == 1
        assert {one.engine_id for one in trajectory.columns.pieces} == {"engine-0"}
        assert {one.numerics_id for one in trajectory.columns.pieces} == set(result.numerics)


async def test_a_tree_has_the_rows_of_each_token_once(mesh: Mesh, client: Client) -> None:
    tree = (await conversation(mesh, client, "tree")).tree
    assert tree is not None
    experts = tree.columns.routed_experts()
    support = tree.columns.sampling_support()
    assert experts is not None
    assert support is not None
    assert not experts.has_row[[tree.nodes[leaf].end - 1 for leaf in tree.leaves()]].any()
    assert (~experts.has_row).sum() == len(tree.leaves()) == 3
    for path in tree.paths():
        ids = tree.token_ids[path]
        assert np.array_equal(experts.rows[path][:-1], scripted_experts(ids[:-1], 0))
    assert np.array_equal(np.diff(support.offsets), 3 * (tree.policy_versions >= 0))


async def test_the_rest_of_an_answer_has_the_rows_of_the_engine_that_took_over(
    mesh: Mesh, client: Client
) -> None:
    slow = {"tokens_per_second": 10, "port": 0}
    names = ("second", "third")
    for name in names:
        await mesh.run("engine", name, **mesh.flags("engine") | {**slow, "engine_id": name})
    await mesh.processes["engine"].terminate()
    async with client.session(columns=BOTH, sampling=CUT) as session:
        talk = Talk(mesh, session)
        answer = await talk.begin("slow")
        async for chunk in answer:
            if chunk.choices and chunk.choices[0].delta.content:
                break
        replicas = (await client.replicas()).replicas
        (address,) = [one.hello.address for one in replicas if one.leases]
        (lost,) = [name for name in names if mesh.processes[name].address == address]
        await mesh.processes[lost].kill()
        async for _ in answer:
            pass
    (trajectory,) = (await delivered(client, session)).trajectories
    assert "MIGRATED" in trajectory.reasons
    check(trajectory)
    other = next(name for name in names if name != lost)
    cut = trajectory.version_spans[0].end
    assert [(one.kind, one.engine_id) for one in trajectory.columns.pieces] == [
        (kind, engine) for kind in (SUPPORT, EXPERTS) for engine in (lost, other)
    ]
    support, experts = trajectory.columns.pieces[:2], trajectory.columns.pieces[2:]
    assert support[0].start + support[0].rows == cut
    # The engine that went on read the last token of the lost one.
    assert experts[0].rows == cut - 1


def answering(
    tokenizer: Tokenizer, shape: tuple[int, int], missing: int
) -> Callable[[engine_pb2.GenerateRequest], Answers]:
    """How an engine answers that gives experts at the end, without the rows of some last ids."""
    ids = tokenizer.encode("It is 13, and more than that.")

    async def answer(request: engine_pb2.GenerateRequest) -> Answers:
        yield engine_pb2.TokenChunk(
            token_ids_u32le=pack_ids(ids),
            logprobs_f32le=pack_logprobs(np.full(len(ids), -0.5, np.float32)),
            policy_version=0,
        )
        last = engine_pb2.TokenChunk()
        last.finish.reason = sampling_pb2.FINISH_REASON_ABORT
        last.finish.prompt_crc32 = zlib.crc32(request.token_ids_u32le)
        last.finish.version_spans.add(end=len(ids))
        start = request.routed_experts_start
        rows = len(request.token_ids_u32le) // 4 + len(ids) - 1 - start - missing
        last.columns.append(experts_column(start, np.full((rows, *shape), 7, np.uint8)))
        yield last

    return answer


@pytest.mark.parametrize("missing", [0, 16])
async def test_a_turn_that_a_stop_string_cut_says_that_rows_are_missing(
    mesh: Mesh, client: Client, tokenizer: Tokenizer, missing: int
) -> None:
    await mesh.processes["engine"].terminate()
    async with (
        noting_engine(mesh.addresses.router, "late") as engine,
        client.session(columns=["routed_experts"]) as session,
    ):
        engine.answers = answering(tokenizer, (3, 2), missing)
        asked: Any = {"model": "policy", "messages": [{"role": "user", "content": "plain"}]}
        create = mesh.openai(session).chat.completions.create
        answer = await create(**asked, stop=["more"])
        assert answer.choices[0].message.content == "It is 13, and "
    (trajectory,) = (await delivered(client, session)).trajectories
    experts = trajectory.columns.routed_experts()
    assert experts is not None
    if missing:
        assert trajectory.reasons == ("STOP_STRING", "COLUMNS_INCOMPLETE")
        assert not experts.has_row[:-1].all()
    else:
        assert trajectory.reasons == ("STOP_STRING",)
        assert experts.has_row[:-1].all()


@pytest.mark.parametrize("export", ["leaves", "turns", "tree"])
async def test_rows_of_another_shape_are_left_out_with_a_reason(
    mesh: Mesh, client: Client, tokenizer: Tokenizer, export: ExportForm
) -> None:
    async with client.session(columns=["routed_experts"], export=export) as session:
        talk = Talk(mesh, session)
        await talk.ask("plain")
        await mesh.processes["engine"].terminate()
        async with noting_engine(mesh.addresses.router, "other") as engine:
            engine.answers = answering(tokenizer, (4, 2), 0)
            create = mesh.openai(session).chat.completions.create
            messages: Any = [*talk.messages, {"role": "user", "content": "next"}]
            await create(model="policy", messages=messages, stop=["more"])
    result = await delivered(client, session)
    row = result.trajectories[-1] if result.tree is None else result.tree
    experts = row.columns.routed_experts()
    assert experts is not None
    known = int(experts.has_row.sum())
    assert np.array_equal(experts.rows[:known], scripted_experts(row.token_ids[:known], 0))
    assert not experts.has_row[known:].any()
    assert {"STOP_STRING", "COLUMNS_INCOMPLETE"} <= set(row.reasons)
    parts = result.tree.nodes if result.tree is not None else result.trajectories[-1].segments
    marked = [
        one.sampled
        for one in parts
        if trajectory_pb2.FIDELITY_REASON_COLUMNS_INCOMPLETE in one.reasons
    ]
    assert marked == [False, True]  # the message, and the answer to it
    if export == "turns":
        assert result.trajectories[0].reasons == ("EXACT",)
    lines = map(json.loads, (mesh.folder / "gateway.log").read_text().splitlines())
    (said,) = [one for one in lines if one["event"] == "rows left out"]
    assert (said["column"], said["engine"]) == ("ROUTED_EXPERTS", "other")
    assert (said["shape"], said["expected"]) == ([4, 2], [3, 2])


async def test_a_session_without_columns_has_none(mesh: Mesh, client: Client) -> None:
    async with client.session(sampling=CUT) as session:
        await Talk(mesh, session).ask("plain")
    (trajectory,) = (await delivered(client, session)).trajectories
    assert (trajectory.columns.routed_experts(), trajectory.columns.sampling_support()) == (
        None,
        None,
    )
    wrong: Any = ("routed",)
    with pytest.raises(InvalidFieldError, match=r"columns\[0\]: 'routed' is invalid; give one of"):
        async with client.session(columns=wrong):
            pass
    twice = gateway_pb2.CreateSessionRequest(columns=[EXPERTS, EXPERTS])
    with pytest.raises(InvalidFieldError, match="columns: give kinds of ColumnKind, each once"):
        await client.open_session(twice)


async def test_rows_count_for_the_size_of_a_record(tmp_path: Path, tokenizer_dir: Path) -> None:
    small = {"gateway": {"max_session_record_bytes": 6_000}}
    async with (
        scripted_mesh(tmp_path, tokenizer_dir, RULES, first=small) as mesh,
        mesh.client() as client,
    ):
        wanted: tuple[tuple[Column, ...], ...] = ((), BOTH)
        for columns in wanted:
            async with client.session(columns=columns, sampling={"max_tokens": 12}) as session:
                talk = Talk(mesh, session)
                await talk.ask("plain")
                turn = talk.ask("next " * 40 + "next")
                if not columns:
                    await turn
                    continue
                with pytest.raises(openai.BadRequestError, match="max_session_record_bytes"):
                    await turn
