"""Documents of ATIF: validated by the package atif, of conversations of several forms."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from rollmesh.client import Session
from rollmesh.record import documents_of, leaves_as_result, write_documents
from rollmesh.v1 import chat_pb2, session_pb2, trajectory_pb2
from tests.collector.records import record, trajectory, tree_record, with_images
from tests.meshes import Mesh, delivered, scripted_mesh
from tests.record.readers import read_by

pytestmark = pytest.mark.asyncio(loop_scope="module")
CALLS = "\n".join(
    f'<tool_call>\n{{"name": "look", "arguments": {{"at": {at}}}}}\n</tool_call>' for at in (1, 2)
)
RULES = [
    ("parallel", f"I look twice.\n{CALLS}"),
    ("two\n</tool_response>", "One and two."),
    ("other", "Another end."),
    ("delegate", "I delegate."),
    ("sub task", "The sub-agent's answer."),
    ("summary", "A summary."),
    ("go on", "The work goes on."),
]
TOOLS: Any = [
    {
        "type": "function",
        "function": {"name": "look", "parameters": {"type": "object", "properties": {}}},
    }
]
_VALIDATE = """
import atif, glob, json, sys
found = {}
for name in glob.glob("*.json"):
    text = open(name).read()
    document = atif.Trajectory.model_validate_json(text)
    assert document.to_json_dict() == json.loads(text)
    found[document.trajectory_id] = name
print(json.dumps(found))
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(
    tmp_path_factory: pytest.TempPathFactory, tokenizer_dir: Path
) -> AsyncIterator[Mesh]:
    folder = tmp_path_factory.mktemp("mesh")
    first = {"gateway": {"record_messages": True}}
    async with scripted_mesh(folder, tokenizer_dir, RULES, first=first) as running:
        yield running


class Agent:
    """An agent that names its requests."""

    def __init__(self, mesh: Mesh, session: Session) -> None:
        self._openai = mesh.openai(session)

    async def ask(self, name: str, messages: list[Any], **settings: Any) -> dict[str, Any]:
        """Returns the answer as a message."""
        answer = await self._openai.chat.completions.create(
            model="policy",
            messages=messages,
            extra_headers={"X-ACP-Model-Request-ID": name},
            **settings,
        )
        said: dict[str, Any] = answer.choices[0].message.model_dump(exclude_none=True)
        return said


async def stored(mesh: Mesh, session: Session) -> session_pb2.SessionRecord:
    async with mesh.client() as client:
        await delivered(client, session)
        (one,) = await client.stored_sessions(session_id=session.session_id, arrays=True)
    return one.session


def written(one: session_pb2.SessionRecord, folder: Path) -> list[dict[str, Any]]:
    """Writes the documents of a session, has them validated, and returns them in order."""
    count = write_documents(one, folder, None)
    valid = json.loads(read_by(_VALIDATE, folder))
    found = documents_of(leaves_as_result(one))
    assert len(valid) == count == len(found)
    return [json.loads((folder / valid[one["trajectory_id"]]).read_text()) for one in found]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


