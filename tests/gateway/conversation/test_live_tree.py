"""Random conversations with a real gateway, real failures between, and every export of the end."""

import asyncio
import dataclasses
import json
import random
import sqlite3
import zlib
from collections import Counter
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory

import grpc
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from rollmesh.client import SessionResult, Subscription
from rollmesh.gateway import Session, Transaction, journal
from rollmesh.runtime.codec import text_of
from rollmesh.runtime.rpc import from_rpc_error
from rollmesh.v1 import chat_pb2, gateway_pb2, sampling_pb2, session_pb2, trajectory_pb2
from tests.chat.images.pictures import picture
from tests.gateway.closing import write_record
from tests.gateway.live import LiveMesh
from tests.messages import close_of, said

TOOLS = json.dumps([{"type": "function", "function": {"name": "f"}}])
TIMEOUT_S = 180
PASSING = {"ENGINE_LOST", "ENGINE_DEAD", "GENERATION_ABORTED", "SHUTTING_DOWN", "REMOTE"}
PASSING |= {"NO_ENGINE", "STORE_FAILED", "STARTING"}
MODES = gateway_pb2.ExportMode.values()[1:]
ORPHANED = trajectory_pb2.FIDELITY_REASON_ORPHANED
EXCUSES = {trajectory_pb2.FIDELITY_REASON_AUXILIARY, ORPHANED}
POLICIES = gateway_pb2.DisconnectPolicy.values()
PICTURES = picture(64, 64), picture(96, 64, seed=1), picture(64, 32, seed=2)
"""Of 4, 6 and 2 ids, so that a prompt says which it shows."""
SIZES = dict(zip((sha256(one).hexdigest() for one in PICTURES), (4, 6, 2), strict=True))


@dataclass
class Agent:
    """Asks in one session, by chance."""

    mesh: LiveMesh
    dice: random.Random
    session_id: str
    session_key: str
    histories: list[tuple[list[chat_pb2.ChatMessage], str]] = field(
        default_factory=lambda: [([], "")]
    )
    answered: dict[str, gateway_pb2.ChatAnswer] = field(default_factory=dict)
    asked: list[tuple[gateway_pb2.ChatRequest, str]] = field(default_factory=list)
    unanswered: int = 0
    """Calls that ended without an answer."""
    sees: bool = False
    """Whether it shows images."""

    def request(self) -> gateway_pb2.ChatRequest:
        """A new turn on any conversation so far, perhaps edited, perhaps with other tools."""
        dice = self.dice
        history, tools = dice.choice(self.histories)
        messages = []
        for message in history:
            messages.append(chat_pb2.ChatMessage())
            messages[-1].CopyFrom(message)
        if messages and dice.random() < 0.15:
            edited = dice.choice(messages)
            edited.content.add(text=dice.choice([" ", "!"]))
        messages.append(said(dice.choice(["x", "y", " z "])))
        if self.sees and dice.random() < 0.4:
            media = chat_pb2.Media(data=dice.choice(PICTURES))
            messages[-1].content.insert(dice.randrange(2), chat_pb2.ContentPart(image=media))
        if dice.random() < 0.1:
            tools = TOOLS if not tools else ""
        max_tokens = dice.randrange(1, 12) if dice.random() < 0.3 else None
        return gateway_pb2.ChatRequest(
            session_id=self.session_id,
            session_key=self.session_key,
            messages=messages,
            tools_json=tools,
            sampling=sampling_pb2.SamplingParams(max_tokens=max_tokens),
            stop=[dice.choice("aeinst")] if dice.random() < 0.3 else [],
            idempotency_key=f"{dice.random()}" if dice.random() < 0.4 else "",
            disconnect_policy=dice.choice(POLICIES),
        )

    async def new_turn(self) -> None:
        """Asks, goes on asking while the mesh fails, and echoes the answer as agents do."""
        request = self.request()
        leave_after = self.dice.choice([0, 1, 2]) if self.dice.random() < 0.2 else None
        if leave_after is not None:
            await self.call(request, leave_after)
            if self.dice.random() < 0.5:
                return
        async with asyncio.timeout(TIMEOUT_S):
            while (done := await self.call(request)) is None:
                request.retry_count += 1
                await asyncio.sleep(0.02)  # as the SDKs do between tries
        echo = chat_pb2.ChatMessage()
        echo.CopyFrom(done.message)
        if echo.content and self.dice.random() < 0.3:
            echo.content[0].text = echo.content[0].text.strip()
        self.histories.append(([*request.messages, echo], request.tools_json))
        self.asked.append((request, done.answer_id))

    async def again(self) -> None:
        """Asks for an answer again that was given: a retry, or another sample."""
        if not self.asked:
            return
        first, answer_id = self.dice.choice(self.asked)
        request = gateway_pb2.ChatRequest()
        request.CopyFrom(first)
        request.retry_count = self.dice.randrange(2)
        done = await self.call(request)
        if done is not None and request.idempotency_key:
            assert done.answer_id == answer_id

    async def twins(self) -> None:
        """Asks the same twice at a time."""
        request = self.request()
        first, second = await asyncio.gather(self.call(request), self.call(request))
        if first is not None and second is not None:
            assert (first.answer_id == second.answer_id) == bool(request.idempotency_key)

    async def call(
        self, request: gateway_pb2.ChatRequest, leave_after: int | None = None
    ) -> gateway_pb2.ChatAnswer | None:
        """Returns the answer. None where there was none, or the agent left before it."""
        streams = leave_after is not None or self.dice.random() < 0.5
        try:
            answer = await (self.streamed(request, leave_after) if streams else self.whole(request))
        except grpc.aio.AioRpcError as error:
            if from_rpc_error(error).reason not in PASSING:
                raise
            answer = None
        self.unanswered += answer is None
        return answer

    async def whole(self, request: gateway_pb2.ChatRequest) -> gateway_pb2.ChatAnswer:
        response = await self.mesh.stub.Chat(request, timeout=TIMEOUT_S, wait_for_ready=True)
        (answer,) = response.answers
        self.check(answer, request)
        return answer

    async def streamed(
        self, request: gateway_pb2.ChatRequest, leave_after: int | None
    ) -> gateway_pb2.ChatAnswer | None:
        call = self.mesh.stub.StreamChat(
            gateway_pb2.StreamChatRequest(chat=request), timeout=TIMEOUT_S, wait_for_ready=True
        )
        pieces: list[str] = []
        begun = ""
        try:
            async for response in call:
                if response.HasField("begun"):
                    begun = response.begun.answer_id
                    continue
                if response.HasField("done"):
                    assert begun == response.done.answer_id
                    assert "".join(pieces) == text_of(response.done.message)
                    self.check(response.done, request)
                    return response.done
                pieces.append(response.delta.content)
                if leave_after is not None and len(pieces) >= leave_after:
                    break
        finally:
            call.cancel()
        return None

    def check(
        self,
        done: gateway_pb2.ChatAnswer,
        request: gateway_pb2.ChatRequest,
    ) -> None:
        said = trajectory_pb2.FIDELITY_REASON_RETRY_REPLAY
        kept = [reason for reason in done.reasons if reason != said]
        del done.reasons[:]
        done.reasons.extend(kept)  # a retry's answer says that it is one
        before = self.answered.setdefault(done.answer_id, done)
        assert before == done


