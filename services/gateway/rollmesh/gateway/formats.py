"""Which parser reads a model's answers: by name, or by what its chat template prints."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from rollmesh.gateway import harmony, object_formats, pythonic_calls, tagged_calls
from rollmesh.gateway.messages import Frame
from rollmesh.gateway.object_calls import ObjectCallParser
from rollmesh.gateway.object_formats import ObjectFormat
from rollmesh.gateway.pieces import ToolParser
from rollmesh.gateway.pythonic_calls import PythonicCallParser, PythonicFormat
from rollmesh.gateway.reasoning import MISTRAL_TAGS, TAGS
from rollmesh.gateway.tagged_calls import TaggedCallParser, TaggedFormat
from rollmesh.gateway.whole_calls import WholeCallParser

VLLM = "vllm:"
"""In front of the name of a parser that vLLM has."""

HARMONY = "openai"
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
}
"""By the names that vLLM's `--tool-call-parser` has for them."""
# The first whose marks all stand in the template's source; the order matters where one format's
# marks are part of another's.
_SIGNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (HARMONY, ("<|channel|>analysis",)),
    ("qwen3_coder", ("<function=", "<parameter=")),
    ("glm45", ("<arg_key>",)),
    ("kimi_k2", ("<|tool_call_begin|>",)),
    ("deepseek_v3", ("<\uff5ctool\u2581call\u2581begin\uff5c>", "```json")),
    ("deepseek_v31", ("<\uff5ctool\u2581call\u2581begin\uff5c>",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("hermes", ("<tool_call>",)),
    ("llama4_pythonic", ("<|python_start|>",)),
    ("pythonic", ("[func_name1(",)),
    ("llama3_json", ("<|python_tag|>",)),
    ("llama3_json", ('"parameters": ', "<|eot_id|>")),
)


_CACHED = 64


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """How a model writes tool calls and reasoning."""

    tools: str
    """A name of `FORMATS`, `HARMONY`, `vllm:` and a name that vLLM has, or "none"."""
    reasoning: bool
    """Whether answers may begin with reasoning between `reasoning_tags`."""
    shown: tuple[str, ...] = ()
    """Special tokens that are text for a parser whose marks are not known."""
    args_mark: bool = False
    """Whether the template prints `[ARGS]` between a call's name and its arguments."""
    reasoning_tags: tuple[str, str] = TAGS

    @property
    def marks(self) -> tuple[str, ...]:
        """What must be visible in the text, special tokens included."""
        if self.tools == HARMONY:
            return harmony.MARKS
        marks = FORMATS[self.tools].marks if self.tools in FORMATS else self.shown
        return (*marks, *self.reasoning_tags) if self.reasoning else marks

    def parser(self, frame: Frame, *, calls: bool = True) -> ToolParser | None:
        """Returns a parser for one answer; None where there is nothing to look for.

        Args:
            frame: The tools that there are.
            calls: Look for calls; else they are text.
        """
        schemas = tool_schemas(frame.tools_json) if frame.tools_json and calls else {}
        if self.tools == HARMONY:
            return harmony.HarmonyParser(schemas.keys())
        if not schemas or self.tools == "none":
            return None
        if self.tools.startswith(VLLM):
            return WholeCallParser(schemas.keys())
        format_ = FORMATS[self.tools]
        if isinstance(format_, TaggedFormat):
            return TaggedCallParser(format_, schemas)
        if isinstance(format_, PythonicFormat):
            return PythonicCallParser(format_, schemas.keys())
        return ObjectCallParser(format_, schemas.keys())


def detect(template_source: str) -> AnswerFormat:
    """Returns the format that a template's marks speak for; Hermes where none do."""
    found = (name for name, signs in _SIGNS if all(sign in template_source for sign in signs))
    name = next(found, "hermes")
    tags = MISTRAL_TAGS if all(tag in template_source for tag in MISTRAL_TAGS) else TAGS
    return AnswerFormat(
        name,
        reasoning=tags[0] in template_source and name != HARMONY,
        args_mark="[ARGS]" in template_source,
        reasoning_tags=tags,
    )


@lru_cache(_CACHED)
def tool_schemas(tools_json: bytes) -> Mapping[str, Mapping[str, Any]]:
    """Returns the JSON schema of each tool's parameters, by the tool's name."""
    schemas: dict[str, Mapping[str, Any]] = {}
    for tool in json.loads(tools_json):
        function = tool.get("function", tool)
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            parameters = function.get("parameters")
            schemas[function["name"]] = parameters if isinstance(parameters, dict) else {}
    return schemas
