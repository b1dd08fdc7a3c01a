r"""Exact continuation of a conversation through the model's own chat template.

Past tokens are never tokenized again. To find the ids of a new message, the message is rendered
after a short fixed window and the window is cut off, so the cost does not grow with the session.

A marker shows where to cut. After the marked content of the window's last message the template
prints the text that ends that message (its *tail*). The cut is after the first token of the tail
that is never merged with its neighbours, so the text on both sides tokenizes separately as it does
together. The rest of the tail (the *closing*) begins the next message's ids. In ChatML:

    head    <|im_start|>system ... <|im_end|>
    delta   \n<|im_start|>user ... <|im_end|>
    prompt  \n<|im_start|>assistant\n          then the sampled ids, which end with <|im_end|>

A sampled answer is never rendered: the cut after it is after the token that ends it. So a template
that prints earlier answers differently (without their reasoning, say) can still be continued: the
session keeps the sampled ids. Each template is probed when it is loaded (`probe`).
"""

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from functools import lru_cache, partial
from itertools import chain
from operator import attrgetter
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np

from rollmesh.chat.caches import ByteCache
from rollmesh.chat.canonical import spelling_key
from rollmesh.chat.images import ImageRule, Placeholder, expand, locate, reserved_texts
from rollmesh.chat.messages import MessageGroup, RenderContext, images_of
from rollmesh.chat.rendering import ModelTemplate, TemplateRenderError
from rollmesh.chat.templates.cutter import Cutter, Ends, TemplateRefusedError, place
from rollmesh.chat.templates.loading import TemplatePair, unix_now
from rollmesh.chat.templates.probing import (
    REWRITING,
    Finding,
    Probed,
    joined,
    probe,
)
from rollmesh.chat.tokenizer import ModelTokenizer, TokenIds

# Compares a template's text with the ids of a session.
#
# A session keeps the tokens that were sampled. If the template would now print them differently (it
# drops reasoning, strips whitespace, formats a call's arguments differently, or the text tokenizes
# differently), the next turn reports it. This is not inferred from probing: the ids of the
# template's render are compared with the session's ids.
#
# A prefix of a render that was compared before is known by its digest and is not tokenized again.
# At the first difference, tokenizing stops.

_ID_BYTES = 4
_DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class Seen:
    """A prefix of a render that was compared with the context and is equal to it."""

    chars: int
    """Length of the prefix."""
    digest: bytes
    """BLAKE2b digest of the prefix."""


class HeldGroup(Protocol):
    """One group of a conversation, with its ids."""

    as_printed: bool | None
    """Whether the template prints the context up to this group, its end aside, as it was sampled.
    None before the comparison."""
    seen: Seen | None
    """The render of the context up to this group, if it was compared and is equal."""

    end: int
    """Length of the context up to and including this group, in tokens."""
    messages: MessageGroup
    """The messages."""
    token_ids: TokenIds
    """The ids that the group adds. Uint32 [N]."""
    ends_turn: bool
    """False for a truncated answer. The next group closes it."""

    @property
    def was_sampled(self) -> bool:
        """Whether a model sampled it. False for a group that the template printed."""
        ...


class Comparison(NamedTuple):
    """The template's text against the ids of a turn's prompt."""

    at: int | None
    """Index of the first node of the path that is printed otherwise, its length where only what the
    request adds is. None if all ids are equal."""
    seen: Seen | None = None
    """The text of the prompt up to the model's turn, where it was compared and is equal."""


