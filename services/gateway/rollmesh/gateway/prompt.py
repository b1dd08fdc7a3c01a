"""Builds the prompt of a turn: the ids that the tree holds, and the ids that a request adds."""

import asyncio
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter

import numpy as np

from rollmesh.chat import (
    ImageRefusedError,
    InvalidInputError,
    MessageGroup,
    ModelTokenizer,
    Placeholder,
    PlacementError,
    RenderContext,
    SpecialTextError,
    bad_sequences,
    constraint_of,
)
from rollmesh.chat.templates import (
    REWRITING,
    Continuation,
    Seen,
    SpecialText,
    TemplateRefusedError,
    TemplateRenderError,
)
from rollmesh.gateway.deps import Deps
from rollmesh.gateway.session import Session, TurnRequest
from rollmesh.gateway.tree import Bookmark, Match
from rollmesh.runtime.codec import TokenIds, pack_ids
from rollmesh.runtime.errors import (
    ContextLengthExceededError,
    InvalidFieldError,
    InvalidMessagesError,
)
from rollmesh.v1 import engine_pb2, sampling_pb2, trajectory_pb2

_ids_of = attrgetter("token_ids")


@dataclass(slots=True)
class Prompt:
    """A conversation as tokens, ending with the opened turn of the model."""

    match: Match
    """The node from which it continues the tree, with its fidelity reasons."""
    new_groups: list[tuple[MessageGroup, TokenIds, tuple[Placeholder, ...]]]
    """Message groups that the tree does not hold, each with the ids that it adds, and where its
    images are in them."""
    generation_prompt: TokenIds
    """Ids between the last group and the sampled ids."""
    seen: Seen | None
    """State of the template's render to store with the last group."""
    packed: bytes = b""
    """The complete prompt in the engine's format. `prepare` sets this and what follows."""
    length: int = 0
    """Number of prompt ids."""
    crc32: int = 0
    """CRC-32 that the engine must report for the prompt it received."""
    inside_reasoning: bool = False
    """Whether the generation prompt opens the reasoning."""
    constraint: engine_pb2.Constraint | None = None
    """Structured-output constraint of the answer."""
    bad_sequences: Sequence[list[int]] = ()
    """Id sequences that the answer must not contain."""
    images: Sequence[Placeholder] = ()
    """Where the images are in the prompt, in order."""


def build_prompt(
    continuation: Continuation,
    special_text: SpecialText,
    match: Match,
    groups: list[MessageGroup],
    render_context: RenderContext,
    *,
    rewrite: bool,
    check: Callable[[list[str]], None] = lambda _: None,
) -> Prompt:
    """Returns the prompt of a turn. If the template is append-only, only the new text costs time.

    If the template would now render the tree's messages differently, the prompt carries
    TEMPLATE_REWRITE. It keeps the tree's ids anyway, or with `rewrite` leaves the tree at the first
    difference and uses the ids of the new render.

    Args:
        continuation: Continues conversations with the model's template.
        special_text: Decides how the template sees text from outside.
        match: The node from which the request continues the tree.
        groups: All message groups of the request.
        render_context: Tools and template options that are rendered with the groups.
        rewrite: Whether to leave the tree for the template's new render.
        check: Called with printed texts before they are tokenised. Its exceptions propagate.

    Raises:
        TemplateRenderError: The template refuses a group.
        TemplateRefusedError: It cannot be continued exactly under the render_context's options.
        InvalidInputError: The text spells a special token, and such text is refused.
        PlacementError: The template does not show the images of a group, or text spells one.
        ImageRefusedError: The model cannot take an image of that size.
    """
    path, new = match.node.path(), groups[match.depth :]
    shown, shown_context, spelled = special_text.apply(groups, match.depth, render_context)
    if spelled:
        match = match._replace(
            reasons=match.reasons | {trajectory_pb2.FIDELITY_REASON_SPECIAL_TEXT}
        )
    fresh = continuation.token_ids(shown, match.depth, shown_context, check)
    generation_prompt = continuation.generation_prompt(groups, render_context)
    if fresh:
        fresh[0] = continuation.after(match.node, fresh[0])
    else:
        generation_prompt = continuation.after(match.node, generation_prompt)
    show = special_text.show
    at, seen = continuation.compare(path, new, shown_context, [*fresh, generation_prompt], show)
    if at is not None:
        match = match._replace(
            reasons=match.reasons | {trajectory_pb2.FIDELITY_REASON_TEMPLATE_REWRITE}
        )
        printed = continuation.reprint(path[:at], groups, shown_context, show) if rewrite else None
        if printed is not None:
            fresh, generation_prompt = printed
            node = path[at].parent if at < len(path) else match.node
            assert node is not None
            match = Match(node, at, match.reasons)
    # The ids that close a cut answer belong to the next group, so there must be one.
    new_groups = []
    for group, ids in zip(groups[match.depth :], fresh, strict=True):
        new_groups.append((group, ids, continuation.places(group, ids)))
    return Prompt(match, new_groups, generation_prompt, seen if fresh else None)


