"""Messages of conversations, and calls in a session, as protos."""

from typing import Any

from rollmesh.v1 import chat_pb2, gateway_pb2, session_pb2


def said(text: str, role: chat_pb2.Role.ValueType = chat_pb2.ROLE_USER) -> chat_pb2.ChatMessage:
    """A message with one text."""
    return chat_pb2.ChatMessage(role=role, content=[chat_pb2.ContentPart(text=text)])


def chat_in(
    opened: gateway_pb2.CreateSessionResponse, *messages: chat_pb2.ChatMessage, **fields: Any
) -> gateway_pb2.ChatRequest:
    """A chat in a session."""
    return gateway_pb2.ChatRequest(
        session_id=opened.session_id, session_key=opened.session_key, messages=messages, **fields
    )


def close_of(
    opened: gateway_pb2.CreateSessionResponse, **fields: Any
) -> gateway_pb2.CloseSessionRequest:
    """The close of a session that its agent completed."""
    return gateway_pb2.CloseSessionRequest(
        session_id=opened.session_id,
        session_key=opened.session_key,
        outcome=session_pb2.SESSION_OUTCOME_COMPLETED,
        **fields,
    )