def _divide(
    ids: TokenIds, known: Sequence[TokenIds | None], generation_prompt: TokenIds
) -> list[TokenIds] | None:
    """Divides the ids of a render among the groups that it prints. None if they are not found.

    `known` has the ids of each group, or None for an answer, which takes the rest between others.
    The parts, joined with `generation_prompt`, are `ids`.
    """
    if not _ends_with(ids, generation_prompt):
        return None
    parts: list[TokenIds] = []
    end = len(ids) - len(generation_prompt)
    for at in range(len(known) - 1, -1, -1):
        own, before = known[at], known[at - 1]
        if at == 0:
            begin = 0
        elif own is not None:
            begin = end - len(own)
        elif before is not None:
            data, wanted = ids[:end].tobytes(), before.tobytes()
            found = data.rfind(wanted)
            while found >= 0 and found % _ID_BYTES:
                found = data.rfind(wanted, 0, found + len(wanted) - 1)
            begin = found // _ID_BYTES + len(before) if found >= 0 else -1
        else:
            return None
        if begin < 0 or (own is not None and not _ends_with(ids[begin:end], own)):
            return None
        parts.append(ids[begin:end].copy())
        end = begin
    return parts[::-1]


def _chunks(render: str, begin: int, ends: Ends) -> Iterator[str]:
    """Yields the rest of a render, cut where answers end."""
    texts = ends.headers.values() if ends.headers else (ends.text, ends.call)
    pattern = re.compile("|".join(map(re.escape, sorted(set(texts)))))
    for found in pattern.finditer(render, begin):
        seam = found.start() if ends.headers else found.end()
        if seam > begin:
            yield render[begin:seam]
            begin = seam
    yield render[begin:]


def _node_at(path: Sequence[HeldGroup], begun: int, offset: int) -> int:
    """Returns the index of the node that holds an id, counted from the first of `path[begun:]`."""
    offset += path[begun - 1].end if begun else 0
    return next((at for at in range(begun, len(path)) if path[at].end > offset), len(path))


def _ends_with(ids: TokenIds, end: TokenIds) -> bool:
    return len(end) <= len(ids) and np.array_equal(ids[len(ids) - len(end) :], end)


# The time that a template prints: a session's own, and no more exact than the template shows it.
#
# A prompt continues what was printed before, so a session prints the time at which it was opened in
# all its turns. Sessions of one day share what is cached of a template that prints only the date.

_ANY = re.compile("strftime_now")
_DATES = re.compile(
    r"""strftime_now\s*\(\s*(["'])(?:%-?[aAbBdDeFGhjmuUVwWxyY]|%%|[^%"'\\])*\1\s*\)"""
    r"""|strftime_now\s+is\s+(?:not\s+)?defined"""
)


def shown_time(source: str) -> Callable[[int], int]:
    """Returns the function that rounds a time, unix seconds, to the precision of a template.

    Returns:
        The time itself, noon of its day if the template prints dates only, or 1 if it prints none.
    """
    uses = len(_ANY.findall(source))
    if not uses:
        return lambda _: 1
    if uses != len(list(_DATES.finditer(source))):
        return lambda now: now

    def noon(now: int) -> int:
        day = datetime.fromtimestamp(now).astimezone()
        return int(day.replace(hour=12, minute=0, second=0).timestamp())

    return noon


Show: TypeAlias = Callable[[Sequence[MessageGroup]], list[MessageGroup]]
"""Returns groups as a template will see them."""
Check: TypeAlias = Callable[[list[str]], None]
"""Is given the printed texts before they are tokenised."""
_messages_of = attrgetter("messages")
_PROBED, _OPENINGS, _TIMES, _FIRST_BYTES = 64, 64, 1024, 16 * 1024 * 1024


