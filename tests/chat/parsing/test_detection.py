"""Parsing of values, reasoning and ids, and detection of a template's format."""

import importlib.util
from pathlib import Path

import pytest

from rollmesh.chat import Tokenizer, ToolCallEvent
from rollmesh.chat.parsing import (
    HARMONY,
    MISTRAL_TAGS,
    SIGNS,
    TAGS,
    UNKNOWN,
    VLLM,
    AnswerFormat,
    ReasoningSplitter,
    Schema,
    choose,
    detect,
    vllm_names,
)
from rollmesh.chat.templates import ChatTemplate
from tests.chat.parsing.test_formats import CONTEXT, kimi
from tests.paths import package_folder

TEMPLATES = package_folder("trl") / "chat_templates"


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("4", {"type": "integer"}, 4),
        ("4", {"type": "string"}, "4"),
        ("4", {}, "4"),
        ("4", None, "4"),
        ("4.0", {"type": "integer"}, 4.0),
        ("4.5", {"type": "integer"}, "4.5"),
        ("four", {"type": "number"}, "four"),
        ("True", {"type": "boolean"}, True),
        ("None", {"type": ["integer", "null"]}, None),
        ("True", {"type": ["object", "null"]}, "True"),
        ("None", {"type": "boolean"}, "None"),
        ("7", {"anyOf": [{"type": "null"}, {"type": "integer"}]}, 7),
        ("[1]", {"type": "array"}, [1]),
        ('{"a": 1}', {"type": "object"}, {"a": 1}),
        ("2", {"enum": [1, 2]}, 2),
        ("[" * 100_000, {"type": "array"}, "[" * 100_000),
        ("5", {"const": 5}, 5),
        ("5", {"const": "5"}, "5"),
        ("02134", {"type": "string"}, "02134"),
        ('{"a": 1}', {"properties": {"a": {}}}, {"a": 1}),
        ("[1]", {"items": {}}, [1]),
        ("5", {"minimum": 1}, 5),
        ("5", {"pattern": "."}, "5"),
        ("5", {"allOf": [{"type": "integer"}, {"minimum": 1}]}, 5),
        ("5", {"allOf": [{"type": ["integer", "string"]}, {"type": "string"}]}, "5"),
        ("5", {"anyOf": [{"const": 5}, {"const": None}]}, 5),
        ("5", {"$ref": "https://example.com/schema"}, "5"),
    ],
)
def test_values_are_read_as_the_schema_says(text: str, schema: object, value: object) -> None:
    assert Schema(schema).typed(text) == value


DEFINED = {
    "$defs": {
        "X": {"type": "object", "properties": {"a": {"type": "integer"}}},
        "Y": {"$ref": "#/$defs/X"},
        "Circle": {"anyOf": [{"$ref": "#/$defs/Circle"}, {"type": "null"}]},
        "with/slash": {"type": "integer"},
        "Options": {"properties": {"n": {"type": "integer"}}},
    },
    "properties": {
        "ref": {"$ref": "#/$defs/X"},
        "chain": {"$ref": "#/$defs/Y"},
        "nullable": {"anyOf": [{"$ref": "#/$defs/X"}, {"type": "null"}]},
        "all": {"allOf": [{"$ref": "#/$defs/X"}]},
        "circle": {"$ref": "#/$defs/Circle"},
        "slash": {"$ref": "#/$defs/with~1slash"},
        "missing": {"$ref": "#/$defs/none"},
        "zip": {"type": "string"},
    },
    "allOf": [{"$ref": "#/$defs/Options"}],
}


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("ref", '{"a": 1}', {"a": 1}),
        ("chain", '{"a": 1}', {"a": 1}),
        ("nullable", '{"a": 1}', {"a": 1}),
        ("nullable", "null", None),
        ("all", '{"a": 1}', {"a": 1}),
        ("circle", "null", None),
        ("slash", "7", 7),
        ("missing", "7", "7"),
        ("zip", "02134", "02134"),
        ("n", "7", 7),
    ],
)
def test_values_are_read_as_the_definitions_of_the_schema_say(
    name: str, text: str, value: object
) -> None:
    assert Schema(DEFINED).member(name).typed(text) == value


