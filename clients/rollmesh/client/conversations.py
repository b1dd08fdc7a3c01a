"""Conversations of sessions in OpenAI's form: transcripts, and contexts that sessions start with.

A transcript is the text of an open session, for reward functions. A session starts with a recorded
node, or with a conversation from elsewhere.
"""

import base64
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from rollmesh.runtime.codec import TokenIds, conversation_of, name_of, text_of, unpack_ids
from rollmesh.runtime.errors import InvalidFieldError
from rollmesh.v1 import chat_pb2, gateway_pb2, sampling_pb2, session_pb2, trajectory_pb2

_IMPORTED = trajectory_pb2.FIDELITY_REASON_IMPORTED
_SPECIAL = trajectory_pb2.FIDELITY_REASON_SPECIAL_TEXT
_MOST_ORIGINS, _MOST_NAME_CHARS = 64, 256


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


# Starts.


@dataclass(frozen=True, slots=True)
class Start:
    """A context that sessions start with. Sessions of one group that share it are siblings."""

    messages: list[dict[str, Any]] = field(repr=False)
    """The conversation in OpenAI's form, oldest message first. The agent sends it, and goes on."""
    tools: list[dict[str, Any]] = field(default_factory=list, repr=False)
    """The tools of the conversation in OpenAI's form. The agent sends the same ones."""
    template_options: dict[str, Any] = field(default_factory=dict, repr=False)
    """The template options (`chat_template_kwargs`), which the agent sends, too."""
    model: str = ""
    """Name of the model that a session needs which starts so. Empty for text."""
    request: gateway_pb2.SessionStart = field(default_factory=gateway_pb2.SessionStart, repr=False)
    """The gateway's form of it, which never changes."""

    @property
    def token_ids(self) -> TokenIds:
        """The ids of the context, uint32 [N]. Empty for text."""
        data = b"".join(one.token_ids_u32le for one in self.request.nodes)
        return unpack_ids(data, "token_ids")


def start_at(record: session_pb2.SessionRecord, node_id: int, *, as_text: bool = False) -> Start:
    """Returns the context of a recorded node.

    Args:
        record: A closed session, with its arrays and messages.
        node_id: Id of the node that the context ends with.
        as_text: Whether the template makes the ids, for a model with another tokenizer or template.

    Raises:
        InvalidFieldError: The record has no such node, no messages, or no ids, or it is damaged.
    """
    if not record.messages:
        raise InvalidFieldError(
            "session_id",
            f"session {record.session_id} recorded no messages, by which requests that go on are "
            "recognised; open sessions with record_messages=True to start from them",
        )
    parents = {one.node_id: one for one in record.messages}
    path = _path(parents, node_id)
    conversation = conversation_of(record, node_id) if path else None
    if conversation is None:
        left = record.messages_left_out
        problem = f"is none of session {record.session_id} with messages ({left} were left out)"
        raise InvalidFieldError("node_id", f"{node_id} {problem}; give one that has them")
    origin = session_pb2.SessionOrigin(
        kind=session_pb2.ORIGIN_KIND_TEXT if as_text else session_pb2.ORIGIN_KIND_TOKENS,
        template_unix_ms=record.origin.template_unix_ms or record.opened_unix_ms,
    )
    start = Start(
        [_shown(message, record) for message in conversation.messages],
        conversation.tools,
        conversation.template_options,
        "" if as_text else record.model,
        gateway_pb2.SessionStart(origin=origin),
    )
    start.request.origin.nodes.add(session_id=record.session_id, node_id=node_id)
    if as_text:
        start.request.origin.template_unix_ms = 0
        return start
    if record.capture not in {session_pb2.CAPTURE_UNSPECIFIED, session_pb2.CAPTURE_TOKENS}:
        problem = f"session {record.session_id} recorded text without ids"
        raise InvalidFieldError("session_id", f"{problem}; start from it as text")
    _add_ids(start.request, record, [parents[one] for one in path])
    return start


