"""Makes the demo's policy: 0.9 M parameters that know the right answer but rarely give it.

Demonstrations are of mixed quality. Each of three faults (no tool, wrong operator, no number in the
answer) occurs with probability 0.34, so a policy that imitates them is right 0.66 ** 3 = 0.29 of
the time. What remains to be learned is preference, which reinforcement learning can teach.
"""

import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import Qwen3Config, Qwen3ForCausalLM

from examples.demo.chatml import CHAT_TEMPLATE, END, make_tokenizer
from examples.demo.prefix import hidden_states, shared_length
from examples.demo.tasks import OPERATIONS, SYSTEM_PROMPT, TOOLS, Task, make_tasks
from rollmesh.chat import Message, ToolCall, make_context
from rollmesh.chat.templates import ChatTemplate

CONTEXT_TOKENS = 512
_VOCABULARY = 900
_FAULT = 0.34
# Small batches and a rate that decays almost to zero: junk left in the sampled distribution limits
# what reinforcement learning can reach, because it cannot teach copying.
_STEPS, _BATCH, _WARM_UP = 700, 16, 20
_RATE, _LAST_RATE = 2.5e-3, 0.03


@dataclass(frozen=True, slots=True)
class PolicyReport:
    """The policy that was made."""

    parameters: int
    vocabulary: int
    seconds: float
    final_loss: float


def make_policy(
    path: Path,
    *,
    seed: int,
    steps: int = _STEPS,
    fault: float = _FAULT,
    progress: Callable[[int, int, float], None] | None = None,
) -> PolicyReport:
    """Makes tokenizer and weights, and writes them as a model directory.

    Args:
        path: Folder to be loaded by vLLM and the gateway.
        seed: Seed of weights, demonstrations and their order.
        steps: Number of supervised steps. With few of them, it is a random policy.
        fault: Probability of each fault of a demonstration. The tokenizer does not depend on it.
        progress: Called with step, number of steps and loss.
    """
    started = time.monotonic()
    torch.manual_seed(seed)
    dice = random.Random(seed)
    template = ChatTemplate(CHAT_TEMPLATE, {})
    texts = ["".join(_demonstration(task, dice, template)) for task in make_tasks(3000, seed)]
    tokenizer = make_tokenizer(texts, _VOCABULARY, path, CONTEXT_TOKENS)
    model = _make_model(tokenizer)
    demonstrate = partial(_demonstration, dice=dice, template=template, fault=fault)
    loss = _supervise(model, tokenizer, demonstrate, seed, steps, progress)
    model.save_pretrained(path)
    generation = {"eos_token_id": tokenizer.token_to_id(END), "pad_token_id": 0}
    (path / "generation_config.json").write_text(json.dumps(generation))
    return PolicyReport(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        vocabulary=tokenizer.get_vocab_size(),
        seconds=time.monotonic() - started,
        final_loss=loss,
    )


def _make_model(tokenizer: Tokenizer) -> Any:
    config = Qwen3Config(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT_TOKENS,
        tie_word_embeddings=True,
        initializer_range=0.06,
        eos_token_id=tokenizer.token_to_id(END),
        pad_token_id=0,
        dtype="float32",
    )
    return Qwen3ForCausalLM(config)


def _demonstration(
    task: Task, dice: random.Random, template: ChatTemplate, fault: float = _FAULT
) -> list[str]:
    """Returns a conversation as alternating pieces of context and answer, with random faults."""
    asked = (Message("system", SYSTEM_PROMPT), Message("user", task.question))
    render_context = make_context(json.dumps(TOOLS).encode(), b"")
    prompt = template.render(asked, render_context, generation_prompt=True)
    if dice.random() < fault:
        return [prompt, f"I am not sure.{END}"]
    wrong = dice.random() < fault
    operation = (
        dice.choice([other for other in OPERATIONS if other != task.operation])
        if wrong
        else task.operation
    )
    made = Task(task.a, operation, task.b)
    call = Message("assistant", "", (ToolCall("c", "calculator", json.dumps(made.call)),))
    result = Message("tool", str(made.result), tool_call_id="c")
    called = template.render((*asked, call), render_context).removesuffix("\n")
    told = template.render((*asked, call, result), render_context, generation_prompt=True)
    silent = dice.random() < fault
    answer = "The calculation is done." if silent else f"The answer is {made.result}."
    return [prompt, called[len(prompt) :], told[len(called) :], f"{answer}{END}"]


def _supervise(
    model: Any,
    tokenizer: Tokenizer,
    demonstrate: Callable[[Task], list[str]],
    seed: int,
    steps: int,
    progress: Callable[[int, int, float], None] | None,
) -> float:
    """Trains on fresh demonstrations. The loss covers only assistant tokens."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=_RATE, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / _WARM_UP, 1.0) * (1 - (1 - _LAST_RATE) * step / steps),
    )
    tasks = iter(make_tasks(steps * _BATCH, seed + 1))
    loss = torch.zeros(())
    for step in range(steps):
        rows = [_encode(demonstrate(next(tasks)), tokenizer) for _ in range(_BATCH)]
        ids, labels = _padded(rows)
        loss = _loss(model, ids, labels)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if progress is not None:
            progress(step + 1, steps, loss.item())
    return float(loss.item())


def _loss(model: Any, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Returns the mean cross-entropy over unmasked labels. Computes logits for those only."""
    shared = shared_length(ids, labels != -100)
    hidden = hidden_states(model, ids, shared)[:, :-1]
    wanted = labels[:, shared + 1 :]
    counted = wanted != -100
    return torch.nn.functional.cross_entropy(model.lm_head(hidden[counted]), wanted[counted])


def _encode(pieces: list[str], tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    ids: list[int] = []
    labels: list[int] = []
    for at, piece in enumerate(pieces):
        new = tokenizer.encode(piece, add_special_tokens=False).ids
        ids += new
        labels += new if at % 2 else [-100] * len(new)
    return ids, labels


def _padded(rows: list[tuple[list[int], list[int]]]) -> tuple[torch.Tensor, torch.Tensor]:
    longest = max(len(ids) for ids, _ in rows)
    ids = [row + [0] * (longest - len(row)) for row, _ in rows]
    labels = [row + [-100] * (longest - len(row)) for _, row in rows]
    return torch.tensor(ids), torch.tensor(labels)
