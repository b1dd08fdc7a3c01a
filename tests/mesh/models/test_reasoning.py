"""A model that thinks: its reasoning is apart, comes back or not, and stays in the tokens."""

from pathlib import Path
from typing import Any

import pytest

from rollmesh.chat import Message, RenderContext, Tokenizer
from rollmesh.chat.templates import load_template
from tests.meshes import scripted_mesh
from tests.paths import package_folder

QWEN3 = package_folder("trl") / "chat_templates" / "qwen3.jinja"
RULES = [
    ("why", "<think>\nWell then.\n</think>\n\nBecause."),
    ("and", "<think>\nHm.\n</think>\n\nSo."),
]


@pytest.fixture
def thinking_model(tmp_path: Path, tokenizer_dir: Path) -> Path:
    model = tmp_path / "model"
    model.mkdir()
    for path in tokenizer_dir.iterdir():
        (model / path.name).write_bytes(path.read_bytes())
    (model / "chat_template.jinja").write_text(QWEN3.read_text())
    return model


@pytest.mark.parametrize("echoed", [True, False], ids=["echoed", "dropped"])
async def test_reasoning_is_apart_and_its_tokens_stay(
    tmp_path: Path, thinking_model: Path, *, echoed: bool
) -> None:
    async with scripted_mesh(tmp_path, thinking_model, RULES) as mesh, mesh.client() as client:
        async with client.session() as session:
            agent = mesh.openai(session)
            messages: list[Any] = [{"role": "user", "content": "why"}]
            first = await agent.chat.completions.create(model="policy", messages=messages)
            said: Any = first.choices[0].message
            assert (said.reasoning_content, said.content) == ("Well then.", "Because.")
            echo = {"role": "assistant", "content": said.content}
            if echoed:
                echo["reasoning_content"] = said.reasoning_content
            messages += [echo, {"role": "user", "content": "and"}]
            chunks = await agent.chat.completions.create(
                model="policy", messages=messages, stream=True
            )
            deltas: list[Any] = [chunk.choices[0].delta async for chunk in chunks if chunk.choices]
        thought = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
        assert (thought, "".join(d.content or "" for d in deltas)) == ("Hm.", "So.")
        async with client.subscribe("trainer", unit="session") as deliveries:
            delivery = await anext(deliveries)
            await deliveries.acknowledge(delivery)
    (trajectory,) = delivery.sessions[0].trajectories
    assert trajectory.turns == 2
    assert "TEMPLATE_REWRITE" in trajectory.reasons  # the template would have dropped it
    assert set(trajectory.reasons) <= {"TEMPLATE_REWRITE", "LENIENT_ECHO"}
    sampled = [s for s in trajectory.segments if s.sampled]
    assert len(sampled) == 2


async def test_history_can_be_rewritten_as_the_template_has_it(
    tmp_path: Path, thinking_model: Path
) -> None:
    messages: list[Any] = [{"role": "user", "content": "why"}]
    first = {"gateway": {"history": "rewrite"}}
    async with scripted_mesh(tmp_path, thinking_model, RULES, first=first) as mesh:
        async with mesh.client() as client:
            async with client.session() as session:
                agent = mesh.openai(session, max_retries=4)
                for said in ("and", "why"):
                    answer = await agent.chat.completions.create(model="policy", messages=messages)
                    messages += [answer.choices[0].message, {"role": "user", "content": said}]
            async with client.subscribe("trainer", unit="session") as deliveries:
                delivery = await anext(deliveries)
                await deliveries.acknowledge(delivery)
    kept, rewritten = delivery.sessions[0].trajectories
    tokenizer = Tokenizer(thinking_model)
    texts = [tokenizer.rust.decode(t.token_ids.tolist()) for t in (kept, rewritten)]
    assert "Well then." in texts[0]
    assert "Well then." not in texts[1]  # the template drops it once another question follows
    assert "Because.\nuser\nand" in texts[1]
    assert (kept.turns, rewritten.turns) == (1, 1)
    assert "TEMPLATE_REWRITE" in rewritten.reasons
    template = load_template(thinking_model, tokenizer)
    plain = (Message("user", "why"), Message("assistant", "Because."), Message("user", "and"))
    prompt = tokenizer.encode(template.render(plain, RenderContext(), generation_prompt=True))
    assert rewritten.token_ids[: len(prompt)].tolist() == prompt.tolist()
    assert all(trajectory.loss_mask.any() for trajectory in (kept, rewritten))