def start_of_atif(document: Mapping[str, Any], last_step: int | None = None) -> Start:
    """Returns the conversation of an ATIF document. The template makes its ids.

    A result that answers no call is a message of the user. Files of images are not read.

    Args:
        document: An ATIF document of version 1.
        last_step: Id of the step that the context ends with. None: the last one.

    Raises:
        InvalidFieldError: It is no such document, or has other parts than text.
    """
    if not str(document.get("schema_version")).startswith("ATIF-v1."):
        raise InvalidFieldError("schema_version", "give a document of ATIF 1")
    messages: list[dict[str, Any]] = []
    try:
        steps = [one for one in document["steps"] if one["step_id"] <= (last_step or math.inf)]
        if last_step is not None and (not steps or steps[-1]["step_id"] != last_step):
            raise InvalidFieldError("steps", f"have no step {last_step}; give the id of one")
        for step in steps:
            messages += _messages_of(step, f"steps[{step['step_id'] - 1}]")
        tools = document["agent"].get("tool_definitions") or []
    except (KeyError, TypeError, AttributeError) as error:
        raise InvalidFieldError("steps", f"are not those of ATIF: {error!r}") from error
    if not messages:
        raise InvalidFieldError("steps", "are empty; give a document with a step")
    origin = session_pb2.SessionOrigin(kind=session_pb2.ORIGIN_KIND_TEXT)
    name = document.get("trajectory_id") or document.get("session_id") or ""
    origin.document_id = str(name)[:_MOST_NAME_CHARS]
    return Start(messages, tools, request=gateway_pb2.SessionStart(origin=origin))


def recorded_node(
    document: Mapping[str, Any], last_step: int | None = None
) -> tuple[str, int] | None:
    """Returns the session and the node of an ATIF document that rollmesh has written.

    None for a document of somebody else, or a step that is no answer.

    Args:
        document: An ATIF document.
        last_step: Id of a step. None: the end of the document.
    """
    try:
        if "rollmesh" not in document["extra"]:
            return None
        if last_step is None:
            node_id = document["trajectory_id"].rpartition("-")[2]
        else:
            (step,) = [one for one in document["steps"] if one["step_id"] == last_step]
            node_id = step["extra"]["rollmesh"]["node_id"]
        return str(document["session_id"]), int(node_id)
    except (KeyError, TypeError, AttributeError, ValueError):
        return None


_ROLES = {"system": "system", "user": "user", "agent": "assistant"}


def _messages_of(step: Mapping[str, Any], field: str) -> Iterator[dict[str, Any]]:
    """Yields the messages of a step: its own, and the results of its calls."""
    message: dict[str, Any] = {
        "role": _ROLES[step["source"]],
        "content": _text(step["message"], f"{field}.message"),
    }
    if step.get("reasoning_content"):
        message["reasoning_content"] = step["reasoning_content"]
    malformed = ((step.get("extra") or {}).get("rollmesh") or {}).get("malformed_calls", {})
    if step.get("tool_calls"):
        message["tool_calls"] = [
            {
                "id": call["tool_call_id"],
                "type": "function",
                "function": {
                    "name": call["function_name"],
                    "arguments": malformed.get(call["tool_call_id"])
                    or json.dumps(call["arguments"], ensure_ascii=False),
                },
            }
            for call in step["tool_calls"]
        ]
    results = (step.get("observation") or {}).get("results", ())
    if message["content"] or message["role"] == "assistant" or not results:
        yield message
    for result in sorted(results, key=lambda one: not one.get("source_call_id")):
        told = {"content": _text(result.get("content") or "", f"{field}.observation")}
        if called := result.get("source_call_id"):
            yield {"role": "tool", **told, "tool_call_id": called}
        elif told["content"]:
            yield {"role": "user", **told}


def _text(content: Any, field: str) -> str:
    if isinstance(content, str):
        return content
    if any(part["type"] != "text" for part in content):
        raise InvalidFieldError(field, "has parts other than text, whose files are not read")
    return "".join(part["text"] for part in content)


