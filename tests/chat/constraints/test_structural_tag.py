"""Constraints of every format, compiled by xgrammar over a real tokenizer: what they let through is
what our parsers read as the wanted calls, and nothing else is let through."""

import json

import pytest

from rollmesh.chat import Calls, Wanted
from rollmesh.chat.parsing import HARMONY, MISTRAL_TAGS, TAGS, AnswerFormat
from tests.chat.constraints.grammars import (
    ALL,
    ONE,
    REQUIRED,
    SCHEMAS,
    WRITTEN,
    Compiler,
    read,
    tag_of,
)

pytestmark = pytest.mark.vllm


def fits(name: str, arguments: str) -> bool:
    value, schema = json.loads(arguments), SCHEMAS[name]
    known = schema["properties"]
    return set(value) <= set(known) and set(schema.get("required", ())) <= set(value)


def begin_of(format_: AnswerFormat) -> str:
    """Harmony's reasoning is free, and would hardly ever end by chance."""
    return "<|channel|>commentary" if format_.tools == HARMONY else ""


@pytest.mark.parametrize("format_", ALL)
def test_sampled_text_is_read_as_whole_calls(compiler: Compiler, format_: AnswerFormat) -> None:
    ended = several = 0
    for seed in range(12):
        text = compiler.sample(tag_of(REQUIRED, format_), seed, begin_of(format_))
        if text is None:
            continue
        parser = read(format_, text)
        assert not parser.malformed, text
        assert parser.content == "", text
        assert parser.calls, text
        assert all(fits(name, arguments) for name, arguments in parser.calls), text
        ended, several = ended + 1, several + (len(parser.calls) > 1)
    assert ended >= 3
    assert several or format_.tools == HARMONY


@pytest.mark.parametrize("format_", ALL)
def test_one_call_is_one_call(compiler: Compiler, format_: AnswerFormat) -> None:
    named = Wanted(Calls.NAMED, tool_name="stop-now")
    ended = 0
    for seed in range(6):
        text = compiler.sample(tag_of(ONE, format_), seed, begin_of(format_))
        if text is not None:
            assert len(read(format_, text).calls) == 1
            ended += 1
        text = compiler.sample(tag_of(named, format_), seed, begin_of(format_))
        assert text is not None
        assert [name for name, _ in read(format_, text).calls] == ["stop-now"]
    assert ended


@pytest.mark.parametrize(("format_", "name"), [(p.values[0], p.id) for p in ALL], ids=lambda v: "")
def test_calls_as_templates_print_them_are_let_through_and_nothing_else(
    compiler: Compiler, format_: AnswerFormat, name: str
) -> None:
    tag, text = tag_of(REQUIRED, format_), WRITTEN[name]
    assert compiler.accepts(tag, text)
    assert [call for call, _ in read(format_, text).calls] == ["add"]
    for spoiled in (
        "Hello",
        "",
        f"Well: {text}",
        f"{text} Done.",
        text[:-1] if text[-1] not in "}" else text[:-2],
        text.replace("add", "subtract"),
        text.replace("4", "true"),
    ):
        assert not compiler.accepts(tag, spoiled), spoiled
    assert compiler.accepts(tag_of(Wanted(Calls.NAMED, "add"), format_), text)
    assert not compiler.accepts(tag_of(Wanted(Calls.NAMED, "move"), format_), text)


@pytest.mark.parametrize("inside", [True, False], ids=["opened by the prompt", "not opened"])
@pytest.mark.parametrize(
    "wanted", [REQUIRED, Wanted(Calls.NONE, json_schema=b"")], ids=["calls", "JSON"]
)
@pytest.mark.parametrize("tags", [TAGS, MISTRAL_TAGS], ids=["think", "mistral"])
def test_reasoning_is_free(
    compiler: Compiler, wanted: Wanted, tags: tuple[str, str], *, inside: bool
) -> None:
    form = AnswerFormat("hermes", reasoning=True, reasoning_tags=tags)
    tag = tag_of(wanted, form, inside=inside)
    answer = WRITTEN["hermes"] if wanted is REQUIRED else '{"a": [1, 2]}'
    thought = f"Let me see: <tool_call> {{\n{tags[1]}\n\n"
    assert compiler.accepts(tag, thought + answer) is inside
    assert compiler.accepts(tag, f"{tags[0]}\n{thought}{answer}")
    assert compiler.accepts(tag, answer) is not inside
    assert not compiler.accepts(tag, f"{tags[0]}{thought}no")


def test_harmony_thinks_in_its_channel(compiler: Compiler) -> None:
    form = AnswerFormat(HARMONY, reasoning=False)
    thought = "<|channel|>analysis<|message|>Let me see.<|end|><|start|>assistant"
    assert compiler.accepts(tag_of(REQUIRED, form), thought + WRITTEN["openai"])
    value = Wanted(Calls.NONE, json_schema=b"")
    assert compiler.accepts(tag_of(value, form), thought + '<|channel|>final<|message|>{"a": 1}')
    assert not compiler.accepts(tag_of(value, form), thought + "<|channel|>final<|message|>one")


@pytest.mark.parametrize(
    ("name", "thought", "said"),
    [
        ("gemma4", "<|channel>thought\nLet me see.\n<channel|>", ""),
        (
            "muse_glimmer",
            " to=self<|message|>Let me see.<|eom|><|start|>assistant",
            " to=user<|message|>",
        ),
        ("solar_open", "<|think|>Let me see.<|end|><|begin|>assistant", "<|content|>"),
    ],
)
def test_json_stands_in_the_channel_of_the_answer(
    compiler: Compiler, name: str, thought: str, said: str
) -> None:
    form = AnswerFormat(name, reasoning=False)
    tag = tag_of(Wanted(Calls.NONE, json_schema=b""), form)
    assert compiler.accepts(tag, f'{said}{{"a": 1}}')
    assert compiler.accepts(tag, f'{thought}{said}{{"a": 1}}')
    assert not compiler.accepts(tag, f"{thought}{said}one")


def test_json_is_the_value_and_where_tools_are_may_be_calls(compiler: Compiler) -> None:
    schema = json.dumps({"type": "object", "properties": {"n": {"type": "integer"}}}).encode()
    form = AnswerFormat("hermes", reasoning=False)
    tag = tag_of(Wanted(json_schema=schema), form)
    assert compiler.accepts(tag, '{"n": 4}')
    assert compiler.accepts(tag, WRITTEN["hermes"])
    assert not compiler.accepts(tag, '{"n": "x"}')
    alone = tag_of(Wanted(Calls.NONE, json_schema=schema), form)
    assert not compiler.accepts(alone, WRITTEN["hermes"])
    # Text inside a value that looks like a call is not one, and is not allowed.
    assert not compiler.accepts(tag_of(Wanted(json_schema=b""), form), '{"a": "<tool_call>"}')
    assert compiler.accepts(
        tag_of(Wanted(Calls.NONE, json_schema=b""), form), '{"a": "<tool_call>"}'
    )
    forced = tag_of(Wanted(Calls.REQUIRED, json_schema=schema), form)
    assert not compiler.accepts(forced, '{"n": 4}')