def test_a_schema_of_many_or_nested_references_is_visited_in_bounds() -> None:
    depth = 5_000
    chain = {str(at): {"$ref": f"#/$defs/{at + 1}"} for at in range(depth)}
    schema: dict[str, object] = {"$defs": {**chain, str(depth): {"type": "integer"}}}
    assert Schema({"$ref": "#/$defs/0"}, schema).typed("5") == "5"
    twice = {str(at): {"anyOf": [{"$ref": f"#/$defs/{at + 1}"}] * 2} for at in range(60)}
    schema = {"$defs": {**twice, "60": {"type": "integer"}}}
    assert Schema({"$ref": "#/$defs/40"}, schema).typed("5") == 5


THOUGHTS = [
    ("<think>\nHm.\n</think>\n\nYes.", False, ("Hm.", "Yes.")),
    ("Hm.\n\nWell. </think>Yes.", True, ("Hm.\n\nWell.", "Yes.")),
    ("  <think>a</think>", False, ("a", "")),
    ("<think></think>\n\nYes.", False, ("", "Yes.")),
    ("<think>cut in the mid", False, ("cut in the mid", "")),
    ("Yes. <think>not at the start</think>", False, ("", "Yes. <think>not at the start</think>")),
    ("<thin", False, ("", "<thin")),
    (" Yes.", False, ("", " Yes.")),
    ("", True, ("", "")),
]


@pytest.mark.parametrize("tags", [TAGS, MISTRAL_TAGS], ids=["think", "mistral"])
@pytest.mark.parametrize(("text", "inside", "expected"), THOUGHTS)
def test_reasoning_is_the_same_however_it_is_cut(
    *, text: str, inside: bool, expected: tuple[str, str], tags: tuple[str, str]
) -> None:
    def tagged(said: str) -> str:
        said = said.replace("</think>", tags[1]).replace("<think>", tags[0])
        return tags[0][:5] if said == "<thin" else said

    text, expected = tagged(text), (tagged(expected[0]), tagged(expected[1]))
    for parts in [[text], list(text), *([text[:at], text[at:]] for at in range(len(text)))]:
        splitter = ReasoningSplitter(inside=inside, tags=tags)
        both = [splitter.feed(part) for part in parts] + [splitter.finish()]
        assert ("".join(a for a, _ in both), "".join(b for _, b in both)) == expected, parts
        assert splitter.reasoning == expected[0]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("qwen2_5", AnswerFormat("hermes", reasoning=False)),
        ("qwen3", AnswerFormat("hermes", reasoning=True)),
        ("qwen3_5_think", AnswerFormat("qwen3_coder", reasoning=True)),
        ("glm4moe", AnswerFormat("glm45", reasoning=True)),
        ("deepseekv3", AnswerFormat("deepseek_v3", reasoning=True)),
        ("llama3_1", AnswerFormat("llama3_json", reasoning=False)),
        ("phi3", AnswerFormat("none", reasoning=False)),
        ("gemma4", AnswerFormat("gemma4", reasoning=False)),
        ("gemma4_v5", AnswerFormat("gemma4", reasoning=False)),
        ("muse_glimmer", AnswerFormat("muse_glimmer", reasoning=False)),
        ("lfm2", AnswerFormat("lfm2", reasoning=False)),
        ("lfm2_v2", AnswerFormat("lfm2", reasoning=False)),
        ("lfm2_2_5", AnswerFormat("lfm2", reasoning=True)),
        ("gptoss", AnswerFormat(HARMONY, reasoning=False)),
    ],
)
def test_a_template_shows_its_format(template: str, expected: AnswerFormat) -> None:
    assert detect((TEMPLATES / f"{template}.jinja").read_text()) == expected