@dataclass
class Rows:
    """How often each sampled node is exported, and how often it is trained."""

    mesh: LiveMesh
    trained: Counter[int] = field(default_factory=Counter)
    excused: set[int] = field(default_factory=set)
    orphaned: set[int] = field(default_factory=set)
    nodes: dict[int, tuple[list[int], list[int]]] = field(default_factory=dict)

    def add(
        self,
        ids: np.ndarray,
        place: tuple[int, int],
        part: trajectory_pb2.TrajectorySegment | trajectory_pb2.TrajectoryNode,
        mask: np.ndarray,
    ) -> None:
        """Adds the sample at `place` after `ids[: place[0]]`."""
        start, end = place
        prompt, sampled = ids[:start].tolist(), ids[start:end].tolist()
        assert zlib.crc32(np.asarray(ids[:start], "<u4").tobytes()) == part.prompt_crc32
        assert self.nodes.setdefault(part.node_id, (prompt, sampled)) == (prompt, sampled)
        assert bool(mask[start:end].all()) == part.trained or not sampled
        assert bool(mask[start:end].any()) == (part.trained and bool(sampled))
        self.trained[part.node_id] += part.trained
        if set(part.reasons) & EXCUSES:
            self.excused.add(part.node_id)
        if ORPHANED in part.reasons:
            self.orphaned.add(part.node_id)

    def check(self, agent: Agent) -> None:
        for node_id in self.nodes:
            assert self.trained[node_id] == (node_id not in self.excused)
        answered = {done.node_id: done for done in agent.answered.values()}
        assert answered.keys() <= self.nodes.keys()
        assert not answered.keys() & self.orphaned  # what an agent got is none
        assert len(self.nodes) <= len(answered) + agent.unanswered
        for node_id, done in answered.items():
            prompt, sampled = self.nodes[node_id]
            assert (done.prompt_tokens, done.completion_tokens) == (len(prompt), len(sampled))
        seen = Counter(tuple(one.prompt) for one in self.mesh.generations)
        used = Counter(tuple(prompt) for prompt, _ in self.nodes.values())
        assert used <= seen  # no sample was taken twice
        replies = {tuple(one.prompt): one.sampled for one in self.mesh.generations}
        for one in self.mesh.generations:  # the longest, where some were cut
            if len(one.sampled) > len(replies[tuple(one.prompt)]):
                replies[tuple(one.prompt)] = one.sampled
        for prompt, sampled in self.nodes.values():
            assert replies[tuple(prompt)][: len(sampled)] == sampled


