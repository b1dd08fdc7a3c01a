"""Sampled tokens as engines return them."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from rollmesh.runtime.codec.arrays import Logprobs, TokenIds


class Tops(NamedTuple):
    """The most likely ids at each of N positions, the most likely first."""

    ids: TokenIds
    """uint32 [N, T]."""
    logprobs: Logprobs
    """float32 [N, T]."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """Tokens as the engine returns them, in arrays of equal length N."""

    token_ids: TokenIds
    """uint32 [N]."""
    logprobs: Logprobs
    """float32 [N]."""
    tops: Tops

    def __len__(self) -> int:
        """Returns N."""
        return len(self.token_ids)

    def until(self, end: int) -> "Sampled":
        """Returns the first `end` tokens."""
        tops = Tops(self.tops.ids[:end], self.tops.logprobs[:end])
        return Sampled(self.token_ids[:end], self.logprobs[:end], tops)


def no_tops(tokens: int) -> Tops:
    """Returns empty `Tops` for tokens whose most likely ids were not requested."""
    return Tops(np.zeros((tokens, 0), np.uint32), np.zeros((tokens, 0), np.float32))


def joined(runs: Iterable[Sampled]) -> Sampled:
    """Concatenates runs of tokens; at least one is required."""
    parts = list(runs)
    return Sampled(
        np.concatenate([one.token_ids for one in parts]),
        np.concatenate([one.logprobs for one in parts]),
        Tops(
            np.concatenate([one.tops.ids for one in parts]),
            np.concatenate([one.tops.logprobs for one in parts]),
        ),
    )
