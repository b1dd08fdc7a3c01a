"""How models write tool calls, in every format."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_DEEPSEEK = "<\uff5ctool\u2581{}\uff5c>"
CALL, CALL_END = _DEEPSEEK.format("call\u2581begin"), _DEEPSEEK.format("call\u2581end")
CALLS, CALLS_END = _DEEPSEEK.format("calls\u2581begin"), _DEEPSEEK.format("calls\u2581end")
SEP = _DEEPSEEK.format("sep")
TAGS = (
    *("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    *("<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", CALL, CALL_END, CALLS, CALLS_END),
    *(SEP, "<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_call_argument_begin|>"),
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    *("<|tool_call_start|>", "<|tool_call_end|>", "<|tool_call>", "<tool_call|>", '<|"|>'),
    *("<|channel>", "<channel|>", "<|start|>", "<|message|>", "<|eom|>", "<|eot|>"),
)
"""What is one token in some model's vocabulary."""
Arguments = dict[str, Any]
Call = tuple[str, Arguments]


@dataclass(frozen=True)
class Writer:
    """How one format writes calls."""

    name: str
    """Format, and after a space its variant."""
    call: Callable[[str, str, int], str]
    """Name, arguments as they are written, index."""
    before: str = ""
    between: str = ""
    after: str = ""
    spell: Callable[[Arguments], str] = lambda arguments: json.dumps(arguments, ensure_ascii=False)
    turned: Callable[[str, str], str] | None = None
    """A call with its keys the other way round, where the format has keys."""
    tag: str = "</tool_call>"
    """What a string may contain that looks like an end."""
    pretty: bool = True
    """Whether arguments are JSON, which may be indented."""
    said: Callable[[str], str] = lambda words: words
    """Text that is not a call, as the format writes it."""
    peer: bool = True
    """Whether vLLM has a parser of that name."""

    @property
    def format(self) -> str:
        return self.name.split()[0]

    def write(self, calls: list[Call], spell: Callable[[Arguments], str] | None = None) -> str:
        spell = spell or self.spell
        each = [self.call(name, spell(arguments), at) for at, (name, arguments) in enumerate(calls)]
        return self.before + self.between.join(each) + self.after


def _named(key: str) -> Callable[[str, str, int], str]:
    return lambda name, arguments, _: f'{{"name": {json.dumps(name)}, "{key}": {arguments}}}'


def _tags(form: str, joint: str) -> Callable[[Arguments], str]:
    """Arguments as tags. Values that are not text as JSON."""

    def spell(arguments: Arguments) -> str:
        return joint.join(
            form.format(key, value if isinstance(value, str) else json.dumps(value))
            for key, value in arguments.items()
        )

    return spell


def _quoted(value: Any) -> str:
    """A value as Gemma 4 writes it."""
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, list):
        return f"[{','.join(map(_quoted, value))}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_quoted(one)}" for key, one in value.items()) + "}"
    return json.dumps(value)


def _plain(value: Any) -> Any:
    """A value as Muse writes it between its tags."""
    return value if isinstance(value, str) else json.dumps(value)


def _keywords(arguments: Arguments) -> str:
    """Arguments as Python writes them."""
    return ", ".join(f"{key}={value!r}" for key, value in arguments.items())