def rows_of(mesh: LiveMesh, result: SessionResult) -> Rows:
    rows = Rows(mesh)
    for trajectory in result.trajectories:
        for segment in trajectory.segments:
            if segment.sampled:
                place = (segment.start, segment.end)
                rows.add(trajectory.token_ids, place, segment, trajectory.loss_mask)
    if result.tree is not None:
        for at, node in enumerate(result.tree.nodes):
            if node.sampled:
                path = result.tree.path(at)
                ids, mask = result.tree.token_ids[path], result.tree.loss_mask[path]
                place = (len(path) - (node.end - node.start - node.scaffold_tokens), len(path))
                mask[: place[0]] = False
                rows.add(ids, place, node, mask)
    return rows


def check_memory(session: Session) -> None:
    """At most 16 bytes per stored token, whatever the arrays are cut from."""
    held: dict[int, int] = {}
    for node in session.tree.nodes.values():
        arrays: list[np.ndarray] = [node.token_ids]
        if node.sample is not None:
            arrays += [node.sample.token_ids, node.sample.logprobs]
        for array in arrays:
            base = array
            while isinstance(base.base, np.ndarray):
                base = base.base
            held[id(base)] = base.nbytes
    assert sum(held.values()) <= 16 * session.tree.tokens


def exported(session: Session, mode: gateway_pb2.ExportMode.ValueType) -> SessionResult:
    close = gateway_pb2.CloseSessionRequest(outcome=session_pb2.SESSION_OUTCOME_COMPLETED)
    spec = dataclasses.replace(session.spec, export_mode=mode)
    record = write_record(spec, session.tree, close, 1)
    for trajectory in record.trajectories:
        check_images(trajectory)
    check_images(record.tree)
    return SessionResult.from_proto(record)


def check_images(one: trajectory_pb2.Trajectory | trajectory_pb2.TrajectoryTree) -> None:
    """The images are exactly where the ids that stand for them are, in their order."""
    ids = np.frombuffer(one.tokens.token_ids_u32le, "<u4")
    told = np.zeros(len(ids), bool)
    for image in one.images:
        assert image.tokens == SIZES[image.sha256]
        assert len(set(ids[image.start : image.start + image.tokens].tolist())) == 1
        assert not told[image.start : image.start + image.tokens].any()
        told[image.start : image.start + image.tokens] = True
    sampled = np.zeros(len(ids), bool)  # a script does not know which ids it may not sample
    if isinstance(one, trajectory_pb2.TrajectoryTree):
        for node in one.nodes:
            sampled[node.start + node.scaffold_tokens : node.end] = node.sampled
    else:
        for segment in one.segments:
            sampled[segment.start : segment.end] = segment.sampled
    assert not len(one.images) or np.array_equal(np.isin(ids, ids[told]) & ~sampled, told)


async def live(folder: Path, model: Path, seed: int, rounds: int, *, sees: bool) -> None:
    dice = random.Random(seed)
    async with LiveMesh(folder, model, dice, faults=0.25) as mesh:
        mode = dice.choice(MODES)
        opened = await mesh.stub.CreateSession(gateway_pb2.CreateSessionRequest(export_mode=mode))
        agent = Agent(mesh, dice, opened.session_id, opened.session_key, sees=sees)
        for _ in range(rounds):
            kinds = dice.choices([agent.new_turn, agent.again, agent.twins], [6, 2, 1], k=4)
            async with asyncio.TaskGroup() as group:
                for kind in kinds:
                    group.create_task(kind())
                if dice.random() < 0.3:
                    group.create_task(mesh.start_gateway())
        session = mesh.gateway.session(agent.session_id)
        await mesh.stub.CloseSession(close_of(opened))
        # Not before: turns of agents that left may be ending, and orphans are known at the close.
        for one in MODES:
            rows_of(mesh, exported(session, one)).check(agent)
        check_memory(session)
        async with (
            Subscription(mesh.collector, consumer="t", unit="session") as deliveries,
            asyncio.timeout(TIMEOUT_S),
        ):
            (delivered,) = (await anext(deliveries)).sessions
    rows, others = rows_of(mesh, delivered), rows_of(mesh, exported(session, mode))
    assert (rows.nodes, rows.trained) == (others.nodes, others.trained)
    assert delivered.turns == len(rows.nodes)


@pytest.mark.long
@given(seed=st.integers(0, 2**32), rounds=st.integers(2, 8))
@settings(max_examples=30)
def test_whatever_happens_every_sampled_token_is_trained_once_or_excused(
    tokenizer_dir: Path, vision_dir: Path, seed: int, rounds: int
) -> None:
    sees = seed % 2 == 1
    insert, dice = journal.insert_turn, random.Random(seed)

    def insert_or_fail(tx: Transaction, *arguments: object) -> None:
        if dice.random() < 0.1:
            raise sqlite3.OperationalError("as the dice want it")
        insert(tx, *arguments)  # type: ignore[arg-type]

    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(journal, "insert_turn", insert_or_fail)
        model = vision_dir if sees else tokenizer_dir
        asyncio.run(live(Path(folder), model, seed, rounds, sees=sees))
