"""Masked tokens: `bad_words` as vLLM reads them."""

from collections.abc import Iterable

from rollmesh.chat.tokenizer import ModelTokenizer
from rollmesh.runtime.errors import InvalidFieldError
from rollmesh.v1 import sampling_pb2


def bad_sequences(words: Iterable[str], tokenizer: ModelTokenizer) -> list[list[int]]:
    """Returns the ids of each word at the beginning of a text and after a space.

    The second form is returned if it has as many tokens and another first token, as in vLLM's
    `SamplingParams.update_from_tokenizer`.

    Raises:
        InvalidFieldError: A word has no tokens.
    """
    sequences: list[list[int]] = []
    for at, word in enumerate(words):
        plain: list[int] = tokenizer.encode(word.lstrip()).tolist()
        if not plain:
            raise InvalidFieldError(f"bad_words[{at}]", "encodes to no tokens; leave it out")
        sequences.append(plain)
        after: list[int] = tokenizer.encode(f" {word.lstrip()}").tolist()
        if len(after) == len(plain) and after[0] != plain[0]:
            sequences.append(after)
    return sequences


def is_masked(sampling: sampling_pb2.SamplingParams) -> bool:
    """Returns whether the request masks tokens or changes their likelihood."""
    return bool(sampling.allowed_token_ids or sampling.logit_bias or sampling.bad_sequences)