@pytest.mark.parametrize("layout", ["leaves", "tree"])
async def test_parallel_calls_have_their_results_in_the_step_that_called(
    mesh: Mesh, tmp_path: Path, layout: Any
) -> None:
    async with mesh.client() as client, client.session(export=layout) as session:
        agent = Agent(mesh, session)
        messages: list[Any] = [{"role": "system", "content": "Look."}, user("parallel")]
        messages.append(await agent.ask("a", messages, tools=TOOLS))
        ids = [call["id"] for call in messages[-1]["tool_calls"]]
        for id_, text in zip(ids, ("one", "two"), strict=True):
            messages.append({"role": "tool", "content": text, "tool_call_id": id_})
        await agent.ask("b", messages, tools=TOOLS)
        await agent.ask("c", [*messages, user("other")], tools=TOOLS)
        session.reward = 0.5
    one = await stored(mesh, session)
    main, branch = written(one, tmp_path)
    system, asked, called, answer = main["steps"]
    assert [step["source"] for step in (system, asked, called, answer)] == [
        "system", "user", "agent", "agent",
    ]  # fmt: skip
    assert [call["arguments"] for call in called["tool_calls"]] == [{"at": 1}, {"at": 2}]
    assert called["observation"]["results"] == [
        {"source_call_id": ids[0], "content": "one"},
        {"source_call_id": ids[1], "content": "two"},
    ]
    assert main["agent"]["tool_definitions"] == TOOLS
    assert main["extra"]["rollmesh"]["reward"] == 0.5
    ours = called["extra"]["rollmesh"]
    assert (ours["trained"], set(ours["policy_versions"])) == (True, {0})
    times = [called["timestamp"], answer["timestamp"]]
    assert times == sorted(times)
    metrics = called["metrics"]
    assert len(metrics["logprobs"]) == len(metrics["completion_token_ids"])
    first = leaves_as_result(one).trajectories[0].token_ids.tolist()
    prompt = metrics["prompt_token_ids"]
    assert (prompt + metrics["completion_token_ids"]) == first[
        : metrics["prompt_tokens"] + len(metrics["completion_token_ids"])
    ]
    copied = [step.get("is_copied_context", False) for step in branch["steps"]]
    assert copied == [True, True, True, False, False]
    assert branch["steps"][-1]["message"] == "Another end."
    own = branch["steps"][-1]["metrics"]["completion_tokens"]
    assert branch["final_metrics"]["total_completion_tokens"] == own


async def test_sub_agents_are_embedded_and_compactions_continue(mesh: Mesh, tmp_path: Path) -> None:
    async with mesh.client() as client, client.session() as session:
        agent = Agent(mesh, session)
        messages: list[Any] = [user("delegate")]
        messages.append(await agent.ask("m1", messages))
        alone = [{"role": "system", "content": "You help."}, user("sub task")]
        await agent.ask("s1", alone)
        await agent.ask("m2", [*messages, user("summary")])
        await agent.ask("c1", [user("A summary. go on")])
        await client.declare_lineage(
            session, [("m1", "s1", "subagent_call"), ("m2", "c1", "compaction")]
        )
    one = await stored(mesh, session)
    main, compacted = written(one, tmp_path)
    (sub,) = main["subagent_trajectories"]
    assert [step["message"] for step in sub["steps"]] == [
        "You help.", "sub task", "The sub-agent's answer.",
    ]  # fmt: skip
    (result,) = main["steps"][1]["observation"]["results"]
    (reference,) = result["subagent_trajectory_ref"]
    assert reference["trajectory_id"] == sub["trajectory_id"]
    labels = [one["extra"]["rollmesh"] for one in (main, compacted)]
    assert [one["lineage"] for one in labels] == ["MAIN", "COMPACTION"]
    assert [one["lineage_rule"] for one in labels] == ["MAIN_PATH", ""]  # the other is declared
    assert main["continued_trajectory_ref"] == f"{compacted['trajectory_id']}.json"
    assert "is_copied_context" not in compacted["steps"][-1]
    for row in one.trajectories:
        if row.lineage == trajectory_pb2.LINEAGE_COMPACTION:
            row.reasons.append(trajectory_pb2.FIDELITY_REASON_COMPACTION_REJECTED)
    assert "continued_trajectory_ref" not in documents_of(leaves_as_result(one))[0]


async def test_a_sub_agent_of_a_sub_agent_is_embedded_in_it(mesh: Mesh, tmp_path: Path) -> None:
    """The inner one ends before the outer one, and edges in a circle embed each once."""
    async with mesh.client() as client, client.session() as session:
        agent = Agent(mesh, session)
        messages: list[Any] = [user("delegate")]
        messages.append(await agent.ask("m1", messages))
        outer: list[Any] = [{"role": "system", "content": "You help."}, user("delegate")]
        outer.append(await agent.ask("a1", outer))
        inner = [{"role": "system", "content": "You look."}, user("sub task")]
        await agent.ask("b1", inner)
        await agent.ask("a2", [*outer, user("go on")])
        await agent.ask("m2", [*messages, user("go on")])
        edges = [("b1", "a2"), ("m1", "a1"), ("a1", "b1")]
        declared = [(source, target, "subagent_call") for source, target in edges]
        await client.declare_lineage(session, declared)
    (main,) = written(await stored(mesh, session), tmp_path)
    (outer_document,) = main["subagent_trajectories"]
    (inner_document,) = outer_document["subagent_trajectories"]
    assert inner_document["steps"][-1]["message"] == "The sub-agent's answer."
    for document, called in ((main, outer_document), (outer_document, inner_document)):
        (result,) = [
            one
            for step in document["steps"]
            for one in step.get("observation", {}).get("results", ())
        ]
        (reference,) = result["subagent_trajectory_ref"]
        assert reference["trajectory_id"] == called["trajectory_id"]


