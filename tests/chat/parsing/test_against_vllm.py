"""Our parsers and vLLM's, on the same answers: they agree, or differ in a way that has a name.

`python -m tests.chat.parsing.test_against_vllm` compares them. `python -m tests.chat.parsing.page`
makes the page of the differences.
"""

import asyncio
import functools
import json
import logging
import sys
from typing import Any

import pytest

from rollmesh.chat.parsing import AnswerFormat
from tests.chat.parsing.differences import CLASSES
from tests.chat.parsing.outputs import outputs
from tests.chat.parsing.readings import SPELLED, Pair, Reading, folded
from tests.chat.parsing.test_formats import CONTEXT, TOOLS
from tests.chat.parsing.writers import TAGS, WRITERS

pytestmark = [pytest.mark.long, pytest.mark.vllm]
SEEDS = 20


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
        from vllm.entrypoints.openai.chat_completion.protocol import (
            ChatCompletionRequest,
        )

        messages = [{"role": "user", "content": "?"}]
        self.request: Any = ChatCompletionRequest.model_validate(
            {"model": "m", "messages": messages, "tools": TOOLS}
        )

    @functools.cached_property
    def _tokenizers(self) -> dict[bool, Any]:
        from tokenizers import Tokenizer, models
        from transformers import PreTrainedTokenizerFast

        made: dict[bool, Any] = {}
        for new in (False, True):
            rust = Tokenizer(models.BPE())
            # By [ARGS] vLLM tells Mistral's formats apart.
            rust.add_special_tokens([tag for tag in TAGS if new or tag != "[ARGS]"])
            made[new] = PreTrainedTokenizerFast(tokenizer_object=rust)
        return made

    def read(self, writer: str, text: str) -> Reading:
        from vllm.tool_parsers import ToolParserManager

        made = ToolParserManager.get_tool_parser(WRITERS[writer].format)
        parser = made(self._tokenizers[writer != "mistral array"], self.request.tools)
        found = parser.extract_tool_calls(text, self.request)
        calls = [(one.function.name, _value(one.function.arguments)) for one in found.tool_calls]
        return Reading((found.content or "").strip(), calls)


@functools.cache
def pairs() -> list[Pair]:
    peer = Peer()
    return [
        Pair(
            writer,
            output,
            ours(written.format, output.text),
            peer.read(writer, output.text),
        )
        for writer, written in WRITERS.items()
        if written.peer
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


def compare() -> None:
    """Checks that all answers agree or differ in a class, and that every class is met."""
    found = set[str]()
    for pair in pairs():
        name = "agree" if pair.agree else class_of(pair)
        assert name is not None, f"{pair.text!r}\nours   {pair.ours}\ntheirs {pair.theirs}"
        found.add(name)
    assert found == {"agree", *CLASSES}


async def test_every_difference_from_vllm_has_a_name_and_is_met() -> None:
    """In a process of its own: importing vLLM takes seconds, and changes the process."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-W", "ignore", "-m", "tests.chat.parsing.test_against_vllm"),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    _, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()[-3000:]


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)  # vLLM prints a traceback for every broken answer
    compare()
