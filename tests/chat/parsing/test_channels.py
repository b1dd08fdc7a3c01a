"""Formats with channels of reasoning, text and calls: of Gemma, Muse Glimmer, Solar and Harmony."""

import re

import pytest
from hypothesis import given, strategies as st

from rollmesh.chat import ParserEvent, ReasoningEvent, ToolCallEvent
from rollmesh.chat.parsing import HARMONY, AnswerFormat
from tests.chat.parsing.test_formats import CONTEXT, joined, parse

Vector = tuple[str, str, str, list[tuple[str, str]], str, bool]
Q = '<|"|>'


def gemma(name: str, arguments: str) -> str:
    return f"<|tool_call>call:{name}{{{arguments}}}<tool_call|>"


def muse(recipient: str, body: str, end: str = "<|eom|>") -> str:
    return f" to={recipient}<|message|>{body}{end}"


def invoke(name: str, *parameters: tuple[str, str]) -> str:
    inner = "".join(
        f'<atem:parameter name="{key}">{value}</atem:parameter>\n' for key, value in parameters
    )
    return (
        f'<atem:function_calls>\n<atem:invoke name="{name}">\n{inner}'
        "</atem:invoke>\n</atem:function_calls>"
    )


def solar(name: str, arguments: str, id_: str = "a1b2c3d4e5") -> str:
    return (
        f"<|tool_call:begin|>{id_}<|tool_call:name|>{name}"
        f"<|tool_call:args|>{arguments}<|tool_call:end|>"
    )