def told(one: session_pb2.SessionRecord, *nodes: list[Any]) -> session_pb2.SessionRecord:
    """The session with messages of its nodes, each after the one before."""
    for number, messages in enumerate(nodes, 1):
        data = json.dumps(messages).encode()
        one.messages.add(node_id=number, parent_node_id=number - 1, data=data, data_bytes=len(data))
    one.trajectories[0].leaf_node_id = len(nodes)
    one.trajectories[0].trajectory_id = f"{one.session_id}-{len(nodes)}"
    return one


def branches() -> session_pb2.SessionRecord:
    """Two answers, nodes 3 and 4, after a turn that the second trains, and a sub-agent of it."""
    one = record("shared")
    rows = [one.trajectories[0], *(one.trajectories.add() for _ in range(2))]
    for row, leaf in zip(rows, (3, 4, 5), strict=True):
        row.CopyFrom(trajectory("shared"))
        row.trajectory_id, row.leaf_node_id = f"shared-{leaf}", leaf
        row.segments.add().CopyFrom(row.segments[1])
        row.segments[1].end = row.segments[2].start = 4
        row.segments[2].node_id = leaf
    rows[0].segments[1].trained = False
    rows[1].reward = 0.25
    rows[1].lineage, rows[2].lineage = (
        trajectory_pb2.LINEAGE_SIBLING,
        trajectory_pb2.LINEAGE_SUB_AGENT,
    )
    for node_id, segment in zip((6, 7, 5), rows[2].segments, strict=True):
        segment.node_id = node_id
    edge = trajectory_pb2.LineageEdge(type="subagent_call")
    one.edges.add(edge=edge, source_node_ids=[2], target_node_ids=[7])
    return one


async def test_a_shared_step_and_its_sub_agent_are_of_the_document_that_trains_it() -> None:
    main, other = documents_of(leaves_as_result(branches()), str)
    copied = [
        [step.get("is_copied_context", False) for step in one["steps"]] for one in (main, other)
    ]
    assert copied == [[False, True, False], [True, False, False]]
    assert "subagent_trajectories" not in main
    assert [one["extra"]["rollmesh"]["reward"] for one in (main, other)] == [0.0, 0.25]
    (sub,) = other["subagent_trajectories"]
    (result,) = other["steps"][1]["observation"]["results"]
    assert result == {"subagent_trajectory_ref": [{"trajectory_id": sub["trajectory_id"]}]}


def labelled(*lineages: "trajectory_pb2.Lineage.ValueType") -> session_pb2.SessionRecord:
    """A session with a trajectory of two nodes of its own for each lineage."""
    one = record("labelled")
    del one.trajectories[:]
    for at, lineage in enumerate(lineages, 1):
        row = one.trajectories.add()
        row.CopyFrom(trajectory("labelled"))
        row.trajectory_id, row.leaf_node_id, row.lineage = f"labelled-{at}", 2 * at, lineage
        for node_id, segment in zip((2 * at - 1, 2 * at), row.segments, strict=True):
            segment.node_id = node_id
    return one


async def test_a_sub_agent_before_all_others_is_embedded_in_the_first_document() -> None:
    """Also where no document is MAIN, and two sub-agents keep their order."""
    sub, side = trajectory_pb2.LINEAGE_SUB_AGENT, trajectory_pb2.LINEAGE_SIBLING
    (only,) = documents_of(leaves_as_result(labelled(sub, side, sub)), str)
    assert only["extra"]["rollmesh"]["lineage"] == "SIBLING"
    embedded = [one["trajectory_id"] for one in only["subagent_trajectories"]]
    assert embedded == ["labelled-1", "labelled-3"]
    (alone,) = documents_of(leaves_as_result(labelled(sub)), str)
    assert alone["trajectory_id"] == "labelled-1"


