"""Every format of tool calls and reasoning: the same answer however its text is cut."""

import json
from typing import Any

import pytest
from hypothesis import given, strategies as st

from rollmesh.chat import (
    ParserEvent,
    RenderContext,
    TextEvent,
    ToolCallEvent,
    make_context,
)
from rollmesh.chat.parsing import FORMATS, AnswerFormat, ToolParser, tool_schemas

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {
                "type": "object",
                "properties": {
                    "n": {"type": "integer"},
                    "x": {"type": ["number", "null"]},
                    "s": {"type": "string"},
                    "b": {"type": "boolean"},
                    "l": {"type": "array"},
                    "o": {"anyOf": [{"type": "object"}, {"type": "null"}]},
                },
            },
        },
    },
    {"type": "function", "function": {"name": "g"}},
]
CONTEXT = make_context(json.dumps(TOOLS).encode(), b"")
B, S, E = (f"<\uff5ctool\u2581call{part}\uff5c>" for part in ("\u2581begin", "", "\u2581end"))
SEP = "<\uff5ctool\u2581sep\uff5c>"
BEGIN, END = "<\uff5ctool\u2581calls\u2581begin\uff5c>", "<\uff5ctool\u2581calls\u2581end\uff5c>"
Expected = tuple[str, list[tuple[str, str]], bool]


def qwen(name: str, *parameters: tuple[str, str]) -> str:
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters)
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


def glm(name: str, *arguments: tuple[str, str]) -> str:
    inner = "".join(
        f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in arguments
    )
    return f"<tool_call>{name}\n{inner}</tool_call>"


def deepseek(name: str, arguments: str) -> str:
    return f"{B}function{SEP}{name}\n```json\n{arguments}\n```{E}"


def kimi(name: str, index: int, arguments: str) -> str:
    call = f"functions.{name}:{index}<|tool_call_argument_begin|>{arguments}"
    return f"<|tool_call_begin|>{call}<|tool_call_end|>"


ODD = '{"n": 6,  "x":7.0, "s": "caf\\u00e9 "}'


