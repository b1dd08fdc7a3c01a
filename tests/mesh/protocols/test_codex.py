"""How Codex speaks, replayed: streams, sub-agents, and a compaction, in both of its ways."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import httpx2
import pytest

from rollmesh.client import SessionResult
from tests.mesh.protocols.replays import Replay, called, check
from tests.meshes import Mesh, delivered

pytestmark = pytest.mark.asyncio(loop_scope="module")

V1, V2 = "multi_agent_v1__spawn_agent", "collaboration__spawn_agent"
SUMMARISE, SUMMARY = "Write a summary for another model.\n", "They ran two tasks."
RULES = [
    ("first task", "The first is done."),
    ("second task", "The second is done."),
    (SUMMARISE, SUMMARY),
    ("Begin.", called("exec", '{"cmd":  "ls"}') + "\n" + called("exec", '{"cmd": "pwd"}')),
    (
        "here\n</tool_response>",
        called(V1, '{"message": "first task"}') + "\n" + called(V1, '{"message":"second task"}'),
    ),
    ("The second is done.\n</note>", called("exec", '{"cmd": "rm x"}')),
    ("gone\n</tool_response>", "It is gone."),
    ("Code.", called("functions__exec", r'{"input":  "text(1);\n"}')),
    ("1\n</tool_response>", called(V2, '{"task_name":  "a", "message": "second task"}')),
    ("Payload:\nThe second is done.", called("functions__exec", '{"input": "text(2);"}')),
    ("2\n</tool_response>", "It is two."),
    (f"so far: {SUMMARY}", "It goes on."),
]


def function(name: str) -> dict[str, Any]:
    return {"type": "function", "name": name, "parameters": {"type": "object"}, "strict": False}


def space(name: str, *tools: dict[str, Any]) -> dict[str, Any]:
    return {"type": "namespace", "name": name, "description": name, "tools": list(tools)}


FUNCTIONS = [
    function("exec"),
    space("multi_agent_v1", function("spawn_agent")),
    {"type": "web_search", "external_web_access": False},
]
SYNTAX = {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}
CODE = {
    "type": "additional_tools",
    "role": "developer",
    "tools": [
        space("functions", {"type": "custom", "name": "exec", "format": SYNTAX}, function("wait")),
        space("collaboration", function("spawn_agent")),
    ],
}
ADVICE = "You are an agent that writes code."


class Codex(Replay):
    path = "responses"

    async def ask(
        self,
        *items: Any,
        tools: Sequence[Any] = FUNCTIONS,
        kind: str = "turn",
        window: int = 0,
        agent: str = "",
        parallel: bool = True,
    ) -> list[dict[str, Any]]:
        """Returns the items of the answer, as they are done in the stream."""
        body = {
            "model": "gpt-6-sol",  # of Codex's own catalogue. A mesh of one model takes any
            "stream": True,
            "input": list(items),
            "tools": tools,
            "tool_choice": "auto",
            "parallel_tool_calls": parallel,
            "reasoning": {"summary": "auto", "context": "all_turns"},
            "store": False,
            "include": ["reasoning.encrypted_content"],
            "prompt_cache_key": "01a2",
            "text": {"verbosity": "low"},
            "client_metadata": {"thread_id": agent or "01a2"},
        }
        metadata = {"request_kind": kind, "window_number": window, "thread_id": agent or "01a2"}
        headers = {
            "authorization": f"Bearer {self._key}",
            "session-id": "01a2",
            "thread-id": agent or "01a2",
            "x-codex-turn-metadata": json.dumps(metadata),
            "x-codex-window-id": f"01a2:{window}",
        }
        if agent:
            headers |= {"x-openai-subagent": "collab_spawn", "x-codex-parent-thread-id": "01a2"}
        request = self._http.stream("POST", self._url, json=body, headers=headers, timeout=60)
        async with request as answer:
            lines = [line async for line in answer.aiter_lines()]
        assert answer.status_code == 200, lines
        events = [json.loads(line[5:]) for line in lines if line.startswith("data:")]
        assert events[-1]["type"] == "response.completed"
        return [one["item"] for one in events if one["type"] == "response.output_item.done"]


def said(role: str, text: str) -> dict[str, Any]:
    part = {"type": "input_text", "text": text}
    return {"type": "message", "id": f"msg_{hash(text):x}", "role": role, "content": [part]}


def start(prompt: str, more: str = "") -> list[dict[str, Any]]:
    """What a window begins with. The environment is another one once there are sub-agents."""
    place = f"<environment_context><cwd>/w</cwd>{more}</environment_context>"
    return [
        said("developer", ADVICE),
        said("developer", "Approval is not needed."),
        said("user", place),
        said("user", prompt),
    ]


def outputs(items: list[dict[str, Any]], *texts: str) -> list[dict[str, Any]]:
    calls = [item for item in items if item["type"].endswith("_call")]
    return [
        {
            "type": f"{one['type']}_output",
            "id": f"fco_{at}",
            "call_id": one["call_id"],
            "output": text
            if one["type"] == "function_call"
            else [said("user", text)["content"][0]],
        }
        for at, (one, text) in enumerate(zip(calls, texts, strict=True))
    ]


def text_of(items: list[dict[str, Any]]) -> str:
    return str(items[-1]["content"][0]["text"])


def written(sender: str, *parts: Mapping[str, str]) -> dict[str, Any]:
    """What an agent writes to another. The message itself would be encrypted by OpenAI."""
    head = {"type": "input_text", "text": f"Sender: {sender}\nPayload:\n"}
    return {"type": "agent_message", "author": sender, "content": [head, *parts]}


def check_exact(result: SessionResult, **found: list[int]) -> None:
    check(result, **found)
    # What comes back is what was sampled. The template prints arguments in its own way.
    reasons = {reason for one in result.trajectories for reason in one.reasons}
    assert reasons <= {"EXACT", "TEMPLATE_REWRITE", "SHARED_PREFIX", "TOOLS_CHANGED"}


async def test_functions_sub_agents_and_a_compaction_are_told_apart_and_nothing_drifts(
    shared: Mesh,
) -> None:
    async with shared.client() as client, httpx2.AsyncClient(timeout=60) as http:
        async with client.session() as session:
            codex = Codex(http, session)
            history = start("Begin.")
            first = await codex.ask(*history)
            assert [item["name"] for item in first] == ["exec", "exec"]
            history += [*first, *outputs(first, "x", "here")]
            second = await codex.ask(*history)
            assert {item["namespace"] for item in second} == {"multi_agent_v1"}
            answers = []
            for at, task in enumerate(("first task", "second task")):
                tools = FUNCTIONS[:1]
                answers.append(await codex.ask(*start(task), tools=tools, agent=f"01a{at}"))
            history += [*second, *outputs(second, '{"agent_id":"1"}', '{"agent_id":"2"}')]
            history += [said("user", f"<note>\n{text_of(one)}\n</note>") for one in answers]
            third = await codex.ask(*history)
            history += [*third, *outputs(third, "gone")]
            summary = await codex.ask(
                *history, said("user", SUMMARISE), tools=[], kind="compaction", parallel=False
            )
            assert text_of(summary) == SUMMARY
            after = start("Begin.", "<subagents>2</subagents>")
            last = await codex.ask(*after, said("user", f"so far: {SUMMARY}"), window=1)
            assert text_of(last) == "It goes on."
        result = await delivered(client, session)
    # The summary is asked for without tools: a conversation of its own, after three turns.
    check_exact(result, MAIN=[3], SUB_AGENT=[1, 1], COMPACTION=[1, 1])


async def test_code_a_forked_sub_agent_and_a_compaction_are_told_apart_and_nothing_drifts(
    shared: Mesh,
) -> None:
    async with shared.client() as client, httpx2.AsyncClient(timeout=60) as http:
        async with client.session() as session:
            codex = Codex(http, session)

            async def ask(*items: Any, **more: Any) -> list[dict[str, Any]]:
                return await codex.ask(CODE, *items, tools=(), parallel=False, **more)

            history = start("Code.")
            first = await ask(*history)
            (run,) = first
            assert (run["type"], run["namespace"], run["name"], run["input"]) == (
                *("custom_tool_call", "functions", "exec"),
                "text(1);\n",
            )
            history += [*first, *outputs(first, "1")]
            second = await ask(*history)
            task = {"type": "encrypted_content", "encrypted_content": "second task"}
            # A sub-agent has all that was said before. Its own call seems to be aborted.
            forked = [*history, *second, *outputs(second, "aborted"), written("/root", task)]
            answer = await ask(*forked, agent="01b0")
            history += [*second, *outputs(second, '{"task_name":"/root/a"}')]
            history.append(written("/root/a", {"type": "input_text", "text": text_of(answer)}))
            third = await ask(*history)
            history += [*third, *outputs(third, "2")]
            history += await ask(*history)
            summary = await ask(*history, said("user", SUMMARISE), kind="compaction")
            assert text_of(summary) == SUMMARY
            after = start("Code.", "<subagents>1</subagents>")
            await ask(*after, said("user", f"so far: {SUMMARY}"), window=1)
        result = await delivered(client, session)
    # The summary goes on from the main line, with the same tools: it is its last turn.
    check_exact(result, MAIN=[5], SUB_AGENT=[3], COMPACTION=[1])
