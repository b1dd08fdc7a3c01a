"""Sampled tokens as a client may want to see them: ids, log-probabilities, text, alternatives."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from rollmesh.chat.tokenizer import ModelTokenizer
from rollmesh.runtime.codec.arrays import Logprobs, TokenIds


class Tops(NamedTuple):
    """The most likely ids at each of N places, the most likely first."""

    ids: TokenIds
    """uint32 [N, T]."""
    logprobs: Logprobs
    """float32 [N, T]."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """Tokens as the engine gives them, arrays of one length N."""

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
    """Returns what is said of the most likely ids where nobody asked for them."""
    return Tops(np.zeros((tokens, 0), np.uint32), np.zeros((tokens, 0), np.float32))


def joined(runs: Iterable[Sampled]) -> Sampled:
    """Returns runs as one; at least one is needed."""
    parts = list(runs)
    return Sampled(
        np.concatenate([one.token_ids for one in parts]),
        np.concatenate([one.logprobs for one in parts]),
        Tops(
            np.concatenate([one.tops.ids for one in parts]),
            np.concatenate([one.tops.logprobs for one in parts]),
        ),
    )


@dataclass(frozen=True, slots=True)
class Returns:
    """What a request wants beside its answer."""

    token_ids: bool = False
    logprobs: bool = False
    top_logprobs: int = 0

    def __bool__(self) -> bool:
        """Says whether it wants anything."""
        return self.token_ids or self.logprobs


@dataclass(frozen=True, slots=True)
class Shown:
    """A run of sampled tokens as it is shown."""

    sampled: Sampled
    texts: tuple[bytes, ...] | None
    """Text of each token; None where log-probabilities are not wanted."""
    top_texts: tuple[bytes, ...]
    """Text of each of the most likely, row by row."""


def show(sampled: Sampled, returns: Returns, tokenizer: ModelTokenizer) -> Shown:
    """Returns tokens as a request wants them."""
    if not returns.logprobs:
        return Shown(sampled, None, ())
    return Shown(
        sampled,
        tuple(map(tokenizer.token_bytes, sampled.token_ids.tolist())),
        tuple(map(tokenizer.token_bytes, sampled.tops.ids.ravel().tolist())),
    )
