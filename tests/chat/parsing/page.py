"""Generates docs/parsers.md: `python -m tests.chat.parsing.page > docs/parsers.md`."""

import sys

from rollmesh.chat import CONSTRAINED_FORMATS
from tests.chat.parsing.differences import CLASSES
from tests.chat.parsing.outputs import KINDS


def document() -> str:
    """The page of the docs."""
    differences = "".join(f"- **{name}**: {why}\n" for name, (_, why) in CLASSES.items())
    forced = ", ".join(f"`{name}`" for name in sorted(CONSTRAINED_FORMATS))
    return _HEAD + differences + _FORCED.format(forced=forced)


_HEAD = f"""\
# Tool-call parsers and vLLM's

The gateway's parsers have the names of vLLM's and read the same formats, but not always in the same
way. They parse while an answer streams, keep all sampled text, and know where strings end. This
page lists every difference from vLLM 0.32.

A test reads answers of {len(KINDS)} kinds in every format with both parsers: complete and broken
ones, with text around calls, several calls, nested and escaped arguments, delimiters inside
strings, cuts at any place, doubled and missing delimiters, missing and unknown names, other
whitespace. Both readings are equal, or differ in one of the ways below; each is a predicate in
`tests/chat/parsing/differences.py`.

In complete answers these parsers find all calls that were meant and no others, except for JSON and
lists of Python calls after prose. Knowing where strings end has a price: if a quote is missing
inside arguments, the delimiters after it are taken for text of that string, and the next call
becomes part of a broken one, flagged. vLLM ends calls at any delimiter and still finds the next.

*Flagged* means that the turn carries `MALFORMED_TOOL_CALL`.

## Differences

"""
_FORCED = """
## Formats that can be forced

These formats serve `tool_choice` required or named, `response_format` beside tools, and
`parallel_tool_calls: false` under a constraint:
{forced}.
A forced call is written as the format's template writes it, with JSON values of the tool's schema
in the schema's order. Strings may not contain delimiters that the parser would not recognise as
part of them. vLLM's parsers cannot be forced.
"""


if __name__ == "__main__":
    sys.stdout.write(document())
