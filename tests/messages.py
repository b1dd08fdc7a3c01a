"""Messages of conversations, as protos."""

from rollmesh.v1 import types_pb2


def said(text: str, role: types_pb2.Role.ValueType = types_pb2.ROLE_USER) -> types_pb2.ChatMessage:
    """A message with one text."""
    return types_pb2.ChatMessage(role=role, content=[types_pb2.ContentPart(text=text)])
