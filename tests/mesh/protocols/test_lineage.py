"""Agents that name their requests and declare edges over HTTP, in each protocol."""

import asyncio
import json
from typing import Any

import httpx2
import openai
import pytest
from anthropic import AsyncAnthropic

from rollmesh.record import documents_of, leaves_as_result, rows_of
from tests.meshes import Mesh, delivered
from tests.processes import running

pytestmark = pytest.mark.asyncio(loop_scope="module")
RULES = [("plain", "The answer is 42."), ("sum", "A summary of the work.")]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def named(name: str) -> dict[str, str]:
    return {"X-ACP-Model-Request-ID": name}


def edge(source: str, kind: str, target: str) -> dict[str, str]:
    return {"source_request_id": source, "target_request_id": target, "type": kind}


async def test_requests_of_every_protocol_are_named_and_edges_come_by_the_route(
    shared: Mesh,
) -> None:
    async with shared.client() as client:
        async with client.session() as session, httpx2.AsyncClient() as http:
            agent = shared.openai(session)
            messages: list[Any] = [user("plain")]
            first = await agent.chat.completions.create(
                model="policy", messages=messages, extra_headers=named("m1")
            )
            messages += [{"role": "assistant", "content": first.choices[0].message.content}]
            async with AsyncAnthropic(
                base_url=session.base_url.removesuffix("/v1"), api_key="none", max_retries=0
            ) as anthropic:
                await anthropic.messages.create(
                    model="policy",
                    max_tokens=64,
                    messages=[{"role": "user", "content": "plain, as a sub-agent"}],
                    extra_headers=named("s1"),
                )
            async with agent.responses.stream(
                model="policy", input="sum up", extra_headers=named("attempt")
            ) as stream:
                await stream.get_final_response()
            given = [
                edge("m1", "subagent_call", "s1"),
                edge("m1", "compaction_attempt", "attempt"),
                edge("m1", "vendor:other", "unseen"),
            ]
            url = f"{session.base_url}/lineage"
            for _ in range(2):
                answer = await http.post(url, json={"edges": given})
                assert (answer.status_code, answer.json()) == (
                    200,
                    {"object": "lineage", "edges": 3},
                )
            assert await client.declare_lineage(session, [("s1", "m1", "subagent_return")]) == 4
        late = await http_post(url, {"edges": given})
        assert (late.status_code, late.json()["error"]["code"]) == (409, "session_closed")
        assert late.headers["x-should-retry"] == "false"
        result = await delivered(client, session)
    found = {one.segments[-1].model_request_ids[0]: one for one in result.trajectories}
    assert (found["m1"].lineage, found["m1"].lineage_source) == ("MAIN", "RULE")
    assert (found["s1"].lineage, found["s1"].lineage_source) == ("SUB_AGENT", "DECLARED")
    assert (found["m1"].lineage_rule, found["s1"].lineage_rule) == ("MAIN_PATH", "")
    attempt = found["attempt"]
    assert (attempt.lineage, attempt.lineage_source) == ("COMPACTION", "DECLARED")
    assert "COMPACTION_REJECTED" in attempt.reasons
    assert not attempt.loss_mask.any()
    assert [len(one.target_node_ids) for one in result.edges] == [1, 1, 0, 1]


KEY = "ai.prime.acp/semantic-edges-v1"


@pytest.mark.parametrize("stream", [False, True])
async def test_requests_declare_edges_in_their_metadata(shared: Mesh, *, stream: bool) -> None:
    async with shared.client() as client:
        async with client.session() as session:
            agent = shared.openai(session)

            async def ask(name: str, text: str, *edges: dict[str, str]) -> None:
                metadata = {KEY: json.dumps({"edges": edges}), "run": "7"} if edges else {}
                found: Any = await agent.chat.completions.create(
                    model="policy",
                    messages=[{"role": "user", "content": text}],
                    metadata=metadata,
                    stream=stream,
                    extra_headers=named(name),
                )
                if stream:
                    assert [one async for one in found]

            await ask("m1", "plain")
            await asyncio.gather(  # at the same time, and one edge by both
                ask("s1", "plain one", edge("m1", "subagent_call", "s1")),
                ask("s2", "plain two", edge("m1", "subagent_call", "s1"),
                    edge("m1", "subagent_call", "s2")),
            )  # fmt: skip
            given: Any = {KEY: json.dumps({"edges": [edge("m1", "compaction", "c1")]})}
            answer = await agent.responses.create(
                model="policy", input="sum up", metadata=given, extra_headers=named("c1")
            )
            assert answer.metadata == given
        result = await delivered(client, session)
    assert {
        one.segments[-1].model_request_ids[0]: (one.lineage, one.lineage_source)
        for one in result.trajectories
    } == {
        "m1": ("MAIN", "RULE"),
        "s1": ("SUB_AGENT", "DECLARED"),
        "s2": ("SUB_AGENT", "DECLARED"),
        "c1": ("COMPACTION", "DECLARED"),
    }
    assert len(result.edges) == 3


