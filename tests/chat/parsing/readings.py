"""What two parsers make of one answer."""

import json
from dataclasses import dataclass, replace
from typing import Any

from rollmesh.chat.parsing import CHANNELS, FORMATS
from tests.chat.parsing.outputs import Output
from tests.chat.parsing.writers import WRITERS

Calls = list[tuple[str, Any]]


@dataclass(frozen=True)
class Reading:
    """What a parser makes of an answer."""

    content: str
    """Without surrounding whitespace, which means nothing beside calls. None is no text."""
    calls: Calls
    """Names, and arguments as JSON values, or as text if they are not JSON."""
    malformed: bool = False


@dataclass(frozen=True)
class Pair:
    """Both readings of one answer."""

    writer: str
    output: Output
    ours: Reading
    theirs: Reading

    @property
    def agree(self) -> bool:
        return (self.ours.content, self.ours.calls) == (self.theirs.content, self.theirs.calls)

    @property
    def text(self) -> str:
        return self.output.text

    @property
    def nothing(self) -> bool:
        """Whether vLLM gives the whole answer as text."""
        return not self.theirs.calls and self.theirs.content == self.text.strip()


SPELLED = {"gemma4", "muse_glimmer"}
"""Formats that are not a `TaggedFormat` and whose values do not all carry a type."""


def marks_of(pair: Pair) -> tuple[str, ...]:
    """What a call of the pair's format is written between."""
    name = WRITERS[pair.writer].format
    return FORMATS[name].delimiters if name in FORMATS else (*CHANNELS[name], "atem:")


def folded(pair: Pair) -> Pair:
    """The pair with all values as text, so that only their spelling is left out."""

    def fold(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: fold(one) for key, one in value.items()}
        if isinstance(value, list):
            return [fold(one) for one in value]
        return value.strip() if isinstance(value, str) else json.dumps(value)

    def read(calls: Calls) -> Calls:
        return [(name, fold(arguments)) for name, arguments in calls]

    output = pair.output
    return replace(
        pair,
        output=output if output.meant is None else replace(output, meant=read(output.meant)),
        ours=replace(pair.ours, calls=read(pair.ours.calls)),
        theirs=replace(pair.theirs, calls=read(pair.theirs.calls)),
    )
