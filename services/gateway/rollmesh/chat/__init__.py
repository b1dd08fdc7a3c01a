"""Token-exact chat templates and answer parsing: messages to ids, sampled ids to messages.

A distribution of its own, `rollmesh-chat`: it imports nothing else of rollmesh, and loads neither
grpc nor asyncio.
"""

from rollmesh.chat.caches import ByteCache as ByteCache
from rollmesh.chat.canonical import (
    ChangedEcho as ChangedEcho,
    argument_value as argument_value,
    contradicts_reasoning as contradicts_reasoning,
    exact_key as exact_key,
    fingerprint as fingerprint,
    lenient_key as lenient_key,
    make_context as make_context,
    spelling_key as spelling_key,
)
from rollmesh.chat.constraints import (
    CONSTRAINED_FORMATS as CONSTRAINED_FORMATS,
    Calls as Calls,
    Wanted as Wanted,
    bad_sequences as bad_sequences,
    constraint_of as constraint_of,
)
from rollmesh.chat.conversation import ChatModel as ChatModel, Conversation as Conversation
from rollmesh.chat.images import (
    ConstantRule as ConstantRule,
    GridRule as GridRule,
    ImageRefusedError as ImageRefusedError,
    ImageRule as ImageRule,
    Placeholder as Placeholder,
    PlacementError as PlacementError,
    expand as expand,
    load_reserved_ids as load_reserved_ids,
    load_rule as load_rule,
    locate as locate,
    reserved_texts as reserved_texts,
)
from rollmesh.chat.json_values import (
    MOST_DEPTH as MOST_DEPTH,
    comparable as comparable,
    is_object as is_object,
    read_json as read_json,
    replace_surrogates as replace_surrogates,
    write_json as write_json,
)
from rollmesh.chat.messages import (
    Image as Image,
    InvalidInputError as InvalidInputError,
    Message as Message,
    MessageGroup as MessageGroup,
    RenderContext as RenderContext,
    RoleName as RoleName,
    ToolCall as ToolCall,
    group_messages as group_messages,
    images_of as images_of,
    new_call_id as new_call_id,
    read_messages as read_messages,
    write_message as write_message,
)
from rollmesh.chat.parsing.parser import (
    ParserEvent as ParserEvent,
    ReasoningEvent as ReasoningEvent,
    TextEvent as TextEvent,
    ToolCallEvent as ToolCallEvent,
)
from rollmesh.chat.tokenizer import (
    ModelFilesError as ModelFilesError,
    ModelTokenizer as ModelTokenizer,
    SpecialTextError as SpecialTextError,
    TokenIds as TokenIds,
    Tokenizer as Tokenizer,
)
