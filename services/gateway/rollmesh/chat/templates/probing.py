"""Probes how a chat template renders a growing conversation, and has the result, a profile.

Every probe conversation is split and compared with the template's own render: completely or, if the
template prints earlier turns differently, after the last answer. If neither matches, the pair of
roles at which the difference begins is refused. The template itself is refused if agents cannot do
without that pair.
"""

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, StrEnum, auto
from functools import cache
from itertools import takewhile
from typing import TypeAlias

import numpy as np

from rollmesh.chat.canonical import make_context
from rollmesh.chat.messages import (
    Image,
    Message,
    MessageGroup,
    RenderContext,
    RoleName,
    group_messages,
    images_of,
)
from rollmesh.chat.parsing.reasoning import OPEN
from rollmesh.chat.rendering import AdaptedTemplate, Messages, ModelTemplate, TemplateRenderError
from rollmesh.chat.templates.cutter import (
    ASKED,
    CALL,
    Cutter,
    Place,
    RefusedOrder,
    TemplateRefusedError,
    place,
    result,
)
from rollmesh.chat.templates.loading import unix_now
from rollmesh.chat.tokenizer import ModelTokenizer

# The profile of a template, or of a pair of templates.


class Kind(StrEnum):
    """How the template treats earlier turns, by the names of `TemplateKind`."""

    APPEND_ONLY = "append-only"
    """A longer conversation begins with the shorter one, in every order that was probed."""
    APPEND_ONLY_EXCEPT = "append-only except"
    """The same, with the exceptions that the findings name."""
    REWRITES = "rewrites"
    """Plain answers of earlier turns are printed differently than they were sampled."""


class Finding(StrEnum):
    """A finding of the probe. The tokens of a session stay as sampled in any case.

    `TemplateFinding` has the same names.
    """

    DROPS_REASONING = "drops earlier reasoning"
    REWRITES_ANSWERS = "prints earlier answers differently than after the generation prompt"
    REWRITES_CALLS = "prints earlier tool calls differently"
    MOVES_LATER_SYSTEM = "moves or merges system messages inside the conversation"
    TEXT_AFTER_RESULTS = "prints the text beside tool calls after their results"
    MOVES_SYSTEM = "prints the first system message in the last user turn"
    SYSTEM_IN_USER = "prints the first system message together with the first user turn"
    REPEATS_TOOLS = "prints the tools again after the conversation"
    STRIPS_ANSWERS = "strips earlier answers"
    HEADERS_END = "ends answers with the header of the next turn"
    IGNORES_TOOLS = "does not print tools"
    PRINTS_CALL_IDS = "prints the ids of tool calls"
    PRINTS_DATE = "prints the date"
    JOINS_FIRST_SYSTEM = "is given the system messages at the beginning as one"
    LATER_SYSTEM_AS_USER = "is given later system messages as user messages"


REWRITING = frozenset(
    {
        Finding.DROPS_REASONING,
        Finding.REWRITES_ANSWERS,
        Finding.REWRITES_CALLS,
        Finding.MOVES_LATER_SYSTEM,
        Finding.MOVES_SYSTEM,
        Finding.REPEATS_TOOLS,
    }
)
"""Findings that print earlier turns differently than a session keeps them."""
MOVING = frozenset({Finding.MOVES_SYSTEM, Finding.REPEATS_TOOLS})
"""Findings that change more than answers. Continuing would need the full conversation."""


@dataclass(frozen=True, slots=True)
class TemplateProfile:
    """What holds for one template, tokenizer and set of template options."""

    kind: Kind
    end_text: str
    """The special token that ends an answer in the history. Empty if it has none of its own."""
    findings: frozenset[Finding] = frozenset()
    refused: Mapping[RefusedOrder, str] = field(default_factory=dict)
    """Orders of messages that the template cannot continue, and why."""
    verified: int = 0
    """Number of probe conversations whose parts equal the template's own render."""
    kept: int = 0
    """Number of those where that holds after the last answer only."""
    headers: dict[str, str] = field(default_factory=dict)
    """By role: the special token that begins a turn after an answer, where nothing else ends it.
    The model samples that of a turn that is not its own."""
    call_end_text: str = ""
    """The special token that ends an answer with calls in the history."""
    image_roles: frozenset[RoleName] = frozenset()
    """Roles whose messages may hold images."""
    stops: tuple[str, ...] = ()
    """The special tokens at which a model of this template must stop."""

    def __str__(self) -> str:
        """Returns a one-line summary."""
        named = "; ".join(sorted(self.findings & REWRITING))
        return f"{self.kind} {named}" if self.kind is Kind.APPEND_ONLY_EXCEPT else str(self.kind)


