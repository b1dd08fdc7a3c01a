"""The result of probing how a chat template renders a growing conversation."""

from dataclasses import dataclass, field
from enum import StrEnum

from rollmesh.chat.messages import RoleName
from rollmesh.chat.templates.windows import Place


class Kind(StrEnum):
    """How the template treats earlier turns; the names are those of `TemplateKind`."""

    APPEND_ONLY = "append-only"
    """A longer conversation begins with the shorter one, in every order that was probed."""
    APPEND_ONLY_EXCEPT = "append-only except"
    """The same, with the exceptions that the findings name."""
    REWRITES = "rewrites"
    """Plain answers of earlier turns are printed differently than they were sampled."""


class Finding(StrEnum):
    """A finding of the probe; the tokens of a session stay as sampled in any case.

    The names are those of `TemplateFinding`.
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
"""Findings that change more than answers; continuing would need the full conversation."""


@dataclass(frozen=True, slots=True)
class Stripped:
    """The whitespace that a template strips from the ends of earlier answers."""

    leading: str = ""
    trailing: str = ""

    def changes(self, answer: str) -> bool:
        """Returns whether an answer is printed without some of its whitespace."""
        ends = _class_of(answer[:1]), _class_of(answer[-1:])
        return bool(answer) and (ends[0] in self.leading or ends[1] in self.trailing)


WHITESPACE = " \t\n\r\u00a0"
"""Whitespace characters that templates tell apart; the last stands for all others."""


def _class_of(character: str) -> str:
    return WHITESPACE[-1] if character.isspace() and character not in WHITESPACE else character


@dataclass(frozen=True, slots=True)
class RefusedOrder:
    """An order of messages that a template cannot continue."""

    place: Place
    """What stands before."""
    role: RoleName | None
    """The message that cannot follow; None if no answer can be sampled there."""
    with_tools: bool
    """Whether the order is refused only if there are tools."""
    why: str

    def __str__(self) -> str:
        """Returns the order, such as "assistant, system with tools"."""
        return f"{self.place}, {self.role or 'answer'}{' with tools' if self.with_tools else ''}"


@dataclass(frozen=True, slots=True)
class TemplateProfile:
    """What holds for one template, tokenizer and set of template options."""

    kind: Kind
    end_text: str
    """The special token that ends an answer in the history; empty if it has none of its own."""
    findings: frozenset[Finding] = frozenset()
    refused: tuple[RefusedOrder, ...] = ()
    """Orders of messages that the template cannot continue."""
    verified: int = 0
    """Number of probe conversations whose parts equal the template's own render."""
    kept: int = 0
    """Number of those where that holds after the last answer only."""
    stripped: Stripped = field(default_factory=Stripped)
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