def hermes(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


VECTORS: list[Any] = [
    ("hermes", "  The answer is 42. \n", ("  The answer is 42. \n", [], False)),
    ("hermes", "", ("", [], False)),
    ("hermes", hermes(f'{{"name": "f", "arguments": {ODD}}}'), ("", [("f", ODD)], False)),
    ("hermes", " I will.\n\n" + hermes('{"name": "f", "arguments": {}}') + "\n"
     + hermes('{"name": "g", "arguments": {}}'), (" I will.", [("f", "{}"), ("g", "{}")], False)),
    ("hermes", hermes('{"arguments": {"l": [1, {"o": 2}]}, "name": "f"}'),
     ("", [("f", '{"l": [1, {"o": 2}]}')], False)),
    ("hermes", hermes('{"name": "f", "arguments": {"s": "}</tool_call>{\\""}}'),
     ("", [("f", '{"s": "}</tool_call>{\\""}')], False)),
    ("hermes", hermes('{"name": "f"}'), ("", [("f", "{}")], False)),
    ("hermes", hermes("not json"), (hermes("not json"), [], True)),
    ("hermes", hermes('{"name": 5, "arguments": {}}'),
     (hermes('{"name": 5, "arguments": {}}'), [], True)),
    ("hermes", hermes('{"name": "f", "arguments": "x"}'),
     (hermes('{"name": "f", "arguments": "x"}'), [], True)),
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {"n": 1', ("", [("f", '{"n": 1')], True)),
    ("hermes", '<tool_call>\n{"na', ('<tool_call>\n{"na', [], True)),
    ("hermes", hermes('{"name": "f", "arguments": {"n": 1,,}}'),
     ("", [("f", '{"n": 1,,}')], True)),
    ("hermes", hermes('{"name": "f", "arguments": {"n": 1') + hermes('{"name": "g"}'),
     ("", [("f", '{"n": 1\n'), ("g", "{}")], True)),
    ("hermes", "a < b <tool", ("a < b <tool", [], False)),
    ("hermes", "</tool_call> x", ("</tool_call> x", [], False)),
    ("hermes", 'Hi <tool_call>{"name": "no", "arguments": {}}</tool_call>',
     ('Hi <tool_call>{"name": "no", "arguments": {}}</tool_call>', [], True)),
    ("hermes", '<tool_call>{"name": "f", "argument": {"n": 1}}</tool_call>',
     ('<tool_call>{"name": "f", "argument": {"n": 1}}</tool_call>', [], True)),
    ("hermes", '<tool_call>{"parameters": {"n": 1}, "name": "f"}</tool_call>',
     ("", [("f", '{"n": 1}')], False)),
    ("hermes", hermes('{"arguments": 5, "name": "f", "arguments": {"n": 1}}'),
     ("", [("f", '{"n": 1}')], False)),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"n": 1}}\n<tool_call>{"name": "g"}'
     "</tool_call>", ("", [("f", '{"n": 1}'), ("g", "{}")], True)),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"n": 1}} I did.',
     ("I did.", [("f", '{"n": 1}')], True)),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"n": 1 <tool',
     ("<tool", [("f", '{"n": 1 ')], True)),
    ("hermes", '<tool_call><tool_call>{"name": "g", "arguments": {}}</tool_call>',
     ("<tool_call>", [("g", "{}")], True)),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"n": 1}}', ("", [("f", '{"n": 1}')], False)),
    ("llama3_json", '{"name": "f", "parameters": {"n": 1}}', ("", [("f", '{"n": 1}')], False)),
    ("llama3_json", '<|python_tag|>{"name": "f", "parameters": {"n": 1}}; {"name": "g", '
     '"parameters": {}}', ("", [("f", '{"n": 1}'), ("g", "{}")], False)),
    ("llama3_json", ' {"name": "f", "parameters": {"n": 1}}\n',
     ("", [("f", '{"n": 1}')], False)),
    ("llama3_json", '{"answer": 5} and so on', ('{"answer": 5} and so on', [], False)),
    ("llama3_json", 'Say {"name": "f", "parameters": {}}',
     ('Say {"name": "f", "parameters": {}}', [], False)),
    ("llama3_json", '{"name": "f", "parameters": "x"}',
     ('{"name": "f", "parameters": "x"}', [], True)),
    ("llama3_json", '{"name": "no", "parameters": {}}',
     ('{"name": "no", "parameters": {}}', [], True)),
    ("llama3_json", '{"name": "f", "para', ('{"name": "f", "para', [], True)),
    ("llama3_json", '{"name": "f", "parameters": {"n"', ("", [("f", '{"n"')], True)),
    ("llama3_json", "", ("", [], False)),
    ("llama3_json", '{"parameters": {"n": 1}, "name": "f"}; {"name": "g", "parameters": {}}',
     ("", [("f", '{"n": 1}'), ("g", "{}")], False)),
    ("llama3_json", '<|python_tag|>{"name": "g", "parameters": {}}; '
     '<|python_tag|>{"name": "f", "parameters": {"n": 1}}; so',
     ("; so", [("g", "{}"), ("f", '{"n": 1}')], False)),
    ("llama3_json", '{"name": "no", "parameters": {}} it is',
     ('{"name": "no", "parameters": {}} it is', [], True)),
    ("llama3_json", ' {"other": 1}', (' {"other": 1}', [], False)),
    ("llama3_json", '\n {<|python_tag|>{"name": "f", "parameters": {"n": 1}},',
     ("\n {,", [("f", '{"n": 1}')], False)),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"n": 1}[TOOL_CALLS]g[ARGS]{}',
     ("", [("f", '{"n": 1}'), ("g", "{}")], False)),
    ("mistral", 'So. [TOOL_CALLS]f[CALL_ID]abc123def[ARGS]{"n": 1}',
     ("So.", [("f", '{"n": 1}')], False)),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"n": 1}},'
     ' {"name": "g", "arguments": {}}]',
     ("", [("f", '{"n": 1}'), ("g", "{}")], False)),
    ("mistral", "[TOOL_CALLS]no[ARGS]{}", ("[TOOL_CALLS]no[ARGS]{}", [], True)),
    ("mistral", "[TOOL_CALLS]f[ARGS]nothing", ("[TOOL_CALLS]f[ARGS]nothing", [], True)),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"n": ', ("", [("f", '{"n": ')], True)),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"s": "[TOOL_CALLS]"}}] Done.',
     (" Done.", [("f", '{"s": "[TOOL_CALLS]"}')], False)),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"n": 1[TOOL_CALLS]g[ARGS]{}',
     ("", [("f", '{"n": 1'), ("g", "{}")], True)),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"n": [TOOL', ("", [("f", '{"n": [TOOL')], True)),
    ("mistral", "f[ARGS]{}", ("f[ARGS]{}", [], False)),
    ("mistral", "plain [TOOL", ("plain [TOOL", [], False)),
    ("deepseek_v3", "Now." + BEGIN + deepseek("f", '{"n": 1}') + "\n" + deepseek("g", "{}") + END,
     ("Now.", [("f", '{"n": 1}'), ("g", "{}")], False)),
    ("deepseek_v3", f"{BEGIN}{B}function{SEP}f\n```json\nno\n```{E}{END}",
     (f"{B}function{SEP}f\n```json\nno\n```{E}", [], True)),
    ("deepseek_v31", f'{BEGIN}{B}f{SEP}{{"s": "a<b"}}{E}{B}g{SEP}{{}}{E}{END}',
     ("", [("f", '{"s": "a<b"}'), ("g", "{}")], False)),
    ("deepseek_v3", (BEGIN + deepseek("f", '{"n": 1}') + END).replace("\n", "\r\n"),
     ("", [("f", '{"n": 1}')], False)),
    ("deepseek_v31", f"{BEGIN}{B}f{SEP}{{}}{B}g{SEP}{{}}{E}{END}",
     ("", [("f", "{}"), ("g", "{}")], True)),
    ("deepseek_v31", f"{BEGIN}{B}f{SEP}{{}}{END} So.", (" So.", [("f", "{}")], True)),
    ("deepseek_v31", f'{BEGIN}{B}f{SEP}{{"n": 1', ("", [("f", '{"n": 1')], True)),
    ("kimi_k2", "Ok<|tool_calls_section_begin|>" + kimi("f", 0, '{"n": 1}') + kimi("g", 1, "{}")
     + "<|tool_calls_section_end|>", ("Ok", [("f", '{"n": 1}'), ("g", "{}")], False)),
    ("kimi_k2", "<|tool_calls_section_begin|>" + kimi("no", 0, "{}"),
     (kimi("no", 0, "{}"), [], True)),
    ("qwen3_coder", "I do.\n\n" + qwen("f", ("n", "4"), ("s", "4"), ("b", "True"), ("x", "1.5")),
     ("I do.", [("f", '{"n": 4, "s": "4", "b": true, "x": 1.5}')], False)),
    ("qwen3_coder", qwen("f", ("s", "a\n\n<b> & 'c'\n"), ("l", "[1, 2]"), ("o", "null")),
     ("", [("f", '{"s": "a\\n\\n<b> & \'c\'\\n", "l": [1, 2], "o": null}')], False)),
    ("qwen3_coder", qwen("g", ("any", "7")), ("", [("g", '{"any": "7"}')], False)),
    ("qwen3_coder", qwen("f"), ("", [("f", "{}")], False)),
    ("qwen3_coder", qwen("no"), (qwen("no"), [], True)),
    ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=n>\n4",
     ("<tool_call>\n<function=f>\n<parameter=n>\n4", [], True)),
    ("qwen3_coder", "<tool_call><function=f>noise<parameter=n>4</parameter></function></tool_call>",
     ("<tool_call><function=f>noise<parameter=n>4</parameter></function></tool_call>", [], True)),
    ("glm45", glm("f", ("n", "4"), ("s", "[1]")) + "\n" + glm("g"),
     ("", [("f", '{"n": 4, "s": "[1]"}'), ("g", "{}")], False)),
    ("qwen3_coder", qwen("f", ("s", "</tool_call>")),
     ("", [("f", '{"s": "</tool_call>"}')], False)),
    ("qwen3_coder", qwen("g").removesuffix("</tool_call>"), ("", [("g", "{}")], False)),
    ("qwen3_coder", qwen("g").removesuffix("</tool_call>") + qwen("f", ("n", "4")),
     ("", [("g", "{}"), ("f", '{"n": 4}')], True)),
    ("qwen3_coder", qwen("g").removesuffix("</tool_call>") + "<tool_call>no</tool_call>",
     ("<tool_call>no</tool_call>", [("g", "{}")], True)),
    ("qwen3_coder", "So: " + qwen("f", ("n", "4")).removeprefix("<tool_call>") + "\n" + qwen("g"),
     ("So:", [("f", '{"n": 4}'), ("g", "{}")], True)),
    ("qwen3_coder", "<function=g>\n</function>", ("", [("g", "{}")], True)),
    ("qwen3_coder", "It is <function=f> that", ("It is <function=f> that", [], True)),
    ("qwen3_coder", "It is <function=f> and " + qwen("g"),
     ("It is <function=f> and", [("g", "{}")], True)),
    ("qwen3_coder", "<tool_call>" + qwen("g"), ("<tool_call>", [("g", "{}")], True)),
    ("qwen3_coder", "<tool_call><function=f><parameter=n>4<parameter=s>x</parameter></function>"
     "</tool_call>", ("<tool_call><function=f><parameter=n>4<parameter=s>x</parameter></function>"
     "</tool_call>", [], True)),
    ("qwen3_coder", "<tool_call><function=f><parameter=n>4</tool_call>" + qwen("g"),
     ("<tool_call><function=f><parameter=n>4</tool_call>", [("g", "{}")], True)),
    ("glm45", glm("f", ("s", "a<tool_call>b</tool_call>")),
     ("", [("f", '{"s": "a<tool_call>b</tool_call>"}')], False)),
    ("glm45", "<tool_call>g\n", ("<tool_call>g\n", [], True)),
    ("glm45", glm("f", ("n", "four")), ("", [("f", '{"n": "four"}')], False)),
    ("glm45", "<tool_call>f\n<arg_key>n</arg_key>\n</tool_call>",
     ("<tool_call>f\n<arg_key>n</arg_key>\n</tool_call>", [], True)),
    ("pythonic", '[f(n=1, s="a", b=True, x=None), g()]',
     ("", [("f", '{"n": 1, "s": "a", "b": true, "x": null}'), ("g", "{}")], False)),
    ("pythonic", "\n [ f ( s = 'it\\'s \\u00e9' , l = [1, -2.5, ('x',)], o = {'k': {}}, ) , ]\n",
     ("", [("f", '{"s": "it\'s \u00e9", "l": [1, -2.5, ["x"]], "o": {"k": {}}}')], False)),
    ("pythonic", '[f(s="a)]" "b\\n")]', ("", [("f", '{"s": "a)]b\\n"}')], False)),
    ("pythonic", "[f(s='\\ud83d\\ude00 line\nline')]",
     ("", [("f", '{"s": "\U0001f600 line\\nline"}')], False)),
    ("pythonic", "[f(n=1), no(), g()]", (" no(),", [("f", '{"n": 1}'), ("g", "{}")], True)),
    ("pythonic", "[no(n=1)]", ("[no(n=1)]", [], True)),
    ("pythonic", "[f(n=__import__('os').getpid())]",
     ("[f(n=__import__('os').getpid())]", [], True)),
    ("pythonic", "[f(1)]", ("[f(1)]", [], True)),
    ("pythonic", "[f(n=1, n=2)]", ("[f(n=1, n=2)]", [], True)),
    ("pythonic", "[f(n=007)]", ("[f(n=007)]", [], True)),
    ("pythonic", "[f(x=1e999)]", ("[f(x=1e999)]", [], True)),
    ("pythonic", "[f(s='\\ud800')]", ("[f(s='\\ud800')]", [], True)),
    ("pythonic", "[f(l=" + "[" * 99 + "]" * 99 + ")]",
     ("[f(l=" + "[" * 99 + "]" * 99 + ")]", [], True)),
    ("pythonic", "[f(n=1), g(", (" g(", [("f", '{"n": 1}')], True)),
    ("pythonic", "[f(n=1", ("[f(n=1", [], True)),
    ("pythonic", "[f(n=1)", ("", [("f", '{"n": 1}')], True)),
    ("pythonic", "[f(n=1)] So.", (" So.", [("f", '{"n": 1}')], False)),
    ("pythonic", "[g() g()]", (" g()]", [("g", "{}")], True)),
    ("pythonic", "[g(), 5]", (" 5]", [("g", "{}")], True)),
    ("pythonic", "So: [g()]", ("So: [g()]", [], False)),
    ("pythonic", "[1, 2] is it", ("[1, 2] is it", [], False)),
    ("pythonic", " [link](there)", (" [link](there)", [], False)),
    ("pythonic", "[f", ("[f", [], False)),
    ("llama4_pythonic", "<|python_start|>[g()]<|python_end|>", ("", [("g", "{}")], False)),
    ("llama4_pythonic", "I do. <|python_start|>[f(s='<|python_end|>')]<|python_end|> Done.",
     ("I do. Done.", [("f", '{"s": "<|python_end|>"}')], False)),
    ("llama4_pythonic", "[g()]", ("", [("g", "{}")], False)),
    ("llama4_pythonic", "<|python_start|>print(1)<|python_end|>",
     ("<|python_start|>print(1)<|python_end|>", [], True)),
    ("llama4_pythonic", "It is <|python_end|>", ("It is <|python_end|>", [], False)),
    ("llama4_pythonic", "<|python_start|>", ("<|python_start|>", [], True)),
    ("llama4_pythonic", "<|python_start|>[g()<|python_end|>", ("", [("g", "{}")], True)),
    ("lfm2", "I do. <|tool_call_start|>[f(n=1), g()]<|tool_call_end|>",
     ("I do.", [("f", '{"n": 1}'), ("g", "{}")], False)),
    ("lfm2", "<|tool_call_start|>[no()]<|tool_call_end|>",
     ("<|tool_call_start|>[no()]<|tool_call_end|>", [], True)),
]  # fmt: skip


def parse(
    name: str, parts: list[str], context: RenderContext = CONTEXT
) -> tuple[ToolParser, list[ParserEvent]]:
    parser = AnswerFormat(name, reasoning=False).parser(context)
    assert parser is not None
    events = [event for part in parts for event in parser.feed(part)]
    return parser, events + parser.finish()


def joined(events: list[ParserEvent]) -> tuple[str, list[tuple[str, str]]]:
    """What an agent has that reads the stream."""
    text, calls = "", list[tuple[str, str]]()
    for event in events:
        match event:
            case TextEvent(more):
                text += more
            case ToolCallEvent(_, _, name) if name:
                calls.append((name, ""))
            case ToolCallEvent(index, arguments=more):
                calls[index] = (calls[index][0], calls[index][1] + more)
    return text, calls


@pytest.mark.parametrize(("name", "text", "expected"), VECTORS)
def test_the_answer_is_the_same_however_it_is_cut(name: str, text: str, expected: Expected) -> None:
    cuts = [[text], list(text), *([text[:at], text[at:]] for at in range(len(text) + 1))]
    for parts in cuts:
        parser, events = parse(name, parts)
        assert (parser.content, parser.calls, parser.malformed) == expected, parts
        assert joined(events) == expected[:2], parts


def test_every_format_has_vectors() -> None:
    assert {name for name, _, _ in VECTORS} == FORMATS.keys()


@pytest.mark.parametrize("name", sorted(FORMATS))
@given(text=st.text(alphabet='<>{}[]()":,;/ \nfgn1_|tol_call=arg', max_size=60))
def test_no_text_breaks_a_parser_or_is_lost_where_there_is_no_call(name: str, text: str) -> None:
    whole, events = parse(name, [text])
    cut, _ = parse(name, list(text))
    assert (whole.content, whole.calls, whole.malformed) == (cut.content, cut.calls, cut.malformed)
    assert joined(events) == (whole.content, whole.calls)
    marks = FORMATS[name].delimiters
    if not whole.calls and not any(mark in text for mark in marks):
        assert whole.content == text


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
WRITERS = {
    "hermes": '<tool_call>{{"name": "f", "arguments": {}}}</tool_call>',
    "llama3_json": '{{"name": "f", "parameters": {}}}',
    "mistral": "[TOOL_CALLS]f[ARGS]{}",
    "deepseek_v3": f"{BEGIN}{B}function{SEP}f\n```json\n{{}}\n```{E}{END}",
    "deepseek_v31": f"{BEGIN}{B}f{SEP}{{}}{E}{END}",
    "kimi_k2": "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|>",
}


@pytest.mark.parametrize("name", sorted(WRITERS))
@given(arguments=st.dictionaries(st.text(), values, max_size=3), at=st.integers(0, 200))
def test_any_arguments_survive_any_cut(name: str, arguments: dict[str, Any], at: int) -> None:
    text = WRITERS[name].format(json.dumps(arguments))
    parser, _ = parse(name, [text[:at], text[at:]])
    assert [(called, json.loads(given)) for called, given in parser.calls] == [("f", arguments)]
    assert (parser.content, parser.malformed) == ("", False)


@pytest.mark.parametrize(
    ("name", "begun"),
    [
        ("hermes", '<tool_call>\n{"name": "f", "arguments": {"s": "lo'),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"s": "lo'),
    ],
)
def test_arguments_leave_while_they_are_sampled(name: str, begun: str) -> None:
    parser = AnswerFormat(name, reasoning=False).parser(CONTEXT)
    assert parser is not None
    assert parser.feed(begun) == [
        ToolCallEvent(0, name="f"),
        ToolCallEvent(0, arguments='{"s": "lo'),
    ]


def test_the_tools_of_a_request_are_its_functions_that_have_a_name() -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    tools: list[dict[str, Any]] = [
        {"type": "function", "function": {"name": "wrapped", "parameters": schema}},
        {"name": "flat", "parameters": schema},
        {"type": "function", "function": {"name": "without"}},
        {"type": "function", "function": {"name": "no_schema", "parameters": [1]}},
        {"type": "function", "function": {"name": 5, "parameters": schema}},
        {"type": "function", "function": {"parameters": schema}},
        {"type": "function", "function": "name"},
        {"type": "web_search"},
    ]
    assert tool_schemas(json.dumps(tools).encode()) == {
        "wrapped": schema,
        "flat": schema,
        "without": {},
        "no_schema": {},
    }


@pytest.mark.parametrize(
    "schema",
    [
        pytest.param({"properties": None}, id="no properties"),
        pytest.param({"properties": [{"n": {"type": "integer"}}]}, id="properties in a list"),
        pytest.param({"properties": {"n": {"type": [["string"]]}}}, id="a type that is none"),
        pytest.param({"properties": {"n": {"anyOf": 5, "enum": {"a": 1}}}}, id="no options"),
    ],
)
@pytest.mark.parametrize(
    ("name", "text"),
    [
        pytest.param("qwen3_coder", qwen("h", ("n", "four")), id="qwen3_coder"),
        pytest.param("glm45", glm("h", ("n", "four")), id="glm45"),
        pytest.param("gemma4", "<|tool_call>call:h{n:four}<tool_call|>", id="gemma4"),
        pytest.param(
            "muse_glimmer",
            ' to=h<|message|><atem:invoke name="h"><atem:parameter name="n">four</atem:parameter>'
            "</atem:invoke><|eot|>",
            id="muse_glimmer",
        ),
    ],
)
def test_a_schema_that_is_none_leaves_values_as_they_were_sampled(
    name: str, text: str, schema: dict[str, Any]
) -> None:
    tools = [{"type": "function", "function": {"name": "h", "parameters": schema}}]
    parser, _ = parse(name, [text], make_context(json.dumps(tools).encode(), b""))
    assert (parser.content, parser.calls) == ("", [("h", '{"n": "four"}')])


def test_kimis_calls_keep_the_id_that_was_sampled() -> None:
    _, events = parse("kimi_k2", [kimi("f", 3, "{}")])
    assert events[0] == ToolCallEvent(0, "functions.f:3", "f")