class Continuation:
    """Computes the ids that new messages add to a conversation."""

    def __init__(
        self,
        template: ModelTemplate,
        tokenizer: ModelTokenizer,
        image_rule: ImageRule | None = None,
    ) -> None:
        """Probes the template without options.

        Raises:
            TemplateRefusedError: The template cannot be continued exactly.
        """
        self._tokenizer = tokenizer
        self._image_rule = image_rule
        self._template = template
        shown = reserved_texts((image_rule.printed_id,), tokenizer) if image_rule else ()
        self._probed = lru_cache(_PROBED)(
            partial(probe, tokenizer=tokenizer, image=next(iter(shown), ""))
        )
        self._shown_time = lru_cache(_TIMES)(shown_time(template.source))
        self._first_ids: ByteCache[tuple[bytes, RenderContext], TokenIds] = ByteCache(_FIRST_BYTES)
        """Ids of first groups: many conversations begin with the same system message."""
        self._openings = lru_cache(_OPENINGS)(self._opening)
        self.profile = self._pinned(RenderContext())[1].profile
        """The result of probing the template without options."""
        if isinstance(template, TemplatePair):
            try:
                tooled = self._probed(template.tool_use, b"").profile
            except TemplateRefusedError as error:
                raise TemplateRefusedError(f"the template for tools: {error}") from error
            self.profile = joined(self.profile, tooled)
        self._headers = {role: self._id_of(text) for role, text in self.profile.headers.items()}
        self.stop_ids = tuple(sorted(map(self._id_of, self.profile.stops)))
        """Ids at which a model of this template must stop."""
        self.end_ids = frozenset({*self.stop_ids, *tokenizer.stop_ids})
        """Ids that end an answer."""
        end = self.profile.end_text
        self.closing_ids = self.end_ids | {self._id_of(end)} if end else self.end_ids
        """Ids after which an answer needs no closing. Includes the end token of the history."""

    @property
    def prints_call_ids(self) -> bool:
        """Whether the template prints the ids of tool calls."""
        return Finding.PRINTS_CALL_IDS in self.profile.findings

    def token_ids(
        self,
        groups: Sequence[MessageGroup],
        start: int,
        context: RenderContext,
        check: Check = lambda _: None,
    ) -> list[TokenIds]:
        """Returns the ids that each of `groups[start:]` adds. Uint32 [N].

        The first `start` groups are held. `check` gets the printed texts before they are tokenised,
        and its exceptions propagate.

        Raises:
            TemplateRenderError: The template refuses a group.
            TemplateRefusedError: It cannot be continued exactly under the context's options.
            PlacementError: The template does not show the images of a group, or text spells one.
            ImageRefusedError: The model cannot take an image of that size.
        """
        context, probed = self._pinned(context)
        cutter = probed.cutter
        if start > 0:
            return self._added(cutter, groups, start, context, check)

        def first() -> TokenIds:
            (ids,) = self._added(cutter, groups[:1], 0, context, check)
            ids.flags.writeable = False
            return ids

        size = len(groups[0][0].content) + len(context.tools_json)
        known = self._first_ids.get((spelling_key(groups[0]), context), size, first)
        return [known, *self._added(cutter, groups, 1, context, check)]

    def _added(
        self,
        cutter: Cutter,
        groups: Sequence[MessageGroup],
        start: int,
        context: RenderContext,
        check: Check = lambda _: None,
    ) -> list[TokenIds]:
        texts = cutter.texts(groups, start, context)
        check(texts)
        ids, rule = map(self._tokenizer.encode, texts), self._image_rule
        if rule is None:
            return list(ids)
        return [
            expand(one, images_of([group]), rule)
            for one, group in zip(ids, groups[start:], strict=True)
        ]

    def places(self, group: MessageGroup, ids: TokenIds) -> tuple[Placeholder, ...]:
        """Returns where the images of a group are in the ids that it adds, uint32 [N].

        Raises:
            PlacementError: The ids do not hold exactly the runs of these images.
        """
        if self._image_rule is None or not (images := images_of([group])):
            return ()
        return tuple(locate(ids, images, self._image_rule))

    def after(self, node: HeldGroup, ids: TokenIds) -> TokenIds:
        """Returns ids that follow a node, adapted to the node's own ids.

        A truncated answer is closed as the template closes it. Where the header of the next turn
        ends answers, a sampled header is kept and not repeated. If the next turn has another
        header, both are in the context, as the engine will see it. `ids` are what the next
        group, or the model's turn, adds by the template alone. Uint32 [N].
        """
        if not self._headers:
            return np.concatenate([self._closing(node), ids])
        sampled = node.was_sampled and len(node.token_ids) > 0
        return ids[1:] if sampled and len(ids) and node.token_ids[-1] == ids[0] else ids

    def generation_prompt(self, groups: Sequence[MessageGroup], context: RenderContext) -> TokenIds:
        """Returns the ids between the last of `groups` and the sample. Uint32 [N].

        Raises:
            TemplateRenderError: The template has no answer after such a group.
            TemplateRefusedError: It cannot be continued exactly under the context's options.
        """
        context, probed = self._pinned(context)
        cutter = probed.cutter
        if len(groups) == 1 and cutter.is_joined(groups[0], context):
            raise TemplateRenderError(
                "a system message alone cannot be rendered; send a user message with it"
            )
        return self._openings(cutter.generation_prompt(groups, context))

    def opens_reasoning(
        self, groups: Sequence[MessageGroup], context: RenderContext, tag: str
    ) -> bool:
        """Returns whether the generation prompt after `groups` opens the reasoning with `tag`."""
        context, probed = self._pinned(context)
        printed = probed.cutter.generation_prompt(groups, context)
        return printed.rstrip().endswith(tag)

    def compare(
        self,
        path: Sequence[HeldGroup],
        fresh: Sequence[MessageGroup],
        context: RenderContext,
        added: Sequence[TokenIds],
        show: Show,
    ) -> Comparison:
        """Compares a turn's prompt with the template's text now.

        An append-only template always prints an answer the same way, so each answer is compared
        once. For other templates the whole conversation is rendered. `added` are the ids of the
        fresh groups, and of what opens the model's turn. Uint32 [N] each.
        """
        context, probed = self._pinned(context)
        groups: list[MessageGroup] = [*map(_messages_of, path), *fresh]
        if not probed.profile.findings & REWRITING:
            with suppress(TemplateRenderError):  # an answer that cannot be continued as others
                begun = len(path)
                while begun and path[begun - 1].as_printed is None:
                    begun -= 1
                for at in range(max(begun - 1, 0), len(path)):
                    node = path[at]
                    if node.as_printed is None and not node.was_sampled:
                        node.as_printed = True
                    elif node.as_printed is None:
                        shown = [*show(groups[: min(at, 1)]), *groups[1:at], *show([groups[at]])]
                        (text,) = probed.cutter.texts(shown, at, context)
                        ids = node.token_ids
                        if not self._headers:
                            ids = np.concatenate([ids, self._closing(node)])
                        elif node.ends_turn:
                            ids = ids[:-1]
                        node.as_printed = np.array_equal(self._tokenizer.encode(text), ids)
                    if not node.as_printed:
                        return Comparison(at)
                    ended = node.was_sampled and node.ends_turn and len(node.token_ids) > 0
                    if self._headers and ended:
                        # The sampled end may not be the header of the next turn.
                        role = groups[at + 1][0].role if at + 1 < len(groups) else "assistant"
                        if int(node.token_ids[-1]) != self._headers.get(role):
                            return Comparison(at)
                return Comparison(None)
        try:
            messages = chain.from_iterable(show(groups))
            render = probed.template.render([*messages], context, generation_prompt=True)
            generation_prompt = probed.cutter.generation_prompt(groups, context)
        except TemplateRenderError:  # each message renders alone, but not all of them together
            sampled = (at for at, node in enumerate(path) if node.was_sampled)
            return Comparison(next(sampled, len(path)))
        # A known prefix is not tokenised again.
        digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
        begun = chars = 0
        for at, node in enumerate(path):
            if node.seen is None:
                continue
            longer = digest.copy()
            longer.update(render[chars : node.seen.chars].encode(errors="surrogatepass"))
            if longer.digest() != node.seen.digest:
                break
            begun, chars, digest = at + 1, node.seen.chars, longer
        held = np.concatenate([*(node.token_ids for node in path[begun:]), *added])
        at, encode = 0, self._encoder_of(groups[begun:])
        for chunk in _chunks(render, chars, probed.cutter.boundaries.ends):
            ids = encode(chunk)
            size = min(len(ids), len(held) - at)
            differing = np.flatnonzero(ids[:size] != held[at : at + size])
            if len(differing) or size < len(ids):
                differs = int(differing[0]) if len(differing) else size
                return Comparison(_node_at(path, begun, at + differs))
            at += size
        if at < len(held):
            return Comparison(_node_at(path, begun, at))
        if not render.endswith(generation_prompt):
            return Comparison(None)
        size = len(render) - len(generation_prompt)
        digest.update(render[chars:size].encode(errors="surrogatepass"))
        return Comparison(None, Seen(size, digest.digest()))

    def reprint(
        self,
        path: Sequence[HeldGroup],
        groups: Sequence[MessageGroup],
        context: RenderContext,
        show: Show,
    ) -> tuple[list[TokenIds], TokenIds] | None:
        """Returns the ids that the template prints after a path that it reproduces exactly.

        Returns:
            The ids of each group after the path and of what opens the model's turn, uint32 [N]
            each. None if the template's render does not fall into these parts.
        """
        context, probed = self._pinned(context)
        cutter, begun = probed.cutter, len(path)
        try:
            groups = show([*map(_messages_of, path), *groups[begun:]])
            messages = [*chain.from_iterable(groups)]
            printed = probed.template.render(messages, context, generation_prompt=True)
            ids = self._encoder_of(groups)(printed)
            # The ids of an answer depend on the next group. Of two in a row one has to be known.
            known = [
                None
                if groups[at][0].role == "assistant" and place(groups, at) != "assistant"
                else self._added(cutter, groups[: at + 1], at, context)[0]
                for at in range(begun, len(groups))
            ]
            generation_prompt = self.generation_prompt(groups, context)
        except TemplateRenderError:
            return None
        held = np.concatenate([np.empty(0, np.uint32), *(node.token_ids for node in path)])
        if not np.array_equal(ids[: len(held)], held):
            return None
        parts = _divide(ids[len(held) :], known, generation_prompt)
        return None if parts is None else (parts, generation_prompt)

    def _closing(self, node: HeldGroup) -> TokenIds:
        """Returns the ids missing at the end of a node. Uint32 [0] or [1].

        Where calls have their own end token, only that token closes them.
        """
        if not node.was_sampled:
            return np.empty(0, np.uint32)
        end, call_end = self.profile.end_text, self.profile.call_end_text
        if node.messages[0].tool_calls and call_end != end:
            ended = len(node.token_ids) > 0 and node.token_ids[-1] == self._id_of(call_end)
            return np.array([] if ended else [self._id_of(call_end)], np.uint32)
        return np.array([] if node.ends_turn else [self._id_of(end)], np.uint32)

    def _id_of(self, text: str) -> int:
        id_ = self._tokenizer.special_id(text)
        if id_ is None:
            raise TemplateRefusedError(f"{text!r} ends a turn but is not a single token")
        return id_

    def _opening(self, text: str) -> TokenIds:
        """Returns the ids of a generation prompt, read-only: the same one opens most turns."""
        ids = self._tokenizer.encode(text)
        ids.flags.writeable = False
        return ids

    def _encoder_of(self, groups: Sequence[MessageGroup]) -> Callable[[str], TokenIds]:
        """Returns a function that encodes the pieces of a printed conversation in order.

        It takes as many of the images as each piece shows. A piece that shows more images than are
        left keeps its placeholders.
        """
        rule, left = self._image_rule, images_of(groups)[::-1]
        if rule is None or not left:
            return self._tokenizer.encode

        def encode(text: str) -> TokenIds:
            ids = self._tokenizer.encode(text)
            shown = int(np.isin(ids, rule.reserved_ids).sum())
            if not 0 < shown <= len(left):
                return ids
            return expand(ids, [left.pop() for _ in range(shown)], rule)

        return encode

    def _pinned(self, context: RenderContext) -> tuple[RenderContext, Probed]:
        """Returns a context with its time as the template prints it, and the probed template.

        Caches are keyed by that time.
        """
        context = replace(context, now=self._shown_time(context.now or unix_now()))
        template = self._template
        if isinstance(template, TemplatePair):
            template = template.of(context)
        return context, self._probed(template, context.options_json)