# Turns a chat request into tokens: the tree's, and the tokens that the template adds.

_INLINE_CHARS, _INLINE_GROUPS = 4_096, 512
"""A prompt with less new text, in a shorter conversation, is made on the event loop: it takes less
than a millisecond, and a thread would cost as much."""
_SHORT_CHARS = 16_384  # tokenised in about 3 ms. Longer text has its own threads
_MESSAGE_CHARS = 64  # rendered around a message, at least in time
_COMPARED_BYTES, _COMPARED_GROUPS = 262_144, 256
"""More messages are compared with the tree in a thread. Fewer take about a millisecond."""
_COMPARED_CHILDREN = 256
"""So is every message of a session in which a node has more children than this."""
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


async def prepare(deps: Deps, session: Session, request: TurnRequest) -> Prompt:
    """Turns a request into tokens. A short one does not wait.

    The search in the tree starts where the earlier request of the conversation led, if that is
    known. If many messages are left to compare, they are compared in a thread.

    Raises:
        RollmeshError: The request has no prompt.
    """
    tree, conversation = session.tree, request.conversation
    context = replace(request.settings.render_context, now=session.now_s)
    groups, earlier = conversation.groups, conversation.earlier
    start = tree.start(context, groups, earlier.digest if earlier is not None else b"")
    changes, owner = tree.changes, session.spec.session_id
    known_bytes = earlier.size if earlier is not None and start.match.depth else 0
    if (
        conversation.size - known_bytes < _COMPARED_BYTES
        and len(groups) - start.match.depth < _COMPARED_GROUPS
        and tree.widest <= _COMPARED_CHILDREN
    ):
        match, bookmark = tree.search(start, groups)
        tree.keep(context, conversation.digest, bookmark)
        # About the size of the text that the tree does not hold, and of answers to be compared.
        chars = len(context.options_json) + (0 if match.depth else len(context.tools_json))
        for group in groups[match.depth :]:
            for message in group:
                chars += _MESSAGE_CHARS + len(message.content) + len(message.reasoning)
                chars += len(message.name) + len(message.tool_call_id)
                for one in message.tool_calls:
                    chars += len(one.id) + len(one.name) + len(one.arguments)
        rewrites = deps.continuation.profile.findings & REWRITING  # renders all of it
        node, compared = match.node, 0  # each answer once, but all of a rebuilt session
        while node.parent is not None and node.as_printed is None and not rewrites:
            for message in node.messages if node.was_sampled else ():
                compared += _MESSAGE_CHARS + len(message.content) + len(message.reasoning)
                for one in message.tool_calls:
                    compared += len(one.arguments)
            node = node.parent
        chars += compared if node.as_printed is not False else 0
        if chars > _SHORT_CHARS:
            work = partial(_prepare, deps, match, request, context, is_long=True)
            return await deps.long_work.run(owner, work)
        if chars > _INLINE_CHARS or len(groups) > _INLINE_GROUPS or rewrites:
            return await deps.run(partial(_prepare, deps, match, request, context))
        return _prepare(deps, match, request, context)

    def keep(bookmark: Bookmark) -> None:
        if tree.changes == changes:
            tree.keep(context, conversation.digest, bookmark)

    loop = asyncio.get_running_loop()

    def search_and_prepare() -> Prompt:
        match, bookmark = tree.search(start, groups)
        loop.call_soon_threadsafe(keep, bookmark)
        return _prepare(deps, match, request, context, is_long=True)

    return await deps.long_work.run(owner, search_and_prepare)


