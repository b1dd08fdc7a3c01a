"""The conversation of a session as text, for reward functions."""

from dataclasses import dataclass
from typing import Any

from rollmesh.runtime.codec import name_of, text_of
from rollmesh.v1 import chat_pb2, gateway_pb2, sampling_pb2, trajectory_pb2


@dataclass(frozen=True, slots=True)
class TranscriptTurn:
    """One answer of the model."""

    answer_id: str
    """The completion's id, as the agent received it."""
    node_id: int
    parent_node_id: int
    """Node that it continues."""
    lineage: str
    """MAIN, SIBLING, BRANCH, ROOT, AUXILIARY, SUB_AGENT or COMPACTION."""
    finish_reason: str
    """STOP or LENGTH."""
    message: dict[str, Any]
    """The answer, as an OpenAI message."""


@dataclass(frozen=True, slots=True)
class Transcript:
    """An open session's conversation tree as text."""

    turns: tuple[TranscriptTurn, ...]
    """In the order of the answers."""
    version_spans: tuple[sampling_pb2.VersionSpan, ...]
    """Policy versions that sampled the turns. Indices count within each turn."""
    _nodes: dict[int, tuple[int, list[dict[str, Any]]]]
    """Parent and messages by node id."""

    @classmethod
    def from_proto(cls, proto: gateway_pb2.GetSessionResponse) -> "Transcript":
        """Reads a session's tree."""
        nodes = {
            node.node_id: (node.parent_node_id, [message_of(message) for message in node.messages])
            for node in proto.nodes
        }
        turns = (
            TranscriptTurn(
                f"chatcmpl-{proto.session.session_id}-{node.node_id}",
                node.node_id,
                node.parent_node_id,
                name_of(trajectory_pb2.Lineage.DESCRIPTOR, node.lineage),
                name_of(sampling_pb2.FinishReason.DESCRIPTOR, node.finish_reason),
                nodes[node.node_id][1][0],
            )
            for node in proto.nodes
            if node.sampled
        )
        spans = tuple(span for node in proto.nodes for span in node.version_spans)
        return cls(tuple(turns), spans, nodes)

    @property
    def last(self) -> TranscriptTurn | None:
        """The last turn that is not auxiliary. None if there is none."""
        return next((turn for turn in reversed(self.turns) if turn.lineage != "AUXILIARY"), None)

    def messages(self, turn: TranscriptTurn | None = None) -> list[dict[str, Any]]:
        """Returns the conversation up to a turn, by default the last one."""
        end = turn or self.last
        found: list[list[dict[str, Any]]] = []
        at = end.node_id if end else 0
        while at:
            at, said = self._nodes[at]
            found.append(said)
        return [message for said in reversed(found) for message in said]


def message_of(message: chat_pb2.ChatMessage) -> dict[str, Any]:
    """Returns a message of a node as an OpenAI message."""
    found: dict[str, Any] = {
        "role": name_of(chat_pb2.Role.DESCRIPTOR, message.role).lower(),
        "content": text_of(message) or None,
    }
    if message.tool_calls:
        found["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments_json},
            }
            for call in message.tool_calls
        ]
    for name in ("tool_call_id", "reasoning_content", "name"):
        if message.HasField(name):
            found[name] = getattr(message, name)
    return found
