"""Token-exact chat templates and answer parsing: messages to ids, sampled ids to messages.

A standalone library: it does not load grpc and needs only `rollmesh[chat]`. May import `v1`, and
`runtime` for arrays, errors and bounded caches. vLLM runs only in the worker process of
`parsing.vllm`.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollmesh.chat.conversation import ChatModel, Conversation
    from rollmesh.chat.parsing.parser import ParserEvent, ReasoningEvent, TextEvent, ToolCallEvent

__all__ = [
    "ChatModel",
    "Conversation",
    "ParserEvent",
    "ReasoningEvent",
    "TextEvent",
    "ToolCallEvent",
]


def __getattr__(name: str) -> Any:
    """Loads exports on first access, because services import only parts of the package."""
    from importlib import import_module

    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    own = "conversation" if name in {"ChatModel", "Conversation"} else "parsing.parser"
    return getattr(import_module(f"{__name__}.{own}"), name)
