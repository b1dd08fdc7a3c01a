"""Sampled tokens as clients request them: ids, log-probabilities, text and alternatives."""

from dataclasses import dataclass

from rollmesh.chat.tokenizer import ModelTokenizer
from rollmesh.mesh.generations.sampled import Sampled


@dataclass(frozen=True, slots=True)
class Returns:
    """What a request wants in addition to its answer."""

    token_ids: bool = False
    logprobs: bool = False
    top_logprobs: int = 0

    def __bool__(self) -> bool:
        """Returns whether anything is requested."""
        return self.token_ids or self.logprobs


@dataclass(frozen=True, slots=True)
class Shown:
    """A run of sampled tokens in the form that the client requested."""

    sampled: Sampled
    texts: tuple[bytes, ...] | None
    """Text of each token; None if log-probabilities are not requested."""
    top_texts: tuple[bytes, ...]
    """Text of each of the most likely tokens, row by row."""


def show(sampled: Sampled, returns: Returns, tokenizer: ModelTokenizer) -> Shown:
    """Returns tokens in the form that a request wants."""
    if not returns.logprobs:
        return Shown(sampled, None, ())
    return Shown(
        sampled,
        tuple(map(tokenizer.token_bytes, sampled.token_ids.tolist())),
        tuple(map(tokenizer.token_bytes, sampled.tops.ids.ravel().tolist())),
    )
