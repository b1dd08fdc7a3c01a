"""The result of probing how a chat template renders a growing conversation."""

from dataclasses import dataclass, field
from enum import StrEnum


class Kind(StrEnum):
    """How the template treats earlier turns."""

    APPEND_ONLY = "append-only"
    """A longer conversation begins with the shorter one, in every order that was probed."""
    EXCEPT = "append-only except"
    """The same, with the exceptions that the findings name."""
    REWRITES = "rewrites"
    """Plain answers of earlier turns are printed differently than they were sampled."""


class Finding(StrEnum):
    """A finding of the probe; the tokens of a session stay as sampled in any case."""

    DROPS_REASONING = "drops earlier reasoning"
    ANSWERS_OTHERWISE = "prints earlier answers otherwise than behind the generation prompt"
    CALLS_OTHERWISE = "prints earlier tool calls otherwise"
    SYSTEM_OTHERWISE = "moves or merges a system message inside the conversation"
    TEXT_AFTER_RESULTS = "prints the text beside tool calls behind their results"
    MOVES_SYSTEM = "prints the first system message in the last user turn"
    SYSTEM_IN_USER = "prints the first system message together with the first user turn"
    REPEATS_TOOLS = "prints the tools again behind the conversation"
    STRIPS_ANSWERS = "strips earlier answers"
    HEADERS_END = "ends answers with the header of the turn behind them"
    IGNORES_TOOLS = "does not print tools"
    PRINTS_CALL_IDS = "prints the ids of tool calls"
    PRINTS_DATE = "prints the date"


REWRITING = frozenset(
    {
        Finding.DROPS_REASONING,
        Finding.ANSWERS_OTHERWISE,
        Finding.CALLS_OTHERWISE,
        Finding.SYSTEM_OTHERWISE,
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
class TemplateProfile:
    """What holds for one template, tokenizer and set of template options."""

    kind: Kind
    end_text: str
    """The special token that ends an answer in the history; empty if it has none of its own."""
    findings: frozenset[Finding] = frozenset()
    refused: dict[str, str] = field(default_factory=dict)
    """Role orders that the template does not accept, such as "assistant, system", and why."""
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
    stops: tuple[str, ...] = ()
    """The special tokens at which a model of this template must stop."""

    def __str__(self) -> str:
        """Returns a one-line summary."""
        named = "; ".join(sorted(self.findings & REWRITING))
        return f"{self.kind} {named}" if self.kind is Kind.EXCEPT else str(self.kind)
