"""Tool-call and reasoning parsers: sampled text in, events out, while it is sampled.

May import `messages`, `json_values` and `tokenizer`. Never `templates`.
"""

from rollmesh.chat.parsing.answer import (
    Answer as Answer,
    StopStrings as StopStrings,
    decoder_of as decoder_of,
)
from rollmesh.chat.parsing.detection import (
    SIGNS as SIGNS,
    check_readable as check_readable,
    choose as choose,
    detect as detect,
    known_parsers as known_parsers,
    vllm_names as vllm_names,
    vllm_problem as vllm_problem,
)
from rollmesh.chat.parsing.formats import (
    CHANNELS as CHANNELS,
    FORMATS as FORMATS,
    HARMONY as HARMONY,
    UNKNOWN as UNKNOWN,
    VLLM as VLLM,
    AnswerFormat as AnswerFormat,
    tool_schemas as tool_schemas,
)
from rollmesh.chat.parsing.json_calls import (
    HERMES as HERMES,
    ObjectCallParser as ObjectCallParser,
)
from rollmesh.chat.parsing.parser import (
    Reading as Reading,
    Schema as Schema,
    ToolParser as ToolParser,
    WholeCallParser as WholeCallParser,
)
from rollmesh.chat.parsing.python_calls import (
    PythonicFormat as PythonicFormat,
    read_call as read_call,
)
from rollmesh.chat.parsing.reasoning import (
    MISTRAL_TAGS as MISTRAL_TAGS,
    REASONING_TAGS as REASONING_TAGS,
    TAGS as TAGS,
    ReasoningSplitter as ReasoningSplitter,
)
from rollmesh.chat.parsing.xml_calls import TaggedFormat as TaggedFormat