async def test_a_compaction_continues_the_first_main_document_and_no_sibling() -> None:
    main, side = trajectory_pb2.LINEAGE_MAIN, trajectory_pb2.LINEAGE_SIBLING
    compaction = trajectory_pb2.LINEAGE_COMPACTION
    for lineages, next_of in (
        ((side, main, main, compaction, compaction), {2: 4, 4: 5}),
        ((side, compaction, compaction), {2: 3}),
    ):
        documents = documents_of(leaves_as_result(labelled(*lineages)), str)
        names = [one["trajectory_id"] for one in documents]
        assert names[0] == ("labelled-2" if main in lineages else "labelled-1")
        assert {
            one["trajectory_id"]: one["continued_trajectory_ref"]
            for one in documents
            if "continued_trajectory_ref" in one
        } == {f"labelled-{at}": f"labelled-{to}.json" for at, to in next_of.items()}


async def test_a_rejected_compaction_continues_nothing() -> None:
    compaction = trajectory_pb2.LINEAGE_COMPACTION
    session = labelled(trajectory_pb2.LINEAGE_MAIN, compaction, compaction)
    session.trajectories[1].reasons.append(trajectory_pb2.FIDELITY_REASON_COMPACTION_REJECTED)
    main, rejected, next_ = documents_of(leaves_as_result(session), str)
    assert main["continued_trajectory_ref"] == f"{next_['trajectory_id']}.json"
    assert "continued_trajectory_ref" not in rejected


async def test_the_steps_up_to_the_recorded_node_that_a_session_starts_from_are_copies() -> None:
    one = branches()
    one.origin.kind = session_pb2.ORIGIN_KIND_TOKENS
    one.origin.nodes.add(session_id="before", node_id=2, tokens=4)
    for row in one.trajectories:
        row.segments[0].role = chat_pb2.ROLE_ASSISTANT  # the caller gave it
    for document in documents_of(leaves_as_result(one), str):
        given = document["steps"][0]
        assert (given["source"], given["llm_call_count"]) == ("agent", 0)
        copied = [step.get("is_copied_context", False) for step in document["steps"]]
        assert copied == [True, True, False]


async def test_answers_and_results_that_the_caller_gave_are_steps_and_copies_of_them(
    tmp_path: Path,
) -> None:
    result = {"role": "tool", "content": "4", "tool_call_id": "of another conversation"}
    thought = {"role": "assistant", "content": "So.", "reasoning_content": "Why?"}
    said = [user("Hi"), {"role": "assistant", "content": "Given."}, result, thought]
    one = told(record("given"), said, [{"role": "assistant", "content": "One."}])
    other = one.trajectories.add()
    other.CopyFrom(one.trajectories[0])
    other.trajectory_id, other.leaf_node_id, other.segments[1].node_id = "given-3", 3, 3
    data = b'[{"role": "assistant", "content": "Two."}]'
    one.messages.add(node_id=3, parent_node_id=1, data=data, data_bytes=len(data))
    first, second = written(one, tmp_path)
    assert [step.get("llm_call_count") for step in first["steps"]] == [None, 0, None, None, 1]
    assert first["steps"][2]["observation"]["results"] == [{"content": "4"}]
    assert ["is_copied_context" in step for step in first["steps"]] == [False] * 5
    assert ["is_copied_context" in step for step in second["steps"]] == [True] * 4 + [False]


STRANGE = [
    r'{"at": "\ud83d"}',
    '{"at": NaN}',
    '{"at": 1e999}',
    '{"at": ' + "[" * 2000 + "]" * 2000 + "}",
    "[1]",
    r'{"at": "\u0000é"}',
]
"""Arguments of calls as models write them. Only the last ones are an object everywhere."""


