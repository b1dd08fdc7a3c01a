"""What all rows of a batch begin with, computed once: here more than half of every row."""

from typing import Any

import torch


def shared_length(ids: torch.Tensor, counted: torch.Tensor) -> int:
    """Returns how many leading ids all rows share, short of what predicts the first counted id.

    Args:
        ids: Token ids [B, L], int64.
        counted: Ids whose log-prob is wanted [B, L], bool; at least one is true.
    """
    same = int((ids == ids[0]).all(0).long().cumprod(0).sum())
    first = int(counted.any(0).long().argmax())
    return max(min(same, first - 1), 0)


def hidden_states(model: Any, ids: torch.Tensor, shared: int) -> torch.Tensor:
    """Returns the last hidden states [B, L - shared, H] of what follows the shared prefix.

    Gradients reach the prefix too, by way of its keys and values.

    Args:
        model: A causal language model of transformers.
        ids: Token ids [B, L], int64, padded on the right.
        shared: Number of leading ids that all rows share; 0 computes every row whole.
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