C, M, R = "<|channel|>", "<|message|>", "<|return|>"
ENDED = "<|end|><|start|>assistant"
NEXT = "<|start|>assistant"
THEN = "<|begin|>assistant"
FOUR, NONE = '{"n":  4}', "{}"
F = invoke("f", ("n", "4"), ("s", "7"))
VECTORS: list[Vector] = [
    ("gemma4", "Yes.", "Yes.", [], "", False),
    ("gemma4", "<|channel>thought\nHm.\n<channel|>Yes.", "Yes.", [], "Hm.", False),
    ("gemma4", "<|channel>thought\n<channel|>Yes.", "Yes.", [], "", False),
    ("gemma4", "<|channel>thought", "", [], "", False),
    ("gemma4", "<|channel>thought\ncut in the", "", [], "cut in the", False),
    ("gemma4", "<|channel>thought\nHm. <chan", "", [], "Hm. <chan", False),
    ("gemma4", "I <|channel>thought\nHm.<channel|>do.", "I do.", [], "Hm.", False),
    ("gemma4", f"<|channel>thought\nHm.{gemma('g', '')}", "", [("g", "{}")], "Hm.", False),
    ("gemma4", gemma("f", f"n:1,s:{Q}a}},<tool_call|>{Q},b:true") + gemma("g", ""), "",
     [("f", '{"n": 1, "s": "a},<tool_call|>", "b": true}'), ("g", "{}")], "", False),
    ("gemma4", "I do. " + gemma("f", f"o:{{a:[1,{Q}x{Q},{{{Q}k{Q}:null}}]}},x:None,l:[]"), "I do.",
     [("f", '{"o": {"a": [1, "x", {"k": null}]}, "x": null, "l": []}')], "", False),
    ("gemma4", gemma("f", "s:7,n:-2.5e1,o:{u:celsius}"), "",
     [("f", '{"s": "7", "n": -25.0, "o": {"u": "celsius"}}')], "", False),
    ("gemma4", "<|tool_call>:g{}<tool_call|>", "", [("g", "{}")], "", False),
    ("gemma4", "<|tool_call>call:g{}", "", [("g", "{}")], "", False),
    ("gemma4", "<|tool_call>call:g{}" + gemma("g", ""), "", [("g", "{}"), ("g", "{}")], "", True),
    ("gemma4", gemma("no", ""), gemma("no", ""), [], "", True),
    ("gemma4", gemma("f", "n:"), gemma("f", "n:"), [], "", True),
    ("gemma4", gemma("f", f"s:{Q}x"), gemma("f", f"s:{Q}x"), [], "", True),
    ("gemma4", gemma("f", "l:" + "[" * 3000), gemma("f", "l:" + "[" * 3000), [], "", True),
    ("gemma4", "a < b <|tool", "a < b <|tool", [], "", False),
    ("muse_glimmer", muse("user", "Yes.", "<|eot|>"), "Yes.", [], "", False),
    ("muse_glimmer", muse("self", "Hm.") + NEXT + muse("user", " Yes.\n"), " Yes.\n", [], "Hm.",
     False),
    ("muse_glimmer", muse("self", "Hm.") + NEXT + muse("f", F, "<|eot|>"), "",
     [("f", '{"n": 4, "s": "7"}')], "Hm.", False),
    ("muse_glimmer", muse("f", F) + NEXT + muse("g", invoke("g")), "",
     [("f", '{"n": 4, "s": "7"}'), ("g", "{}")], "", False),
    ("muse_glimmer", muse("self", invoke("g")) + NEXT + muse("user", "No."), "No.", [],
     invoke("g"), False),
    ("muse_glimmer", " to=self<|message|>Hm. to=g<|message|>" + invoke("g") + "<|eot|>", "",
     [("g", "{}")], "Hm.", False),
    ("muse_glimmer", " to=self<|message|>Go to=" + NEXT + muse("user", "Yes."), "Yes.", [],
     "Go to=", False),
    ("muse_glimmer", muse("no", invoke("no")),
     invoke("no").removeprefix("<atem:function_calls>\n").removesuffix("\n</atem:function_calls>"),
     [], "", True),
    ("muse_glimmer", muse("f", "n=4"), "n=4", [], "", True),
    ("muse_glimmer", " to=self<|message|>cut in the mid", "", [], "cut in the mid", False),
    ("muse_glimmer", " to=se", "", [], "", False),
    ("muse_glimmer", "no channel at all", "no channel at all", [], "", True),
    ("muse_glimmer", " to=user<|message|>Yes.<|message|> More.<|eot|>", "Yes. More.", [], "",
     False),
    ("muse_glimmer", " to=self<|message|>Hm.<|message|>Yes.<|eot|>", "Yes.", [], "Hm.", False),
    ("muse_glimmer", "<|message|>Yes.<|eot|>", "Yes.", [], "", False),
    ("muse_glimmer", "<|message|>Yes.<|eot|><|eot|>", "Yes.", [], "", False),
    ("solar_open", "<|content|>Yes.<|flush|>", "Yes.", [], "", False),
    ("solar_open", f"<|think|>Hm.<|end|>{THEN}<|content|> Yes.\n<|flush|>", " Yes.\n", [], "Hm.",
     False),
    ("solar_open", "<|think|><|end|><|content|>Yes.", "Yes.", [], "", False),
    ("solar_open", f"<|think|>Hm.<|end|>{THEN}<|tool_calls|>{solar('f', FOUR)}<|calls|>", "",
     [("f", FOUR)], "Hm.", False),
    ("solar_open", f"<|tool_calls|>{solar('f', NONE)}{solar('g', NONE, '')}<|calls|>", "",
     [("f", "{}"), ("g", "{}")], "", False),
    ("solar_open", f"<|tool_calls|>{solar('g', NONE)}<|tool_call:begin|>a", "<|tool_call:begin|>a",
     [("g", "{}")], "", True),
    ("solar_open", f"<|content|>I do.<|flush|><|tool_calls|>{solar('g', NONE)}<|calls|>", "I do.",
     [("g", "{}")], "", False),
    ("solar_open", f"<|think|>Hm.<|tool_calls|>{solar('g', NONE)}<|calls|>", "", [("g", "{}")],
     "Hm.", False),
    ("solar_open", f"<|think|>Hm.{THEN}<|content|>Yes.", "Yes.", [], "Hm.", False),
    ("solar_open", f"<|think|>One.<|end|>{THEN}<|think|>Two.<|end|>{THEN}<|content|>Yes.", "Yes.",
     [], "One.Two.", False),
    ("solar_open", f"<|tool_calls|>{solar('no', NONE)}<|calls|>", solar("no", "{}"), [], "", True),
    ("solar_open", f"<|tool_calls|>{solar('f', '[1]')}<|calls|>", solar("f", "[1]"), [], "", True),
    ("solar_open", f"<|tool_calls|>so{solar('g', NONE)}", "so", [("g", "{}")], "", True),
    ("solar_open", "<|think|>cut in the", "", [], "cut in the", False),
    ("solar_open", f"<|think|>Hm.<|end|>{THEN}", "", [], "Hm.", False),
    ("solar_open", "<|think|>Hm.<|end|><|beg", "", [], "Hm.", False),
    ("solar_open", "no channel at all", "no channel at all", [], "", True),
    ("solar_open", "", "", [], "", False),
    (HARMONY, f"{C}final{M}Yes.{R}", "Yes.", [], "", False),
    (HARMONY, f"{C}analysis{M}Hm.{ENDED}{C}final{M} Yes.\n{R}", " Yes.\n", [], "Hm.", False),
    (HARMONY, f"{C}analysis{M}Hm.{ENDED}{C}commentary to=functions.f <|constrain|>json{M}"
     '{"n": 1}<|call|>', "", [("f", '{"n": 1}')], "Hm.", False),
    (HARMONY, f'<|start|>assistant to=functions.f{C}commentary json{M}{{"s": "a<b"}}<|call|>',
     "", [("f", '{"s": "a<b"}')], "", False),
    (HARMONY, f"{C}commentary{M}I will.{ENDED}{C}commentary to=functions.g{M}{{}}<|call|>",
     "I will.", [("g", "{}")], "", False),
    (HARMONY, f"{C}commentary to=functions.no{M}{{}}<|call|>", "{}", [], "", True),
    (HARMONY, f'{C}commentary to=functions.f{M}{{"n": ', "", [("f", '{"n": ')], "", True),
    (HARMONY, f"{C}analysis{M}cut in the mid", "", [], "cut in the mid", False),
    (HARMONY, "no channel at all", "no channel at all", [], "", True),
    (HARMONY, f"{C}final{M}a < b <|en", "a < b <|en", [], "", False),
    (HARMONY, f"{C}fin", "", [], "", False),
    (HARMONY, "", "", [], "", False),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "text", "content", "calls", "reasoning", "malformed"),
    VECTORS,
    # Plain: pytest escapes such an id anew each time that it collects, so no other could be named.
    ids=lambda value: re.sub(r"[^ -~]|\\", " ", str(value)[:40]),
)
def test_channels_are_the_same_however_they_are_cut(
    *,
    name: str,
    text: str,
    content: str,
    calls: list[tuple[str, str]],
    reasoning: str,
    malformed: bool,
) -> None:
    ways = [[text], list(text)]
    if len(text) < 500:
        ways += [[text[:at], text[at:]] for at in range(len(text))]
    for parts in ways:
        parser, events = parse(name, parts)
        assert (parser.content, parser.calls) == (content, calls), parts
        assert (parser.reasoning, parser.malformed) == (reasoning, malformed), parts
        thoughts = [event.text for event in events if isinstance(event, ReasoningEvent)]
        assert "".join(thoughts) == reasoning
        others: list[ParserEvent] = [one for one in events if not isinstance(one, ReasoningEvent)]
        assert joined(others) == (content, calls)


