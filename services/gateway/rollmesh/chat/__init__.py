"""Chat templates and answers, exact to the token: messages to ids, sampled ids to messages.

A library of its own: it loads no grpc and needs only `rollmesh[chat]`. It imports `runtime` for
arrays, errors and bounded caches; vLLM runs only in the worker process of `parsing.vllm`.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollmesh.chat.conversation import ChatModel, Conversation
    from rollmesh.chat.parsing.events import ParserEvent, ReasoningEvent, TextEvent, ToolCallEvent

__all__ = [
    "ChatModel",
    "Conversation",
    "ParserEvent",
    "ReasoningEvent",
    "TextEvent",
    "ToolCallEvent",
]


def __getattr__(name: str) -> Any:
    """Loads what is exported when it is asked for: services import parts of the package."""
    from importlib import import_module  # noqa: PLC0415

    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    own = "conversation" if name in {"ChatModel", "Conversation"} else "parsing.events"
    return getattr(import_module(f"{__name__}.{own}"), name)
