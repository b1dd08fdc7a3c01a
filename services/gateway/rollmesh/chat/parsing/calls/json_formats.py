"""How models write calls whose arguments are a JSON object.

Hermes and Qwen (a JSON object in tags), Llama 3 (a JSON object after `<|python_tag|>`, or the
whole answer), Mistral, DeepSeek V3 and V3.1, Kimi K2 (the name outside of the object).
"""

import re
from dataclasses import dataclass

_STRING = r'"(?:[^"\\]|\\.)*"'


@dataclass(frozen=True, slots=True)
class ObjectFormat:
    """How one family of models writes a call."""

    open: str
    """Begins a call."""
    header: re.Pattern[str]
    """From after `open` to the `{` of the arguments; groups `name` and, where it has one, `id`."""
    tail: re.Pattern[str]
    """What may stand between the arguments and `close`."""
    close: str
    """Ends a call; empty if the arguments' last brace does."""
    around: tuple[str, ...] = ()
    """Delimiters around the calls; no part of the text."""
    inside: tuple[str, ...] = ()
    """Delimiters inside of calls; text where there is none."""
    keys: tuple[str, ...] = ()
    """Keys of the arguments, where a call may also be a JSON object with keys in any order."""
    id_key: str = ""
    """Key of a call's id where the calls are JSON; empty if the format has none there."""
    bare: bool = False
    """Whether an answer may begin with a call that nothing opens."""

    @property
    def opens(self) -> tuple[str, ...]:
        """What begins a call."""
        return (self.open,)

    @property
    def delimiters(self) -> tuple[str, ...]:
        """What must be visible in the text, special tokens included."""
        return tuple(filter(None, (self.open, self.close, *self.around, *self.inside)))


def _named(keys: str) -> str:
    return rf'\s*\{{\s*"name"\s*:\s*(?P<name>{_STRING})\s*,\s*"(?:{keys})"\s*:\s*(?=\{{)'


HERMES = ObjectFormat(
    open="<tool_call>",
    header=re.compile(_named("arguments|parameters"), re.DOTALL),
    tail=re.compile(r"\s*\}\s*"),
    close="</tool_call>",
    keys=("arguments", "parameters"),
)
LLAMA3 = ObjectFormat(
    open="<|python_tag|>",
    header=re.compile(_named("parameters|arguments"), re.DOTALL),
    tail=re.compile(r"\s*"),
    close="}",
    keys=("parameters", "arguments"),
    bare=True,
)
MISTRAL = ObjectFormat(
    open="[TOOL_CALLS]",
    header=re.compile(
        r"\s*(?P<name>[\w.-]+)\s*(?:\[CALL_ID\](?P<id>\w+))?\s*(?:\[ARGS\])?\s*(?=\{)"
    ),
    tail=re.compile(r"\s*"),
    close="",
    inside=("[CALL_ID]", "[ARGS]"),
    keys=("arguments", "parameters"),
    id_key="id",
)
DEEPSEEK_V3 = ObjectFormat(
    open="<\uff5ctool\u2581call\u2581begin\uff5c>",
    header=re.compile(r"function<\uff5ctool\u2581sep\uff5c>(?P<name>[^\n<]+)\n```json\s*(?=\{)"),
    tail=re.compile(r"\s*```\s*"),
    close="<\uff5ctool\u2581call\u2581end\uff5c>",
    around=(
        "<\uff5ctool\u2581calls\u2581begin\uff5c>",
        "<\uff5ctool\u2581calls\u2581end\uff5c>",
    ),
    inside=("<\uff5ctool\u2581sep\uff5c>",),
)
DEEPSEEK_V31 = ObjectFormat(
    open=DEEPSEEK_V3.open,
    header=re.compile(r"(?P<name>[^\n<]+)<\uff5ctool\u2581sep\uff5c>\s*(?=\{)"),
    tail=re.compile(r"\s*"),
    close=DEEPSEEK_V3.close,
    around=DEEPSEEK_V3.around,
    inside=DEEPSEEK_V3.inside,
)
KIMI_K2 = ObjectFormat(
    open="<|tool_call_begin|>",
    header=re.compile(
        r"\s*(?P<id>(?:functions\.)?(?P<name>[\w.-]+?):\d+)\s*<\|tool_call_argument_begin\|>\s*(?=\{)"
    ),
    tail=re.compile(r"\s*"),
    close="<|tool_call_end|>",
    around=(
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
    ),
    inside=("<|tool_call_argument_begin|>",),
)
