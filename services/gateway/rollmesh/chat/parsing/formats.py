"""The formats of tool calls and reasoning, and the parser of each."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rollmesh.chat.caches import ByteCache
from rollmesh.chat.messages import RenderContext
from rollmesh.chat.parsing import (
    channels,
    gemma_calls,
    json_calls as object_formats,
    python_calls as pythonic_calls,
    xml_calls as tagged_calls,
)
from rollmesh.chat.parsing.json_calls import ObjectCallParser, ObjectFormat
from rollmesh.chat.parsing.parser import (
    MOST_NAME,
    NAME_CHARACTER,
    Schemas,
    ToolParser,
    WholeCallParser,
)
from rollmesh.chat.parsing.python_calls import PythonicCallParser, PythonicFormat
from rollmesh.chat.parsing.reasoning import REASONING_TAGS, TAGS, ReasoningSplitter
from rollmesh.chat.parsing.xml_calls import TaggedCallParser, TaggedFormat

VLLM = "vllm:"
"""Prefix of the name of a parser that vLLM has."""

UNKNOWN = "unknown"
"""The tool format if none was configured and none was detected."""
HARMONY, GEMMA, MUSE, SOLAR = "openai", "gemma4", "muse_glimmer", "solar_open"
CHANNELS: dict[str, tuple[str, ...]] = {
    HARMONY: channels.HARMONY_TOKENS,
    GEMMA: gemma_calls.SPECIAL_TOKENS,
    MUSE: channels.MUSE_TOKENS,
    SOLAR: channels.SOLAR_TOKENS,
}
"""Special tokens of formats with channels. One parser reads their reasoning, text and calls."""
FORMATS: dict[str, ObjectFormat | TaggedFormat | PythonicFormat] = {
    "hermes": object_formats.HERMES,
    "llama3_json": object_formats.LLAMA3,
    "mistral": object_formats.MISTRAL,
    "deepseek_v3": object_formats.DEEPSEEK_V3,
    "deepseek_v31": object_formats.DEEPSEEK_V31,
    "kimi_k2": object_formats.KIMI_K2,
    "qwen3_coder": tagged_calls.QWEN_CODER,
    "glm45": tagged_calls.GLM,
    "pythonic": pythonic_calls.PYTHONIC,
    "llama4_pythonic": pythonic_calls.LLAMA4,
    "lfm2": pythonic_calls.LFM2,
}
"""By their names in vLLM's `--tool-call-parser`."""

VLLM_OPENINGS: dict[str, tuple[str, ...]] = {
    "apertus": ("<|tools_prefix|>",),
    "cohere_command3": ("<|START_ACTION|>",),
    "cohere_command4": ("<|START_ACTION|>",),
    "deepseek_v32": ("<\uff5cDSML\uff5cfunction_calls>",),
    "deepseek_v4": ("<\uff5cDSML\uff5ctool_calls>",),
    "granite": ("<|tool_call|>", "<tool_call>"),
    "granite4": ("<tool_call>",),
    "hy_v3": ("<tool_calls>", "<tool_call>"),
    "k2_horizon": ("<ifm|tool_calls>", "<ifm|tool_call>"),
    "longcat": ("<longcat_tool_call>",),
    "minimax_m2": ("<minimax:tool_call>",),
    "minimax_m3": ("]<]minimax[>[<tool_call>",),
    "olmo3": ("<function_calls>",),
    "seed_oss": ("<seed:tool_call>",),
    "step3": ("<\uff5ctool_calls_begin\uff5c>",),
    "step3p5": ("<tool_call>",),
}
"""What begins the calls of a format that only vLLM reads, where models of it write reasoning."""

_PLAIN_NAME = re.compile(rf"{NAME_CHARACTER}+")
_PYTHON_NAME = re.compile(rf"[A-Za-z_]{NAME_CHARACTER}*")
_ANY_NAME = {
    "hermes": re.compile(r".+", re.DOTALL),
    "llama3_json": re.compile(r".+", re.DOTALL),
    "deepseek_v3": re.compile(r"[^\s<]([^\n<]*[^\s<])?"),
    "deepseek_v31": re.compile(r"[^\s<]([^\n<]*[^\s<])?"),
    "qwen3_coder": re.compile(r"[^\s>]([^\n>]*[^\s>])?"),
}
"""Names that a format can carry, where something stands around them. Others: `_PLAIN_NAME`."""
_SCHEMAS_BYTES = 32 * 1024 * 1024
_PARSED_SIZE = 10  # JSON takes about that many times its bytes as Python objects


