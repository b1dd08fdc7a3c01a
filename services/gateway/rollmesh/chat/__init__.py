"""Token-exact chat templates and answer parsing: messages to ids, sampled ids to messages.

A distribution of its own, `rollmesh-chat`: it imports nothing else of rollmesh, and loads neither
grpc nor asyncio.
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