# Models with a chat template for requests with tools, and another one for all others.


def joined(plain: TemplateProfile, tooled: TemplateProfile) -> TemplateProfile:
    """Returns the profile of a pair.

    Raises:
        TemplateRefusedError: The two end answers differently.
    """
    ends = [
        (one.end_text, one.call_end_text or one.end_text, one.headers) for one in (plain, tooled)
    ]
    if ends[0] != ends[1]:
        raise TemplateRefusedError(
            f"the template for tools ends answers with {tooled.end_text or 'a header'}, and the "
            f"other one with {plain.end_text or 'a header'}"
        )
    kinds = list(Kind)
    tools_only = {
        order._replace(with_tools=True): why
        for order, why in tooled.refused.items()
        if (order, why) not in plain.refused.items()
    }
    return replace(
        plain,
        kind=max(plain.kind, tooled.kind, key=kinds.index),
        findings=(plain.findings - {Finding.IGNORES_TOOLS}) | tooled.findings,
        refused={**plain.refused, **tools_only},
        verified=plain.verified + tooled.verified,
        kept=plain.kept + tooled.kept,
        image_roles=plain.image_roles & tooled.image_roles,
        stops=tuple(dict.fromkeys((*plain.stops, *tooled.stops))),
    )


# The conversations over which a chat template is probed.

TOOLS = (
    b'[{"type": "function", "function": {"name": "look_up", "description": "Looks up.",'
    b' "parameters": {"type": "object", "properties": {"key": {"type": "string"}}}}}]'
)
SYSTEM, USER = Message("system", "Be  brief. "), Message("user", " Where?\n")
ANSWER, EMPTY = Message("assistant", "  Here. \n"), Message("user", "")
PLAIN = Message("assistant", "Here.")
THOUGHT = Message("assistant", "Here.", reasoning="thought7zq")
INLINE = Message("assistant", f"{OPEN}thought7zq</think>Here.")
CALLS = Message("assistant", "", (CALL,))
THOUGHT_CALLS = Message("assistant", "", (CALL,), reasoning=THOUGHT.reasoning)
CALLS_TWICE = Message("assistant", "", (CALL, CALL))
SAYS_AND_CALLS = Message("assistant", "Let me see.", (CALL, CALL))
RESULT = Message("tool", '{"found": "caf\u00e9"}\n', tool_call_id=CALL.id, name=CALL.name)


