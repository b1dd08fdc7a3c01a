"""A model that thinks: its reasoning is apart, comes back or not, and stays in the tokens."""

from pathlib import Path
from typing import Any

from rollmesh.chat import Message, RenderContext, Tokenizer
from rollmesh.chat.templates import load_template
from tests.meshes import scripted_mesh
from tests.models import make_thinking_dir

RULES = [
    ("why", "<think>\nWell then.\n</think>\n\nBecause."),
    ("and", "<think>\nHm.\n</think>\n\nSo."),
]


async def test_history_can_be_rewritten_as_the_template_has_it(tmp_path: Path) -> None:
    thinking_model = make_thinking_dir(tmp_path / "model")
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
