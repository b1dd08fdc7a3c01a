"""Constraints of every format, compiled by xgrammar over a real tokenizer: what they let through is
what our parsers read as the wanted calls, and nothing else is let through."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken

from examples.demo.chatml import make_tokenizer
from rollmesh.gateway import harmony
from rollmesh.gateway.canonical import make_frame
from rollmesh.gateway.forced import FORCED_FORMATS, Calls, Wanted, constraint_of
from rollmesh.gateway.formats import FORMATS, HARMONY, AnswerFormat
from rollmesh.gateway.messages import Frame
from rollmesh.gateway.reasoning import MISTRAL_TAGS, TAGS, ReasoningSplitter
from rollmesh.runtime.errors import InvalidFieldError
from tests.models import CORPUS

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]
SCHEMAS: dict[str, Any] = {
    "add": {
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
    "look_up": {
        "type": "object",
        "properties": {
            "query": {"type": "string"},
            "kind": {"enum": ["web", "file"]},
            "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 3},
            "exact": {"type": "boolean"},
        },
        "required": ["query", "kind"],
    },
    "stop-now": {"type": "object", "properties": {}},
    "move": {
        "properties": {
            "to": {
                "type": "object",
                "properties": {"x": {"type": "number"}, "y": {"type": "number"}},
                "required": ["x", "y"],
            }
        },
        "required": ["to"],
    },
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
FRAME = make_frame(json.dumps(TOOLS).encode(), b"")
MARKS = sorted(
    {mark for form in FORMATS.values() for mark in form.marks if len(mark) > 1}
    | {*harmony.MARKS, "<think>", "</think>"}
)
END = "<|im_end|>"
ARGS = AnswerFormat("mistral", reasoning=False, args_mark=True)
ALL = [
    *(
        pytest.param(AnswerFormat(name, reasoning=False), id=name)
        for name in sorted(FORCED_FORMATS)
    ),
    pytest.param(ARGS, id="mistral args"),
]


class Compiler:
    """xgrammar over a tokenizer in which the marks are special tokens, or text."""

    def __init__(self, folder: Path, *, special: bool) -> None:
        import xgrammar  # noqa: PLC0415 - imports torch
        from transformers import PreTrainedTokenizerFast  # noqa: PLC0415

        tokenizer = make_tokenizer(CORPUS * 50, 400, folder, 2048)
        if special:
            tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in MARKS])
        self._xgrammar = xgrammar
        self.tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)
        info = xgrammar.TokenizerInfo.from_huggingface(
            self.tokenizer, stop_token_ids=[tokenizer.token_to_id(END)]
        )
        self.stop = tokenizer.token_to_id(END)
        self._compiler = xgrammar.GrammarCompiler(info)
        self._size = info.vocab_size
        texts = self.tokenizer.batch_decode([[id_] for id_ in range(self._size)])
        self._ends = np.array([text[:1] in set('"}]<') for text in texts])
        self._ends[self.stop] = True

    def matcher(self, tag: str) -> Any:
        return self._xgrammar.GrammarMatcher(self._compiler.compile_structural_tag(tag))

    def accepts(self, tag: str, text: str) -> bool:
        """Says whether a whole answer is let through, as the tokenizer writes it."""
        matcher = self.matcher(tag)
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        return all(matcher.accept_token(id_) for id_ in ids) and matcher.accept_token(self.stop)

    def spells(self, tag: str, text: str) -> bool:
        """Says whether an answer is let through letter by letter, marks too."""
        matcher = self.matcher(tag)
        return bool(matcher.accept_string(text) and matcher.accept_token(self.stop))

    def sample(self, tag: str, seed: int, begin: str = "") -> str | None:
        """Returns a random answer that ends; None where it did not within 2,000 tokens."""
        matcher, chance = self.matcher(tag), random.Random(seed)
        assert not begin or matcher.accept_string(begin)
        mask = self._xgrammar.allocate_token_bitmask(1, self._size)
        ids: list[int] = []
        while len(ids) < 2000:
            matcher.fill_next_token_bitmask(mask)
            bits = np.unpackbits(mask[0].numpy().view(np.uint8), bitorder="little")
            allowed = np.flatnonzero(bits[: self._size])
            # Rather what ends something: random text would go on for ever.
            closing = allowed[self._ends[allowed]]
            pool = closing if len(closing) and chance.random() < 0.5 else allowed
            chosen = int(chance.choice(pool))
            if chosen == self.stop:
                return begin + str(self.tokenizer.decode(ids, skip_special_tokens=False))
            assert matcher.accept_token(chosen)
            ids.append(chosen)
        return None


@pytest.fixture(scope="module", params=[True, False], ids=["marks special", "marks text"])
def compiler(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Compiler:
    return Compiler(tmp_path_factory.mktemp("tokenizer"), special=request.param)


def tag_of(wanted: Wanted, format_: AnswerFormat, *, inside: bool = False) -> str:
    constraint = constraint_of(wanted, format_, FRAME, inside_reasoning=inside)
    assert constraint is not None
    return constraint.structural_tag


def read(format_: AnswerFormat, text: str, frame: Frame = FRAME) -> Any:
    parser = format_.parser(frame)
    assert parser is not None
    for char in text:
        parser.feed(char)
    parser.finish()
    return parser


def fits(name: str, arguments: str) -> bool:
    value, schema = json.loads(arguments), SCHEMAS[name]
    known = schema["properties"]
    return set(value) <= set(known) and set(schema.get("required", ())) <= set(value)


def begin_of(format_: AnswerFormat) -> str:
    """Harmony's reasoning is free, and would hardly ever end by chance."""
    return "<|channel|>commentary" if format_.tools == HARMONY else ""


