"""A model whose answers end with the header of the next turn, through the whole mesh."""

import json
from pathlib import Path
from typing import Any

from rollmesh.chat import Message, RenderContext
from rollmesh.chat.templates import load_model
from tests.chat import families
from tests.meshes import scripted_mesh

SAID = "\n<think></think>\nHello."


async def test_the_sampled_header_is_trained_once_and_never_printed_twice(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    families.write("glm4moe", model)
    template, tokenizer = load_model(model)
    (model / "config.json").write_text(
        json.dumps({"vocab_size": 2000, "max_position_embeddings": 4096})
    )
    rules = [
        # The engine must stop at the header. Otherwise it would sample the text after it too.
        {
            "after": tokenizer.encode(f"{said}<|assistant|>").tolist(),
            "reply": tokenizer.encode(f"{SAID}<|user|>and more").tolist(),
        }
        for said in ("one", "two")
    ]
    folder = tmp_path / "mesh"
    folder.mkdir()
    (folder / "script.json").write_text(json.dumps(rules))
    async with scripted_mesh(folder, model, eos_id=1999) as mesh, mesh.client() as client:
        async with client.session() as session:
            agent = mesh.openai(session)
            messages: list[Any] = [{"role": "user", "content": "one"}]
            for then in ("two", "end"):
                answer = await agent.chat.completions.create(model="policy", messages=messages)
                said = answer.choices[0].message
                assert said.content == "Hello."
                messages += [said, {"role": "user", "content": then}]
        async with client.subscribe("trainer", unit="session") as deliveries:
            delivery = await anext(deliveries)
            await deliveries.acknowledge(delivery)
    (trajectory,) = delivery.sessions[0].trajectories
    plain = [Message("user", "one"), Message("assistant", "Hello."), Message("user", "two")]
    asked = template.render(plain, RenderContext(), generation_prompt=True)
    whole = tokenizer.encode(f"{asked}{SAID}<|user|>")
    assert trajectory.token_ids.tolist() == whole.tolist()
    header = trajectory.token_ids == tokenizer.special_id("<|user|>")
    assert trajectory.loss_mask[header].tolist() == [0, 1, 1]  # the first was not sampled
