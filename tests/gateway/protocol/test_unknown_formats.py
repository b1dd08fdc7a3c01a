"""What a gateway reports about its parsers, and what it does with an unknown format."""

import json
from pathlib import Path
from typing import Any

import openai
import pytest

from rollmesh.chat import Tokenizer
from rollmesh.runtime.rpc import open_channel
from rollmesh.v1 import gateway_pb2, gateway_pb2_grpc
from tests.chat import families
from tests.chat.parsing.test_formats import TOOLS
from tests.meshes import Mesh, scripted_mesh, write_script

OFFERED: Any = TOOLS


async def info(mesh: Mesh) -> gateway_pb2.GetGatewayInfoResponse:
    async with open_channel(mesh.processes["gateway"].address) as channel:
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        return await stub.GetGatewayInfo(gateway_pb2.GetGatewayInfoRequest(), timeout=60)


def copied(source: Path, folder: Path) -> Path:
    folder.mkdir()
    for path in source.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


async def test_tools_of_a_format_that_nobody_knows_are_refused_and_the_rest_is_served(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    model = copied(tokenizer_dir, tmp_path / "model")
    template = (model / "chat_template.jinja").read_text()
    template = template.replace("<tool_call>", "<<call>>").replace("</tool_call>", "<</call>>")
    (model / "chat_template.jinja").write_text(template)
    ask: Any = {"model": "policy", "messages": [{"role": "user", "content": "call"}]}
    async with scripted_mesh(tmp_path, model, [("call", "Text.")]) as mesh, mesh.client() as client:
        found = await info(mesh)
        assert found.tool_calls == gateway_pb2.TOOL_CALL_PARSING_UNKNOWN
        assert found.reasoning_format == gateway_pb2.REASONING_FORMAT_NONE
        assert not found.tool_parser
        async with client.session() as session:
            agent = mesh.openai(session)
            with pytest.raises(openai.BadRequestError, match=r"tool_parser .*glm45.*vllm:"):
                await agent.chat.completions.create(**ask, tools=OFFERED)
            stayed: Any = await agent.chat.completions.create(
                **ask, tools=OFFERED, tool_choice="none"
            )
            assert stayed.choices[0].message.content == "Text."
            assert (await agent.chat.completions.create(**ask)).choices[0].message.content
        await mesh.restart("gateway", tool_parser="hermes")
        found = await info(mesh)
        assert found.tool_calls == gateway_pb2.TOOL_CALL_PARSING_PARSED
        assert found.tool_parser == "hermes"
        async with client.session() as session:
            read = await mesh.openai(session).chat.completions.create(**ask, tools=OFFERED)
            assert read.choices[0].message.content == "Text."


SAID = '<|channel>thought\nHm.\n<channel|>I do.<|tool_call>call:f{n:1,s:<|"|>a<b<|"|>}<tool_call|>'


@pytest.mark.long
async def test_the_channels_of_gemma_are_parted_while_they_are_sampled(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    families.write("gemma4_v2", model)
    tokenizer = Tokenizer(model)
    config = {"vocab_size": tokenizer.rust.get_vocab_size(), "max_position_embeddings": 8192}
    (model / "config.json").write_text(json.dumps(config))
    turn = ("<turn|>\n<|turn>model\n", "<turn|>")
    write_script(tmp_path / "script.json", tokenizer, [("call", SAID)], turn)
    async with scripted_mesh(tmp_path, model) as mesh, mesh.client() as client:
        found = await info(mesh)
        assert found.tool_parser == "gemma4"
        assert found.reasoning_format == gateway_pb2.REASONING_FORMAT_GEMMA4
        async with client.session() as session:
            agent = mesh.openai(session)
            ask: Any = {"model": "policy", "messages": [{"role": "user", "content": "call"}]}
            thought, text, calls = "", "", ""
            async for chunk in await agent.chat.completions.create(
                **ask, tools=OFFERED, stream=True
            ):
                delta: Any = chunk.choices[0].delta
                thought += getattr(delta, "reasoning_content", None) or ""
                text += delta.content or ""
                calls += "".join(one.function.arguments or "" for one in delta.tool_calls or [])
            assert (thought, text, json.loads(calls)) == ("Hm.", "I do.", {"n": 1, "s": "a<b"})
