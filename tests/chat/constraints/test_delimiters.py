"""Marks spelled as the text of a forced call: they are that text, or are not let through."""

import json
from dataclasses import replace
from typing import Any

import pytest

from rollmesh.chat import constraint_of, make_context
from rollmesh.chat.parsing import HARMONY, AnswerFormat, ReasoningSplitter
from tests.chat.constraints.grammars import ALL, MARKS, REQUIRED, WRITTEN, Compiler, read

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize(
    ("name", "text"),
    [
        pytest.param(
            "qwen3_coder",
            "<tool_call>\n<function=say>\n<parameter=text>\nVALUE\n</parameter>\n</function>\n"
            "</tool_call>",
            id="qwen3_coder",
        ),
        pytest.param(
            "glm45",
            "<tool_call>say\n<arg_key>text</arg_key>\n<arg_value>VALUE</arg_value>\n</tool_call>",
            id="glm45",
        ),
    ],
)
def test_a_value_in_tags_holds_no_tag_that_would_end_it(
    compiler: Compiler, name: str, text: str
) -> None:
    schema = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
    tool = {"type": "function", "function": {"name": "say", "parameters": schema}}
    context, form = (
        make_context(json.dumps([tool]).encode(), b""),
        AnswerFormat(name, reasoning=False),
    )
    constraint = constraint_of(REQUIRED, form, context, inside_reasoning=False)
    assert constraint is not None
    assert compiler.accepts(constraint.structural_tag_json, text.replace("VALUE", "a <b> c"))
    for mark in ("<parameter=text>", "<arg_value>"):
        marked = text.replace("VALUE", f"a {mark} c")
        whole = read(form, marked, context)
        is_read = whole.calls == [("say", json.dumps({"text": f"a {mark} c"}))]
        assert compiler.accepts(constraint.structural_tag_json, marked) is is_read


SAY: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "say",
        "parameters": {
            "type": "object",
            "properties": {"text": {"type": "string"}},
            "required": ["text"],
        },
    },
}
SAY_CONTEXT = make_context(json.dumps([SAY]).encode(), b"")
SAID = {
    name: text.replace("add", "say").replace('{"a": 4, "b": 2}', '{"text": VALUE}')
    for name, text in WRITTEN.items()
} | {
    "qwen3_coder": "<tool_call>\n<function=say>\n<parameter=text>\nVALUE\n</parameter>\n"
    "</function>\n</tool_call>",
    "glm45": "<tool_call>say\n<arg_key>text</arg_key>\n<arg_value>VALUE</arg_value>\n</tool_call>",
}


def spelled(name: str, form: AnswerFormat) -> list[str]:
    """Texts that spell marks: each alone, the format's in pairs, and a whole call."""
    pairs = [f"{one}{other}" for one in form.delimiters for other in form.delimiters]
    return [*MARKS, *(f"a {mark} b" for mark in MARKS), *pairs, f"see {WRITTEN[name]} there"]


@pytest.mark.parametrize(("form", "name"), [(p.values[0], p.id) for p in ALL], ids=lambda v: "")
def test_marks_sampled_as_the_text_of_a_value_are_its_text_or_are_not_let_through(
    compiler: Compiler, form: AnswerFormat, name: str
) -> None:
    constraint = constraint_of(REQUIRED, form, SAY_CONTEXT, inside_reasoning=False)
    assert constraint is not None
    let_through = 0
    for value in ("plain", *spelled(name, form)):
        written = (
            value if name in {"qwen3_coder", "glm45"} else json.dumps(value, ensure_ascii=False)
        )
        text = SAID[name].replace("VALUE", written)
        if not compiler.spells(constraint.structural_tag_json, text):
            continue
        whole = read(form, text, SAY_CONTEXT)
        assert [(call, json.loads(given)) for call, given in whole.calls] == [
            ("say", {"text": value})
        ], text
        assert (whole.content, whole.malformed) == ("", False), text
        let_through += 1
    assert let_through


@pytest.mark.parametrize(("form", "name"), [(p.values[0], p.id) for p in ALL], ids=lambda v: "")
def test_marks_sampled_as_the_text_of_a_thought_are_its_text_or_are_not_let_through(
    compiler: Compiler, form: AnswerFormat, name: str
) -> None:
    form = replace(form, reasoning=name != HARMONY)
    constraint = constraint_of(REQUIRED, form, SAY_CONTEXT, inside_reasoning=False)
    assert constraint is not None
    let_through = 0
    for thought in ("plain", *spelled(name, form)):
        text = SAID[name].replace("VALUE", "x" if name in {"qwen3_coder", "glm45"} else '"x"')
        begin, end = ("<think>", "</think>\n")
        if name == HARMONY:
            begin, end = "<|channel|>analysis<|message|>", "<|end|><|start|>assistant"
        if not compiler.spells(constraint.structural_tag_json, f"{begin}{thought}{end}{text}"):
            continue
        splitter, parser = ReasoningSplitter(inside=False), form.parser(SAY_CONTEXT)
        assert parser is not None
        for char in f"{begin}{thought}{end}{text}":
            parser.feed(splitter.feed(char)[1] if form.reasoning else char)
        parser.finish()
        assert (splitter.reasoning or parser.reasoning) == thought
        assert [(call, json.loads(given)) for call, given in parser.calls] == [
            ("say", {"text": "x"})
        ], thought
        assert (parser.content, parser.malformed) == ("", False), thought
        let_through += 1
    assert let_through
