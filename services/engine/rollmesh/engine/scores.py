"""Scores of given tokens, and requests for them: plain data."""

from collections.abc import Iterator
from dataclasses import dataclass

from rollmesh.runtime.codec import Logprobs, TokenIds, pack_ids, pack_logprobs
from rollmesh.v1 import engine_pb2

NO_ID = 2**32 - 1
"""Fills a row of given ids that has fewer."""
_MESSAGE_BYTES = 1024 * 1024 - 64  # leaves room for the lengths of the fields


@dataclass(frozen=True, slots=True)
class ScoreInput:
    """A checked request to score a sequence of N ids."""

    request_id: str
    token_ids: TokenIds
    """uint32 [N], N at least 2."""
    start: int
    """Index of the first id that is scored, 1 to N - 1."""
    top_k: int
    """Number K of most likely ids to return at each position."""
    ids: TokenIds | None = None
    """Ids to score at each position instead, uint32 [N - start, K]. `NO_ID` fills a row."""

    @property
    def width(self) -> int:
        """Number of log-probabilities at each position, 1 + K."""
        return 1 + (self.top_k if self.ids is None else self.ids.shape[1])


@dataclass(frozen=True, slots=True)
class Scores:
    """The log-probabilities at M positions, in nats, at temperature 1 and without truncation."""

    logprobs: Logprobs
    """Of the id at each position, float32 [M]."""
    top_ids: TokenIds
    """The most likely ids, in descending order, uint32 [M, K]. [M, 0] if ids were given."""
    top_logprobs: Logprobs
    """Of those, or of the given ids, float32 [M, K]. Minus infinity for `NO_ID`."""
    policy_version: int
    """Version of the weights, the same at all positions."""

    def messages(self) -> Iterator[engine_pb2.ScoreTokensResponse]:
        """Yields them in messages of at most 1 MiB."""
        rows = _MESSAGE_BYTES // (4 + 8 * self.top_logprobs.shape[1])
        for start in range(0, len(self.logprobs), rows):
            part = slice(start, start + rows)
            yield engine_pb2.ScoreTokensResponse(
                logprobs_f32le=pack_logprobs(self.logprobs[part]),
                top_ids_u32le=pack_ids(self.top_ids[part]),
                top_logprobs_f32le=pack_logprobs(self.top_logprobs[part]),
                policy_version=self.policy_version,
            )
