"""Parsing of values, reasoning and ids, and detection of a template's format."""

from pathlib import Path

import pytest

from rollmesh.chat.parsing.calls.xml_calls import typed
from rollmesh.chat.parsing.detection import SIGNS, choose, detect
from rollmesh.chat.parsing.events import ToolCallEvent
from rollmesh.chat.parsing.formats import HARMONY, UNKNOWN, VLLM, AnswerFormat
from rollmesh.chat.parsing.reasoning import MISTRAL_TAGS, TAGS, ReasoningSplitter
from rollmesh.chat.parsing.vllm import installed as vllm_parsers
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
    ],
)
def test_values_are_read_as_the_schema_says(text: str, schema: object, value: object) -> None:
    assert typed(text, schema) == value


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
def test_what_is_left_to_vllm_is_what_vllm_has() -> None:
    detected = {name.removeprefix(VLLM) for name, _ in SIGNS if name.startswith(VLLM)}
    assert detected <= vllm_parsers.names()


def chosen(source: str, tool_parser: str = "auto") -> AnswerFormat:
    return choose(source, tool_parser=tool_parser, reasoning_parser="auto", shown=("<|x|>",))


@pytest.mark.vllm
def test_a_format_of_vllms_is_chosen_only_where_vllm_is(monkeypatch: pytest.MonkeyPatch) -> None:
    source = "{{ tools }} <|start_of_role|> <|tool_call|>"
    assert (chosen(source).tools, chosen(source).delimiters) == ("vllm:granite", ("<|x|>",))
    monkeypatch.setattr(vllm_parsers, "installed", lambda: False)
    assert chosen(source).tools == UNKNOWN


def test_channels_are_parted_where_calls_stay_text() -> None:
    form = chosen((TEMPLATES / "gemma4.jinja").read_text(), "none")
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