REQUIRED, ONE = Wanted(Calls.REQUIRED), Wanted(Calls.REQUIRED, one_call=True)


@pytest.mark.parametrize("format_", ALL)
def test_what_is_sampled_is_read_as_whole_calls(compiler: Compiler, format_: AnswerFormat) -> None:
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
    for seed in range(6):
        text = compiler.sample(tag_of(ONE, format_), seed, begin_of(format_))
        assert text is None or len(read(format_, text).calls) == 1
        text = compiler.sample(tag_of(named, format_), seed, begin_of(format_))
        assert text is not None
        assert [name for name, _ in read(format_, text).calls] == ["stop-now"]


_DS = [
    f"<\uff5ctool\u2581{name}\uff5c>"
    for name in (
        "calls\u2581begin",
        "call\u2581begin",
        "sep",
        "call\u2581end",
        "calls\u2581end",
    )
]
WRITTEN = {
    "hermes": '<tool_call>\n{"name": "add", "arguments": {"a": 4, "b": 2}}\n</tool_call>',
    "llama3_json": '{"name": "add", "parameters": {"a": 4, "b": 2}}',
    "mistral": '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 4, "b": 2}}]',
    "mistral args": '[TOOL_CALLS]add[ARGS]{"a": 4, "b": 2}',
    "deepseek_v3": f"{_DS[0]}{_DS[1]}function{_DS[2]}add\n```json\n"
    f'{{"a": 4, "b": 2}}\n```{_DS[3]}{_DS[4]}',
    "deepseek_v31": f'{_DS[0]}{_DS[1]}add{_DS[2]}{{"a": 4, "b": 2}}{_DS[3]}{_DS[4]}',
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0"
    '<|tool_call_argument_begin|>{"a": 4, "b": 2}<|tool_call_end|><|tool_calls_section_end|>',
    "qwen3_coder": "<tool_call>\n<function=add>\n<parameter=a>\n4\n</parameter>\n<parameter=b>\n2\n"
    "</parameter>\n</function>\n</tool_call>",
    "glm45": "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>4</arg_value>\n"
    "<arg_key>b</arg_key>\n<arg_value>2</arg_value>\n</tool_call>",
    "openai": '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 4, "b": 2}',
}


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
    frame, form = make_frame(json.dumps([tool]).encode(), b""), AnswerFormat(name, reasoning=False)
    constraint = constraint_of(REQUIRED, form, frame, inside_reasoning=False)
    assert constraint is not None
    assert compiler.accepts(constraint.structural_tag, text.replace("VALUE", "a <b> c"))
    for mark in ("<parameter=text>", "<arg_value>"):
        marked = text.replace("VALUE", f"a {mark} c")
        whole = read(form, marked, frame)
        is_read = whole.calls == [("say", json.dumps({"text": f"a {mark} c"}))]
        assert compiler.accepts(constraint.structural_tag, marked) is is_read


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
SAY_FRAME = make_frame(json.dumps([SAY]).encode(), b"")
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
    pairs = [f"{one}{other}" for one in form.marks for other in form.marks]
    return [*MARKS, *(f"a {mark} b" for mark in MARKS), *pairs, f"see {WRITTEN[name]} there"]


