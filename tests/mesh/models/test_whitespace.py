"""Blanks around an answer that the template takes off: the tokens stay, and the reasons say so."""

from pathlib import Path
from typing import Any

import pytest

from rollmesh.chat import Tokenizer
from tests.meshes import scripted_mesh

PADDED, PLAIN = "Because. \n", "So."
RULES = [("why", PADDED), ("and", PLAIN), ("then", PLAIN)]


@pytest.fixture
def stripping_model(tmp_path: Path, tokenizer_dir: Path) -> Path:
    model = tmp_path / "model"
    model.mkdir()
    for path in tokenizer_dir.iterdir():
        (model / path.name).write_bytes(path.read_bytes())
    template = model / "chat_template.jinja"
    source = template.read_text()
    assert "message.content" in source
    template.write_text(source.replace("message.content", "(message.content | trim)"))
    return model


@pytest.mark.parametrize(
    ("asked", "echo", "reasons"),
    [
        pytest.param("why", PADDED, {"TEMPLATE_REWRITE"}, id="echoed as it was"),
        pytest.param("why", PADDED.strip(), {"TEMPLATE_REWRITE", "LENIENT_ECHO"}, id="stripped"),
        pytest.param("and", PLAIN, {"EXACT"}, id="without blanks"),
    ],
)
async def test_an_answer_whose_blanks_the_template_strips_stays_and_is_not_called_exact(
    tmp_path: Path, stripping_model: Path, asked: str, echo: str, reasons: set[str]
) -> None:
    async with scripted_mesh(tmp_path, stripping_model, RULES) as mesh, mesh.client() as client:
        async with client.session() as session:
            agent = mesh.openai(session)
            messages: list[Any] = [{"role": "user", "content": asked}]
            await agent.chat.completions.create(model="policy", messages=messages)
            messages += [
                {"role": "assistant", "content": echo},
                {"role": "user", "content": "then"},
            ]
            await agent.chat.completions.create(model="policy", messages=messages)
        async with client.subscribe("trainer", unit="session") as deliveries:
            delivery = await anext(deliveries)
            await deliveries.acknowledge(delivery)
    (trajectory,) = delivery.sessions[0].trajectories
    assert trajectory.turns == 2
    assert set(trajectory.reasons) == reasons
    text = Tokenizer(stripping_model).rust.decode(trajectory.token_ids.tolist())
    assert (PADDED if asked == "why" else PLAIN) in text
    sampled = [segment for segment in trajectory.segments if segment.sampled]
    assert not set(sampled[0].reasons) - {"EXACT"}  # the next turn reports it