def test_a_call_of_solar_has_the_id_that_the_model_gave_it() -> None:
    text = f"<|tool_calls|>{solar('f', FOUR)}{solar('g', NONE, 'other')}<|calls|>"
    _, events = parse("solar_open", [text])
    given = [one.id for one in events if isinstance(one, ToolCallEvent) and one.name]
    assert given == ["a1b2c3d4e5", "other"]


def test_reasoning_that_the_prompt_opened_is_reasoning() -> None:
    parser = AnswerFormat("gemma4", reasoning=False).parser(CONTEXT, inside_reasoning=True)
    assert parser is not None
    parser.feed("Hm.\n<channel|>Yes.")
    parser.finish()
    assert (parser.reasoning, parser.content) == ("Hm.", "Yes.")


_PARTS = ("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", Q, "call:f{", "n:1", "}", ",")
_MUSE_PARTS = ("<|start|>", "assistant", " to=", "self", "<|message|>", "<|eom|>", "f", F, " ", "x")


@pytest.mark.parametrize(("name", "parts"), [("gemma4", _PARTS), ("muse_glimmer", _MUSE_PARTS)])
@given(data=st.data())
def test_no_text_breaks_a_channel_parser(
    name: str, parts: tuple[str, ...], data: st.DataObject
) -> None:
    text = "".join(data.draw(st.lists(st.sampled_from(parts), max_size=14)))
    whole, events = parse(name, [text])
    cut, _ = parse(name, list(text))
    assert (whole.content, whole.calls, whole.malformed) == (cut.content, cut.calls, cut.malformed)
    assert whole.reasoning == cut.reasoning
    others: list[ParserEvent] = [one for one in events if not isinstance(one, ReasoningEvent)]
    assert joined(others) == (whole.content, whole.calls)
