"""A session whose template prints the time prints that of its beginning, in every turn."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from rollmesh.chat import Tokenizer
from rollmesh.runtime import clock
from rollmesh.v1 import chat_pb2, gateway_pb2
from tests.gateway.live import LiveMesh
from tests.messages import said

DAY_MS = 86_400_000
TEMPLATE = (
    "<|im_start|>system\nNow: {{ strftime_now('PATTERN') }}<|im_end|>\n"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


async def ask(
    mesh: LiveMesh, opened: gateway_pb2.CreateSessionResponse, *messages: chat_pb2.ChatMessage
) -> tuple[list[int], gateway_pb2.ChatAnswer]:
    response = await mesh.stub.Chat(
        gateway_pb2.ChatRequest(
            session_id=opened.session_id,
            session_key=opened.session_key,
            messages=messages,
            returns=gateway_pb2.ReturnOptions(token_ids=True),
        )
    )
    return np.frombuffer(response.prompt_token_ids_u32le, "<u4").tolist(), response.answers[0]


@pytest.mark.parametrize(
    ("pattern", "apart_ms"), [("%Y-%m-%d %H:%M:%S", 1000), ("%d %b %Y", DAY_MS)]
)
async def test_each_session_prints_its_own_time_and_is_exact(
    pattern: str,
    apart_ms: int,
    tmp_path: Path,
    tokenizer_dir: Path,
    tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = shutil.copytree(tokenizer_dir, tmp_path / "model")
    (model / "chat_template.jinja").write_text(TEMPLATE.replace("PATTERN", pattern))
    now = [clock.unix_ms()]
    monkeypatch.setattr(clock, "unix_ms", lambda: now[0])
    asked, begun = said("What is 6 times 7?"), set[str]()
    async with LiveMesh(tmp_path, model) as mesh:
        for _ in range(3):
            opened = await mesh.stub.CreateSession(gateway_pb2.CreateSessionRequest())
            ids, answer = await ask(mesh, opened, asked)
            begun.add(tokenizer.rust.decode(ids, skip_special_tokens=False))
            now[0] += apart_ms  # the session goes over the second, or over midnight
            more, _ = await ask(mesh, opened, asked, answer.message, said("Why?"))
            assert more[: len(ids)] == ids
            assert list(answer.reasons) == []
    assert len(begun) == 3
