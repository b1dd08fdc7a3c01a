"""An export for supervised fine-tuning, as TRL, datasets and transformers read it."""

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.meshes import delivered, scripted_mesh

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2]}}\n</tool_call>'
RULES = [
    ("plain", "Two and two are four."),
    ("add", f"I add.\n{CALL}"),
    ("<tool_response>\n3\n</tool_response>", "It is 3."),
]
NUMBER = {"type": "number"}
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds.",
            "parameters": {"type": "object", "properties": {"a": NUMBER}},
        },
    }
]
EXPORT = ("-m", "rollmesh.cli", "export", "--format", "sft")


@pytest.mark.long
async def test_trl_trains_the_tokens_of_the_export_and_templates_print_its_messages(
    tmp_path: Path, model_dir: Path
) -> None:
    datasets, transformers, trl = map(pytest.importorskip, ("datasets", "transformers", "trl"))
    path = tmp_path / "sft.jsonl"
    first = {"gateway": {"record_messages": True}}
    async with scripted_mesh(tmp_path, model_dir, RULES, first=first) as mesh:
        async with mesh.client() as client:
            async with client.session() as plain:
                asked: list[Any] = [{"role": "user", "content": "plain"}]
                await mesh.openai(plain).chat.completions.create(model="policy", messages=asked)
            async with client.session() as session:
                agent = mesh.openai(session)
                asked = [{"role": "system", "content": "Add."}, {"role": "user", "content": "add"}]
                answer = await agent.chat.completions.create(
                    model="policy", messages=asked, tools=TOOLS
                )
                said = answer.choices[0].message
                assert said.tool_calls
                asked += [
                    said.model_dump(exclude_none=True),
                    {"role": "tool", "content": "3", "tool_call_id": said.tool_calls[0].id},
                ]
                await agent.chat.completions.create(model="policy", messages=asked, tools=TOOLS)
            await delivered(client, plain)
            await delivered(client, session)
        flags = (*EXPORT, "--to", str(path), "--collector", mesh.address("collector"))
        exporting = await asyncio.create_subprocess_exec(sys.executable, *flags)
        assert await exporting.wait() == 0
    rows = datasets.load_dataset(
        "json", data_files=str(path), split="train", cache_dir=str(tmp_path / "cache")
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_dir)
    for row in rows:
        printed = tokenizer.apply_chat_template(
            row["messages"],
            tools=row["tools"] or None,
            return_dict=False,
            **(row["chat_template_kwargs"] or {}),
        )
        assert printed[: len(row["input_ids"])] == row["input_ids"]
    settings = trl.SFTConfig(
        str(tmp_path / "out"), use_cpu=True, bf16=False, report_to="none", max_length=4096
    )
    trainer = trl.SFTTrainer(str(model_dir), settings, train_dataset=rows)
    for row, ready in zip(rows, trainer.train_dataset, strict=True):
        assert ready["input_ids"] == row["input_ids"]
        trained = [token for token in ready["labels"] if token != -100]
        sampled = zip(row["input_ids"], row["assistant_masks"], strict=True)
        assert trained == [token for token, is_sampled in sampled if is_sampled]