def strange() -> session_pb2.SessionRecord:
    """A session of a turn with such calls, and a tool with half an emoji."""
    calls = [
        {"id": f"c{at}", "type": "function", "function": {"name": "look", "arguments": text}}
        for at, text in enumerate(STRANGE)
    ]
    one = told(
        record("strange"),
        [user("A\0.")],
        [{"role": "assistant", "content": "", "tool_calls": calls}],
    )
    tool = r'{"type": "function", "function": {"name": "look", "description": "half \ud83d"}}'
    one.contexts.add(data=f'{{"tools": [{tool}]}}'.encode())
    for node in one.messages:
        node.context_index = 0
    return one


async def test_a_turn_of_an_adapter_names_it_as_its_model(tmp_path: Path) -> None:
    one = told(record("two"), [user("Hi")], [{"role": "assistant", "content": "One."}])
    (plain,) = written(one, tmp_path)
    assert "model_name" not in plain["steps"][1]
    one.trajectories[0].version_spans[0].adapter = "judge"
    (document,) = written(one, tmp_path)
    assert document["steps"][1]["model_name"] == "judge"


async def test_images_are_files_and_malformed_arguments_are_extra(tmp_path: Path) -> None:
    one = with_images(record("pictured"), b"cat")
    url = {"url": f"sha256:{one.images[0].sha256}"}
    shown = [{"type": "text", "text": "See"}, {"type": "image_url", "image_url": url}]
    function = {"name": "look", "arguments": '{"at": '}
    calls = [{"type": "function", "function": function}]
    told(
        one,
        [{"role": "user", "content": shown}],
        [{"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": calls}],
    )
    (document,) = written(one, tmp_path)
    asked, called = document["steps"]
    text, image = asked["message"]
    assert text == {"type": "text", "text": "See"}
    assert (tmp_path / image["source"]["path"]).read_bytes() == b"cat"
    assert called["tool_calls"][0]["arguments"] == {}
    assert called["extra"]["rollmesh"]["malformed_calls"] == {"call-0": '{"at": '}
    assert (called["reasoning_content"], called["llm_call_count"]) == ("Hm.", 1)


async def test_arguments_that_not_every_reader_takes_stay_text(tmp_path: Path) -> None:
    (document,) = written(strange(), tmp_path)
    called = document["steps"][-1]
    assert [call["arguments"] for call in called["tool_calls"]] == [{}] * 5 + [{"at": "\0é"}]
    malformed = called["extra"]["rollmesh"]["malformed_calls"]
    assert list(malformed.values()) == STRANGE[:5]
    (tool,) = document["agent"]["tool_definitions"]
    assert tool["function"]["description"] == "half ?"


async def test_a_session_of_text_has_steps_without_tokens(tmp_path: Path) -> None:
    one = told(record("text"), [user("Hi")], [{"role": "assistant", "content": "One."}])
    one.capture = session_pb2.CAPTURE_TEXT
    del one.trajectories[0].segments[0]
    one.trajectories[0].segments[0].start = one.trajectories[0].segments[0].end = 0
    for name in ("tokens", "version_spans"):
        one.trajectories[0].ClearField(name)
    other = one.trajectories.add()
    other.CopyFrom(one.trajectories[0])
    other.trajectory_id, other.leaf_node_id = "text-3", 3
    other.segments[0].node_id = 3
    data = b'[{"role": "assistant", "content": "Two."}]'
    one.messages.add(node_id=3, parent_node_id=1, data=data, data_bytes=len(data))
    first, second = written(one, tmp_path)
    assert [step["message"] for step in second["steps"]] == ["Hi", "Two."]
    assert [step.get("is_copied_context") for step in second["steps"]] == [True, None]
    assert [set(step) & {"metrics", "is_copied_context"} for step in first["steps"]] == [set()] * 2


async def test_sessions_without_messages_have_the_text_of_their_tokens(tmp_path: Path) -> None:
    tree = tree_record("tree")
    assert documents_of(leaves_as_result(tree)) == []
    found = documents_of(leaves_as_result(tree), lambda ids: " ".join(map(str, ids)))
    last = [document["steps"][-1] for document in found]
    assert [step["message"] for step in last] == ["3", "5"]
    assert [step["metrics"]["completion_token_ids"] for step in last] == [[3], [5]]
    assert [len(document["steps"]) for document in found] == [3, 3]
