"""GRPO in plain torch, from exact ids, masks and rollout log-probs."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import Qwen3ForCausalLM

from examples.demo.prefix import hidden_states, shared_length

_CLIP_LOW, _CLIP_HIGH = 0.2, 0.28
_GRADIENT_CLIP = 0.1
# Nats a conversation that an update may move the policy further from the one that sampled. Without
# this bound Adam, whose steps do not shrink with the gradient, now and then destroys a small policy
# in one update.
_TRUST = 0.2
_HALVINGS = 6
_ROWS_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class Row:
    """One trajectory; arrays of one length N."""

    token_ids: NDArray[np.uint32]
    loss_mask: NDArray[np.bool_]
    logprobs: NDArray[np.float32]
    """Under the policy that sampled."""
    reward: float


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one step did."""

    loss: float
    logprob_mean_abs_diff: float
    """Rollout versus trainer, before the update, over all masked tokens."""
    grad_norm: float
    groups_used: int
    """Groups whose rewards differ; the others teach nothing."""
    divergence: float
    """Of the new policy from the one that sampled, nats a conversation."""


class Trainer:
    """Holds the trained weights."""

    def __init__(
        self, model_path: Path, *, rate: float, warm_up: int, steps: int, mini_batches: int = 2
    ) -> None:
        """Loads the policy; the rate rises over `warm_up` updates, then falls to a tenth."""
        self._model: Any = Qwen3ForCausalLM.from_pretrained(model_path, dtype=torch.float32)
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.0
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
        """Makes one pass over whole groups: one update per mini-batch."""
        difference = self._difference([row for group in groups for row in group])
        used = [group for group in groups if np.any(group_advantages(group))]
        losses, norm, divergence = [0.0], 0.0, 0.0
        for start in range(self._mini_batches):
            part = used[start :: self._mini_batches]
            if not part:
                continue
            rows = [row for group in part for row in group]
            advantages = np.concatenate([group_advantages(group) for group in part])
            loss, before = self._loss(rows, advantages)
            self._optimizer.zero_grad()
            loss.backward()
            norm = float(torch.nn.utils.clip_grad_norm_(self._model.parameters(), _GRADIENT_CLIP))
            divergence = self._move(rows, before + _TRUST)
            losses.append(loss.item())
        return StepReport(
            loss=float(np.mean(losses)),
            logprob_mean_abs_diff=difference,
            grad_norm=norm,
            groups_used=len(used),
            divergence=divergence,
        )

    def _move(self, rows: list[Row], most: float) -> float:
        """Takes one step, halved until the divergence is at most `most`; returns it [nats]."""
        parameters = list(self._model.parameters())
        before = [parameter.detach().clone() for parameter in parameters]
        self._optimizer.step()
        self._schedule.step()
        for _ in range(_HALVINGS):
            divergence = self._divergence(rows)
            if divergence <= most:
                return divergence
            with torch.no_grad():
                for parameter, old in zip(parameters, before, strict=True):
                    parameter.lerp_(old, 0.5)
        return self._divergence(rows)

    @torch.no_grad()
    def _divergence(self, rows: list[Row]) -> float:
        """Returns the divergence from the policy that sampled, nats a conversation."""
        logprobs, old, _ = self._token_logprobs(rows)
        return _divergence(logprobs - old) / len(rows)

    def weights(self) -> dict[str, torch.Tensor]:
        """Returns the tensors by the checkpoint's names, the tied output layer left out."""
        return {
            name: tensor
            for name, tensor in self._model.state_dict().items()
            if name != "lm_head.weight"
        }

    def _loss(self, rows: list[Row], advantages: NDArray[np.float64]) -> tuple[torch.Tensor, float]:
        """Returns the clipped policy loss, a mean over the masked tokens, and the divergence.

        The importance ratio is each token's own: what sampled one may be older than what sampled
        the next.
        """
        logprobs, old, counted = self._token_logprobs(rows)
        weight = torch.tensor(advantages, dtype=torch.float32)[:, None].expand(counted.shape)
        ratio = torch.exp(logprobs - old)
        advantage = weight[counted]
        clipped = torch.clamp(ratio, 1 - _CLIP_LOW, 1 + _CLIP_HIGH)
        loss = -torch.minimum(ratio * advantage, clipped * advantage).mean()
        return loss, _divergence(logprobs.detach() - old) / len(rows)

    @torch.no_grad()
    def _difference(self, rows: list[Row]) -> float:
        total, count = 0.0, 0
        for start in range(0, len(rows), _ROWS_AT_ONCE):
            logprobs, old, _ = self._token_logprobs(rows[start : start + _ROWS_AT_ONCE])
            total += float((logprobs - old).abs().sum())
            count += len(old)
        return total / max(count, 1)

    def _token_logprobs(self, rows: list[Row]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns log-probs of the masked tokens: now [M], at rollout [M]; where [B, K]."""
        longest = max(len(row.token_ids) for row in rows)
        ids = torch.zeros(len(rows), longest, dtype=torch.long)
        mask = torch.zeros(len(rows), longest, dtype=torch.bool)
        old = torch.zeros(len(rows), longest)
        for at, row in enumerate(rows):
            size = len(row.token_ids)
            ids[at, :size] = torch.tensor(row.token_ids.astype(np.int64))
            mask[at, :size] = torch.tensor(row.loss_mask)
            old[at, :size] = torch.tensor(row.logprobs)
        shared = shared_length(ids, mask)
        hidden = hidden_states(self._model, ids, shared)[:, :-1]
        counted = mask[:, shared + 1 :]
        logits = self._model.lm_head(hidden[counted])
        chosen = ids[:, shared + 1 :][counted]
        logprobs = torch.log_softmax(logits, -1).gather(1, chosen[:, None]).squeeze(1)
        return logprobs, old[:, shared + 1 :][counted], counted


def _divergence(change: torch.Tensor) -> float:
    """Returns the sum over tokens of Schulman's k3 estimator, for changes of log-probs [M]."""
    return float((change.exp() - 1 - change).sum())


def group_advantages(group: Sequence[Row]) -> NDArray[np.float64]:
    """Returns reward minus the group's mean [n]; zeros where the rewards are equal.

    Not divided by the deviation: that would blow up the one failure among seven successes, and the
    policy would forget what it has learned.
    """
    rewards = np.array([row.reward for row in group])
    return rewards - rewards.mean()
