"""GRPO in plain torch, on exact ids, masks and rollout log-probs.

The policy that sampled a token may be older than the policy at the start of a step, and older than
the one that sampled the next token. The loss therefore decouples the two (Hilton et al. 2021,
"Batch size-invariance for policy optimization"): the ratio is clipped against the policy at the
start of the step, and each token is weighted by how much likelier it was under that policy than
under the one that sampled it. If no token is stale this is the usual loss, up to rounding.

The loss includes the KL divergence from the initial policy, the reference (Shao et al. 2024,
"DeepSeekMath"), here over the full vocabulary. It stabilizes what the rewards say little about,
such as the form of a tool call: without it, a single update occasionally makes one token likely
where it does not belong, and most of what is sampled from then on is noise.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from transformers import Qwen3ForCausalLM

from examples.demo.prefix import hidden_states, shared_length

_CLIP_LOW, _CLIP_HIGH = 0.2, 0.28
_GRADIENT_CLIP = 0.1
# Upper bound of a token's weight for having become likelier since it was sampled.
_MOST_WEIGHT = 2.0
# Cost of one nat per token, in rewards: GRPO's beta.
_KL_COEFFICIENT = 0.2
_ROWS_AT_ONCE = 64
_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@dataclass(frozen=True, slots=True)
class Row:
    """One trajectory. All arrays have the same length N."""

    token_ids: NDArray[np.uint32]
    loss_mask: NDArray[np.bool_]
    logprobs: NDArray[np.float32]
    """Log-probs under the policy that sampled."""
    reward: float


@dataclass(frozen=True, slots=True)
class StepReport:
    """The outcome of one step."""

    loss: float
    logprob_mean_abs_diff: float
    """Rollout versus trainer before the update, over all masked tokens."""
    grad_norm: float
    groups_used: int
    """Groups whose rewards differ. Other groups have no gradient."""
    reference_kl: float
    """Mean divergence from the reference before each update, nats per token."""

    def metrics(self) -> dict[str, float]:
        """Returns the numbers under the names that `Client.report_step` knows."""
        named = {"logprob_difference_mean": self.logprob_mean_abs_diff, "loss": self.loss}
        return named | {"grad_norm": self.grad_norm, "reference_kl": self.reference_kl}


@dataclass(frozen=True, slots=True)
class _Sample:
    """A row being processed in a step."""

    row: Row
    advantage: float
    before: torch.Tensor
    """Log-probs [M] of its masked tokens under the policy before the step."""


class Trainer:
    """Holds the weights being trained."""

    def __init__(
        self,
        model_path: Path,
        *,
        rate: float,
        warm_up: int,
        steps: int,
        mini_batches: int = 2,
        temperature: float = 1.0,
        rank: int = 0,
    ) -> None:
        """Loads the policy. The rate rises over `warm_up` updates, then falls to a tenth.

        Logits are divided by the temperature, as the engine divides them before it samples. With a
        rank, a LoRA adapter is trained in the place of the weights.
        """
        self._temperature = temperature
        self._model = _load(model_path)
        self._adapter: Any = None
        if rank:  # it adds matrices to the layers of the model, and freezes the rest
            self._adapter = get_peft_model(
                self._model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=_TARGETS)
            )
        self._reference = _load(model_path).requires_grad_(requires_grad=False)
        self._optimizer = torch.optim.AdamW(
            [one for one in self._model.parameters() if one.requires_grad],
            lr=rate,
            betas=(0.9, 0.98),
            weight_decay=0.0,
        )
        self._schedule = torch.optim.lr_scheduler.LambdaLR(
            self._optimizer,
            lambda update: (
                min((update + 1) / warm_up, 1.0)
                * (1 - 0.9 * min(update / (steps * mini_batches), 1.0))
            ),
        )
        self._mini_batches = mini_batches

    def step(self, groups: Sequence[Sequence[Row]]) -> StepReport:
        """Makes one pass over complete groups, with one update per mini-batch."""
        before = self._before([row for group in groups for row in group])
        samples = [_samples(group, before) for group in groups]
        used = [group for group in samples if any(sample.advantage for sample in group)]
        losses: list[float] = []
        divergences: list[float] = []
        norm = 0.0
        for start in range(self._mini_batches):
            part = [sample for group in used[start :: self._mini_batches] for sample in group]
            if not part:
                continue
            loss, divergence = self._loss(part)
            self._optimizer.zero_grad()
            loss.backward()
            norm = float(torch.nn.utils.clip_grad_norm_(self._model.parameters(), _GRADIENT_CLIP))
            self._optimizer.step()
            self._schedule.step()
            losses.append(loss.item())
            divergences.append(divergence)
        return StepReport(
            loss=float(np.mean(losses or [0.0])),
            logprob_mean_abs_diff=_difference([one for group in samples for one in group]),
            grad_norm=norm,
            groups_used=len(used),
            reference_kl=float(np.mean(divergences or [0.0])),
        )

    def state(self) -> dict[str, Any]:
        """Returns all that a further step depends on."""
        parts = {"model": self._model, "optimizer": self._optimizer, "schedule": self._schedule}
        return {name: part.state_dict() for name, part in parts.items()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continues from a state."""
        self._model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._schedule.load_state_dict(state["schedule"])

    def weights(self) -> dict[str, torch.Tensor]:
        """Returns the tensors under their checkpoint names, without the tied output layer.

        Of an adapter, its matrices under PEFT's names.
        """
        if self._adapter is not None:
            matrices: dict[str, torch.Tensor] = get_peft_model_state_dict(self._adapter)
            return matrices
        return {
            name: tensor
            for name, tensor in self._model.state_dict().items()
            if name != "lm_head.weight"
        }

    @property
    def is_adapter(self) -> bool:
        """Whether an adapter is trained in the place of the weights."""
        return self._adapter is not None

    @property
    def adapter_config(self) -> dict[str, Any]:
        """PEFT's config of the adapter that is trained."""
        config: dict[str, Any] = self._adapter.peft_config["default"].to_dict()
        return config

    def _loss(self, samples: list[_Sample]) -> tuple[torch.Tensor, float]:
        """Returns the loss, a mean over the masked tokens, and the divergence from the reference.

        The divergence [nats per token] is exact at each sampled token.
        """
        rows = [sample.row for sample in samples]
        scores = row_scores(self._model, rows, self._temperature)
        reference = row_scores(self._reference, rows, self._temperature).full
        divergence = (scores.full.exp() * (scores.full - reference)).sum(1)
        before = torch.cat([sample.before for sample in samples])
        advantages = torch.tensor([sample.advantage for sample in samples])
        advantage = advantages.repeat_interleave(scores.counts)
        weight = torch.exp(before - _sampled(samples)).clamp(max=_MOST_WEIGHT)
        ratio = torch.exp(scores.chosen - before)
        clipped = torch.clamp(ratio, 1 - _CLIP_LOW, 1 + _CLIP_HIGH)
        gain = weight * torch.minimum(ratio * advantage, clipped * advantage)
        return (_KL_COEFFICIENT * divergence - gain).mean(), divergence.mean().item()

    @torch.no_grad()
    def _before(self, rows: list[Row]) -> Iterator[torch.Tensor]:
        """Returns the log-probs [M] of the masked tokens of each row."""
        parts: list[torch.Tensor] = []
        for start in range(0, len(rows), _ROWS_AT_ONCE):
            part = rows[start : start + _ROWS_AT_ONCE]
            scores = row_scores(self._model, part, self._temperature)
            parts += scores.chosen.split(scores.counts.tolist())
        return iter(parts)


