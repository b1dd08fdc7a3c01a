"""Turns a chat request into tokens: those that the tree holds, and those the template adds."""

import asyncio
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import TypeVar

from rollmesh.chat.constraints.masks import bad_sequences
from rollmesh.chat.constraints.structural_tag import constraint_of
from rollmesh.chat.images.placing import Placeholder, PlacementError
from rollmesh.chat.images.rules import ImageRefusedError
from rollmesh.chat.messages import Message, MessageGroup, RenderContext
from rollmesh.chat.parsing.formats import AnswerFormat
from rollmesh.chat.templates.continuation import Continuation
from rollmesh.chat.templates.ends import TemplateRefusedError
from rollmesh.chat.templates.jinja import TemplateRenderError
from rollmesh.chat.templates.special_text import SpecialText
from rollmesh.chat.tokenizer import ModelTokenizer, SpecialTextError
from rollmesh.gateway.conversation.matching import Bookmark, Match
from rollmesh.gateway.conversation.session import Session, TurnRequest
from rollmesh.gateway.turns.fairness import FairExecutor
from rollmesh.gateway.turns.prompt import Prompt, build_prompt
from rollmesh.mesh.leasing.prefixes import prefix_crc32s
from rollmesh.runtime.codec.arrays import pack_ids
from rollmesh.runtime.errors import ContextLengthExceededError, InvalidMessagesError
from rollmesh.v1 import engine_pb2, sampling_pb2

_SHORT_CHARS = 16_384  # tokenised in about 3 ms; longer text has its own threads
_MESSAGE_CHARS = 64  # what a template renders around a message, at least in time
_COMPARED_BYTES, _COMPARED_GROUPS = 262_144, 256
"""More messages are compared with the tree in a thread; fewer take about a millisecond."""
_LIKELY_CHARS = 4
"""Text with at most this many characters per token of room is tokenised at once, not in chunks."""
_CHUNK_CHARS = 65_536
_CUT_TOKENS = 64

_REFUSALS = (
    TemplateRenderError,
    TemplateRefusedError,
    SpecialTextError,
    PlacementError,
    ImageRefusedError,
)
_Result = TypeVar("_Result")


class Workers:
    """Tokeniser threads; long texts have their own, so that short texts never wait for them."""

    def __init__(self, short: Executor, long: FairExecutor) -> None:
        """Takes the two pools."""
        self._short = short
        self._long = long

    def run(self, work: Callable[[], _Result]) -> asyncio.Future[_Result]:
        """Starts short work off the event loop."""
        return asyncio.get_running_loop().run_in_executor(self._short, work)

    def run_long(self, session_id: str, work: Callable[[], _Result]) -> asyncio.Future[_Result]:
        """Queues long work of a session, which runs off the event loop at the session's turn."""
        return self._long.begin(session_id, work)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request as tokens."""

    prompt: Prompt
    packed: bytes
    """The complete prompt in the engine's format."""
    prompt_tokens: int
    """Number of prompt ids."""
    prompt_crc32: int
    """CRC-32 that the engine must report for the prompt it received."""
    prefixes: list[int]
    """CRC-32 of its beginnings, the shortest first."""
    inside_reasoning: bool
    """Whether the generation prompt opens the reasoning."""
    constraint: engine_pb2.Constraint | None
    """Structured-output constraint of the answer."""
    bad_sequences: list[list[int]]
    """Id sequences that the answer must not contain."""
    images: list[Placeholder]
    """Where the images are in the prompt, in order."""


