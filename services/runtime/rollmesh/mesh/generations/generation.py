"""What was sampled for one request."""

import zlib
from dataclasses import dataclass, field

import numpy as np

from rollmesh.mesh.generations.checking import AnswerCheck, Expected
from rollmesh.mesh.generations.continuing import continued, prompt_crc32
from rollmesh.mesh.generations.sampled import Sampled, joined
from rollmesh.mesh.leasing.offered import Offered
from rollmesh.runtime.codec.arrays import TokenIds, pack_ids
from rollmesh.v1 import engine_pb2, sampling_pb2

_BYTES = 4  # of a packed id
_ANY = 2**32


@dataclass(slots=True)
class Generation:
    """What was sampled for one request, by one engine or by several of them in turn."""

    request: engine_pb2.GenerateRequest
    """The complete request; its id is not used."""
    vocabulary_tokens: int = 0
    """Exclusive upper bound of the ids; 0 if it is unknown."""
    prompt_crc32: int | None = None
    """CRC-32 of the packed prompt; None if it is not known yet."""
    runs: list[Sampled] = field(default_factory=list)
    spans: list[sampling_pb2.VersionSpan] = field(default_factory=list)
    """Who sampled the ids, as far as the engines have said."""
    finish: engine_pb2.GenerateFinish | None = None
    """How the last engine ended."""
    engine_id: str = ""
    """The engine that samples."""
    _prompt_tokens: int = 0
    _check: AnswerCheck | None = None
    _start: int = 0
    _taken: int = 0

    def __post_init__(self) -> None:
        """Counts the ids of the prompt."""
        self._prompt_tokens = len(self.request.token_ids_u32le) // _BYTES

    @property
    def migrated(self) -> bool:
        """Whether an engine continued what another one, or an earlier attempt, had sampled."""
        return self._start > 0

    @property
    def is_known(self) -> bool:
        """Whether the policy version of every id is known."""
        return self._taken == (self.spans[-1].end if self.spans else 0)

    @property
    def taken(self) -> int:
        """Number of ids sampled so far."""
        return self._taken

    @property
    def fresh(self) -> int:
        """Number of ids that the current engine has sampled."""
        return self._taken - self._start

    def sampled(self) -> Sampled | None:
        """Returns everything that was sampled so far; None if nothing was."""
        return joined(self.runs) if self.runs else None

    def token_ids(self) -> TokenIds:
        """Returns the ids sampled so far, uint32 [S]."""
        return joined(self.runs).token_ids if self.runs else np.empty(0, np.uint32)

    def anew(self) -> "Generation":
        """Returns the same generation before its first token."""
        return Generation(self.request, self.vocabulary_tokens, self.prompt_crc32)

    def begin(
        self,
        engine_id: str,
        request_id: str,
        offered: Offered = Offered(),  # noqa: B008
        into: engine_pb2.GenerateRequest | None = None,
    ) -> engine_pb2.GenerateRequest:
        """Begins to take from an engine; returns the request for it, which asks for what is left.

        Args:
            engine_id: The engine.
            request_id: Id of the generation there.
            offered: What the router offers now.
            into: As of `continued`.
        """
        sampled = self.token_ids()
        rest = continued(self.request, sampled, request_id, into)
        if self.prompt_crc32 is None:
            self.prompt_crc32 = prompt_crc32(self.request)
        self._check = AnswerCheck(
            Expected(
                prompt_tokens=self._prompt_tokens + len(sampled),
                prompt_crc32=zlib.crc32(pack_ids(sampled), self.prompt_crc32),
                max_tokens=rest.sampling.max_tokens or _ANY,
                top_logprobs=rest.top_logprobs,
                vocabulary_tokens=self.vocabulary_tokens,
            ),
            offered,
        )
        self.engine_id = engine_id
        self._start, self.finish = self._taken, None
        return rest

    def take(
        self,
        response: engine_pb2.StreamGenerateResponse,
        offered: Offered = Offered(),  # noqa: B008
    ) -> Sampled:
        """Takes a message from the engine; returns its tokens.

        Raises:
            EngineFaultError: The message is invalid; none of it was taken.
        """
        assert self._check is not None
        run = self._check.take(response, offered)
        if len(run):
            self.runs.append(run)
        if response.HasField("policy_version") and self.is_known:
            self._add_span(response.policy_version, len(run))
        self._taken += len(run)
        if response.HasField("finish"):
            self.end(response.finish)
        return run

    def end(self, finish: engine_pb2.GenerateFinish) -> None:
        """Ends what the engine sampled; the spans of its finish replace those of its messages."""
        self.finish = finish
        if not finish.version_spans:
            return
        self.spans = [one for one in self.spans if one.end <= self._start]
        for span in finish.version_spans:
            self._add_span(span.policy_version, span.end - span.start)

    def _add_span(self, policy_version: int, tokens: int) -> None:
        """Says who sampled the next tokens."""
        if not tokens:  # vLLM returns an empty span if the weights changed and no token followed
            return
        start = self.spans[-1].end if self.spans else 0
        last = self.spans[-1] if start > self._start else None
        if last is not None and last.policy_version == policy_version:
            last.end += tokens
            return
        self.spans.append(
            sampling_pb2.VersionSpan(
                policy_version=policy_version,
                start=start,
                end=start + tokens,
                engine_id=self.engine_id,
            )
        )
