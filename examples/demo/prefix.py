"""Computes the common prefix of a batch only once: here, more than half of every row."""

from typing import Any

import torch


def shared_length(ids: torch.Tensor, counted: torch.Tensor) -> int:
    """Returns the length of the common prefix, short of what predicts the first counted id.

    Args:
        ids: Token ids [B, L], int64.
        counted: Ids whose log-prob is needed [B, L], bool. At least one is true.
    """
    same = int((ids == ids[0]).all(0).long().cumprod(0).sum())
    first = int(counted.any(0).long().argmax())
    return max(min(same, first - 1), 0)


def hidden_states(model: Any, ids: torch.Tensor, shared: int) -> torch.Tensor:
    """Returns the last hidden states [B, L - shared, H] of the ids after the shared prefix.

    Gradients also reach the prefix, through its keys and values.

    Args:
        model: A causal language model from transformers.
        ids: Token ids [B, L], int64, padded on the right.
        shared: Number of leading ids common to all rows. 0 computes every row in full.
    """
    hidden: torch.Tensor
    if shared == 0:
        hidden = model.model(ids).last_hidden_state
        return hidden
    cache = model.model(ids[:1, :shared], use_cache=True).past_key_values
    cache.batch_repeat_interleave(len(ids))
    behind = model.model(ids[:, shared:], past_key_values=cache)
    hidden = behind.last_hidden_state
    return hidden
