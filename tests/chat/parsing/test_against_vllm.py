"""Our parsers and vLLM's, on the same answers: they agree, or differ in a way that has a name.

`python -m tests.chat.parsing.test_against_vllm > docs/parsers.md` makes the page with the counts.
"""

import asyncio
import functools
import json
import logging
import sys
from collections import Counter
from typing import Any

import pytest

from rollmesh.chat.constraints.structural_tag import FORCED_FORMATS
from rollmesh.chat.parsing.formats import AnswerFormat
from tests.chat.parsing.differences import CLASSES, SPELLED, Pair, Reading, folded
from tests.chat.parsing.outputs import KINDS, TAGS, WRITERS, outputs
from tests.chat.parsing.test_formats import CONTEXT, TOOLS
from tests.paths import ROOT

pytestmark = [pytest.mark.vllm]
SEEDS = 20
PAGE = ROOT / "docs" / "parsers.md"


def _value(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments.strip()


def ours(name: str, text: str) -> Reading:
    parser = AnswerFormat(name, reasoning=False).parser(CONTEXT)
    assert parser is not None
    parser.feed(text)
    parser.finish()
    calls = [(called, _value(arguments)) for called, arguments in parser.calls]
    return Reading(parser.content.strip(), calls, parser.malformed)


class Peer:
    """vLLM's parsers, over a tokenizer with all their special tokens."""

    def __init__(self) -> None:
        from vllm.entrypoints.openai.chat_completion.protocol import (  # noqa: PLC0415
            ChatCompletionRequest,
        )

        messages = [{"role": "user", "content": "?"}]
        self.request: Any = ChatCompletionRequest.model_validate(
            {"model": "m", "messages": messages, "tools": TOOLS}
        )

    @functools.cached_property
    def _tokenizers(self) -> dict[bool, Any]:
        from tokenizers import Tokenizer, models  # noqa: PLC0415
        from transformers import PreTrainedTokenizerFast  # noqa: PLC0415

        made: dict[bool, Any] = {}
        for new in (False, True):
            rust = Tokenizer(models.BPE())
            # By [ARGS] vLLM tells Mistral's formats apart.
            rust.add_special_tokens([tag for tag in TAGS if new or tag != "[ARGS]"])
            made[new] = PreTrainedTokenizerFast(tokenizer_object=rust)
        return made

    def read(self, writer: str, text: str) -> Reading:
        from vllm.tool_parsers import ToolParserManager  # noqa: PLC0415

        made = ToolParserManager.get_tool_parser(WRITERS[writer].format)
        parser = made(self._tokenizers[writer != "mistral array"], self.request.tools)
        found = parser.extract_tool_calls(text, self.request)
        calls = [(one.function.name, _value(one.function.arguments)) for one in found.tool_calls]
        return Reading((found.content or "").strip(), calls)


"""Differences in the order in which they are looked for: who it applies to, why ours is right."""


@functools.cache
def pairs() -> list[Pair]:
    peer = Peer()
    return [
        Pair(
            writer,
            output,
            ours(WRITERS[writer].format, output.text),
            peer.read(writer, output.text),
        )
        for writer in WRITERS
        for output in outputs(writer, SEEDS)
    ]


def class_of(pair: Pair) -> str | None:
    found = next((name for name, (is_one, _) in CLASSES.items() if is_one(pair)), None)
    if found is not None or pair.writer not in SPELLED:
        return found
    other = folded(pair)
    if other.agree:
        return "spelling of values"
    return next((name for name, (is_one, _) in CLASSES.items() if is_one(other)), None)


def counts() -> Counter[tuple[str, str]]:
    """How many answers of each writer agree, and fall in each class."""
    found: Counter[tuple[str, str]] = Counter()
    for pair in pairs():
        name = "agree" if pair.agree else class_of(pair)
        assert name is not None, f"{pair.text!r}\nours   {pair.ours}\ntheirs {pair.theirs}"
        found[pair.writer, name] += 1
    assert {name for _, name in found} == {"agree", *CLASSES}
    return found


def document() -> str:
    """The page of the docs."""
    found = counts()
    lines = [_HEAD, "| | " + " | ".join(WRITERS) + " |", "|---" * (len(WRITERS) + 1) + "|"]
    for name in ("agree", *CLASSES):
        numbers = (str(found[writer, name] or "") for writer in WRITERS)
        lines.append(f"| {name} | " + " | ".join(numbers) + " |")
    lines += ["", "## Why ours is right", ""]
    lines += [f"- **{name}**: {why}" for name, (_, why) in CLASSES.items()]
    lines += ["", _FORCED]
    return "\n".join(lines) + "\n"


_HEAD = f"""\
# Tool calls: our parsers and vLLM's

`tests/chat/parsing/outputs.py` makes {SEEDS} answers of each of {len(KINDS)} kinds in every format,
whole and spoiled: text around calls, several calls, nested and escaped arguments, marks inside
strings, cuts at any place, doubled and missing marks and commas, missing and unknown names, other
blanks. A test reads them with our parsers and with the ones that vLLM 0.32 has by the same names,
the whole answer at once, and compares the text (without blanks around it) and the calls (names, and
arguments as JSON values). All either agree or differ in one of these ways; each is an exact
predicate in `tests/chat/parsing/differences.py`. `test_against_vllm.py` beside it makes this page.

In the answers that are whole we find all calls that were meant and no others, but for JSON and
lists of Python calls behind prose.

The price of knowing what is a string: where a quote is missing inside arguments, the marks behind
it are taken for text of that string, and the next call becomes part of a broken one, flagged. vLLM
ends calls at any mark and still finds the next.
"""


_FORCED = f"""\
## Calls that are forced

`tool_choice` required or named, and `response_format` beside tools, are served with
{", ".join(f"`{name}`" for name in sorted(FORCED_FORMATS))}. Calls are then as the format's template
prints them, their arguments JSON values of the tool's schema with the keys in its order. Strings
may not hold marks that our parsers would not know for a part of them. `parallel_tool_calls: false`
is served with all of these too. With parsers of vLLM's none of this is."""


async def test_every_difference_from_vllm_has_a_name_and_the_page_counts_them() -> None:
    """In a process of its own: importing vLLM takes seconds, and changes the process."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-W", "ignore", "-m", "tests.chat.parsing.test_against_vllm"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    page, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()[-3000:]
    assert page.decode() == PAGE.read_text(encoding="utf-8")


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)  # vLLM prints a traceback for every broken answer
    sys.stdout.write(document())