def _load(model_path: Path) -> Any:
    return Qwen3ForCausalLM.from_pretrained(model_path, dtype=torch.float32)


class RowScores(NamedTuple):
    """A policy's log-probs for the masked tokens of B rows, row by row."""

    full: torch.Tensor
    """Log-probs over the full vocabulary [M, V], float32."""
    chosen: torch.Tensor
    """Log-probs of the chosen tokens [M]."""
    counts: torch.Tensor
    """Number of masked tokens per row [B], int64."""


def row_scores(model: Any, rows: list[Row], temperature: float) -> RowScores:
    """Returns the log-probs of a policy at a temperature."""
    longest = max(len(row.token_ids) for row in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    mask = torch.zeros(len(rows), longest, dtype=torch.bool)
    for at, row in enumerate(rows):
        size = len(row.token_ids)
        ids[at, :size] = torch.tensor(row.token_ids.astype(np.int64))
        mask[at, :size] = torch.tensor(row.loss_mask)
    shared = shared_length(ids, mask)
    hidden = hidden_states(model, ids, shared)[:, :-1]
    counted = mask[:, shared + 1 :]
    full = torch.log_softmax(model.lm_head(hidden[counted]) / temperature, -1)
    chosen = full.gather(1, ids[:, shared + 1 :][counted][:, None]).squeeze(1)
    return RowScores(full, chosen, counted.sum(1))


def _samples(group: Sequence[Row], before: Iterator[torch.Tensor]) -> list[_Sample]:
    """Consumes as many items of `before` as the group has rows."""
    advantages = group_advantages(group)
    return [
        _Sample(row, advantage, next(before))
        for row, advantage in zip(group, advantages.tolist(), strict=True)
    ]


def _sampled(samples: list[_Sample]) -> torch.Tensor:
    """Returns the log-probs [M] under the policies that sampled the tokens."""
    masked = [sample.row.logprobs[sample.row.loss_mask] for sample in samples]
    return torch.tensor(np.concatenate(masked))


def _difference(samples: list[_Sample]) -> float:
    """Returns the mean absolute difference of log-probs before the step and in the rollout."""
    before = torch.cat([sample.before for sample in samples])
    return float((before - _sampled(samples)).abs().mean())


def group_advantages(group: Sequence[Row]) -> NDArray[np.float64]:
    """Returns reward minus group mean [n]. Zeros if all rewards are equal.

    It is not divided by the standard deviation, which would amplify a single failure among seven
    successes until the policy forgets what it has learned.
    """
    rewards = np.array([row.reward for row in group])
    return rewards - rewards.mean()
