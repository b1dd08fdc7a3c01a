"""Probes how a chat template renders a growing conversation.

Every probe conversation is split and compared with the template's own render: completely or, if the
template prints earlier turns differently, after the last answer. If neither matches, the pair of
roles at which the difference begins is refused. The template itself is refused if agents cannot do
without that pair.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import cache

import numpy as np

from rollmesh.chat.canonical import make_context
from rollmesh.chat.messages import (
    Message,
    MessageGroup,
    RenderContext,
    RoleName,
    group_messages,
    images_of,
)
from rollmesh.chat.templates.cutter import Cutter
from rollmesh.chat.templates.ends import TemplateRefusedError
from rollmesh.chat.templates.jinja import ModelTemplate, TemplateRenderError
from rollmesh.chat.templates.probing import conversations as probes
from rollmesh.chat.templates.probing.questions import Questions
from rollmesh.chat.templates.probing.remembered import RememberedTemplate
from rollmesh.chat.templates.profile import (
    REWRITING,
    Finding,
    Kind,
    RefusedOrder,
    Stripped,
    TemplateProfile,
)
from rollmesh.chat.templates.system_messages import RuledTemplate, SystemRule, must_join
from rollmesh.chat.templates.windows import Place, place
from rollmesh.chat.tokenizer import ModelTokenizer

_ESSENTIAL: set[tuple[Place, RoleName]] = {
    ("start", "user"),
    ("user", "assistant"),
    ("assistant", "user"),
}
_GREETS: set[tuple[Place, RoleName]] = {("start", "assistant"), ("first system", "assistant")}
"""Role orders in which an agent begins; a failure after one of them is attributed to it."""


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
    """The template, behind what it needs to be given system messages."""


def probe(
    template: ModelTemplate, tokenizer: ModelTokenizer, options_json: bytes, *, image: str = ""
) -> Probed:
    """Probes a template.

    Args:
        template: The template.
        tokenizer: Its tokenizer.
        options_json: Extra variables of the template: a JSON object, or empty.
        image: What the template prints for an image; empty if the model takes none.

    Raises:
        TemplateRefusedError: It cannot be continued exactly; the message describes the difference.
    """
    remembered = RememberedTemplate(template)
    try:
        return _probe(remembered, tokenizer, make_context(b"", options_json), image)
    finally:
        remembered.forget()


def _probe(
    template: ModelTemplate, tokenizer: ModelTokenizer, options: RenderContext, image: str
) -> Probed:
    rule = SystemRule(joins_first=must_join(template, options))
    try:
        plain = _Probe(template, tokenizer, options, rule)
        found = plain.probed(image)
    except TemplateRenderError as error:
        raise TemplateRefusedError(f"the template failed while it was probed: {error}") from error
    if not plain.refused_systems:
        return found
    try:
        other = _Probe(template, tokenizer, options, replace(rule, later_as_user=True))
        ruled = other.probed(image)
    except (TemplateRenderError, TemplateRefusedError):
        return found
    return ruled if other.refused_systems < plain.refused_systems else found


class _Probe:
    def __init__(
        self,
        template: ModelTemplate,
        tokenizer: ModelTokenizer,
        options: RenderContext,
        rule: SystemRule,
    ) -> None:
        if rule != SystemRule():
            template = RuledTemplate(template, rule)
        self._template = template
        self._tokenizer = tokenizer
        self._encode = cache(tokenizer.encode)
        self._rule = rule
        self._cutter = cutter = Cutter(template, tokenizer, options)
        self._bare = options
        self._tools = make_context(probes.TOOLS, options.options_json)
        self._contexts: tuple[RenderContext, ...] = (self._bare, self._tools)
        self._boundaries = cutter.boundaries
        self._ask = Questions(template, cutter.boundaries, self._bare, self._tools)
        self._counts = dict.fromkeys(_Outcome, 0)
        self.refused_systems: set[tuple[Message, ...]] = set()
        """Conversations with several system messages that cannot be continued."""

    def probed(self, image: str) -> Probed:
        """Probes the template; call it once."""
        return Probed(self._profile(image), self._cutter, self._template)

    def _profile(self, image: str) -> TemplateProfile:
        findings = self._find_system_and_tools()
        if self._rule.joins_first:
            findings.add(Finding.JOINS_FIRST_SYSTEM)
        if self._rule.later_as_user:
            findings.add(Finding.LATER_SYSTEM_AS_USER)
        plain = self._all(probes.BASIC) and self._ask.generation_prompt_begins_answers()
        findings |= self._find_rewrites(plain=plain)
        self._all(probes.TWICE)
        self._all(probes.ENDING)
        self._all(probes.THINKING)
        self._find_greetings()
        stripped = self._ask.stripped()
        if stripped != Stripped():
            findings.add(Finding.STRIPS_ANSWERS)
        if self._ask.prints_call_ids(self._contexts[-1]):
            findings.add(Finding.PRINTS_CALL_IDS)
        if self._ask.prints_date():
            findings.add(Finding.PRINTS_DATE)
        ends, shown = self._boundaries.ends, self._tokenizer.shown
        if ends.headers:
            findings.add(Finding.HEADERS_END)
        if self._boundaries.says_after_results:
            findings.add(Finding.TEXT_AFTER_RESULTS)
        image_roles = self._find_image_roles(image) if image else frozenset[RoleName]()
        self._cutter.image_roles = image_roles
        kind = Kind.APPEND_ONLY_EXCEPT if findings & REWRITING else Kind.APPEND_ONLY
        return TemplateProfile(
            kind if plain else Kind.REWRITES,
            shown(ends.text),
            frozenset(findings),
            tuple(self._refused_orders()),
            self._counts[_Outcome.EXACT],
            self._counts[_Outcome.KEPT],
            stripped,
            {role: shown(one) for role, one in ends.headers.items()},
            shown(ends.call),
            image_roles,
            tuple(map(shown, ends.stops)),
        )

    def _refused_orders(self) -> Iterator[RefusedOrder]:
        for (before, role), why in self._cutter.refused.items():
            yield RefusedOrder(before, role, with_tools=False, why=why)
        for (before, role), why in self._cutter.refused_with_tools.items():
            yield RefusedOrder(before, role, with_tools=True, why=why)
        for last, why in self._cutter.refused_prompts.items():
            yield RefusedOrder(last, None, with_tools=False, why=why)

    def _find_system_and_tools(self) -> set[Finding]:
        """Examines the beginning of a conversation and configures the cutter."""
        findings: set[Finding] = set()
        if self._ask.ignores_tools():
            findings.add(Finding.IGNORES_TOOLS)
            self._cutter.ignores_tools = True
            self._contexts = (self._bare,)
        elif self._ask.repeats_tools():
            findings.add(Finding.REPEATS_TOOLS)
            self._cutter.repeats_tools = True
        if self._ask.moves_system():
            findings.add(Finding.MOVES_SYSTEM)
            self._cutter.moves_system = True
        for context in self._contexts:
            joined = self._cutter.find_joined_system(context)
            self._cutter.joins_system[bool(context.tools_json)] = joined
            if joined:
                findings.add(Finding.SYSTEM_IN_USER)
        return findings

    def _find_rewrites(self, *, plain: bool) -> set[Finding]:
        findings: set[Finding] = set()
        if not (self._all(probes.STRIPPED) and plain):
            findings.add(Finding.REWRITES_ANSWERS)
        several = probes.TWO_CALLS if self._boundaries.says_after_results else probes.SAYING
        if not self._all((*probes.CALLING, several)):
            findings.add(Finding.REWRITES_CALLS)
        if not self._all(probes.SYSTEMS) and not self._rule.later_as_user:
            findings.add(Finding.MOVES_LATER_SYSTEM)
        if self._ask.drops_reasoning(self._contexts[-1]):
            findings.add(Finding.DROPS_REASONING)
        return findings

    def _all(self, conversations: tuple[tuple[Message, ...], ...]) -> bool:
        """Tries conversations; returns whether each one's texts equal the complete render.

        Raises:
            TemplateRefusedError: A conversation that agents need cannot be continued.
        """
        exact = True
        for messages in conversations:
            groups = group_messages(messages)
            for context in self._contexts:
                outcome = self._try(groups, context)
                self._counts[outcome] += 1
                if outcome is _Outcome.REFUSED and messages in probes.SYSTEMS:
                    self.refused_systems.add(messages)
                if outcome is _Outcome.KEPT and not self._is_explained(messages, context):
                    exact = False
        return exact

    def _find_image_roles(self, image: str) -> frozenset[RoleName]:
        """Returns the roles in whose messages every image is printed, in its place."""
        self._cutter.image_roles = frozenset(probes.IMAGES)
        return frozenset(
            role
            for role, conversations in probes.IMAGES.items()
            if all(
                self._shows_images(messages, context, image)
                for messages in conversations
                for context in self._contexts
            )
        )

    def _shows_images(
        self, messages: tuple[Message, ...], context: RenderContext, image: str
    ) -> bool:
        groups = group_messages(messages)
        try:
            full = self._template.render(messages, context, generation_prompt=True)
            outcome, _ = self._compare(groups, context, full)
            texts = self._cutter.texts(groups, 0, context)
        except TemplateRenderError:
            return False
        counts = [len(images_of([group])) for group in groups]
        return outcome is not _Outcome.REFUSED and [one.count(image) for one in texts] == counts

    def _find_greetings(self) -> None:
        """Tries conversations that an agent begins; refuses those that differ from the render.

        A greeting was not sampled, so keeping sampled tokens does not explain a difference.
        """
        refused = self._cutter.refused
        for context in self._contexts:
            before = set(refused)
            for messages in probes.GREETING:
                self._try_greeting(messages, context)
            if context.tools_json:
                for order in refused.keys() - before:
                    self._cutter.refused_with_tools[order] = refused.pop(order)

    def _try_greeting(self, messages: tuple[Message, ...], context: RenderContext) -> None:
        groups = group_messages(messages)
        order = self._culprit(groups, context)
        outcome = self._try(groups, context)
        self._counts[outcome] += 1
        if outcome is _Outcome.KEPT and not self._is_explained(messages, context):
            self._cutter.refused[order] = "later messages change how it is printed"
        elif outcome is _Outcome.REFUSED and order not in self._cutter.refused:
            without = tuple(one for one in messages if one.role != "assistant")
            why = self._refusal(messages, context)
            if why and not self._refusal(without, context):
                self._cutter.refused[order] = why

    def _refusal(self, messages: tuple[Message, ...], context: RenderContext) -> str:
        """Returns why the template itself refuses a conversation; empty if it accepts it."""
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
            if (before, role) in self._cutter.refused:
                return _Outcome.REFUSED
            whole = size == len(groups)
            outcome, why = self._judge(groups[:size], context, whole=whole)
            if why and role == "assistant":
                # Templates end the last answer differently; the text after it decides.
                if whole:
                    self._cutter.refused_prompts["assistant"] = why
            elif why:
                before, role = self._culprit(groups[:size], context)
                if (before, role) in _ESSENTIAL:
                    raise TemplateRefusedError(f"{role} after {before}: {why}")
                self._cutter.refused[before, role] = why
                return outcome
        return outcome

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
            return self._compare(groups, context, full)
        except TemplateRenderError as error:
            return _Outcome.REFUSED, str(error) if whole else ""

    def _compare(
        self, groups: list[MessageGroup], context: RenderContext, full: str
    ) -> tuple[_Outcome, str]:
        texts = self._cutter.texts(groups, 0, context)
        texts.append(self._cutter.generation_prompt(place(groups, len(groups))))
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
