"""A model that writes harmony as gpt-oss does, through the whole mesh, whole and streamed."""

import json
from pathlib import Path
from typing import Any

import pytest

from rollmesh.chat.templates import load_model
from tests.chat import families
from tests.meshes import Mesh, scripted_mesh

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds.",
            "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}},
        },
    }
]
ASKED = "<|start|>user<|message|>{}<|end|><|start|>assistant"
CALLED = (
    "<|channel|>analysis<|message|>One more.<|end|><|start|>assistant<|channel|>commentary"
    ' to=functions.add <|constrain|>json<|message|>{"n": 41}<|call|>'
)
RESULT = (
    '<|start|>functions.add to=assistant<|channel|>commentary<|message|>"42"<|end|>'
    "<|start|>assistant"
)
ANSWERED = (
    "<|channel|>analysis<|message|>There it is.<|end|><|start|>assistant<|channel|>final"
    "<|message|>It is 42.<|return|>"
)
MORE = "never sampled"
"""What the model would go on with if nothing stopped it."""


def write_model(folder: Path, mesh_folder: Path) -> Path:
    """Writes a model's files, and the script of an engine that only the gateway's stops end."""
    model = folder / "model"
    for one in (model, mesh_folder):
        one.mkdir()
    families.write("gptoss", model)
    _, tokenizer = load_model(model)
    (model / "config.json").write_text(
        json.dumps({"vocab_size": 2000, "max_position_embeddings": 4096})
    )
    rules = [(ASKED.format("one"), CALLED), (RESULT, ANSWERED), (ASKED.format("two"), ANSWERED)]
    script = [
        {
            "after": tokenizer.encode(after).tolist(),
            "reply": tokenizer.encode(reply + MORE).tolist(),
        }
        for after, reply in rules
    ]
    (mesh_folder / "script.json").write_text(json.dumps(script))
    return model


async def ask(mesh: Mesh, session: Any, messages: list[Any], *, stream: bool) -> dict[str, Any]:
    """Returns the answer as a message, and why it ended."""
    agent = mesh.openai(session)
    if not stream:
        answer = await agent.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
        whole = answer.choices[0]
        return whole.message.model_dump(exclude_none=True) | {"finish": whole.finish_reason}
    said: dict[str, Any] = {"role": "assistant", "content": "", "reasoning_content": ""}
    async for chunk in await agent.chat.completions.create(
        model="policy", messages=messages, tools=TOOLS, stream=True
    ):
        for choice in chunk.choices:
            delta = choice.delta.model_dump(exclude_none=True)
            for text in ("content", "reasoning_content"):
                said[text] += delta.get(text, "")
            for call in delta.get("tool_calls", []):
                if call.get("id"):
                    said.setdefault("tool_calls", []).append(
                        {"id": call["id"], "type": "function", "function": call["function"]}
                    )
                else:
                    function = said["tool_calls"][call["index"]]["function"]
                    function["arguments"] += call["function"]["arguments"]
            said["finish"] = choice.finish_reason or said.get("finish")
    return said


@pytest.mark.parametrize(
    "stream",
    [pytest.param(False, id="whole", marks=pytest.mark.long), pytest.param(True, id="streamed")],
)
async def test_a_conversation_with_a_tool_is_written_as_harmony_has_it(
    tmp_path: Path, *, stream: bool
) -> None:
    model = write_model(tmp_path, tmp_path / "mesh")
    async with (
        scripted_mesh(tmp_path / "mesh", model, eos_id=1999) as mesh,
        mesh.client() as client,
    ):
        async with client.session() as session:
            messages: list[Any] = [{"role": "user", "content": "one"}]
            called = await ask(mesh, session, messages, stream=stream)
            assert called["finish"] == "tool_calls"
            assert called["reasoning_content"] == "One more."
            assert not called.get("content")
            (call,) = called["tool_calls"]
            assert call["function"] == {"name": "add", "arguments": '{"n": 41}'}
            result = {"role": "tool", "tool_call_id": call["id"], "content": "42"}
            messages += [{key: called[key] for key in ("role", "tool_calls")}, result]
            said = await ask(mesh, session, messages, stream=stream)
            assert (said["finish"], said["content"]) == ("stop", "It is 42.")
            assert said["reasoning_content"] == "There it is."
            messages += [{"role": "assistant", "content": said["content"]}]
            messages += [{"role": "user", "content": "two"}]
            assert (await ask(mesh, session, messages, stream=stream))["content"] == "It is 42."
        async with client.subscribe("trainer", unit="session") as deliveries:
            delivery = await anext(deliveries)
            await deliveries.acknowledge(delivery)
    (trajectory,) = delivery.sessions[0].trajectories
    _, tokenizer = load_model(model)
    ids = trajectory.token_ids.tolist()
    behind = f"{ASKED.format('one')}{CALLED}{RESULT}{ANSWERED}{ASKED.format('two')}{ANSWERED}"
    expected = tokenizer.encode(behind).tolist()
    assert ids[-len(expected) :] == expected
    sampled = [ids[one.start : one.end] for one in trajectory.segments if one.trained]
    assert sampled == [tokenizer.encode(text).tolist() for text in (CALLED, ANSWERED, ANSWERED)]
