"""The result of probing how a chat template renders a growing conversation."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from rollmesh.chat.messages import RenderContext, RoleName
from rollmesh.chat.rendering import AdaptedTemplate, Messages, ModelTemplate
from rollmesh.chat.templates.windows import ANY_TOOLS, RefusedOrder, TemplateRefusedError


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


class TemplatePair(ModelTemplate):
    """Two templates, of which a request's tools choose one, as in transformers."""

    def __init__(self, plain: ModelTemplate, tool_use: ModelTemplate) -> None:
        """Takes the templates of requests without tools and with tools."""
        super().__init__(f"{plain.source}\n{tool_use.source}")
        # The second is only rendered with tools: of windows without tools it is given one.
        self.plain = plain
        self.tool_use = AdaptedTemplate(
            tool_use,
            lambda messages, context: (
                messages,
                context if context.tools_json else replace(context, tools_json=ANY_TOOLS),
            ),
        )

    def render(
        self, messages: Messages, context: RenderContext, *, generation_prompt: bool = False
    ) -> str:
        """Returns the text of a conversation. See `ModelTemplate.render`."""
        return self.of(context).render(messages, context, generation_prompt=generation_prompt)

    def of(self, context: RenderContext) -> ModelTemplate:
        """Returns the template of a request."""
        return self.tool_use if context.tools_json else self.plain


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