def _prepare(
    deps: Deps, match: Match, request: TurnRequest, context: RenderContext, *, is_long: bool = False
) -> Prompt:
    """Tokenises the part of a request that the tree lacks. May run in a worker thread.

    Long text is refused before it is tokenised as a whole if it cannot fit into the context.
    """
    groups, settings = request.conversation.groups, request.settings

    def check(texts: Iterable[str]) -> None:
        room = deps.max_context_tokens - match.node.end
        least = least_tokens(texts, room, deps.tokenizer)
        if least > room:
            raise _too_long(deps, f"at least {match.node.end + least}", match.node.end + least)

    def check_printed(texts: Sequence[str]) -> None:
        if sum(map(len, texts)) > _SHORT_CHARS:  # a short one is counted exactly
            check(texts)

    if is_long:
        check(message.content for group in groups[match.depth :] for message in group)
    try:
        prompt = build_prompt(
            deps.continuation,
            deps.special_text,
            match,
            groups,
            context,
            rewrite=deps.config.history == "rewrite",
            check=check_printed,
        )
    except _REFUSALS as error:
        raise InvalidMessagesError("messages", f"the chat template: {error}") from error
    except InvalidInputError as error:
        raise InvalidMessagesError(error.field, error.problem) from error
    opening = deps.answer_format.opening
    inside = bool(opening) and deps.continuation.opens_reasoning(groups, context, opening)
    try:
        found = constraint_of(settings.wanted, deps.answer_format, context, inside_reasoning=inside)
        if words := settings.sampling.bad_words:
            prompt.bad_sequences = bad_sequences(words, deps.tokenizer)
    except InvalidInputError as error:
        raise InvalidFieldError(error.field, error.problem) from error
    prompt.inside_reasoning = inside
    prompt.constraint = None if found is None else engine_pb2.Constraint(**found._asdict())
    parts: list[TokenIds] = [*map(_ids_of, prompt.match.node.path())]
    for _, added, _ in prompt.new_groups:
        parts.append(added)
    ids = np.concatenate([*parts, prompt.generation_prompt])
    prompt.packed, prompt.length = pack_ids(ids), len(ids)
    prompt.crc32 = zlib.crc32(prompt.packed)
    if request.conversation.images:
        held = [(node.token_ids, node.images) for node in prompt.match.node.path()]
        images, end = list[Placeholder](), 0
        for ids, shown in [*held, *((ids, shown) for _, ids, shown in prompt.new_groups)]:
            images += (one._replace(offset=one.offset + end) for one in shown)
            end += len(ids)
        prompt.images = images
    return prompt


def sampling_of(deps: Deps, request: TurnRequest, prompt: Prompt) -> sampling_pb2.SamplingParams:
    """Returns the sampling parameters for the engine.

    Raises:
        ContextLengthExceededError: The prompt leaves no room for an answer, or less than the
            request asks for.
    """
    room = deps.max_context_tokens - prompt.length
    if room < 1:
        raise _too_long(deps, str(prompt.length), prompt.length)
    wanted = request.sampling.max_tokens
    if request.settings.max_tokens_must_fit and wanted > room:
        raise ContextLengthExceededError(
            "sampling.max_tokens",
            f"is {wanted}, and the prompt of {prompt.length} tokens leaves room for {room}; "
            "give less, or reduce the length of the messages",
            max_tokens=deps.max_context_tokens,
            prompt_tokens=prompt.length,
            wanted_tokens=wanted,
        )
    sampling = sampling_pb2.SamplingParams()
    sampling.CopyFrom(request.sampling)
    if not sampling.ignore_eos:
        sampling.stop_token_ids.extend(deps.continuation.stop_ids)
    sampling.max_tokens = min(sampling.max_tokens, room) if sampling.max_tokens else room
    for ids in prompt.bad_sequences:
        sampling.bad_sequences.add(token_ids=ids)
    return sampling


def _too_long(deps: Deps, said: str, prompt_tokens: int) -> ContextLengthExceededError:
    return ContextLengthExceededError(
        "messages",
        f"This model's maximum context length is {deps.max_context_tokens} tokens. "
        f"However, your messages resulted in {said} tokens. "
        "Please reduce the length of the messages.",
        max_tokens=deps.max_context_tokens,
        prompt_tokens=prompt_tokens,
    )


def least_tokens(texts: Iterable[str], room: int, tokenizer: ModelTokenizer) -> int:
    """Returns a lower bound of the number of tokens in texts, or 0 if they probably fit.

    Tokenising time is proportional to the text. Text that is far too long is therefore counted
    chunk by chunk until it is known not to fit, so the cost is bounded by the context, not by the
    text. A cut between two chunks may add tokens, so a margin is subtracted from each chunk.
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
