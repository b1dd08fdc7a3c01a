"""Message content: text as parts, and parts as text."""

from rollmesh.v1 import chat_pb2


def text_of(message: chat_pb2.ChatMessage) -> str:
    """Returns the text of a message, joined from its text parts."""
    return "".join(part.text for part in message.content)
