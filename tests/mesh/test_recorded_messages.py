"""Messages beside the tokens: kept over a kill, delivered if asked for, exported for SFT."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from rollmesh.client import SubscribeOptions
from tests.meshes import Mesh, delivered

pytestmark = pytest.mark.asyncio(loop_scope="module")
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2]}}\n</tool_call>'
RULES = [("plain", f"I add.\n{CALL}"), ("<tool_response>\n3\n</tool_response>", "It is 3.")]
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {"type": "object", "properties": {"a": {"type": "number"}}},
        },
    }
]


async def tool(mesh: Mesh, *words: str) -> tuple[int, str, str]:
    """Runs `rollmesh` and returns its exit code and its output."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "rollmesh.cli", *words),
        *("--collector", mesh.address("collector")),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, errors = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), errors.decode()


async def test_the_messages_of_a_conversation_reach_a_reader_that_asks(
    shared: Mesh, tmp_path: Path
) -> None:
    path = tmp_path / "sft.jsonl"
    async with shared.client() as client:
        async with client.session() as bare:
            agent = shared.openai(bare)
            messages: list[Any] = [{"role": "user", "content": "plain"}]
            await agent.chat.completions.create(model="policy", messages=messages)
        await delivered(client, bare)
        code, _, told = await tool(shared, "export", "--format", "sft", "--to", str(path))
        assert (code, path.exists()) == (2, False)
        assert "open sessions with record_messages=True" in told
        async with client.session(record_messages=True) as session:
            agent = shared.openai(session)
            first = await agent.chat.completions.create(
                model="policy", messages=messages, tools=TOOLS
            )
            said = first.choices[0].message
            assert said.tool_calls
            await shared.restart("gateway")
            messages += [  # an echo that lost its text
                {"role": "assistant", "tool_calls": [one.model_dump() for one in said.tool_calls]},
                {"role": "tool", "content": "3", "tool_call_id": said.tool_calls[0].id},
            ]
            last = await agent.chat.completions.create(
                model="policy", messages=messages, tools=TOOLS
            )
            session.reward = 0.5
        result = await delivered(client, session)
        assert result.conversation(result.trajectories[0]) is None  # it did not ask
        wants = SubscribeOptions(messages=True)
        async with client.subscribe("reads", unit="session", options=wants) as deliveries:
            async for delivery in deliveries:
                (result,) = delivery.sessions
                if result.session_id == session.session_id:
                    break
    (trajectory,) = result.trajectories
    found = result.conversation(trajectory)
    assert found is not None
    assert (found.tools, found.template_options) == (TOOLS, {})
    calls = [one.model_dump(exclude_none=True) for one in said.tool_calls]
    assert found.messages == [
        {"role": "user", "content": "plain"},
        {"role": "assistant", "content": said.content, "tool_calls": calls},
        {"role": "tool", "content": "3", "tool_call_id": calls[0]["id"]},
        {"role": "assistant", "content": last.choices[0].message.content},
    ]
    code, shown, told = await tool(shared, "collector", "inspect", "--session", session.session_id)
    assert (code, told) == (0, "")
    assert [one for node in json.loads(shown)["messages"] for one in node["messages"]] == (
        found.messages
    )
    flags = ("--format", "sft", "--consumer", "reads", "--to", str(path))
    code, _, told = await tool(shared, "export", *flags)
    assert code == 0
    assert "left out: 1 trajectories have no messages" in told
    (row,) = [json.loads(line) for line in path.read_text().splitlines()]
    assert row["trained_messages"] == [False, True, False, True]
    assert row["input_ids"] == trajectory.token_ids.tolist()
    assert row["assistant_masks"] == trajectory.loss_mask.astype(int).tolist()
    assert (row["session_id"], row["reward"], row["policy_versions"]) == (
        session.session_id, 0.5, [0],
    )  # fmt: skip
