"""Token-exact chat templates and answer parsing: messages to ids, sampled ids to messages.

A distribution of its own, `rollmesh-chat`: it imports nothing else of rollmesh, and loads neither
grpc nor asyncio.
"""

from rollmesh.chat.caches import ByteCache
from rollmesh.chat.canonical import (
    ChangedEcho,
    argument_value,
    contradicts_reasoning,
    exact_key,
    fingerprint,
    lenient_key,
    make_context,
    spelling_key,
)
from rollmesh.chat.constraints import (
    CONSTRAINED_FORMATS,
    Calls,
    Wanted,
    bad_sequences,
    constraint_of,
)
from rollmesh.chat.conversation import ChatModel, Conversation
from rollmesh.chat.errors import InvalidInputError
from rollmesh.chat.images import (
    ConstantRule,
    GridRule,
    ImageRefusedError,
    ImageRule,
    Placeholder,
    PlacementError,
    expand,
    load_reserved_ids,
    load_rule,
    locate,
    reserved_texts,
)
from rollmesh.chat.json_values import (
    MOST_DEPTH,
    comparable,
    is_object,
    read_json,
    replace_surrogates,
    write_json,
)
from rollmesh.chat.messages import (
    Image,
    Message,
    MessageGroup,
    RenderContext,
    RoleName,
    ToolCall,
    group_messages,
    images_of,
    new_call_id,
)
from rollmesh.chat.openai import read_messages, write_message
from rollmesh.chat.parsing.parser import ParserEvent, ReasoningEvent, TextEvent, ToolCallEvent
from rollmesh.chat.tokenizer import (
    ModelFilesError,
    ModelTokenizer,
    SpecialTextError,
    TokenIds,
    Tokenizer,
)

__all__ = [
    "CONSTRAINED_FORMATS",
    "MOST_DEPTH",
    "ByteCache",
    "Calls",
    "ChangedEcho",
    "ChatModel",
    "ConstantRule",
    "Conversation",
    "GridRule",
    "Image",
    "ImageRefusedError",
    "ImageRule",
    "InvalidInputError",
    "Message",
    "MessageGroup",
    "ModelFilesError",
    "ModelTokenizer",
    "ParserEvent",
    "Placeholder",
    "PlacementError",
    "ReasoningEvent",
    "RenderContext",
    "RoleName",
    "SpecialTextError",
    "TextEvent",
    "TokenIds",
    "Tokenizer",
    "ToolCall",
    "ToolCallEvent",
    "Wanted",
    "argument_value",
    "bad_sequences",
    "comparable",
    "constraint_of",
    "contradicts_reasoning",
    "exact_key",
    "expand",
    "fingerprint",
    "group_messages",
    "images_of",
    "is_object",
    "lenient_key",
    "load_reserved_ids",
    "load_rule",
    "locate",
    "make_context",
    "new_call_id",
    "read_json",
    "read_messages",
    "replace_surrogates",
    "reserved_texts",
    "spelling_key",
    "write_json",
    "write_message",
]