def _path(parents: Mapping[int, session_pb2.NodeMessages], node_id: int) -> list[int]:
    """Returns the ids of the nodes from the first message to a node. Empty if one is missing."""
    path: list[int] = []
    while node_id:
        if node_id not in parents or len(path) > len(parents):
            return []
        path.append(node_id)
        node_id = parents[node_id].parent_node_id
    return path[::-1]


def _shown(message: dict[str, Any], record: session_pb2.SessionRecord) -> dict[str, Any]:
    """Returns a message with its images as data URLs, as agents send them."""
    if not isinstance(message["content"], list):
        return message
    images = {f"sha256:{one.sha256}": one for one in record.images}
    parts = []
    for part in message["content"]:
        image = images.get(part["image_url"]["url"]) if part["type"] == "image_url" else None
        if image is None:
            parts.append(part)
            continue
        url = f"data:{image.media_type};base64,{base64.b64encode(image.data).decode()}"
        parts.append({"type": "image_url", "image_url": {"url": url}})
    return {**message, "content": parts}


def _add_ids(
    request: gateway_pb2.SessionStart,
    record: session_pb2.SessionRecord,
    path: list[session_pb2.NodeMessages],
) -> None:
    """Adds the nodes of a path, with their ids and images, and where these come from."""
    known = _known(record)
    if path[-1].node_id not in known:
        raise InvalidFieldError(
            "node_id", f"{path[-1].node_id} is on no trajectory that is recorded; give another one"
        )
    ends = list[int]()
    for one in path:
        node = request.nodes.add(node_id=one.node_id, data=one.data)
        node.MergeFrom(known.get(one.node_id, gateway_pb2.StartNode()))
        ends.append((ends[-1] if ends else 0) + len(node.token_ids_u32le) // 4)
    if path[0].HasField("context_index"):
        request.context.CopyFrom(record.contexts[path[0].context_index])
    data = b"".join(one.data for one in path)
    request.images.extend(one for one in record.images if one.sha256.encode() in data)
    request.tokenizer_sha256 = record.tokenizer_sha256
    request.template_sha256 = record.template_sha256
    (own,) = request.origin.nodes
    own.tokens = ends[-1]
    before = record.origin.nodes
    if not before or not before[0].tokens:  # it began empty, or with text
        return
    parents = {one.node_id: one for one in record.messages}
    context = set(_path(parents, before[0].node_id))
    shared = [*takewhile(lambda at: path[at].node_id in context, range(len(path)))]
    for origin in before[: _MOST_ORIGINS - 1] if shared else ():
        last = path[shared[-1]].node_id, ends[shared[-1]]
        node_id, tokens = min((origin.node_id, origin.tokens), last, key=lambda found: found[1])
        request.origin.nodes.add(session_id=origin.session_id, node_id=node_id, tokens=tokens)


def _known(record: session_pb2.SessionRecord) -> dict[int, gateway_pb2.StartNode]:
    """Returns the ids and facts of the nodes by the rows of a record. Nodes without ids lack."""
    found: dict[int, gateway_pb2.StartNode] = {}
    rows: list[trajectory_pb2.Trajectory | trajectory_pb2.TrajectoryTree]
    rows = [*record.trajectories, *([record.tree] if record.HasField("tree") else [])]
    for row in rows:
        ids, own = row.tokens.token_ids_u32le, dict[int, gateway_pb2.StartNode]()
        parts = row.segments if isinstance(row, trajectory_pb2.Trajectory) else row.nodes
        for part in parts:
            data = ids[4 * part.start : 4 * part.end]
            if len(data) != 4 * (part.end - part.start):
                raise InvalidFieldError(
                    "session_id", f"the ids of session {record.session_id} are damaged"
                )
            node = own.setdefault(part.node_id, gateway_pb2.StartNode())
            if part.sampled:
                scaffold = getattr(part, "scaffold_tokens", len(node.token_ids_u32le) // 4)
                node.scaffold_tokens = scaffold
                if part.HasField("prompt_crc32"):
                    node.prompt_crc32 = part.prompt_crc32
            node.token_ids_u32le += data
            node.sampled |= part.sampled or _IMPORTED in part.reasons
            node.special_text |= _SPECIAL in part.reasons
        found = own | found
    return found
