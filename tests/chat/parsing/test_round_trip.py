"""A detected format is one whose parser reads what the template prints."""

import importlib.util
import json
import re
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer as RustTokenizer, decoders, models, pre_tokenizers

from rollmesh.chat import InvalidInputError, Tokenizer
from rollmesh.chat.check import report
from rollmesh.chat.parsing import UNKNOWN, AnswerFormat, check_readable, choose
from rollmesh.chat.templates import ChatTemplate, Kind, TemplateProfile
from tests.chat import families

CONTROL = re.compile(r"<\|[a-z_]+\|>")
LOOP = """{%- if tools %}{{ tools | tojson }}{% endif -%}
{%- for message in messages %}{{ '<|' + message.role + '|>' }}{{ message.content }}
{%- for call in message.tool_calls or [] %}CALL{% endfor %}{{ '<|eot|>' }}{% endfor -%}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif -%}"""
SEED = (
    "{{ '<seed:tool_call>\\n<function=' + call.function.name + '>\\n' }}"
    "{% for key, value in call.function.arguments | items %}"
    "{{ '<parameter=' + key + '>' + value | string + '</parameter>\\n' }}{% endfor %}"
    "{{ '</function>\\n</seed:tool_call>' }}"
)
MINIMAX = (
    "{% set mark = ']<]minimax[>[' %}{{ mark + '<tool_call>\\n' + mark }}"
    "{{ '<invoke name=\"' + call.function.name + '\">' }}{% for key, value in "
    "call.function.arguments | items %}{{ mark + '<' + key + '>' + value | string + mark }}"
    "{{ '</' + key + '>' }}{% endfor %}{{ mark + '</invoke>\\n' + mark + '</tool_call>' }}"
)
FUNCTIONARY = (
    "{{ '<function=' + call.function.name + '>' }}{{ call.function.arguments | tojson }}</function>"
)
PYTHONIC_HEAD = 'Answer {"name": a name, "parameters": {}}.{# <|python_start|><|python_end|> #}'
LLAMA4 = (
    '{{ \'<|python_start|><|python_end|>{"name": "\' + call.function.name + \'", '
    "\"parameters\": ' + call.function.arguments | tojson + '}' }}"
)


def template(call: str, says: str = "") -> str:
    return says + LOOP.replace("CALL", call)


def tokenizer_of(source: str, folder: Path) -> Tokenizer:
    """Bytes, and the control tokens that a template names."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    rust = RustTokenizer(models.BPE({char: at for at, char in enumerate(alphabet)}, []))
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    rust.decoder = decoders.ByteLevel()
    control = sorted({*CONTROL.findall(source), "<|user|>", "<|assistant|>"})
    rust.add_special_tokens([AddedToken(one, special=True, normalized=False) for one in control])
    rust.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}")
    return Tokenizer(folder)


def chosen(source: str, folder: Path) -> AnswerFormat:
    return choose(
        ChatTemplate(source, {}),
        tokenizer_of(source, folder),
    )


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("source", "tools"),
    [
        pytest.param(template(SEED), "vllm:seed_oss", id="seed_oss"),
        pytest.param(template(MINIMAX), "vllm:minimax_m3", id="minimax_m3"),
    ],
)
def test_a_format_that_only_looks_like_ours_is_left_to_vllm(
    source: str, tools: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = chosen(source, tmp_path)
    assert (found.tools, found.why) == (tools, "")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    found = chosen(source, tmp_path)
    assert found.tools == UNKNOWN
    assert tools in found.why


def test_calls_that_are_printed_as_json_are_not_read_as_python(tmp_path: Path) -> None:
    assert chosen(template(LLAMA4, PYTHONIC_HEAD), tmp_path).tools == "llama3_json"


def test_a_printed_call_that_no_parser_reads_makes_the_format_unknown(tmp_path: Path) -> None:
    says = '{# <|python_tag|> #}<function=example>{"a": 1}</function>'
    found = chosen(template(FUNCTIONARY, says), tmp_path)
    assert found.tools == UNKNOWN
    assert "prints a call as '<function=look_up>{" in found.why
    with pytest.raises(InvalidInputError, match=re.escape("prints a call as '<function=look_up>")):
        check_readable(found, b"[]")
    shown = report(TemplateProfile(Kind.APPEND_ONLY, "<|eot|>"), found)
    assert "Requests with tools are refused: the chat template prints a call as" in shown


def test_a_format_of_ours_is_found_by_its_print_where_the_source_hides_its_delimiters(
    tmp_path: Path,
) -> None:
    hidden = (
        "{{ '<tool' + '_call>\\n{\"name\": \"' + call.function.name + '\", "
        "\"arguments\": ' + call.function.arguments | tojson + '}\\n</tool' + '_call>' }}"
    )
    assert chosen(template(hidden), tmp_path).tools == "hermes"


def test_a_template_that_prints_no_call_keeps_the_format_that_it_shows(tmp_path: Path) -> None:
    refuses = "{{ raise_exception('no calls') }}"
    assert chosen(template(refuses, "{# <tool_call> #}"), tmp_path).tools == "hermes"
    assert chosen(template("", "{# <tool_call> #}"), tmp_path).tools == "hermes"


@pytest.mark.parametrize(
    "tags",
    [
        ("<mm:think>", "</mm:think>"),
        ("<|inner_prefix|>", "<|inner_suffix|>"),
        ("<seed:think>", "</seed:think>"),
    ],
)
def test_the_marks_of_reasoning_are_those_that_the_template_prints(
    tags: tuple[str, str], tmp_path: Path
) -> None:
    thought = f"{{{{ '{tags[0]}' + (message.reasoning_content or '') + '{tags[1]}' }}}}"
    printed = f"{{% if message.role == 'assistant' %}}{thought}{{% endif %}}"
    source = LOOP.replace("CALL", "").replace(
        "{{ message.content }}", printed + "{{ message.content }}"
    )
    found = chosen("{# as <think> and </think> #}" + source, tmp_path)
    assert (found.reasoning, found.reasoning_tags) == (True, tags)


@pytest.mark.parametrize("name", [name for name in families.names() if "_training" not in name])
def test_every_template_keeps_the_format_that_its_parser_reads_back(name: str) -> None:
    family = families.load(name)
    found = choose(
        family.template,
        family.tokenizer,
    )
    assert (found.tools != UNKNOWN, found.why) == (True, "")


@pytest.mark.parametrize(
    ("tools", "name"),
    [
        ("kimi_k2", "two words"),
        ("deepseek_v31", "a<b"),
        ("qwen3_coder", "a>b"),
        ("glm45", "a\nb"),
        ("pythonic", "1st"),
        ("hermes", "a" * 257),
        ("openai", ""),
    ],
)
def test_a_name_that_a_format_cannot_carry_is_refused_by_name(tools: str, name: str) -> None:
    given = json.dumps([{"type": "function", "function": {"name": name}}]).encode()
    with pytest.raises(InvalidInputError, match=re.escape(f"carry the name {name[:80]!r}")):
        check_readable(AnswerFormat(tools, reasoning=False), given)
    check_readable(AnswerFormat("none", reasoning=False), given)


@pytest.mark.parametrize("tools", ["hermes", "llama3_json"])
def test_a_name_in_json_may_be_any_text(tools: str) -> None:
    given = json.dumps([{"type": "function", "function": {"name": "look up!"}}]).encode()
    check_readable(AnswerFormat(tools, reasoning=False), given)
