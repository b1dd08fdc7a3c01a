"""Attached servers, without vLLM and torch: what answers share, and where the kinds differ."""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from rollmesh.engine.attached.server import Server
from rollmesh.engine.backend import GenerateInput, ModelLimits, message
from rollmesh.engine.config import EngineConfig
from rollmesh.runtime.errors import (
    EngineFaultError,
    EngineStartError,
    InvalidConstraintError,
    InvalidFieldError,
    InvalidSamplingError,
)
from rollmesh.v1 import engine_pb2, sampling_pb2

# Answers: their tokens, checked, as the engine's messages.

_MALFORMED = (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError)
_REST_BYTES, _TOKEN_BYTES, _CANDIDATE_BYTES = 64 * 1024, 256, 128


def most_bytes(tokens: int, top: int) -> int:
    """Returns the size that an answer with log-probabilities has at most."""
    return _REST_BYTES + tokens * (_TOKEN_BYTES + _CANDIDATE_BYTES * (2 + top))


@contextmanager
def well_formed(what: str) -> Iterator[None]:
    """Reads a part of an answer in the block.

    Raises:
        EngineFaultError: The block failed, because a field is missing or has another type.
    """
    try:
        yield
    except _MALFORMED as error:
        raise EngineFaultError(
            f"the server's {what} malformed: {type(error).__name__}: {error}"
        ) from error


def expect(holds: bool, problem: str) -> None:
    """Checks an answer.

    Raises:
        EngineFaultError: It does not hold.
    """
    if not holds:
        raise EngineFaultError(f"the server's answer cannot be right: {problem}")


def read_id(value: Any, vocabulary: int) -> int:
    """Returns an id of the vocabulary."""
    expect(type(value) is int and 0 <= value < vocabulary, f"{value!r:.20} is no id")
    return int(value)


class Row(NamedTuple):
    """One token with its candidates, the most likely first."""

    id: int
    logprob: float
    top_ids: list[int]
    top_logprobs: list[float]


class Answer(ABC):
    """The answer to one request to generate, whole or in parts."""

    def __init__(
        self, request: GenerateInput, vocabulary_tokens: int, version_of: Callable[[str], int]
    ) -> None:
        """Starts without tokens.

        `version_of` returns the policy version of weights by the server's name for them, or raises.
        """
        self._request = request
        self._vocabulary = vocabulary_tokens
        self._version_of = version_of
        self._rows: list[Row] = []  # not taken yet
        self._taken = 0
        self.finish: engine_pb2.GenerateFinish | None = None
        """How the answer ended."""

    @property
    def sampled(self) -> int:
        """Returns the number of tokens so far."""
        return self._taken + len(self._rows)

    def add(self, part: Any) -> None:
        """Adds the whole answer, or an event of its stream.

        Raises:
            EngineFaultError: It cannot be right.
        """
        with well_formed("answer is"):
            self._add(part)
        most = self._request.generate.sampling.max_tokens
        expect(self.sampled <= most, f"it has more ids than the {most} requested")

    def messages(self, policy_version: int | None) -> Iterator[engine_pb2.TokenChunk]:
        """Yields the tokens that were added. The last message of an answer has its finish.

        The version is None if only the end of the answer tells it.
        """
        spans: list[tuple[int | None, int]] = [(policy_version, self.sampled)]
        if self.finish is not None:
            spans = [(one.policy_version, one.end) for one in self.finish.version_spans]
        parts = [part for version, end in spans for part in self._take(version, end)]
        if self.finish is not None:
            parts = parts or [engine_pb2.TokenChunk()]
            parts[-1].finish.CopyFrom(self.finish)
        yield from parts

    @abstractmethod
    def _add(self, part: Any) -> None:
        """Adds rows and, at the end, the finish."""

    def _end(
        self,
        reason: sampling_pb2.FinishReason.ValueType,
        spans: Iterable[Mapping[str, Any]],
        stop: Any,
    ) -> None:
        """Ends the answer.

        `stop` is the id that ended it, None if the server does not say.
        """
        finish = engine_pb2.GenerateFinish(reason=reason)
        at = 0
        for span in spans:
            start, end = span["start"], span["end"]
            expect(start == at <= end, "its version spans have gaps")
            if end > start:  # an empty one stands for weights that sampled nothing
                version = self._version_of(span["version"])
                finish.version_spans.add(policy_version=version, start=start, end=end)
            at = end
        expect(at == self.sampled, "its version spans do not cover its tokens")
        if reason == sampling_pb2.FINISH_REASON_STOP:
            last = self._rows[-1].id
            expect(stop is None or stop == last, "it does not end with its stop token")
            finish.stop_token_id = last
        self.finish = finish

    def _note_prompt(self, count: int, cached: int) -> None:
        """Notes the sizes of the prompt and of its cached part."""
        expect(count == len(self._request.token_ids), f"the server received {count} prompt ids")
        if self.finish is not None:
            self.finish.cached_tokens = cached

    def _take(self, version: int | None, end: int) -> Iterator[engine_pb2.TokenChunk]:
        """Yields the tokens up to an index, in messages of at most the requested size."""
        top = self._request.generate.top_logprobs
        while (count := end - self._taken) > 0:
            count = min(count, self._request.max_chunk_tokens or count)
            rows, self._rows = self._rows[:count], self._rows[count:]
            self._taken += count
            part = message(
                np.array([one.id for one in rows], np.uint32),
                np.array([one.logprob for one in rows], np.float32),
                np.array([one.top_ids for one in rows], np.uint32).reshape(count, top),
                np.array([one.top_logprobs for one in rows], np.float32).reshape(count, top),
                version or 0,
            )
            if version is None:
                part.ClearField("policy_version")
            yield part


