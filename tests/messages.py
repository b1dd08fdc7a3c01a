"""Messages of conversations, as protos."""

from rollmesh.v1 import chat_pb2


def said(text: str, role: chat_pb2.Role.ValueType = chat_pb2.ROLE_USER) -> chat_pb2.ChatMessage:
    """A message with one text."""
    return chat_pb2.ChatMessage(role=role, content=[chat_pb2.ContentPart(text=text)])