WRITERS = {
    writer.name: writer
    for writer in (
        Writer(
            "hermes",
            lambda *call: f"<tool_call>\n{_named('arguments')(*call)}\n</tool_call>",
            between="\n",
            turned=lambda name, arguments: (
                f'<tool_call>\n{{"arguments": {arguments}, "name": "{name}"}}\n</tool_call>'
            ),
        ),
        Writer(
            "llama3_json",
            _named("parameters"),
            between="; ",
            turned=lambda name, arguments: f'{{"parameters": {arguments}, "name": "{name}"}}',
            tag="<|python_tag|>",
        ),
        Writer(
            "llama3_json marked",
            lambda *call: f"<|python_tag|>{_named('parameters')(*call)}",
            between="; ",
            turned=lambda name, arguments: (
                f'<|python_tag|>{{"parameters": {arguments}, "name": "{name}"}}'
            ),
            tag="; ",
        ),
        Writer(
            "mistral",
            lambda name, arguments, _: f"[TOOL_CALLS]{name}[ARGS]{arguments}",
            tag="[ARGS]",
        ),
        Writer(
            "mistral array",
            _named("arguments"),
            before="[TOOL_CALLS][",
            between=", ",
            after="]",
            turned=lambda name, arguments: (
                f'[TOOL_CALLS][{{"arguments": {arguments}, "name": "{name}"}}]'
            ),
            tag="[TOOL_CALLS]",
        ),
        Writer(
            "deepseek_v3",
            lambda name, arguments, _: (
                f"{CALL}function{SEP}{name}\n```json\n{arguments}\n```{CALL_END}"
            ),
            before=CALLS,
            between="\n",
            after=CALLS_END,
            tag="```",
        ),
        Writer(
            "deepseek_v31",
            lambda name, arguments, _: f"{CALL}{name}{SEP}{arguments}{CALL_END}",
            before=CALLS,
            after=CALLS_END,
            tag=CALL_END,
        ),
        Writer(
            "kimi_k2",
            lambda name, arguments, at: (
                f"<|tool_call_begin|>functions.{name}:{at}<|tool_call_argument_begin|>"
                f"{arguments}<|tool_call_end|>"
            ),
            before="<|tool_calls_section_begin|>",
            after="<|tool_calls_section_end|>",
            tag="<|tool_call_end|>",
        ),
        Writer(
            "qwen3_coder",
            lambda name, arguments, _: (
                f"<tool_call>\n<function={name}>\n{arguments}</function>\n</tool_call>"
            ),
            between="\n",
            spell=_tags("<parameter={}>\n{}\n</parameter>\n", ""),
            pretty=False,
        ),
        Writer(
            "glm45",
            lambda name, arguments, _: f"<tool_call>{name}\n{arguments}</tool_call>",
            between="\n",
            spell=_tags("<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n", ""),
            pretty=False,
        ),
        Writer(
            "pythonic",
            lambda name, arguments, _: f"{name}({arguments})",
            before="[",
            between=", ",
            after="]",
            spell=_keywords,
            tag=")]",
            pretty=False,
        ),
        Writer(
            "llama4_pythonic",
            lambda name, arguments, _: f"{name}({arguments})",
            before="<|python_start|>[",
            between=", ",
            after="]<|python_end|>",
            spell=_keywords,
            tag="<|python_end|>",
            pretty=False,
        ),
        Writer(
            "lfm2",
            lambda name, arguments, _: f"{name}({arguments})",
            before="<|tool_call_start|>[",
            between=", ",
            after="]<|tool_call_end|>",
            spell=_keywords,
            tag="<|tool_call_end|>",
            pretty=False,
        ),
        Writer(
            "gemma4",
            lambda name, arguments, _: f"<|tool_call>call:{name}{{{arguments}}}<tool_call|>",
            spell=lambda arguments: ",".join(
                f"{key}:{_quoted(value)}" for key, value in arguments.items()
            ),
            tag="<tool_call|>",
            pretty=False,
        ),
        Writer(
            "muse_glimmer",
            lambda name, arguments, _: (
                f" to={name}<|message|><atem:function_calls>\n"
                f'<atem:invoke name="{name}">\n{arguments}</atem:invoke>\n</atem:function_calls>'
            ),
            between="<|eom|><|start|>assistant",
            after="<|eot|>",
            spell=lambda arguments: "".join(
                f'<atem:parameter name="{key}">{_plain(value)}</atem:parameter>\n'
                for key, value in arguments.items()
            ),
            tag="<atem:function_calls>",
            pretty=False,
            said=lambda words: f" to=user<|message|>{words}<|eom|><|start|>assistant",
        ),
        Writer(
            "solar_open",
            lambda name, arguments, at: (
                f"<|tool_call:begin|>a1b2c3d4e{at % 10}<|tool_call:name|>{name}"
                f"<|tool_call:args|>{arguments}<|tool_call:end|>"
            ),
            before="<|tool_calls|>",
            after="<|calls|>",
            said=lambda words: f"<|content|>{words}<|end|><|begin|>assistant",
            peer=False,
        ),
    )
}


class Characters:
    """Stands in for a tokenizer of which each character is a token."""

    special_ids: frozenset[int] = frozenset()

    def special_id(self, _: str) -> None:
        return None

    def stream(self, _: frozenset[int]) -> "Characters":
        return self

    def feed(self, token_id: int) -> str:
        return chr(token_id)

    def feed_all(self, token_ids: list[int]) -> str:
        return "".join(map(chr, token_ids))

    def finish(self) -> str:
        return ""