@pytest.mark.parametrize(("form", "name"), [(p.values[0], p.id) for p in ALL], ids=lambda v: "")
def test_marks_sampled_as_the_text_of_a_value_are_its_text_or_are_not_let_through(
    compiler: Compiler, form: AnswerFormat, name: str
) -> None:
    constraint = constraint_of(REQUIRED, form, SAY_FRAME, inside_reasoning=False)
    assert constraint is not None
    let_through = 0
    for value in ("plain", *spelled(name, form)):
        written = (
            value if name in {"qwen3_coder", "glm45"} else json.dumps(value, ensure_ascii=False)
        )
        text = SAID[name].replace("VALUE", written)
        if not compiler.spells(constraint.structural_tag, text):
            continue
        whole = read(form, text, SAY_FRAME)
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
    constraint = constraint_of(REQUIRED, form, SAY_FRAME, inside_reasoning=False)
    assert constraint is not None
    let_through = 0
    for thought in ("plain", *spelled(name, form)):
        text = SAID[name].replace("VALUE", "x" if name in {"qwen3_coder", "glm45"} else '"x"')
        begin, end = ("<think>", "</think>\n")
        if name == HARMONY:
            begin, end = "<|channel|>analysis<|message|>", "<|end|><|start|>assistant"
        if not compiler.spells(constraint.structural_tag, f"{begin}{thought}{end}{text}"):
            continue
        splitter, parser = ReasoningSplitter(inside=False), form.parser(SAY_FRAME)
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


def test_json_is_the_value_and_where_tools_are_may_be_calls(compiler: Compiler) -> None:
    schema = json.dumps({"type": "object", "properties": {"n": {"type": "integer"}}}).encode()
    form = AnswerFormat("hermes", reasoning=False)
    tag = tag_of(Wanted(json_schema=schema), form)
    assert compiler.accepts(tag, '{"n": 4}')
    assert compiler.accepts(tag, WRITTEN["hermes"])
    assert not compiler.accepts(tag, '{"n": "x"}')
    alone = tag_of(Wanted(Calls.NONE, json_schema=schema), form)
    assert not compiler.accepts(alone, WRITTEN["hermes"])
    # What looks like a call is none where it stands in a value: it is not let through.
    assert not compiler.accepts(tag_of(Wanted(json_schema=b""), form), '{"a": "<tool_call>"}')
    assert compiler.accepts(
        tag_of(Wanted(Calls.NONE, json_schema=b""), form), '{"a": "<tool_call>"}'
    )
    forced = tag_of(Wanted(Calls.REQUIRED, json_schema=schema), form)
    assert not compiler.accepts(forced, '{"n": 4}')


def test_what_is_free_has_no_constraint() -> None:
    form = AnswerFormat("hermes", reasoning=True)
    for wanted in (Wanted(), Wanted(Calls.NONE), Wanted(one_call=True)):
        assert constraint_of(wanted, form, FRAME, inside_reasoning=False) is None


@pytest.mark.parametrize(
    ("wanted", "field"),
    [
        pytest.param(REQUIRED, "tool_choice", id="required"),
        pytest.param(Wanted(one_call=True), "parallel_tool_calls", id="one call"),
        pytest.param(Wanted(json_schema=b""), "tool_choice", id="JSON or calls"),
    ],
)
def test_a_format_that_is_not_known_is_refused_and_the_known_ones_are_named(
    wanted: Wanted, field: str
) -> None:
    form = AnswerFormat("vllm:pythonic", reasoning=False)
    with pytest.raises(InvalidFieldError, match=r"deepseek_v3, .*hermes") as caught:
        constraint_of(wanted, form, FRAME, inside_reasoning=False)
    assert caught.value.field == field


def test_a_name_that_formats_cannot_carry_is_refused() -> None:
    tools = [{"type": "function", "function": {"name": 'a"b'}}]
    frame = make_frame(json.dumps(tools).encode(), b"")
    with pytest.raises(InvalidFieldError, match="cannot be forced"):
        constraint_of(
            REQUIRED, AnswerFormat("hermes", reasoning=False), frame, inside_reasoning=False
        )


def test_a_strict_tool_makes_the_constraint_strict() -> None:
    strict = {"type": "function", "function": {"name": "f", "strict": True}}
    frame = make_frame(json.dumps([*TOOLS, strict]).encode(), b"")
    form = AnswerFormat("hermes", reasoning=False)

    def is_strict(name: str) -> bool:
        wanted = Wanted(Calls.NAMED, name)
        constraint = constraint_of(wanted, form, frame, inside_reasoning=False)
        return constraint is not None and constraint.strict

    assert is_strict("f")
    assert not is_strict("add")
