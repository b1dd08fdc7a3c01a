"""The formats of tool calls and reasoning, and the parser of each."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rollmesh.chat.messages import RenderContext
from rollmesh.chat.parsing.calls import (
    gemma_calls,
    harmony,
    json_formats as object_formats,
    muse_calls,
    python_calls as pythonic_calls,
    xml_calls as tagged_calls,
)
from rollmesh.chat.parsing.calls.json_calls import ObjectCallParser
from rollmesh.chat.parsing.calls.json_formats import ObjectFormat
from rollmesh.chat.parsing.calls.python_calls import PythonicCallParser, PythonicFormat
from rollmesh.chat.parsing.calls.xml_calls import Schemas, TaggedCallParser, TaggedFormat
from rollmesh.chat.parsing.parser import ToolParser
from rollmesh.chat.parsing.reasoning import REASONING_TAGS, TAGS
from rollmesh.chat.parsing.vllm.answers import WholeCallParser
from rollmesh.runtime.caches import ByteCache

VLLM = "vllm:"
"""Prefix of the name of a parser that vLLM has."""

UNKNOWN = "unknown"
"""The tool format if none was configured and none was detected."""
HARMONY, GEMMA, MUSE = "openai", "gemma4", "muse_glimmer"
CHANNELS: dict[str, tuple[str, ...]] = {
    HARMONY: harmony.SPECIAL_TOKENS,
    GEMMA: gemma_calls.SPECIAL_TOKENS,
    MUSE: muse_calls.SPECIAL_TOKENS,
}
"""Special tokens of formats with channels; one parser reads their reasoning, text and calls."""
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


_SCHEMAS_BYTES = 32 * 1024 * 1024
_PARSED_SIZE = 10  # JSON takes about that many times its bytes as Python objects


@dataclass(frozen=True, slots=True)
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

    @property
    def reasoning_name(self) -> str:
        """The format of the reasoning: a name of `CHANNELS` or `REASONING_TAGS`, or "none"."""
        if self.in_channels:
            return self.in_channels
        named = {tags: name for name, tags in REASONING_TAGS.items()}
        return named[self.reasoning_tags] if self.reasoning else "none"

    @property
    def opening(self) -> str:
        """Opens the reasoning; the generation prompt may end with it; may be empty."""
        if self.in_channels == GEMMA:
            return gemma_calls.THOUGHT
        return self.reasoning_tags[0] if self.reasoning else ""

    @property
    def delimiters(self) -> tuple[str, ...]:
        """What must stay in the decoded text, special tokens included."""
        if self.in_channels:
            return CHANNELS[self.in_channels]
        delimiters = FORMATS[self.tools].delimiters if self.tools in FORMATS else self.shown
        return (*delimiters, *self.reasoning_tags) if self.reasoning else delimiters

    def parser(
        self, context: RenderContext, *, calls: bool = True, inside_reasoning: bool = False
    ) -> ToolParser | None:
        """Returns a parser for one answer; None if there is nothing to look for.

        Args:
            context: The tools.
            calls: Look for calls; else they are text.
            inside_reasoning: Whether the generation prompt has opened the reasoning.
        """
        schemas = tool_schemas(context.tools_json) if context.tools_json and calls else {}
        if self.in_channels:
            return self._channel_parser({} if self.channels else schemas, inside_reasoning)
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

    @property
    def in_channels(self) -> str:
        """The name of `CHANNELS` in whose channels the model writes; empty if it has none."""
        return self.tools if self.tools in CHANNELS else self.channels

    def _channel_parser(self, schemas: Schemas, inside_reasoning: bool) -> ToolParser:  # noqa: FBT001
        if self.in_channels == GEMMA:
            return gemma_calls.GemmaParser(schemas, inside_reasoning=inside_reasoning)
        if self.in_channels == MUSE:
            return muse_calls.MuseParser(schemas)
        return harmony.HarmonyParser(schemas.keys())


def tool_schemas(tools_json: bytes) -> Mapping[str, Mapping[str, Any]]:
    """Returns the JSON schema of each tool's parameters, by the tool's name."""
    size = _PARSED_SIZE * len(tools_json)
    return _schemas.get(tools_json, size, lambda: _read_schemas(tools_json))


def named_functions(tools_json: bytes) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields the name and the definition of each tool that is a function with a name."""
    for tool in json.loads(tools_json):
        function = tool.get("function", tool)
        if isinstance(function, dict) and isinstance(name := function.get("name"), str):
            yield name, function


def _read_schemas(tools_json: bytes) -> Mapping[str, Mapping[str, Any]]:
    schemas: dict[str, Mapping[str, Any]] = {}
    for name, function in named_functions(tools_json):
        parameters = function.get("parameters")
        schemas[name] = parameters if isinstance(parameters, dict) else {}
    return schemas


_schemas: ByteCache[bytes, Mapping[str, Mapping[str, Any]]] = ByteCache(_SCHEMAS_BYTES)