@dataclass(frozen=True, slots=True)
class PromptSize:
    """The size of a prompt."""

    tokens: int
    """Number of its ids."""
    is_lower_bound: bool = False
    """Whether it has more: text that far exceeds the context is not counted to its end."""


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
        """Takes the model's tokenizer, template and formats, and the gateway's limits."""
        self._tokenizer = tokenizer
        self._continuation = continuation
        self._format = answer_format
        self._workers = workers
        self._max_context_tokens = max_context_tokens
        self._rewrite_history = rewrite_history
        self._special_text = special_text

    def begin(self, session: Session, request: TurnRequest) -> asyncio.Future[Prepared]:
        """Starts turning a request into tokens.

        The search in the tree starts where the earlier request of the conversation led, if that is
        known. If many messages are left to compare, they are compared in a thread.
        """
        tree, context, conversation = session.tree, request.render_context, request.conversation
        groups, earlier = conversation.groups, conversation.earlier
        start = tree.start(context, groups, earlier.digest if earlier is not None else b"")
        changes, owner = tree.changes, session.spec.session_id

        def keep(bookmark: Bookmark) -> None:
            if tree.changes == changes:
                tree.keep(context, conversation.digest, bookmark)

        known_bytes = earlier.size if earlier is not None and start.match.depth else 0
        if (
            conversation.size - known_bytes < _COMPARED_BYTES
            and len(groups) - start.match.depth < _COMPARED_GROUPS
        ):
            match, bookmark = tree.search(start, groups)
            keep(bookmark)
            if _new_chars(match, context, groups) <= _SHORT_CHARS:
                return self._workers.run(lambda: self._prepare(match, request))
            return self._workers.run_long(owner, lambda: self._prepare_long(match, request))
        loop = asyncio.get_running_loop()

        def work() -> Prepared:
            match, bookmark = tree.search(start, groups)
            loop.call_soon_threadsafe(keep, bookmark)
            return self._prepare_long(match, request)

        return self._workers.run_long(owner, work)

    def _prepare_long(self, match: Match, request: TurnRequest) -> Prepared:
        """Prepares a request with much new text, unless the text cannot fit into the context."""
        groups = request.conversation.groups
        room = self._max_context_tokens - match.node.end
        texts = (message.content for group in groups[match.depth :] for message in group)
        least = least_tokens(texts, room, self._tokenizer)
        if least > room:
            raise self._too_long(f"at least {match.node.end + least}", match.node.end + least)
        return self._prepare(match, request)

    def _prepare(self, match: Match, request: TurnRequest) -> Prepared:
        """Tokenises what the tree does not hold of the request. Runs in a worker thread."""
        groups, render_context = request.conversation.groups, request.render_context
        try:
            prompt = build_prompt(
                self._continuation,
                self._special_text,
                match,
                groups,
                render_context,
                rewrite=self._rewrite_history,
            )
        except _REFUSALS as error:
            raise InvalidMessagesError("messages", f"the chat template: {error}") from error
        opening = self._format.opening
        inside = bool(opening) and self._continuation.opens_reasoning(
            groups, render_context, opening
        )
        constraint = constraint_of(
            request.wanted, self._format, render_context, inside_reasoning=inside
        )
        ids = prompt.ids()
        packed = pack_ids(ids)
        prefixes, crc32 = prefix_crc32s(packed)
        bad = bad_sequences(request.bad_words, self._tokenizer)
        images = prompt.placeholders() if request.conversation.images else []
        return Prepared(prompt, packed, len(ids), crc32, prefixes, inside, constraint, bad, images)

    async def count(self, session: Session, request: TurnRequest) -> PromptSize:
        """Returns the size of a request's prompt."""
        try:
            prepared = await self.begin(session, request)
        except ContextLengthExceededError as error:
            return PromptSize(int(error.metadata["prompt_tokens"]), is_lower_bound=True)
        return PromptSize(prepared.prompt_tokens)

    def sampling(self, request: TurnRequest, prepared: Prepared) -> sampling_pb2.SamplingParams:
        """Returns the sampling parameters for the engine.

        Raises:
            ContextLengthExceededError: The prompt leaves no room for an answer, or less than the
                request asks for.
        """
        prompt_tokens = prepared.prompt_tokens
        room = self._max_context_tokens - prompt_tokens
        if room < 1:
            raise self._too_long(str(prompt_tokens), prompt_tokens)
        wanted = request.sampling.max_tokens
        if request.max_tokens_must_fit and wanted > room:
            raise ContextLengthExceededError(
                "sampling.max_tokens",
                f"is {wanted}, and the prompt of {prompt_tokens} tokens leaves room for {room}; "
                "give less, or reduce the length of the messages",
                max_tokens=self._max_context_tokens,
                prompt_tokens=prompt_tokens,
                wanted_tokens=wanted,
            )
        sampling = sampling_pb2.SamplingParams()
        sampling.CopyFrom(request.sampling)
        if not sampling.ignore_eos:
            sampling.stop_token_ids.extend(self._continuation.stop_ids)
        sampling.max_tokens = min(sampling.max_tokens, room) if sampling.max_tokens else room
        for ids in prepared.bad_sequences:
            sampling.bad_sequences.add(token_ids=ids)
        return sampling

    def _too_long(self, said: str, prompt_tokens: int) -> ContextLengthExceededError:
        return ContextLengthExceededError(
            "messages",
            f"This model's maximum context length is {self._max_context_tokens} tokens. "
            f"However, your messages resulted in {said} tokens. "
            "Please reduce the length of the messages.",
            max_tokens=self._max_context_tokens,
            prompt_tokens=prompt_tokens,
        )


def least_tokens(texts: Iterable[str], room: int, tokenizer: ModelTokenizer) -> int:
    """Returns a lower bound of the number of tokens in texts, or 0 if they probably fit.

    Tokenising time is proportional to the text. Text that is far too long is therefore counted
    chunk by chunk until it is known not to fit, so the cost is bounded by the context, not by the
    text. A cut between two chunks may add tokens, so a margin is subtracted from each chunk.

    Args:
        texts: Approximate content of the prompt.
        room: Number of tokens that fit.
        tokenizer: Tokenizer of the model.
    """
    stripped = [text.strip() for text in texts]
    if sum(map(len, stripped)) <= _LIKELY_CHARS * max(room, 1):
        return 0
    least = 0
    for text in stripped:
        for at in range(0, len(text), _CHUNK_CHARS):
            ids = tokenizer.encode(text[at : at + _CHUNK_CHARS])
            least += max(len(ids) - _CUT_TOKENS, 0)
            if least > room:
                return least
    return least


def _new_chars(match: Match, render_context: RenderContext, groups: list[MessageGroup]) -> int:
    """Returns the approximate size of the text that the tree does not hold, characters."""
    fresh = sum(_chars(message) for group in groups[match.depth :] for message in group)
    return fresh if match.depth else fresh + len(render_context.tools_json)


def _chars(message: Message) -> int:
    calls = sum(len(call.arguments) for call in message.tool_calls)
    return _MESSAGE_CHARS + len(message.content) + len(message.reasoning) + calls
