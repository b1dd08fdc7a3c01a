"""A template that refuses two calls in one answer: the answer ends before the second."""

import json
from pathlib import Path

import numpy as np
import pytest

from rollmesh.chat import Tokenizer
from rollmesh.v1 import chat_pb2, gateway_pb2, trajectory_pb2
from tests.chat import families
from tests.gateway.live import LiveMesh
from tests.meshes import write_script
from tests.messages import said

TOOLS = '[{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]'
ONE = '{"name": "add", "parameters": {"a": 1}}'
TURN = ("<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n", "<|eot_id|>")


@pytest.mark.parametrize("parallel", [None, True])
async def test_a_rollout_goes_on_after_two_sampled_calls(
    tmp_path: Path, *, parallel: bool | None
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    families.write("llama3_1", model)
    tokenizer = Tokenizer(model)
    size = {"vocab_size": tokenizer.rust.get_vocab_size(), "max_position_embeddings": 8192}
    (model / "config.json").write_text(json.dumps(size))
    rules = [("twice", f"{ONE}; {ONE}"), ('"done"', "Good.")]
    write_script(tmp_path / "script.json", tokenizer, rules, TURN)
    async with LiveMesh(tmp_path, model, script=tmp_path / "script.json") as mesh:
        info = await mesh.stub.GetGatewayInfo(gateway_pb2.GetGatewayInfoRequest())
        assert (info.tool_parser, info.one_tool_call) == ("llama3_json", True)
        opened = await mesh.stub.CreateSession(gateway_pb2.CreateSessionRequest())

        async def ask(*messages: chat_pb2.ChatMessage) -> gateway_pb2.ChatResponse:
            response: gateway_pb2.ChatResponse = await mesh.stub.Chat(
                gateway_pb2.ChatRequest(
                    session_id=opened.session_id,
                    session_key=opened.session_key,
                    messages=messages,
                    tools_json=TOOLS,
                    parallel_tool_calls=parallel,
                    returns=gateway_pb2.ReturnOptions(token_ids=True),
                )
            )
            return response

        first = await ask(said("twice"))
        answer = first.answers[0]
        (call,) = answer.message.tool_calls
        assert json.loads(call.arguments_json) == {"a": 1}
        assert trajectory_pb2.FIDELITY_REASON_STOP_STRING in answer.reasons
        ids = np.frombuffer(answer.tokens.token_ids_u32le, "<u4")
        assert tokenizer.rust.decode(ids.tolist()) == ONE
        result = said("done", chat_pb2.ROLE_TOOL)
        result.tool_call_id = call.id
        second = await ask(said("twice"), answer.message, result)
    prompts = [np.frombuffer(one.prompt_token_ids_u32le, "<u4") for one in (first, second)]
    kept = [*prompts[0], *ids]
    assert prompts[1][: len(kept)].tolist() == kept
    assert trajectory_pb2.FIDELITY_REASON_TEMPLATE_REWRITE not in second.answers[0].reasons