@pytest.mark.parametrize(
    ("edges", "param"),
    [
        (5, f"metadata[{KEY}]"),
        ("no JSON", f"metadata[{KEY}]"),
        ("{}", f"metadata[{KEY}].edges"),
        ('{"edges": [{"type": "x"}]}', f"metadata[{KEY}].edges[0]"),
        (json.dumps({"edges": [edge("a", "x", "a")]}), "edges[0].target_request_id"),
    ],
)
async def test_a_bad_edge_in_metadata_is_named_and_its_request_is_no_turn(
    shared: Mesh, edges: object, param: str
) -> None:
    async with shared.client() as client:
        async with client.session() as session:
            body = {"model": "policy", "messages": [user("plain")], "metadata": {KEY: edges}}
            answer = await http_post(f"{session.base_url}/chat/completions", body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
        assert (await delivered(client, session)).turns == 0


async def test_a_rejected_compaction_owns_no_shared_step_in_rows_the_viewer_and_atif(
    shared: Mesh,
) -> None:
    """Though it comes before the turn that goes on, and its sub-agent has the main prompt."""
    async with shared.client() as client:
        async with client.session(record_messages=True) as session:
            agent = shared.openai(session)

            async def ask(name: str, messages: list[Any], *edges: dict[str, str]) -> dict[str, str]:
                given = {KEY: json.dumps({"edges": edges})} if edges else {}
                answer = await agent.chat.completions.create(
                    model="policy", messages=messages, metadata=given, extra_headers=named(name)
                )
                return {"role": "assistant", "content": answer.choices[0].message.content or ""}

            begun: list[Any] = [user("plain")]
            begun.append(await ask("m1", begun))
            rejected = edge("m1", "compaction_attempt", "attempt")
            await ask("attempt", [*begun, user("sum up")], rejected)
            await ask("m2", [*begun, user("plain, go on")])
            await ask("s1", [user("plain, alone")], edge("m2", "subagent_call", "s1"))
        result = await delivered(client, session)
        (stored,) = await client.stored_sessions(session_id=session.session_id, arrays=True)
        record = stored.session
        by_name = {one.segments[-1].model_request_ids[0]: one for one in result.trajectories}
        labels = {name: (one.lineage, one.lineage_source) for name, one in by_name.items()}
        assert labels == {
            "attempt": ("COMPACTION", "DECLARED"),
            "m2": ("MAIN", "RULE"),
            "s1": ("SUB_AGENT", "DECLARED"),
        }
        rows = {one["trajectory_id"]: one for one in rows_of(record)}
        trained = {name: sum(rows[one.trajectory_id]["loss_mask"]) for name, one in by_name.items()}
        assert trained["attempt"] == 0
        prompt = by_name["m2"].prompt_tokens
        assert rows[by_name["m2"].trajectory_id]["loss_mask"][prompt]
        assert {"SHARED_PREFIX", "COMPACTION_REJECTED"} <= set(by_name["attempt"].reasons)
        assert "SHARED_PREFIX" not in by_name["m2"].reasons
        async with (
            running(
                "view",
                shared.folder / "lineage",
                router=shared.address("router"),
                collector=shared.address("collector"),
            ) as process,
            httpx2.AsyncClient(base_url=f"http://127.0.0.1:{process.port}", timeout=60) as http,
        ):
            shown = (await http.get("/api/session", params={"id": session.session_id})).json()
        paths = {one["trajectory_id"]: one for one in shown["paths"]}
        for name, one in by_name.items():
            path = paths[one.trajectory_id]
            assert (path["lineage"], "declared" in path["label"]) == (one.lineage, name != "m2")
        documents = {one["trajectory_id"]: one for one in documents_of(leaves_as_result(record))}
        main, attempt = (documents[by_name[name].trajectory_id] for name in ("m2", "attempt"))
        copied = [
            [step.get("is_copied_context", False) for step in one["steps"]]
            for one in (main, attempt)
        ]
        assert copied == [[False] * 4, [True, True, False, False]]
        assert not any("continued_trajectory_ref" in one for one in documents.values())
        (sub,) = main["subagent_trajectories"]
        assert sub["trajectory_id"] == by_name["s1"].trajectory_id


async def http_post(url: str, body: Any) -> httpx2.Response:
    async with httpx2.AsyncClient() as http:
        return await http.post(url, json=body)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "edges"),
        ({"edges": {}}, "edges"),
        ({"edges": ["a"]}, "edges[0]"),
        ({"edges": [edge("a", "continuation", "b"), {"type": "x"}]}, "edges[1]"),
        ({"edges": [{**edge("a", "x", "b"), "type": 5}]}, "edges[0]"),
        ({"edges": [edge("a", "continuation", "a")]}, "edges[0].target_request_id"),
    ],
)
async def test_a_bad_edge_over_http_is_named(shared: Mesh, body: Any, param: str) -> None:
    async with shared.client() as client, client.session() as session:
        answer = await http_post(f"{session.base_url}/lineage", body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_a_request_with_a_bad_name_is_refused_by_the_name_of_the_header(
    shared: Mesh,
) -> None:
    async with shared.client() as client, client.session() as session:
        agent = shared.openai(session)
        with pytest.raises(openai.BadRequestError, match="X-ACP-Model-Request-ID"):
            await agent.chat.completions.create(
                model="policy", messages=[{"role": "user", "content": "plain"}],
                extra_headers=named("a b"),
            )  # fmt: skip