def _with_ids(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """Returns a conversation whose calls have ids of their own. Some templates look results up."""
    given = itertools.count(1)
    open_ids: list[str] = []
    told: list[Message] = []
    for message in messages:
        calls = tuple(replace(call, id=f"call{next(given)}prob") for call in message.tool_calls)
        open_ids += (call.id for call in calls)
        answers = open_ids.pop(0) if message.role == "tool" else ""
        told.append(replace(message, tool_calls=calls, tool_call_id=answers))
    return tuple(told)


BASIC = (
    (USER,),
    (SYSTEM, USER),
    (USER, PLAIN, USER),
    (SYSTEM, USER, PLAIN, USER, PLAIN, USER),
)
ENDING = ((USER, PLAIN), (SYSTEM, USER, PLAIN))
STRIPPED = (
    (USER, ANSWER, USER),
    (USER, ANSWER, EMPTY, ANSWER, USER),
)
TWICE = ((USER, USER), (SYSTEM, USER, USER))
CALLING = tuple(
    map(
        _with_ids,
        (
            (USER, CALLS, RESULT),
            (SYSTEM, USER, CALLS, RESULT),
            (USER, CALLS, RESULT, PLAIN, USER),
            (USER, CALLS, RESULT, USER),
            (USER, CALLS, RESULT, CALLS, RESULT, PLAIN, USER, CALLS, RESULT),
            (USER, CALLS_TWICE, RESULT, RESULT, PLAIN, USER),
            (SYSTEM, USER, CALLS_TWICE, RESULT, RESULT),
            (SYSTEM, USER, CALLS_TWICE, RESULT, RESULT, PLAIN, USER),
            (SYSTEM, USER, PLAIN, USER, CALLS_TWICE, RESULT, RESULT, CALLS, RESULT, USER),
        ),
    )
)
TWO_CALLS = _with_ids((USER, CALLS_TWICE, RESULT, RESULT))
SAYING = _with_ids((USER, SAYS_AND_CALLS, RESULT, RESULT))
SYSTEMS = tuple(
    map(
        _with_ids,
        (
            (SYSTEM, SYSTEM, USER, PLAIN, USER),
            (USER, PLAIN, SYSTEM, USER),
            (SYSTEM, USER, PLAIN, SYSTEM, USER),
            (USER, SYSTEM),
            (USER, SYSTEM, USER),
            (USER, CALLS, RESULT, SYSTEM),
        ),
    )
)
GREETING = (
    (PLAIN, USER),
    (ANSWER, USER),
    (PLAIN, USER, PLAIN, USER),
    (SYSTEM, PLAIN, USER),
    (SYSTEM, PLAIN, USER, PLAIN, USER),
)
THINKING = ((USER, THOUGHT, USER), (SYSTEM, USER, THOUGHT, USER, PLAIN, USER))


def _seeing(message: Message, *places: int) -> Message:
    """Returns a message with images at offsets of its content."""
    return replace(message, images=tuple(Image(at, "", 1, 1) for at in places))


LOOK, LOOK_TWICE = _seeing(USER, 0), _seeing(USER, 3, len(USER.content))
ONLY_IMAGES = _seeing(EMPTY, 0, 0)
SEEN = _seeing(RESULT, len(RESULT.content))
IMAGES: dict[RoleName, tuple[tuple[Message, ...], ...]] = {
    "user": (
        (LOOK,),
        (LOOK_TWICE, PLAIN, ONLY_IMAGES),
        (SYSTEM, LOOK, PLAIN, USER, PLAIN, LOOK_TWICE, PLAIN, USER),
    ),
    "tool": (
        (USER, CALLS, SEEN),
        (SYSTEM, USER, CALLS_TWICE, SEEN, SEEN, PLAIN, USER),
    ),
    "system": ((_seeing(SYSTEM, 0), USER), (_seeing(SYSTEM, 0), USER, PLAIN, USER)),
}
"""By role whose messages hold images."""


# Renders that are kept while a template is probed.


_Key: TypeAlias = tuple[tuple[Message, ...], RenderContext, bool]


class RememberedTemplate(ModelTemplate):
    """A template that renders each conversation once, until it forgets.

    The probes grow turn by turn and share their beginnings and windows: most of what they ask for
    has been rendered before.
    """

    def __init__(self, template: ModelTemplate) -> None:
        super().__init__(template.source)
        self._template = template
        self._known: dict[_Key, str | TemplateRenderError] | None = {}

    def render(
        self, messages: Messages, context: RenderContext, *, generation_prompt: bool = False
    ) -> str:
        """Returns the text of a conversation. See `ModelTemplate.render`."""
        if self._known is None:
            return self._template.render(messages, context, generation_prompt=generation_prompt)
        key = tuple(messages), context, generation_prompt
        if key not in self._known:
            try:
                self._known[key] = self._template.render(*key[:2], generation_prompt=key[2])
            except TemplateRenderError as error:
                self._known[key] = error
        known = self._known[key]
        if isinstance(known, TemplateRenderError):
            raise TemplateRenderError(str(known)) from known
        return known

    def forget(self) -> None:
        """Drops the renders, and keeps none from now on."""
        self._known = None


# How a template is given system messages that it does not take as they are.
#
# Agents send several system messages before the first user message, and others within the
# conversation. Some templates take only one, at the beginning: they refuse the others, or drop
# them. The rule depends on the template alone, so a message is printed the same in every turn.

_BETWEEN = "\n\n"
_TWO = (Message("system", "one7zq"), Message("system", "two7zq"))


@dataclass(frozen=True, slots=True)
class SystemRule:
    """The form of a conversation's system messages before the template sees them."""

    joins_first: bool = False
    """Whether those at the beginning are one, their texts separated by an empty line."""
    later_as_user: bool = False
    """Whether those within the conversation are user messages."""

    def apply(self, messages: Sequence[Message]) -> list[Message]:
        """Returns the messages as the template is given them."""
        first = list(takewhile(lambda message: message.role == "system", messages))
        later = list(messages[len(first) :])
        if self.joins_first and len(first) > 1:
            whole = first[0]
            for message in first[1:]:
                before = whole.content + _BETWEEN if whole.content else ""
                images = (replace(one, at=one.at + len(before)) for one in message.images)
                content = before + message.content if message.content else whole.content
                whole = replace(whole, content=content, images=(*whole.images, *images))
            first = [whole]
        if self.later_as_user:
            later = [replace(one, role="user") if one.role == "system" else one for one in later]
        return first + later


_ESSENTIAL: set[tuple[Place, RoleName]] = {
    ("start", "user"),
    ("user", "assistant"),
    ("assistant", "user"),
}
_GREETS: set[tuple[Place, RoleName]] = {("start", "assistant"), ("first system", "assistant")}
"""Role orders in which an agent begins. A failure after one of them is attributed to it."""

_OPENS_NONE = "the template does not open it there as elsewhere"
_LEAST_BEHIND_SYSTEM = 3  # a system message and two others
_WEEKS_S = 30 * 86_400 + 3_661
"""Until a session that prints another time than the probe's own."""


_WHITESPACE = " \t\n\r\u00a0"
"""Whitespace characters that templates tell apart. The last stands for all others."""
_DATE = re.compile(r"strftime_now|date_string")


class _Outcome(Enum):
    EXACT = auto()
    KEPT = auto()
    """Equal after the last answer."""
    REFUSED = auto()


@dataclass(frozen=True, slots=True)
class Probed:
    """A template with one set of options, ready to be continued."""

    profile: TemplateProfile
    cutter: Cutter
    template: ModelTemplate
    """The template, behind its adapter for system messages."""


def probe(
    template: ModelTemplate, options_json: bytes, *, tokenizer: ModelTokenizer, image: str = ""
) -> Probed:
    """Probes a template.

    `image` is the template's text for an image, empty if the model takes none.

    Raises:
        TemplateRefusedError: It cannot be continued exactly. The message describes the difference.
    """
    remembered = RememberedTemplate(template)
    try:
        options = replace(make_context(b"", options_json), now=unix_now())
        return _probe(remembered, tokenizer, options, image)
    finally:
        remembered.forget()


def _probe(
    template: ModelTemplate, tokenizer: ModelTokenizer, options: RenderContext, image: str
) -> Probed:
    # Some templates print one system message at the beginning, but not two.
    alone, both = (template.printed((*first, ASKED), options) for first in (_TWO[:1], _TWO))
    prints_two = all(one.content in both for one in _TWO)
    rule = SystemRule(joins_first=_TWO[0].content in alone and not prints_two)
    try:
        plain = _Probe(template, tokenizer, options, rule)
        found = plain.probed(image)
    except TemplateRenderError as error:
        raise TemplateRefusedError(f"the template failed while it was probed: {error}") from error
    if plain.refused_systems:
        later = replace(rule, later_as_user=True)
        try:
            other = _Probe(template, tokenizer, options, later)
            ruled = other.probed(image)
        except (TemplateRenderError, TemplateRefusedError):
            pass
        else:
            if other.refused_systems < plain.refused_systems:
                found, rule = ruled, later
    if any(order.behind_system for order in found.cutter.refused):
        try:
            behind = _Probe(template, tokenizer, options, rule, behind_system=True).probed(image)
        except (TemplateRenderError, TemplateRefusedError):
            return found
        if len(behind.profile.refused) <= len(found.profile.refused):
            return behind
    return found


class _Probe:
    def __init__(
        self,
        template: ModelTemplate,
        tokenizer: ModelTokenizer,
        options: RenderContext,
        rule: SystemRule,
        *,
        behind_system: bool = False,
    ) -> None:
        if rule != SystemRule():
            template = AdaptedTemplate(
                template, lambda messages, context: (rule.apply(messages), context)
            )
        self._template = template
        self._tokenizer = tokenizer
        self._encode = cache(tokenizer.encode)
        self._rule = rule
        self._cutter = cutter = Cutter(template, tokenizer, options, behind_system=behind_system)
        self._bare = options
        self._tools = replace(options, tools_json=TOOLS)
        self._contexts: tuple[RenderContext, ...] = (self._bare, self._tools)
        self._boundaries = cutter.boundaries
        self._counts = dict.fromkeys(_Outcome, 0)
        self.refused_systems: set[tuple[Message, ...]] = set()
        """Conversations with several system messages that cannot be continued."""

    def probed(self, image: str) -> Probed:
        """Probes the template. Call it once."""
        cutter, boundaries, bare = self._cutter, self._boundaries, self._bare
        findings = {
            finding
            for finding, is_found in (
                (Finding.JOINS_FIRST_SYSTEM, self._rule.joins_first),
                (Finding.LATER_SYSTEM_AS_USER, self._rule.later_as_user),
                (Finding.HEADERS_END, bool(boundaries.ends.headers)),
                (Finding.TEXT_AFTER_RESULTS, boundaries.says_after_results),
            )
            if is_found
        }
        # The beginning of a conversation configures the cutter.
        if self._render((USER,), bare) == self._render((USER,), self._tools):
            findings.add(Finding.IGNORES_TOOLS)
            cutter.ignores_tools = True
            self._contexts = (bare,)
        elif '"look_up"' in self._render((USER,), self._tools):
            whole = self._render((USER, PLAIN, USER, PLAIN, USER), self._tools)
            if '"look_up"' in whole.rpartition(boundaries.last_end)[2]:
                findings.add(Finding.REPEATS_TOOLS)
                cutter.repeats_tools = True
        whole = self._template.printed((SYSTEM, USER, PLAIN, USER), bare)
        if SYSTEM.content.strip() in whole.rpartition(boundaries.last_end)[2]:
            findings.add(Finding.MOVES_SYSTEM)
            cutter.moves_system = True
        if _DATE.search(self._template.source):
            findings.add(Finding.PRINTS_DATE)
            self._contexts = (replace(bare, now=bare.now + _WEEKS_S), *self._contexts)
        for context in self._contexts:
            joined = cutter.find_joined_system(context)
            cutter.joins_system[bool(context.tools_json)] = joined
            if joined:
                findings.add(Finding.SYSTEM_IN_USER)
        # Earlier answers may be printed differently than they are sampled.
        plain = self._all(BASIC)
        asked = self._template.render((USER,), bare, generation_prompt=True)
        answered = self._render((USER, PLAIN, USER), bare)
        plain &= answered.startswith(f"{asked}{PLAIN.content}{boundaries.ends.text}")
        if not (self._all(STRIPPED) and plain):
            findings.add(Finding.REWRITES_ANSWERS)
        several = TWO_CALLS if boundaries.says_after_results else SAYING
        if not self._all((*CALLING, several)):
            findings.add(Finding.REWRITES_CALLS)
        if not self._all(SYSTEMS) and not self._rule.later_as_user:
            findings.add(Finding.MOVES_LATER_SYSTEM)
        if self._drops_reasoning():
            findings.add(Finding.DROPS_REASONING)
        for conversations in (TWICE, ENDING, THINKING):
            self._all(conversations)
        self._find_greetings()
        padded = [f"{one}{PLAIN.content}" for one in _WHITESPACE]
        padded += [f"{PLAIN.content}{one}" for one in _WHITESPACE]
        answers = (replace(PLAIN, content=one) for one in padded)
        if any(self._render((USER, one, USER), bare) == answered for one in answers):
            findings.add(Finding.STRIPS_ANSWERS)
        renders: list[str] = []
        for call in (CALL, replace(CALL, id="other9zq1")):
            messages = (USER, Message("assistant", "", (call,)), result("x", call))
            renders.append(self._template.printed(messages, self._contexts[-1]))
        if all(renders) and renders[0] != renders[1]:
            findings.add(Finding.PRINTS_CALL_IDS)
        if image:
            cutter.image_roles = frozenset(IMAGES)
            cutter.image_roles = frozenset(
                role
                for role, conversations in IMAGES.items()
                if all(
                    self._shows_images(messages, context, image)
                    for messages in conversations
                    for context in self._contexts
                )
            )
        ends, shown = boundaries.ends, self._tokenizer.shown
        kind = Kind.APPEND_ONLY_EXCEPT if findings & REWRITING else Kind.APPEND_ONLY
        profile = TemplateProfile(
            kind if plain else Kind.REWRITES,
            shown(ends.text),
            frozenset(findings),
            dict(cutter.refused),
            self._counts[_Outcome.EXACT],
            self._counts[_Outcome.KEPT],
            {role: shown(one) for role, one in ends.headers.items()},
            shown(ends.call),
            cutter.image_roles,
            tuple(map(shown, ends.stops)),
        )
        return Probed(profile, cutter, self._template)

    def _render(self, messages: tuple[Message, ...], context: RenderContext) -> str:
        return self._template.render(messages, context)

    def _drops_reasoning(self) -> bool:
        """Returns whether an answer's reasoning is dropped once another answer follows."""
        thinks = OPEN in self._template.source
        for answer in (THOUGHT, INLINE):
            shows = THOUGHT.reasoning in self._render((USER, answer), self._bare)
            for more in ((), (PLAIN, USER)):
                earlier = self._render((USER, answer, USER, *more), self._bare)
                if (shows or thinks) and THOUGHT.reasoning not in earlier:
                    return True
        called = (USER, THOUGHT_CALLS, RESULT)
        last = self._template.printed(called, self._contexts[-1])
        earlier = self._template.printed((*called, PLAIN, USER), self._contexts[-1])
        return bool(earlier) and THOUGHT.reasoning in last and THOUGHT.reasoning not in earlier

    def _all(self, conversations: tuple[tuple[Message, ...], ...]) -> bool:
        """Tries conversations. Returns whether each one's texts equal the complete render.

        Raises:
            TemplateRefusedError: A conversation that agents need cannot be continued.
        """
        exact = True
        for messages in conversations:
            groups = group_messages(messages)
            for context in self._contexts:
                outcome = self._try(groups, context)
                self._counts[outcome] += 1
                if outcome is _Outcome.REFUSED and messages in SYSTEMS:
                    self.refused_systems.add(messages)
                if outcome is _Outcome.KEPT and not self._is_explained(messages, context):
                    exact = False
        return exact

    def _shows_images(
        self, messages: tuple[Message, ...], context: RenderContext, image: str
    ) -> bool:
        groups = group_messages(messages)
        if self._judge(groups, context, whole=True)[0] is _Outcome.REFUSED:
            return False
        texts = self._cutter.texts(groups, 0, context)
        return [one.count(image) for one in texts] == [len(images_of([one])) for one in groups]

    def _find_greetings(self) -> None:
        """Tries conversations that an agent begins. Refuses what differs from the render.

        A greeting was not sampled, so keeping sampled tokens does not explain a difference.
        """
        refused = self._cutter.refused
        for context in self._contexts:
            before = set(refused)
            for messages in GREETING:
                groups = group_messages(messages)
                order = RefusedOrder(*self._culprit(groups, context))
                outcome = self._try(groups, context)
                self._counts[outcome] += 1
                if outcome is _Outcome.KEPT and not self._is_explained(messages, context):
                    refused[order] = "later messages change how it is printed"
                elif outcome is _Outcome.REFUSED and order not in refused:
                    without = tuple(one for one in messages if one.role != "assistant")
                    why = self._refusal(messages, context)
                    if why and not self._refusal(without, context):
                        refused[order] = why
            if context.tools_json:
                for order in refused.keys() - before:
                    if order.role and not order.behind_system:
                        refused[order._replace(with_tools=True)] = refused.pop(order)

    def _refusal(self, messages: tuple[Message, ...], context: RenderContext) -> str:
        """Returns why the template itself refuses a conversation. Empty if it accepts it."""
        try:
            self._template.render(messages, context, generation_prompt=True)
        except TemplateRenderError as error:
            return str(error)
        return ""

    def _is_explained(self, messages: tuple[Message, ...], context: RenderContext) -> bool:
        """Returns whether a finding on tools or the system message explains the difference."""
        moved = self._cutter.moves_system and messages[0].role == "system"
        return moved or (self._cutter.repeats_tools and bool(context.tools_json))

    def _try(self, groups: list[MessageGroup], context: RenderContext) -> _Outcome:
        """Compares ever longer prefixes, so that the last role identifies a failure.

        Raises:
            TemplateRefusedError: The failing conversation is one that agents need.
        """
        outcome = _Outcome.REFUSED
        for size in range(1, len(groups) + 1):
            before, role = place(groups, size - 1), groups[size - 1][0].role
            if self._cutter.refusal(groups, size - 1, context):
                return _Outcome.REFUSED
            whole = size == len(groups)
            outcome, why = self._judge(groups[:size], context, whole=whole)
            if why and role == "assistant":
                # Templates end the last answer differently. The text after it decides.
                if whole:
                    self._cutter.refused.setdefault(RefusedOrder("assistant", None), why)
            elif why and size == 1 and role == "system" and self._prints_alone(groups[0], context):
                # Agents send a user message with it. The text after that decides.
                self._cutter.refused.setdefault(RefusedOrder("first system", None), _OPENS_NONE)
            elif why:
                before, role = self._culprit(groups[:size], context)
                if (before, role) in _ESSENTIAL:
                    raise TemplateRefusedError(f"{role} after {before}: {why}")
                of_system = self._is_of_system(groups[:size], context)
                order = RefusedOrder(before, role, behind_system=of_system)
                self._cutter.refused[order] = why
                return outcome
        return outcome

    def _prints_alone(self, group: MessageGroup, context: RenderContext) -> bool:
        """Returns whether only the generation prompt differs after a first system message."""
        try:
            (text,) = self._cutter.texts([group], 0, context)
        except TemplateRenderError:
            return False
        return self._template.render(group, context).startswith(text)

    def _is_of_system(self, groups: list[MessageGroup], context: RenderContext) -> bool:
        """Returns whether a conversation could be continued without its first system message."""
        if groups[0][0].role != "system" or len(groups) < _LEAST_BEHIND_SYSTEM:
            return False
        return self._judge(groups[1:], context, whole=True)[0] is not _Outcome.REFUSED

    def _culprit(
        self, groups: list[MessageGroup], context: RenderContext
    ) -> tuple[Place, RoleName]:
        """Returns the first pair of roles that cannot be split and is optional, else the last pair.

        An agent's greeting takes precedence: the other pairs have been verified without it.
        """
        pairs: list[tuple[Place, RoleName]] = [
            (place(groups, at), groups[at][0].role) for at in range(len(groups))
        ]
        if greeting := next((pair for pair in pairs if pair in _GREETS), None):
            return greeting
        for at, pair in enumerate(pairs):
            try:
                self._cutter.texts(groups[: at + 1], at, context)
            except TemplateRenderError:
                if pair not in _ESSENTIAL:
                    return pair
        return pairs[-1]

    def _judge(
        self, groups: list[MessageGroup], context: RenderContext, *, whole: bool
    ) -> tuple[_Outcome, str]:
        """Returns the outcome of a comparison, and why it failed.

        No reason is given if the template itself always refuses the conversation, or if a
        conversation that cannot end here can be continued.
        """
        messages = tuple(message for group in groups for message in group)
        joined = self._cutter.joins_system[bool(context.tools_json)]
        if len(groups) == 1 and joined and messages[0].role == "system":
            return _Outcome.REFUSED, ""
        try:
            full = self._template.render(messages, context, generation_prompt=True)
        except TemplateRenderError:
            return _Outcome.REFUSED, ""
        try:
            texts = self._cutter.texts(groups, 0, context)
            texts.append(self._cutter.generation_prompt(groups, context))
        except TemplateRenderError as error:
            return _Outcome.REFUSED, str(error) if whole else ""
        ids = np.concatenate([self._encode(text) for text in texts])
        if not np.array_equal(ids, self._encode("".join(texts))):
            return (
                _Outcome.REFUSED,
                "its text and that of its neighbours cannot be tokenized separately",
            )
        if "".join(texts) == full:
            return _Outcome.EXACT, ""
        answers = [at for at, group in enumerate(groups) if group[0].role == "assistant"]
        tail = "".join(texts[answers[-1] + 1 :]) if answers else ""
        ends = (self._boundaries.ends.text, self._boundaries.ends.call)
        if tail and full.endswith(tuple(end + tail for end in ends)):
            return _Outcome.KEPT, ""
        return _Outcome.REFUSED, "earlier messages change how it is printed"