@pytest.mark.parametrize("path", sorted(TEMPLATES.glob("*.jinja")), ids=lambda path: path.stem)
def test_no_template_with_tools_is_taken_for_another_format(path: Path) -> None:
    source = path.read_text()
    found = detect(source).tools
    assert found != UNKNOWN
    assert (found == "none") <= ("tools" not in source)
    assert found != "hermes" or "<tool_call>" in source


def test_calls_of_a_format_that_nobody_knows_are_unknown_and_not_hermes() -> None:
    assert detect("{{ tools }} <<call f>>").tools == UNKNOWN
    assert detect("{{ messages }}").tools == "none"


@pytest.mark.vllm
def test_formats_left_to_vllm_exist_in_vllm() -> None:
    detected = {name.removeprefix(VLLM) for name, _ in SIGNS if name.startswith(VLLM)}
    assert detected <= vllm_names()


def chosen(source: str, tokenizer: Tokenizer, tool_parser: str = "auto") -> AnswerFormat:
    return choose(
        ChatTemplate(source, {}),
        tokenizer,
        tool_parser=tool_parser,
        shown=("<|x|>",),
    )


@pytest.mark.vllm
def test_a_format_of_vllms_is_chosen_only_where_vllm_is(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "{{ tools }} <|start_of_role|> <|tool_call|>"
    found = chosen(source, tokenizer)
    assert (found.tools, found.delimiters, found.why) == ("vllm:granite", ("<|x|>",), "")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    found = chosen(source, tokenizer)
    assert found.tools == UNKNOWN
    assert "vllm:granite needs the vllm package" in found.why


def test_channels_are_parted_where_calls_stay_text(tokenizer: Tokenizer) -> None:
    form = chosen((TEMPLATES / "gemma4.jinja").read_text(), tokenizer, "none")
    assert (form.tools, form.reasoning_name) == ("none", "gemma4")
    parser = form.parser(CONTEXT)
    assert parser is not None
    parser.feed("<|channel>thought\nHm.\n<channel|>Yes. <|tool_call>call:g{}<tool_call|>")
    parser.finish()
    assert (parser.reasoning, parser.calls) == ("Hm.", [])
    assert parser.content == "Yes. <|tool_call>call:g{}<tool_call|>"


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("You should only return [func_name1(params_name1=params_value1)]", "pythonic"),
        ("{{ '<|python_start|>' + call + '<|python_end|>' }}", "llama4_pythonic"),
    ],
)
def test_a_template_of_python_calls_shows_its_format(source: str, name: str) -> None:
    assert detect(source) == AnswerFormat(name, reasoning=False)


def test_a_template_shows_whether_its_calls_have_a_delimiter_before_their_arguments() -> None:
    source = "{{ '[TOOL_CALLS]' + call.name + '[ARGS]' + call.arguments }}"
    assert detect(source) == AnswerFormat("mistral", reasoning=False, has_args_delimiter=True)
    source = source.replace("[ARGS]", "")
    assert detect(source) == AnswerFormat("mistral", reasoning=False, has_args_delimiter=False)


@pytest.mark.parametrize(
    ("name", "text", "ids"),
    [
        (
            "kimi_k2",
            kimi("f", 0, '{"n": 1}') + kimi("g", 1, "{}"),
            ["functions.f:0", "functions.g:1"],
        ),
        ("mistral", '[TOOL_CALLS]f[CALL_ID]abc123def[ARGS]{"n": 1}', ["abc123def"]),
        (
            "mistral",
            '[TOOL_CALLS][{"name": "f", "arguments": {"n": 1}, "id": "abc123def"}]',
            ["abc123def"],
        ),
        ("hermes", '<tool_call>\n{"id": "1", "name": "f", "arguments": {}}\n</tool_call>', [""]),
    ],
)
def test_an_id_that_was_sampled_is_the_calls_id(name: str, text: str, ids: list[str]) -> None:
    parser = AnswerFormat(name, reasoning=False).parser(CONTEXT)
    assert parser is not None
    events = [*parser.feed(text), *parser.finish()]
    assert [one.id for one in events if isinstance(one, ToolCallEvent) and one.name] == ids