# Kinds of servers.

NOT_SENT = "is not sent to an attached server; ask an engine with the backend vllm"


class Dialect:
    """One kind of server. `backend` calls it, and types the errors of the server.

    Each kind adds the calls of `VllmHttp`.
    """

    name: ClassVar[str]
    """Name of the backend."""
    tested: ClassVar[str]
    """Release that the tests run."""
    generate_path: ClassVar[str]
    alive_path: ClassVar[str]
    """Path of a GET that fails if the model died."""
    answers: ClassVar[type[Answer]]
    """Reads the answers."""
    sleep_flag: ClassVar[str]
    """Lets a server sleep."""
    aborts_late: ClassVar[bool] = False
    """Whether a closed connection ends its request only later."""
    tells_sleep: ClassVar[bool] = True
    """Whether the server says that it is asleep."""

    def __init__(self, server: Server, config: EngineConfig) -> None:
        """Takes the server and the settings of the engine."""
        self.server = server
        self.config = config
        self.limits = ModelLimits(0, 0)
        self.numerics = sampling_pb2.Numerics()
        self.weight_transfer = ""
        self.may_sleep = False
        self.slots = 1
        """Number of requests that the server samples at the same time."""

    def check_context(self, most: int) -> int:
        """Returns the maximum context, tokens.

        Raises:
            EngineStartError: The setting is above the server's maximum.
        """
        wanted = self.config.max_context_tokens
        if wanted > most:
            raise EngineStartError(
                f"max_context_tokens: is {wanted}, and the attached server has {most}; give at "
                "most that"
            )
        return wanted or most

    def vocabulary(self, served: Path) -> int:
        """Returns the size of the vocabulary, which the server does not say.

        Raises:
            EngineStartError: No setting and no file says it either.
        """
        if self.config.vocabulary_tokens:
            return self.config.vocabulary_tokens
        for folder in (served, self.config.model_path):
            try:
                found = json.loads((folder / "config.json").read_text())
                return int((found | found.get("text_config", {}))["vocab_size"])
            except (OSError, ValueError, TypeError, KeyError, AttributeError):
                continue
        raise EngineStartError(
            "vocabulary_tokens: the server does not say it; give it, or in model_path the folder "
            "of the server's model"
        )

    def check_sleep(self) -> None:
        """Checks that the server can sleep.

        Raises:
            InvalidFieldError: It cannot.
        """
        if not self.may_sleep:
            raise InvalidFieldError(
                "level", f"the attached server cannot sleep; start it with {self.sleep_flag}"
            )

    def refuse(self, request: GenerateInput) -> None:
        """Refuses the fields that the server does not have.

        Raises:
            InvalidFieldError: Names the field.
        """
        generate = request.generate
        if generate.HasField("constraint"):
            raise InvalidConstraintError("constraint", NOT_SENT)
        if generate.banned_token_ids:
            raise InvalidFieldError("banned_token_ids", NOT_SENT)
        if generate.sampling.bad_sequences:
            raise InvalidSamplingError("sampling.bad_sequences", NOT_SENT)
        if generate.images:
            raise InvalidFieldError("images", NOT_SENT)
