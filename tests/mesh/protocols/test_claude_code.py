"""How Claude Code speaks, replayed: sub-agents, a title, and a compaction of its context."""

from typing import Any

import httpx2
import pytest

from tests.mesh.protocols.replays import Replay, called, check
from tests.meshes import Mesh, delivered

pytestmark = pytest.mark.asyncio(loop_scope="module")


EDIT = (
    '{"type":"function","function":'
    '{"name":"Edit","description":"Edit","parameters":{"type":"object"}}}'
)
RULES = [
    ("first task", "The first is done."),
    ("second task", "The second is done."),
    ("</session>", '{"title": "Work"}'),
    ("Do NOT call any tools.", "They did two tasks."),
    ("Begin.", called("Bash", '{"command":  "ls"}') + "\n" + called("Bash", '{"command": "pwd"}')),
    (
        "here\n</tool_response>",
        called("Agent", '{"prompt": "first task"}')
        + "\n"
        + called("Agent", '{"prompt":"second task"}'),
    ),
    ("second is done.\n</tool_response>", called("Bash", '{"command":  "rm x"}')),
    ("gone\n</tool_response>", "It is gone."),
    ("Search.", called("ToolSearch", '{"query":  "select:Edit"}')),
    (f"<tool_response>\n{EDIT}\n\n</tool_response>", called("Edit", '{"path":  "x"}')),
    ("edited\n</tool_response>", "It is edited."),
]
BILLING = "x-anthropic-billing-header: cc_version=2.1.197.{}; cc_entrypoint=sdk-cli;"
TOOLS = [
    {"name": name, "description": name, "input_schema": {"type": "object"}}
    for name in ("Bash", "Agent")
]
SUMMARY = "This session is being continued from a previous conversation. They did two tasks. Go on."


class ClaudeCode(Replay):
    path = "messages?beta=true"

    async def ask(
        self, *messages: Any, system: str = "You are Claude Code.", agent_id: str = "", **more: Any
    ) -> dict[str, Any]:
        note = BILLING.format("abc") + (" cc_is_subagent=true;" if agent_id else "")
        body = {
            "model": "policy",
            "max_tokens": 500,
            "system": [text(note), text(system) | CACHED],
            "messages": list(messages),
            "tools": TOOLS,
            "thinking": {"type": "adaptive"},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "metadata": {"user_id": "{}"},
            **more,
        }
        headers = {"x-api-key": self._key, "anthropic-version": "2023-06-01"}
        if agent_id:
            headers["x-claude-code-agent-id"] = agent_id
        answer = await self._http.post(self._url, json=body, headers=headers, timeout=60)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found


CACHED = {"cache_control": {"type": "ephemeral"}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def echo(answer: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": answer["content"]}


def results(answer: dict[str, Any], *texts: str, cached: bool = False) -> list[dict[str, Any]]:
    calls = [block["id"] for block in answer["content"] if block["type"] == "tool_use"]
    found: list[dict[str, Any]] = [
        {"type": "tool_result", "tool_use_id": id_, "content": one, "is_error": False}
        for id_, one in zip(calls, texts, strict=True)
    ]
    found[-1] |= CACHED if cached else {}
    return found


async def test_sub_agents_a_title_and_a_compaction_are_told_apart_and_nothing_drifts(
    shared: Mesh,
) -> None:
    async with shared.client() as client, httpx2.AsyncClient(timeout=60) as http:
        async with client.session() as session:
            claude = ClaudeCode(http, session)
            await claude.ask(
                user("<session>Begin.</session>"),
                system="Generate a concise, sentence-case title",
                tools=[],
                thinking={"type": "disabled"},
            )
            begin = user([text("<system-reminder>Today.</system-reminder>"), text("Begin.")])
            first = await claude.ask(begin)
            # The mark of the cache moves on from turn to turn.
            history = [begin, echo(first), user(results(first, "x", "here", cached=True))]
            second = await claude.ask(*history)
            history[-1] = user(results(first, "x", "here"))
            said = []
            for at, task in enumerate(("first task", "second task")):
                answer = await claude.ask(
                    user(task), system="You are a sub-agent.", agent_id=f"0a{at}", tools=TOOLS[:1]
                )
                said.append(answer["content"][0]["text"])
            history += [echo(second), user(results(second, *said, cached=True))]
            third = await claude.ask(*history)
            # It asks for a summary of all but the newest turn, in the message before that turn.
            asked = [
                *results(second, *said),
                text("CRITICAL: Respond with TEXT ONLY. Do NOT call any tools."),
            ]
            await claude.ask(*history[:-1], user(asked))
            # The newest turn moves behind the summary, where it was not sampled.
            last = user(results(third, "gone"))
            fourth = await claude.ask(user([text(SUMMARY)]), echo(third), last)
            assert fourth["content"] == [text("It is gone.")]
        result = await delivered(client, session)
    assert result.turns == 8
    check(  # the summary follows two turns of the main line
        result, AUXILIARY=[1], SUB_AGENT=[1, 1], MAIN=[3], COMPACTION=[3, 1]
    )


async def test_tools_that_a_search_finds_do_not_begin_the_conversation_anew(shared: Mesh) -> None:
    search, edit = (
        {"name": name, "description": name, "input_schema": {"type": "object"}}
        for name in ("ToolSearch", "Edit")
    )
    placeholder = {**edit, "name": "DeferredToolPlaceholder", "defer_loading": True}
    async with shared.client() as client, httpx2.AsyncClient(timeout=60) as http:
        async with client.session() as session:
            claude = ClaudeCode(http, session)
            history = [user("Search.")]
            first = await claude.ask(*history, tools=[search, placeholder])
            (reference,) = results(first, "")
            reference["content"] = [{"type": "tool_reference", "tool_name": "Edit"}]
            history += [echo(first), user([reference])]
            tools = [search, {**edit, "defer_loading": True}, placeholder]
            second = await claude.ask(*history, tools=tools)
            assert [block["name"] for block in second["content"]] == ["Edit"]
            history += [echo(second), user(results(second, "edited"))]
            third = await claude.ask(*history, tools=tools)
            assert third["content"] == [text("It is edited.")]
        (trajectory,) = (await delivered(client, session)).trajectories
    assert (trajectory.lineage, trajectory.turns) == ("MAIN", 3)
