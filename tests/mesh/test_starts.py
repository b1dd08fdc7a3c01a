"""Sessions that start from a recorded node: exact prefixes, no second training, kills, refusals."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import pytest_asyncio

from rollmesh.batches import group_advantages, ragged, rows_of
from rollmesh.client import (
    Client,
    Group,
    Session,
    SessionResult,
    Start,
    SubscribeOptions,
    recorded_node,
    rollout,
    start_of_atif,
)
from rollmesh.client.sync import Client as SyncClient
from rollmesh.record import documents_of
from rollmesh.runtime.errors import InvalidFieldError, ModelMismatchError, RollmeshError
from rollmesh.v1 import gateway_pb2, session_pb2
from tests.meshes import Mesh, delivered

pytestmark = pytest.mark.asyncio(loop_scope="module")
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2]}}\n</tool_call>'
RULES = [
    ("plain", f"I add.\n{CALL}"),
    ("<tool_response>\n3\n</tool_response>", "It is 3."),
    ("more", " More text. "),
    ("again", "And again."),
]
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {"type": "object", "properties": {"a": {"type": "number"}}},
        },
    }
]


class Recorded(NamedTuple):
    """A session of three turns, as the collector has it."""

    session_id: str
    nodes: list[int]
    """Its nodes: user, call, result, answer, user, answer."""
    messages: list[dict[str, Any]]
    """What the agent had of it."""
    ids: list[int]
    ends: list[int]
    """Number of ids up to each node."""


async def chat(mesh: Mesh, session: Session, messages: list[Any], **more: Any) -> dict[str, Any]:
    agent = mesh.openai(session)
    answer = await agent.chat.completions.create(
        model="policy", messages=messages, tools=TOOLS, **more
    )
    message: dict[str, Any] = answer.choices[0].message.model_dump(exclude_none=True)
    return message


async def record(mesh: Mesh, client: Client, **settings: Any) -> Recorded:
    messages: list[Any] = [{"role": "user", "content": "plain"}]
    async with client.session(record_messages=True, **settings) as session:
        messages.append(await chat(mesh, session, messages))
        called = messages[-1]["tool_calls"][0]["id"]
        messages.append({"role": "tool", "content": "3", "tool_call_id": called})
        messages.append(await chat(mesh, session, messages))
        messages.append({"role": "user", "content": "more"})
        messages.append(await chat(mesh, session, messages))
    result = await delivered(client, session)
    (row,) = result.trajectories
    ends = {one.node_id: one.end for one in row.segments}
    return Recorded(session.session_id, [*ends], messages, row.token_ids.tolist(), [*ends.values()])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def recorded(shared: Mesh) -> AsyncIterator[Recorded]:
    async with shared.client() as client:
        yield await record(shared, client)


def check_row(result: SessionResult, start: Start, turns: int) -> None:
    """What holds of each session that went on from a start."""
    (row,) = result.trajectories
    size = len(start.token_ids)
    assert row.token_ids[:size].tolist() == start.token_ids.tolist()
    assert not row.loss_mask[:size].any()
    assert not row.logprobs[:size].any()
    assert (row.policy_versions[:size] == -1).all()
    assert (row.turns, result.turns, row.lineage) == (turns, turns, "MAIN")
    assert row.prompt_tokens >= size
    assert row.loss_mask[row.prompt_tokens]
    assert result.origin is not None
    assert result.origin.kind == session_pb2.ORIGIN_KIND_TOKENS
    assert result.origin.continued
    assert ("IMPORTED" in row.reasons) == any(one.sampled for one in start.request.nodes)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("at", range(6), ids=["root", "call", "result", "text", "user", "leaf"])
async def test_a_session_goes_on_from_any_node_with_the_recorded_ids(
    shared: Mesh, recorded: Recorded, at: int, *, stream: bool
) -> None:
    next_ones: dict[str, Any] = {
        "user": [],
        "tool": [],
        "assistant": [{"role": "user", "content": "again"}],
    }
    async with shared.client() as client:
        start = await client.start_at(recorded.session_id, recorded.nodes[at])
        assert start.token_ids.tolist() == recorded.ids[: recorded.ends[at]]
        assert start.tools == TOOLS
        role = start.messages[-1]["role"]
        more = next_ones[role]
        if start.messages[-1].get("tool_calls"):
            called = start.messages[-1]["tool_calls"][0]["id"]
            more = [{"role": "tool", "content": "3", "tool_call_id": called}]
        async with client.session(start=start, record_messages=True) as session:
            assert session.start is start
            agent = shared.openai(session)
            asked: Any = [*start.messages, *more]
            answer: Any = await agent.chat.completions.create(
                model="policy", messages=asked, tools=TOOLS, stream=stream
            )
            if stream:
                async for _ in answer:
                    pass
        result = await delivered(client, session)
        check_row(result, start, 1)
        assert result.origin is not None
        (origin,) = result.origin.nodes
        assert (origin.session_id, origin.node_id, origin.tokens) == (
            recorded.session_id, recorded.nodes[at], recorded.ends[at],
        )  # fmt: skip
        (row,) = result.trajectories
        if at < 2:  # the same prompt as the recorded turn
            end = recorded.ends[at]
            assert row.token_ids[: end + 3].tolist() == recorded.ids[: end + 3]


async def test_an_echo_that_lost_its_text_continues_an_imported_answer(
    shared: Mesh, recorded: Recorded
) -> None:
    async with shared.client() as client:
        start = await client.start_at(recorded.session_id, recorded.nodes[-1])
        messages = [*start.messages[:-1], {"role": "assistant", "content": "More text."}]
        messages += [{"role": "user", "content": "again"}]
        async with client.session(start=start) as session:
            await chat(shared, session, messages)
        result = await delivered(client, session)
    check_row(result, start, 1)
    assert "LENIENT_ECHO" in result.trajectories[0].reasons


async def test_a_conversation_that_does_not_continue_the_context_is_a_session_of_its_own(
    shared: Mesh, recorded: Recorded
) -> None:
    async with shared.client() as client:
        start = await client.start_at(recorded.session_id, recorded.nodes[-1])
        async with client.session(start=start) as session:
            await chat(shared, session, [{"role": "user", "content": "again"}])
        result = await delivered(client, session)
        (row,) = result.trajectories
        assert (row.lineage, row.reasons, row.turns) == ("MAIN", ("EXACT",), 1)
        assert result.origin is not None
        assert not result.origin.continued
        async with client.session(start=start) as session:
            pass
        result = await delivered(client, session)
        assert (result.trajectories, result.turns) == ((), 0)
        async with client.session(start=start) as session:  # from the middle of the context
            await chat(shared, session, [*start.messages[:1]])
        (row,) = (await delivered(client, session)).trajectories
        assert (row.lineage, row.reasons) == ("MAIN", ("EXACT",))
        end = recorded.ends[0]
        assert row.token_ids[:end].tolist() == recorded.ids[:end]


@pytest.mark.parametrize("export", ["leaves", "turns", "tree"])
async def test_a_session_that_was_imported_is_imported_again(
    shared: Mesh, recorded: Recorded, export: Any
) -> None:
    async with shared.client() as client:
        first = await client.start_at(recorded.session_id, recorded.nodes[3])
        settings: Any = {"record_messages": True, "export": export}
        async with client.session(start=first, **settings) as session:
            messages = [*first.messages, {"role": "user", "content": "more"}]
            messages.append(await chat(shared, session, messages))
        await delivered(client, session)
        stored = await client.stored_session(session.session_id)
        assert stored.recorded is not None
        last = stored.recorded.messages[-1].node_id
        second = await client.start_at(session.session_id, last)
        end = len(first.token_ids)
        assert second.token_ids[:end].tolist() == first.token_ids.tolist()
        assert [(one.session_id, one.tokens) for one in second.request.origin.nodes] == [
            (session.session_id, len(second.token_ids)), (recorded.session_id, end),
        ]  # fmt: skip
        earlier = await client.start_at(session.session_id, recorded.nodes[1])
        assert [one.tokens for one in earlier.request.origin.nodes] == [recorded.ends[1]] * 2
        async with client.session(start=second) as session:
            await chat(shared, session, [*messages, {"role": "user", "content": "again"}])
        result = await delivered(client, session)
    check_row(result, second, 1)
    assert result.origin is not None
    assert len(result.origin.nodes) == 2


async def test_siblings_from_one_node_are_a_group_with_one_prefix(
    shared: Mesh, recorded: Recorded
) -> None:
    rewards = count()
    async with shared.client() as client:
        start = await client.start_at(recorded.session_id, recorded.nodes[3])

        async def run(sample: str, session: Session) -> float:
            assert session.start is not None
            messages = [*session.start.messages, {"role": "user", "content": sample}]
            await chat(shared, session, messages)
            return float(next(rewards))

        group = Group(sample="again", group_id="siblings", start=start)
        summary = await rollout(client, [group], n=3, runner=run, run_id="r", needed="all")
        assert summary.counts == {"COMPLETED": 3}
        async with client.subscribe("of siblings") as groups, asyncio.timeout(60):
            delivery = await anext(groups)
            while delivery.group_id != "siblings":
                delivery = await anext(groups)
    assert len(delivery.sessions) == 3
    for session in delivery.sessions:
        check_row(session, start, 1)
    found = rows_of([delivery])
    prompts = [one.trajectory.token_ids[: one.trajectory.prompt_tokens] for one in found.rows]
    assert [one.tolist() for one in prompts] == [prompts[0].tolist()] * 3
    columns = ragged(found).trajectories
    advantages = group_advantages(columns)
    assert sorted(advantages.tolist()) == [-1, 0, 1]
    assert np.array_equal(advantages + 1, columns.reward)


async def test_a_context_survives_a_killed_gateway_before_and_in_the_first_turn(
    shared: Mesh, recorded: Recorded
) -> None:
    async with shared.client() as client:
        start = await client.start_at(recorded.session_id, recorded.nodes[3])
        request = client.session_request(start=start, request_id="kill", record_messages=True)
        session = await client.open_session(request)
        await shared.restart("gateway")
        again = await client.open_session(request)
        assert again.session_id == session.session_id
        tree = await client.open_session_tree(session.session_id)
        assert [one.node_id for one in tree.nodes] == recorded.nodes[:4]
        assert tree.session.origin.nodes[0].session_id == recorded.session_id
        messages: list[Any] = [*start.messages, {"role": "user", "content": "again"}]
        agent = shared.openai(session)
        stream: Any = await agent.chat.completions.create(
            model="policy", messages=messages, tools=TOOLS, stream=True
        )
        async for _ in stream:  # a part of the answer has arrived
            break
        await shared.restart("gateway")
        await chat(shared, session, messages)
        await client.close_session(session)
        result = await delivered(client, session)
    (row,) = result.trajectories
    assert row.token_ids[: recorded.ends[3]].tolist() == recorded.ids[: recorded.ends[3]]
    assert result.origin is not None
    assert result.origin.continued


async def test_two_equal_imports_at_once_open_one_session(shared: Mesh, recorded: Recorded) -> None:
    async with shared.client() as client:
        start = await client.start_at(recorded.session_id, recorded.nodes[-1])
        requests = [client.session_request(start=start, request_id="twice") for _ in range(4)]
        sessions = await asyncio.gather(*map(client.open_session, requests))
        assert len({one.session_id for one in sessions}) == 1
        tree = await client.open_session_tree(sessions[0].session_id)
        assert [one.node_id for one in tree.nodes] == recorded.nodes
        await client.close_session(sessions[0])


def damaged(request: gateway_pb2.SessionStart, how: str) -> None:
    node = request.nodes[1]
    ids = np.frombuffer(node.token_ids_u32le, "<u4").copy()
    match how:
        case "tokenizer":
            request.tokenizer_sha256 = "0" * 64
        case "template":
            request.template_sha256 = ""
        case "id outside":
            ids[0] = 1 << 31
            node.token_ids_u32le = ids.tobytes()
        case "other id":
            ids[-1] += 1
            node.token_ids_u32le = ids.tobytes()
        case "half an id":
            node.token_ids_u32le = node.token_ids_u32le[:-1]
        case "node missing":
            del request.nodes[2]
        case "cut":
            del request.nodes[3:]
        case "twice":
            request.nodes[2].node_id = node.node_id
        case "no JSON":
            node.data = b"[{"
        case "no message":
            node.data = b'["a"]'
        case "no Unicode":
            node.data = b'[{"role": "assistant", "content": "\\ud800"}]'
        case "no answer":
            request.nodes[0].sampled = True
        case "image":
            request.nodes[
                0
            ].data = (
                b'[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}]'
            )
        case "merged":
            request.nodes[2].data = b'[{"role": "user", "content": "a"}, {"role": "user"}]'
        case "nothing":
            request.origin.ClearField("nodes")
        case "tools":
            request.context.data = b'{"tools": 3}'


@pytest.mark.parametrize(
    ("how", "field"),
    [
        ("tokenizer", "start.tokenizer_sha256"),
        ("template", "start.template_sha256"),
        ("id outside", "start.nodes[1].token_ids_u32le"),
        ("other id", "start.nodes[3].prompt_crc32"),
        ("half an id", "start.nodes[1].token_ids_u32le"),
        ("node missing", "start.nodes[2].prompt_crc32"),
        ("cut", "start.nodes"),
        ("twice", "start.nodes[2].node_id"),
        ("no JSON", "start.nodes[1].data"),
        ("no message", "start.nodes[1].data"),
        ("no Unicode", "start.nodes[1].data"),
        ("no answer", "start.nodes[0].sampled"),
        ("image", "start.nodes[0].data"),
        ("merged", "start.nodes"),
        ("nothing", "start.origin.nodes"),
        ("tools", "start.context.data"),
    ],
)
async def test_a_damaged_or_foreign_context_opens_no_session(
    shared: Mesh, recorded: Recorded, how: str, field: str
) -> None:
    async with shared.client() as client:
        start = await client.start_at(recorded.session_id, recorded.nodes[3])
        damaged(start.request, how)
        request = client.session_request(start=start, request_id=f"damaged {how}")
        with pytest.raises(InvalidFieldError) as refused:
            await client.open_session(request)
        assert refused.value.field == field
        if how in ("tokenizer", "template"):
            assert isinstance(refused.value, ModelMismatchError)
            assert "as text" in str(refused.value)
        assert await client.find_session(f"damaged {how}") is None


async def test_a_session_without_messages_cannot_be_started_from(shared: Mesh) -> None:
    async with shared.client() as client:
        async with client.session() as session:
            await chat(shared, session, [{"role": "user", "content": "again"}])
        await delivered(client, session)
        with pytest.raises(InvalidFieldError, match="record_messages=True"):
            await client.start_at(session.session_id, 1)


async def test_a_start_as_text_is_a_prompt_that_the_template_prints(
    shared: Mesh, recorded: Recorded
) -> None:
    async with shared.client() as client:
        with pytest.raises(RollmeshError, match="node_id"):
            await client.start_at(recorded.session_id, 999)
        start = await client.start_at(recorded.session_id, recorded.nodes[3], as_text=True)
        assert start.token_ids.size == 0
        async with client.session(start=start) as session:
            messages = [*start.messages, {"role": "user", "content": "again"}]
            await chat(shared, session, messages)
        result = await delivered(client, session)
    (row,) = result.trajectories
    assert (row.turns, row.reasons) == (1, ("EXACT",))
    assert result.origin is not None
    assert result.origin.kind == session_pb2.ORIGIN_KIND_TEXT
    assert result.origin.nodes[0].session_id == recorded.session_id


ATIF: dict[str, Any] = {
    "schema_version": "ATIF-v1.8",
    "trajectory_id": "doc-1",
    "agent": {"name": "a", "version": "1", "tool_definitions": TOOLS},
    "steps": [
        {"step_id": 1, "source": "system", "message": "Be brief."},
        {"step_id": 2, "source": "user", "message": [{"type": "text", "text": "plain"}]},
        {
            "step_id": 3,
            "source": "agent",
            "message": "I add.",
            "reasoning_content": "Hm.",
            "tool_calls": [
                {"tool_call_id": "c1", "function_name": "add", "arguments": {"a": 1, "é": "ü"}}
            ],
            "observation": {
                "results": [{"content": "A warning."}, {"source_call_id": "c1", "content": "3"}]
            },
        },
        {"step_id": 4, "source": "agent", "message": "It is 3."},
    ],
}


async def test_an_atif_document_is_a_conversation() -> None:
    start = start_of_atif(ATIF, last_step=3)
    assert start.tools == TOOLS
    assert start.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "plain"},
        {
            "role": "assistant",
            "content": "I add.",
            "reasoning_content": "Hm.",
            "tool_calls": [
                {
                    "id": "c1",
                    "type": "function",
                    "function": {"name": "add", "arguments": '{"a": 1, "é": "ü"}'},
                }
            ],
        },
        {"role": "tool", "content": "3", "tool_call_id": "c1"},
        {"role": "user", "content": "A warning."},
    ]
    assert start.request.origin.document_id == "doc-1"
    image = {"type": "image", "source": {"media_type": "image/png", "path": "a.png"}}
    changes: list[dict[str, Any]] = [
        {"schema_version": "2"},
        {"steps": []},
        {"steps": [{"step_id": 1, "source": "user"}]},
        {"steps": [{"step_id": 1, "source": "user", "message": [image]}]},
        {"steps": 3},
        {"agent": None},
    ]
    for changed in changes:
        with pytest.raises(InvalidFieldError):
            start_of_atif({**ATIF, **changed})
    with pytest.raises(InvalidFieldError, match="no step 9"):
        start_of_atif(ATIF, last_step=9)


async def imported(mesh: Mesh, *flags: str) -> tuple[int, list[dict[str, Any]], str]:
    """Runs `rollmesh import` and returns its exit code, its lines and its errors."""
    addresses = [f"--{name}={mesh.address(name)}" for name in ("router", "gateway", "sidecar")]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "rollmesh.cli.imports", *addresses, *flags),
        f"--collector={mesh.address('collector')}",
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, errors = await process.communicate()
    assert process.returncode is not None
    return process.returncode, [json.loads(line) for line in out.splitlines()], errors.decode()


async def test_the_command_opens_siblings_once_with_a_conversation_for_their_agents(
    shared: Mesh, recorded: Recorded, tmp_path: Path
) -> None:
    path = tmp_path / "conversation.json"
    node = ("--session", recorded.session_id, "--node", str(recorded.nodes[-1]))
    flags = (*node, "--count=2", "--request-id=cli", f"--conversation={path}")
    code, lines, told = await imported(shared, *flags)
    assert (code, told) == (0, "")
    code, again, told = await imported(shared, *flags)
    assert again == lines
    assert [one["sample_index"] for one in lines] == [0, 1]
    assert [one["context_tokens"] for one in lines] == [recorded.ends[-1]] * 2
    conversation = json.loads(path.read_text())
    async with shared.client() as client:
        start = await client.start_at(recorded.session_id, recorded.nodes[-1])
        for line in lines:
            agent = shared.agent(line["base_url"], line["api_key"])
            await agent.chat.completions.create(
                model=line["model"],
                messages=[*conversation["messages"], {"role": "user", "content": "again"}],
                tools=conversation["tools"],
            )
            session = Session(line["session_id"], line["api_key"], line["base_url"])
            await client.close_session(session)
            result = await delivered(client, session)
            check_row(result, start, 1)
            assert (result.group_id, result.sample_index) == ("cli", line["sample_index"])
    code, lines, told = await imported(shared, *node[:2], "--node=999")
    assert (code, lines) == (1, [])
    assert "node_id: 999" in told


async def test_the_command_takes_a_document_with_half_a_character_and_no_endless_one(
    shared: Mesh, tmp_path: Path
) -> None:
    document, path = tmp_path / "atif.json", tmp_path / "conversation.json"
    step = {"step_id": 1, "source": "user", "message": "half \ud83d"}
    document.write_text(json.dumps({**ATIF, "steps": [step]}))
    code, lines, told = await imported(shared, f"--atif={document}", f"--conversation={path}")
    assert (code, len(lines), told) == (0, 1, "")
    assert json.loads(path.read_text())["messages"][0]["content"] == "half \ud83d"
    document.write_text("[" * 100_000)
    code, lines, told = await imported(shared, f"--atif={document}")
    assert (code, lines) == (2, [])
    assert told.startswith("rollmesh import: --atif: ")


async def test_a_document_of_ours_starts_from_the_recorded_ids(
    shared: Mesh, recorded: Recorded, tmp_path: Path
) -> None:
    async with shared.client() as client:
        options = SubscribeOptions(messages=True)
        async with client.subscribe("atif", unit="session", options=options) as deliveries:
            delivery = await anext(deliveries)
            while delivery.sessions[0].session_id != recorded.session_id:
                delivery = await anext(deliveries)
    (document,) = documents_of(delivery.sessions[0])
    assert recorded_node(document) == (recorded.session_id, recorded.nodes[-1])
    assert recorded_node(document, 2) == (recorded.session_id, recorded.nodes[1])
    assert recorded_node(document, 1) is None
    assert recorded_node(ATIF) is None
    text = start_of_atif(document)
    assert [one["role"] for one in text.messages] == [one["role"] for one in recorded.messages]
    path = tmp_path / "trajectory.json"
    path.write_text(json.dumps(document))
    for flags, tokens in (([], recorded.ends[-1]), (["--step=2"], recorded.ends[1])):
        _, (line,), _ = await imported(shared, f"--atif={path}", *flags)
        assert line["context_tokens"] == tokens
    _, (line,), _ = await imported(shared, f"--atif={path}", "--as-text")
    assert line["context_tokens"] == 0


async def test_the_command_reads_atif(shared: Mesh, tmp_path: Path) -> None:
    path = tmp_path / "trajectory.json"
    path.write_text(json.dumps(ATIF))
    code, (line,), told = await imported(shared, f"--atif={path}")
    assert (code, told, line["context_tokens"]) == (0, "", 0)
    async with shared.client() as client:
        tree = await client.open_session_tree(line["session_id"])
        assert tree.session.origin.document_id == "doc-1"
        assert tree.session.origin.kind == session_pb2.ORIGIN_KIND_TEXT
    path.write_text("[]")
    code, lines, told = await imported(shared, f"--atif={path}")
    assert (code, lines) == (2, [])


async def test_an_answer_that_was_cut_is_closed_as_in_its_own_session(shared: Mesh) -> None:
    messages: list[Any] = [{"role": "user", "content": "plain"}]
    async with shared.client() as client:
        async with client.session(record_messages=True) as session:
            messages.append(await chat(shared, session, messages, max_tokens=3))
            messages.append({"role": "user", "content": "again"})
            await chat(shared, session, messages)
        (own,) = (await delivered(client, session)).trajectories
        cut = next(one for one in own.segments if one.sampled)
        start = await client.start_at(session.session_id, cut.node_id)
        async with client.session(start=start) as again:
            await chat(shared, again, messages)
        result = await delivered(client, again)
    check_row(result, start, 1)
    (row,) = result.trajectories
    assert row.token_ids.tolist() == own.token_ids.tolist()


async def test_another_model_is_refused_and_the_blocking_client_starts_too(
    shared: Mesh, recorded: Recorded
) -> None:
    def work() -> str:
        with SyncClient(shared.addresses) as client:
            start = client.start_at(recorded.session_id, recorded.nodes[-1])
            with pytest.raises(ModelMismatchError, match="model"):
                client.open_session(client.session_request(start=start, model="other"))
            with client.session(start=start) as session:
                tree = client.open_session_tree(session.session_id)
            assert [one.node_id for one in tree.nodes] == recorded.nodes
            return tree.session.origin.nodes[0].session_id

    assert await asyncio.to_thread(work) == recorded.session_id
