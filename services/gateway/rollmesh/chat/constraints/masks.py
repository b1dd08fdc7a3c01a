"""Tokens that an answer may not hold: `bad_words` as vLLM reads them."""

from collections.abc import Iterable

from rollmesh.chat.tokenizer import ModelTokenizer
from rollmesh.runtime.errors import InvalidFieldError
from rollmesh.v1 import types_pb2


def bad_sequences(words: Iterable[str], tokenizer: ModelTokenizer) -> list[list[int]]:
    """Returns the ids of each word at the beginning of a text, and after a space.

    The second form counts where it is one of its own: as many tokens, the first another one. So
    does `SamplingParams.update_from_tokenizer` of vLLM.

    Raises:
        InvalidFieldError: A word has no tokens.
    """
    sequences: list[list[int]] = []
    for at, word in enumerate(words):
        plain: list[int] = tokenizer.encode(word.lstrip()).tolist()
        if not plain:
            raise InvalidFieldError(f"bad_words[{at}]", "has no tokens; leave it out")
        sequences.append(plain)
        behind: list[int] = tokenizer.encode(f" {word.lstrip()}").tolist()
        if len(behind) == len(plain) and behind[0] != plain[0]:
            sequences.append(behind)
    return sequences


def is_masked(sampling: types_pb2.SamplingParams) -> bool:
    """Says whether tokens are taken out, or made more or less likely, beside the model."""
    return bool(sampling.allowed_token_ids or sampling.logit_bias or sampling.bad_sequences)
