"""A chat request as tokens: what the tree holds of it, and what the template adds."""

import asyncio
import zlib
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import TypeVar

from rollmesh.gateway.continuation import Continuation
from rollmesh.gateway.ends import TemplateRefusedError
from rollmesh.gateway.forced import constraint_of
from rollmesh.gateway.formats import AnswerFormat
from rollmesh.gateway.masks import bad_sequences
from rollmesh.gateway.messages import Frame, Unit, units_of
from rollmesh.gateway.prompt import Prompt, build_prompt
from rollmesh.gateway.session import Session, TurnRequest
from rollmesh.gateway.special_text import SpecialText
from rollmesh.gateway.template import TemplateRenderError
from rollmesh.gateway.tokenizer import ModelTokenizer, SpecialTextError
from rollmesh.gateway.tree import Match
from rollmesh.runtime.arrays import pack_ids
from rollmesh.runtime.errors import ContextLengthExceededError, InvalidMessagesError
from rollmesh.v1 import engine_pb2, types_pb2

_SHORT_CHARS = 16_384  # tokenised in about 3 ms; more text than this has threads of its own

_Result = TypeVar("_Result")


class Workers:
    """The threads that tokenise; long texts have their own, so that no short one waits for them."""

    def __init__(self, short: Executor, long: Executor) -> None:
        """Takes the two pools."""
        self._short = short
        self._long = long

    def run(self, work: Callable[[], _Result], *, is_long: bool = False) -> asyncio.Future[_Result]:
        """Begins work off the event loop."""
        executor = self._long if is_long else self._short
        return asyncio.get_running_loop().run_in_executor(executor, work)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request as tokens."""

    prompt: Prompt
    packed: bytes
    """The whole prompt, as it goes to the engine."""
    prompt_tokens: int
    """Number of its ids."""
    prompt_crc32: int
    """What the engine must say it received."""
    inside_reasoning: bool
    """Whether the generation prompt has opened the reasoning."""
    constraint: engine_pb2.Constraint | None
    """What the answer must be."""
    bad_sequences: list[list[int]]
    """Ids of what the answer must not hold."""


class Preparer:
    """Turns requests into tokens; holds no state of its own."""

    def __init__(
        self,
        *,
        tokenizer: ModelTokenizer,
        continuation: Continuation,
        answer_format: AnswerFormat,
        workers: Workers,
        max_context_tokens: int,
        rewrite_history: bool,
        special_text: SpecialText,
    ) -> None:
        """Takes what a model's requests are turned into tokens with."""
        self._tokenizer = tokenizer
        self._continuation = continuation
        self._format = answer_format
        self._workers = workers
        self._max_context_tokens = max_context_tokens
        self._rewrite_history = rewrite_history
        self._special_text = special_text

    def begin(self, session: Session, request: TurnRequest) -> asyncio.Future[Prepared]:
        """Begins to make a request into tokens."""
        units = units_of(request.messages)
        match = session.tree.match(request.frame, units)
        return self._workers.run(
            lambda: self._prepare(match, request, units),
            is_long=_new_chars(match, request.frame, units) > _SHORT_CHARS,
        )

    def _prepare(self, match: Match, request: TurnRequest, units: list[Unit]) -> Prepared:
        """Tokenises what the tree does not hold. Runs in a worker thread."""
        frame = request.frame
        try:
            prompt = build_prompt(
                self._continuation,
                self._special_text,
                match,
                units,
                frame,
                rewrite=self._rewrite_history,
            )
        except (TemplateRenderError, TemplateRefusedError, SpecialTextError) as error:
            raise InvalidMessagesError("messages", f"the chat template: {error}") from error
        opening = self._format.opening
        inside = bool(opening) and self._continuation.opens_reasoning(units, frame, opening)
        constraint = constraint_of(request.wanted, self._format, frame, inside_reasoning=inside)
        ids = prompt.ids()
        packed = pack_ids(ids)
        crc32 = zlib.crc32(packed)
        bad = bad_sequences(request.bad_words, self._tokenizer)
        return Prepared(prompt, packed, len(ids), crc32, inside, constraint, bad)

    def sampling(self, request: TurnRequest, prepared: Prepared) -> types_pb2.SamplingParams:
        """Returns how the engine is to sample.

        Raises:
            ContextLengthExceededError: The prompt leaves no room for an answer.
        """
        prompt_tokens = prepared.prompt_tokens
        room = self._max_context_tokens - prompt_tokens
        if room < 1:
            raise ContextLengthExceededError(
                "messages",
                f"This model's maximum context length is {self._max_context_tokens} tokens. "
                f"However, your messages resulted in {prompt_tokens} tokens. "
                "Please reduce the length of the messages.",
                max_tokens=self._max_context_tokens,
                prompt_tokens=prompt_tokens,
            )
        sampling = types_pb2.SamplingParams()
        sampling.CopyFrom(request.sampling)
        if not sampling.ignore_eos:
            sampling.stop_token_ids.extend(self._continuation.stop_ids)
        sampling.max_tokens = min(sampling.max_tokens, room) if sampling.max_tokens else room
        for ids in prepared.bad_sequences:
            sampling.bad_sequences.add(token_ids=ids)
        return sampling


def _new_chars(match: Match, frame: Frame, units: list[Unit]) -> int:
    """Returns the size of the text that the tree does not hold, about."""
    fresh = sum(len(message.content) for unit in units[match.depth :] for message in unit)
    return fresh if match.depth else fresh + len(frame.tools_json)
