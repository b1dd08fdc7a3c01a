"""A small model that has learnt by heart what to answer: with reasoning, and with calls.

A random model never writes either. This one is trained on the spot for half a minute.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from examples.demo.chatml import CHAT_TEMPLATE, END
from tests.models import CORPUS, load_network, make_model_dir

_PRINTED = "{{- '<|im_start|>assistant\\n' + message.content }}"
_WITH_REASONING = """\
{{- '<|im_start|>assistant\\n' }}
        {%- set thought = message.reasoning_content or message.reasoning %}
        {%- if thought %}{{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}{%- endif %}
        {{- message.content }}"""
_TAGS = ("<think>", "</think>")
_STEPS, _ENOUGH = 800, 0.003


class Lesson(NamedTuple):
    """A conversation in the form of chat completions, and its answer as the model writes it."""

    messages: Sequence[dict[str, Any]]
    answer: str
    tools: Sequence[dict[str, Any]] = ()


def make_taught_dir(path: Path, lessons: Sequence[Lesson]) -> Path:
    """Writes a model that gives these answers at temperature 0.

    Its chat template prints reasoning, and its tokenizer has the tags of reasoning.
    """
    import torch  # only the tests with vLLM have it
    from transformers import AutoTokenizer

    make_model_dir(
        path, corpus=[*CORPUS, *(one.answer for one in lessons)], tags=_TAGS, spread=0.02
    )
    assert _PRINTED in CHAT_TEMPLATE
    template = CHAT_TEMPLATE.replace(_PRINTED, _WITH_REASONING)
    (path / "chat_template.jinja").write_text(template)
    printed = AutoTokenizer.from_pretrained(path)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    rows: list[tuple[list[int], list[int]]] = []
    for lesson in lessons:
        prompt = printed.apply_chat_template(
            list(lesson.messages),
            tools=list(lesson.tools) or None,
            add_generation_prompt=True,
            tokenize=False,
        )
        rows.append((tokenizer.encode(prompt).ids, tokenizer.encode(lesson.answer + END).ids))
    length = max(len(prompt) + len(answer) for prompt, answer in rows)
    ids = torch.zeros((len(rows), length), dtype=torch.int64)
    wanted = torch.full_like(ids, -100)
    for at, (prompt, answer) in enumerate(rows):
        end = len(prompt) + len(answer)
        ids[at, :end] = torch.tensor(prompt + answer)
        wanted[at, len(prompt) : end] = torch.tensor(answer)
    network = load_network(path)
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3)
    for _ in range(_STEPS):
        loss = network(input_ids=ids, labels=wanted).loss  # padding on the right is not seen
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if loss.item() < _ENOUGH:
            network.save_pretrained(path)
            return path
    raise AssertionError(f"the model has not learnt its answers in {_STEPS} steps")
