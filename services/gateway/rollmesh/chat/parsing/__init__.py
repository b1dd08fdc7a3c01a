"""Tool-call and reasoning parsers: sampled text in, events out, while it is sampled.

May import `messages`, `json_values` and `tokenizer`. Never `templates`.
"""

from rollmesh.chat.parsing.answer import Answer, IncrementalDecoder, StopStrings
from rollmesh.chat.parsing.calls.json_calls import HERMES, ObjectCallParser
from rollmesh.chat.parsing.calls.python_calls import PythonicFormat, read_call
from rollmesh.chat.parsing.calls.xml_calls import TaggedFormat
from rollmesh.chat.parsing.detection import (
    SIGNS,
    check_readable,
    choose,
    detect,
    known_parsers,
    vllm_names,
    vllm_problem,
)
from rollmesh.chat.parsing.formats import (
    CHANNELS,
    FORMATS,
    HARMONY,
    UNKNOWN,
    VLLM,
    AnswerFormat,
    tool_schemas,
)
from rollmesh.chat.parsing.parser import ToolParser
from rollmesh.chat.parsing.reasoning import MISTRAL_TAGS, REASONING_TAGS, TAGS, ReasoningSplitter
from rollmesh.chat.parsing.schemas import Schema
from rollmesh.chat.parsing.whole import Reading, WholeCallParser

__all__ = [
    "CHANNELS",
    "FORMATS",
    "HARMONY",
    "HERMES",
    "MISTRAL_TAGS",
    "REASONING_TAGS",
    "SIGNS",
    "TAGS",
    "UNKNOWN",
    "VLLM",
    "Answer",
    "AnswerFormat",
    "IncrementalDecoder",
    "ObjectCallParser",
    "PythonicFormat",
    "Reading",
    "ReasoningSplitter",
    "Schema",
    "StopStrings",
    "TaggedFormat",
    "ToolParser",
    "WholeCallParser",
    "check_readable",
    "choose",
    "detect",
    "known_parsers",
    "read_call",
    "tool_schemas",
    "vllm_names",
    "vllm_problem",
]
