"""What a model sampled can always be gone on from, restored and exported. Odd JSON is a 400."""

import json
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from rollmesh.runtime.rpc import open_channel
from rollmesh.v1 import gateway_pb2, gateway_pb2_grpc, trajectory_pb2
from tests.meshes import Mesh, scripted_mesh

pytestmark = pytest.mark.asyncio(loop_scope="module")
TOOL: Any = {
    "type": "function",
    "function": {"name": "calculator", "parameters": {"type": "object", "properties": {}}},
}
HARD = {
    "open": '{"a": ' + "[" * 3000,
    "deep": '{"a": ' + "[" * 3000 + "]" * 3000 + "}",
    "near": '{"a": ' + "[" * 100 + "]" * 100 + "}",
    "surrogate": '{"a": "\\ud800"}',
    "huge": '{"a": ' + "9" * 5000 + "}",
    "nan": '{"a": NaN, "b": 1e400}',
    "twice": '{"a": 1, "a": 2}',
}


def call(arguments: str) -> str:
    return f'<tool_call>\n{{"name": "calculator", "arguments": {arguments}}}\n</tool_call>'


async def ask(agent: openai.AsyncOpenAI, messages: list[Any], **more: Any) -> Any:
    answer: Any = await agent.chat.completions.create(
        model="policy", messages=messages, **{"tools": [TOOL], **more}
    )
    return answer.choices[0].message


async def test_sampled_turns_can_be_continued_restored_and_closed(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    rules = [(f"ask {name}", call(arguments)) for name, arguments in HARD.items()]
    large = {"max_context_tokens": 60_000}
    async with (
        scripted_mesh(tmp_path, tokenizer_dir, rules, first={"gateway": large}) as mesh,
        mesh.client() as client,
    ):
        conversations: dict[str, list[Any]] = {}
        async with client.session() as session:
            agent = mesh.openai(session)
            for name, arguments in HARD.items():
                messages: list[Any] = [{"role": "user", "content": f"ask {name}"}]
                said = await ask(agent, messages)
                if said.tool_calls:
                    assert said.tool_calls[0].function.arguments.startswith(arguments), name
                    messages.append(said.model_dump(exclude_none=True))
                    result = {"tool_call_id": said.tool_calls[0].id, "content": "x"}
                    messages.append({"role": "tool", **result})
                else:
                    assert "calculator" in said.content, name
                    messages += [
                        {"role": "assistant", "content": said.content},
                        {"role": "user", "content": "and?"},
                    ]
                assert (await ask(agent, messages)).content, name
                conversations[name] = messages
            await mesh.restart("gateway", **large)
            for name, messages in conversations.items():
                more = [*messages, {"role": "assistant", "content": "else"}]
                assert (await ask(agent, [*more, {"role": "user", "content": "y"}])).content, name
        async with client.subscribe("trainer", unit="session") as deliveries:
            delivery = await anext(deliveries)
            await deliveries.acknowledge(delivery)
        trajectories = delivery.sessions[0].trajectories
        assert sum(int(one.loss_mask.sum()) > 0 for one in trajectories) >= len(HARD)


async def test_a_conversation_with_half_an_emoji_is_continued_exactly(shared: Mesh) -> None:
    half = "cut \ud83d"
    user = {"role": "user", "content": half}
    async with shared.client() as client, client.session() as session:
        async with httpx2.AsyncClient(base_url=session.base_url, timeout=60) as http:

            async def post(path: str, **body: Any) -> Any:
                content = json.dumps({"model": "policy", "max_tokens": 64} | body).encode()
                answer = await http.post(path, content=content)
                assert answer.status_code == 200, answer.text
                return answer.json()

            messages: list[Any] = [user]
            for _ in range(3):
                said = (await post("/chat/completions", messages=messages))["choices"][0]
                messages += [said["message"], user]
            items: list[Any] = [user]
            for _ in range(3):
                items += [*(await post("/responses", input=items))["output"], user]
            messages = [user]
            for _ in range(3):
                content = (await post("/messages", messages=messages))["content"]
                messages += [{"role": "assistant", "content": content}, user]
        request = gateway_pb2.GetSessionRequest(session_id=session.session_id)
        async with open_channel(shared.addresses.gateway) as channel:
            shown = await gateway_pb2_grpc.GatewayServiceStub(channel).GetSession(request)
    depths = {0: 0}
    for node in shown.nodes:
        depths[node.node_id] = depths[node.parent_node_id] + 1
    assert sorted(depths.values()).count(6) == 3  # three questions and answers by each protocol
    reasons = {reason for node in shown.nodes for reason in node.reasons}
    assert trajectory_pb2.FIDELITY_REASON_LENIENT_ECHO not in reasons


def deep(levels: int) -> Any:
    """A JSON value with a number of levels."""
    value: Any = 1
    for _ in range(levels):
        value = {"properties": value}
    return value


async def test_json_that_is_nested_too_deep_is_a_400(shared: Mesh) -> None:
    user = [{"role": "user", "content": "x"}]
    async with shared.client() as client, client.session() as session:
        agent = shared.openai(session)
        for levels in (150, 240, 900):
            function = {"name": "f", "parameters": {"type": "object", "properties": deep(levels)}}
            schema = {"name": "s", "schema": {"type": "object", "properties": deep(levels)}}
            form = {"type": "json_schema", "json_schema": schema}
            for wanted in (
                {"tools": [{"type": "function", "function": function}]},
                {"tools": [], "response_format": form},
                {"tools": [], "extra_body": {"chat_template_kwargs": {"a": deep(levels)}}},
            ):
                with pytest.raises(openai.BadRequestError, match="deep"):
                    await ask(agent, user, **wanted)


async def test_a_history_with_hard_arguments_is_served(shared: Mesh) -> None:
    async with shared.client() as client, client.session() as session:
        agent = shared.openai(session, timeout=60)
        for at, hard in enumerate(HARD.values()):
            # Those of thousands of characters are more than the model's context.
            arguments = hard.replace("[" * 2500, "").replace("]" * 2500, "").replace("9" * 4400, "")
            function = {"name": "calculator", "arguments": arguments}
            called = {"id": "abcdef123", "type": "function", "function": function}
            messages: list[Any] = [
                {"role": "user", "content": f"x{at}"},
                {"role": "assistant", "content": "", "tool_calls": [called]},
                {"role": "tool", "tool_call_id": "abcdef123", "content": "y"},
            ]
            assert (await ask(agent, messages)).content is not None