@dataclass(frozen=True)
class AnswerFormat:
    """How a model writes tool calls and reasoning."""

    tools: str
    """A name of `FORMATS` or `CHANNELS`, `vllm:` and a name that vLLM has, "none" or `UNKNOWN`."""
    reasoning: bool
    """Whether answers may begin with reasoning between `reasoning_tags`."""
    shown: tuple[str, ...] = ()
    """Special tokens that are text for a parser whose delimiters are not known."""
    has_args_delimiter: bool = False
    """Whether the template prints `[ARGS]` between a call's name and its arguments."""
    reasoning_tags: tuple[str, str] = TAGS
    channels: str = ""
    """A name of `CHANNELS` where the model writes in channels and its calls stay text."""
    one_call: bool = False
    """Whether the template refuses two calls in one answer, so that answers end before a second."""
    why: str = ""
    """Why the format of calls is `UNKNOWN`. Empty if it is known."""

    @property
    def reasoning_name(self) -> str:
        """The format of the reasoning: a name of `CHANNELS` or `REASONING_TAGS`, or "none"."""
        if self.in_channels:
            return self.in_channels
        named = {tags: name for name, tags in REASONING_TAGS.items()}
        return named[self.reasoning_tags] if self.reasoning else "none"

    @cached_property
    def opening(self) -> str:
        """Opens the reasoning. The generation prompt may end with it. May be empty."""
        if self.in_channels == GEMMA:
            return gemma_calls.THOUGHT
        return self.reasoning_tags[0] if self.reasoning else ""

    @cached_property
    def delimiters(self) -> tuple[str, ...]:
        """Strings that must stay in the decoded text, special tokens included."""
        if self.in_channels:
            return CHANNELS[self.in_channels]
        delimiters = FORMATS[self.tools].delimiters if self.tools in FORMATS else self.shown
        return (*delimiters, *self.reasoning_tags) if self.reasoning else delimiters

    def splitter(self, parser: ToolParser | None, *, inside: bool) -> ReasoningSplitter | None:
        """Returns what separates the reasoning of one answer. None if there is nothing to separate.

        Without a parser no call ends the reasoning. `inside` says whether the generation prompt has
        opened it.
        """
        if not self.reasoning:
            return None
        calls: tuple[str, ...] = ()
        if parser is not None:
            calls = VLLM_OPENINGS.get(self.tools.removeprefix(VLLM), ())
            if (format_ := FORMATS.get(self.tools)) is not None:
                around = format_.around if isinstance(format_, ObjectFormat) else ()
                calls = (*format_.opens, *around)
        return ReasoningSplitter(inside=inside, tags=self.reasoning_tags, calls=calls)

    def parser(
        self, context: RenderContext, *, calls: bool = True, inside_reasoning: bool = False
    ) -> ToolParser | None:
        """Returns a parser for one answer. None if there is nothing to look for.

        Without `calls`, calls are text. `inside_reasoning` says whether the generation prompt has
        opened the reasoning.
        """
        schemas = tool_schemas(context.tools_json) if context.tools_json and calls else {}
        if self.in_channels:
            schemas = {} if self.channels else schemas
            if self.in_channels == GEMMA:
                return gemma_calls.GemmaParser(schemas, inside_reasoning=inside_reasoning)
            if self.in_channels == MUSE:
                return channels.MuseParser(schemas)
            if self.in_channels == SOLAR:
                return channels.SolarParser(schemas)
            return channels.HarmonyParser(schemas.keys())
        if not schemas or self.tools in {"none", UNKNOWN}:
            return None
        if self.tools.startswith(VLLM):
            return WholeCallParser(schemas.keys())
        format_ = FORMATS[self.tools]
        if isinstance(format_, TaggedFormat):
            return TaggedCallParser(format_, schemas)
        if isinstance(format_, PythonicFormat):
            return PythonicCallParser(format_, schemas.keys())
        return ObjectCallParser(format_, schemas.keys())

    def carries(self, name: str) -> bool:
        """Returns whether a call of a tool with this name can be read back."""
        if self.tools == "none" or self.tools.startswith(VLLM):
            return True
        format_ = FORMATS.get(self.tools)
        names = _ANY_NAME.get(self.tools, _PLAIN_NAME)
        if isinstance(format_, PythonicFormat):
            names = _PYTHON_NAME
        return len(name) <= MOST_NAME and names.fullmatch(name) is not None

    @cached_property
    def in_channels(self) -> str:
        """The name of `CHANNELS` in whose channels the model writes. Empty if it has none."""
        return self.tools if self.tools in CHANNELS else self.channels


def tool_schemas(tools_json: bytes) -> Schemas:
    """Returns the JSON schema of each tool's parameters, by the tool's name."""

    def read() -> Schemas:
        schemas: dict[str, Mapping[str, Any]] = {}
        for name, function in named_functions(tools_json):
            parameters = function.get("parameters")
            schemas[name] = parameters if isinstance(parameters, dict) else {}
        return schemas

    return _schemas.get(tools_json, _PARSED_SIZE * len(tools_json), read)


def named_functions(tools_json: bytes) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields the name and the definition of each tool that is a function with a name."""
    for tool in json.loads(tools_json):
        function = tool.get("function", tool)
        if isinstance(function, dict) and isinstance(name := function.get("name"), str):
            yield name, function


_schemas: ByteCache[bytes, Schemas] = ByteCache(_SCHEMAS_BYTES)
