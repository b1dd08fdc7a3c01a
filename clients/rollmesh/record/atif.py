"""Sessions as documents of ATIF 1.8, the interchange format of agents' trajectories.

A leaf of the conversation tree is a document. A step that another document has is copied context,
except in the document that trains it. ATIF has no mask, versions, rewards or branches: they are in
`extra["rollmesh"]`.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import quote

from rollmesh.client import SessionResult, Trajectory, reason_names
from rollmesh.record import beside
from rollmesh.record.tables import leaves_of, moment, spans_in
from rollmesh.runtime.codec import Conversation, arguments_of, name_of
from rollmesh.v1 import chat_pb2, sampling_pb2, session_pb2, trajectory_pb2

Decode: TypeAlias = Callable[[list[int]], str]
"""Returns the text of token ids, as a tokenizer's `decode`."""
_Json: TypeAlias = dict[str, Any]
_VERSION = "ATIF-v1.8"
_SOURCES = {"system": "system", "developer": "system", "user": "user", "assistant": "agent"}
_REJECTED = "COMPACTION_REJECTED"
_IMAGES = "images"
_SHA256 = "sha256:"


def documents_of(session: SessionResult, decode: Decode | None = None) -> list[_Json]:
    """Returns the documents of a session, the main one first.

    The trajectories of sub-agents are embedded in the document that called them by a declared edge,
    or else in the main one. A document that a compaction continues names the file of the next.

    Args:
        session: A delivered session, or a recorded one.
        decode: Of the model's tokenizer. Without messages, the text of a step is that of its
            tokens. None leaves such trajectories out.
    """
    told_by = [(one, session.conversation(one)) for one in ordered(session)]
    owners = _owners(told_by)
    documents: list[_Json] = []
    made: list[tuple[Trajectory, _Json]] = []
    told: _Json | None = None  # the end of the main conversation so far
    for trajectory, found in told_by:
        if found is None and decode is None:
            continue
        document = _document(session, trajectory, found)
        turns = _Turns(session, trajectory, owners)
        if found is not None:
            document["steps"] = list(_message_steps(found, turns))
        else:
            assert decode is not None
            document["steps"] = list(_token_steps(turns, decode))
        for number, step in enumerate(document["steps"], 1):
            step["step_id"] = number
        document["final_metrics"] = _final(document["steps"])
        if trajectory.lineage != "SUB_AGENT" or not made:
            documents.append(document)
            if trajectory.lineage == "COMPACTION" and _REJECTED not in trajectory.reasons:
                if told is not None:
                    told["continued_trajectory_ref"] = file_of(trajectory.trajectory_id)
                told = document
            elif trajectory.lineage == "MAIN":
                told = told or document
        made.append((trajectory, document))
    _embed(session, made)
    return documents


def leaves_as_result(record: session_pb2.SessionRecord) -> SessionResult:
    """Returns a session whose tree is replaced by the trajectories of its leaves."""
    if record.HasField("tree"):
        leaves = list(leaves_of(record))
        record = session_pb2.SessionRecord.FromString(record.SerializeToString())
        record.ClearField("tree")
        record.trajectories.extend(leaves)
    return SessionResult.from_proto(record)


def write_documents(record: session_pb2.SessionRecord, to: Path, decode: Decode | None) -> int:
    """Writes the documents of a session, and its images beside. Returns their number.

    Raises:
        OSError: A file cannot be written.
    """
    documents = documents_of(leaves_as_result(record), decode)
    if documents:
        to.mkdir(parents=True, exist_ok=True)
        beside.write_images(record.images, to / _IMAGES)
    for document in documents:
        path = to / file_of(document["trajectory_id"])
        part = path.with_name(path.name + ".part")
        text = json.dumps(document, ensure_ascii=False, allow_nan=False)
        part.write_text(text, "utf-8", "replace")  # tools may have half an emoji
        part.replace(path)
    return len(documents)


def file_of(trajectory_id: str) -> str:
    """Returns the name of a document's file."""
    return f"{quote(trajectory_id, safe='')}.json"


def ids_of(trajectory: Trajectory, one: trajectory_pb2.TrajectorySegment) -> _Json:
    """Returns the ids of a turn in ATIF's words, with those before it, and log-probabilities."""
    ids = trajectory.token_ids
    return {
        "prompt_token_ids": ids[: one.start].tolist(),
        "completion_token_ids": ids[one.start : one.end].tolist(),
        "logprobs": trajectory.logprobs[one.start : one.end].tolist(),
    }


def facts_of(trajectory: Trajectory, one: trajectory_pb2.TrajectorySegment) -> _Json:
    """Returns the facts of a turn that ATIF has no words for."""
    return {
        "node_id": one.node_id,
        "trained": one.trained,
        "reasons": list(reason_names(one.reasons)),
        "policy_versions": trajectory.policy_versions[one.start : one.end].tolist(),
        "policy_runs": trajectory.policy_runs[one.start : one.end].tolist(),
        "loss_mask": trajectory.loss_mask[one.start : one.end].tolist(),
        "reward": one.reward if one.HasField("reward") else None,
        "engine_id": one.engine_id,
        "finish_reason": name_of(sampling_pb2.FinishReason.DESCRIPTOR, one.finish_reason),
    }


def ordered(session: SessionResult) -> list[Trajectory]:
    """Returns the trajectories, the main one first and those of sub-agents last."""
    places = {"MAIN": 0, "SUB_AGENT": 2}
    return sorted(session.trajectories, key=lambda one: places.get(one.lineage, 1))


def _owners(ordered: Iterable[tuple[Trajectory, Conversation | None]]) -> dict[int, str]:
    """Returns the trajectory of each node in which its step is no copy, by node id."""
    owners: dict[int, str] = {}
    trained: dict[int, str] = {}
    for trajectory, found in ordered:
        for node_id in found.node_ids if found is not None else ():  # also those without tokens
            owners.setdefault(node_id, trajectory.trajectory_id)
        for one in trajectory.path.segments:
            owners.setdefault(one.node_id, trajectory.trajectory_id)
            if one.trained:
                trained.setdefault(one.node_id, trajectory.trajectory_id)
    return owners | trained


def _document(session: SessionResult, one: Trajectory, found: Conversation | None) -> _Json:
    agent: _Json = {
        "name": session.metadata.get("harbor_agent", "agent"),
        "version": session.metadata.get("harbor_agent_version", "unknown"),
        "model_name": session.model,
    }
    if found is not None and found.tools:
        agent["tool_definitions"] = found.tools
    ours = {
        "lineage": one.lineage,
        "lineage_source": one.lineage_source,
        "lineage_rule": one.lineage_rule,
        "reasons": list(one.reasons),
        "reward": session.reward if one.reward is None else one.reward,
        "outcome": session.outcome,
        "run_id": session.run_id,
        "group_id": session.group_id,
        "sample_index": session.sample_index,
        "purpose": session.purpose,
        "metadata": dict(sorted(session.metadata.items())),
        "template_options": found.template_options if found is not None else {},
    }
    return {
        "schema_version": _VERSION,
        "session_id": session.session_id,
        "trajectory_id": one.trajectory_id,
        "agent": agent,
        "steps": [],
        "extra": {"rollmesh": ours},
    }


class _Turns:
    """The nodes of a trajectory: which of them are copies here, and the turn of each."""

    def __init__(
        self, session: SessionResult, trajectory: Trajectory, owners: Mapping[int, str]
    ) -> None:
        self.trajectory = trajectory
        self.images = session.images
        self._sampled = {one.node_id: one for one in trajectory.path.segments if one.sampled}
        self._copied = {
            node_id for node_id, owner in owners.items() if owner != trajectory.trajectory_id
        }
        path = [one.node_id for one in trajectory.path.segments]
        origin = session.origin.nodes[0].node_id if session.origin and session.origin.nodes else 0
        if origin in path:  # another session has these steps
            self._copied |= set(path[: path.index(origin) + 1])

    def copied(self, node_id: int) -> _Json:
        """Returns the flag of a step that another document has."""
        return {"is_copied_context": True} if node_id in self._copied else {}

    def sampled(self, node_id: int) -> trajectory_pb2.TrajectorySegment | None:
        """Returns the turn of a node. None if it was not sampled here."""
        return self._sampled.get(node_id)

    def agent_step(self, node_id: int, message: Any, **parts: Any) -> _Json:
        """Returns a step of the agent, with the tokens of its turn if it was sampled."""
        one = self.sampled(node_id)
        step: _Json = {"source": "agent", "message": message, **parts, **self.copied(node_id)}
        if one is None:
            return step if "reasoning_content" in step else step | {"llm_call_count": 0}
        step |= {"llm_call_count": 1}
        if (spans := spans_in(self.trajectory.path, one)) and spans[-1].adapter:
            step["model_name"] = spans[-1].adapter
        if one.ended_unix_ms:
            step["timestamp"] = moment(one.ended_unix_ms).isoformat(timespec="milliseconds")
        ours = {**facts_of(self.trajectory, one), **step.get("extra", {}).get("rollmesh", {})}
        step["extra"] = {"rollmesh": ours}
        if one.end > one.start:
            counts = {"prompt_tokens": one.start, "completion_tokens": one.end - one.start}
            step["metrics"] = counts | ids_of(self.trajectory, one)
        return step


# Steps of recorded messages.


def _message_steps(found: Conversation, turns: _Turns) -> Iterator[_Json]:
    """Yields the steps of a conversation. Results of tools are in the step that called."""
    steps: list[_Json] = []
    callers: dict[str, _Json] = {}
    for node_id, message in zip(found.node_ids, found.messages, strict=True):
        content = _content(message.get("content"), turns.images)
        role = message.get("role", "")
        if role == "tool":
            result = {"content": content}
            caller = callers.get(message.get("tool_call_id") or "")
            if caller is None:  # of a call that the conversation does not have
                caller = {"source": "system", "message": "", **turns.copied(node_id)}
                steps.append(caller)
            else:
                result["source_call_id"] = message["tool_call_id"]
            caller.setdefault("observation", {"results": []})["results"].append(result)
        elif role == "assistant":
            parts = calls_of(message)
            if message.get("reasoning_content"):
                parts["reasoning_content"] = message["reasoning_content"]
            step = turns.agent_step(node_id, content, **parts)
            steps.append(step)
            callers |= {call["tool_call_id"]: step for call in step.get("tool_calls", ())}
        else:
            source = _SOURCES.get(role, "user")
            steps.append({"source": source, "message": content, **turns.copied(node_id)})
    yield from steps


def calls_of(message: Mapping[str, Any]) -> _Json:
    """Returns the calls of a message. ATIF has objects as arguments, so other text is extra."""
    calls, malformed = [], {}
    for number, call in enumerate(message.get("tool_calls") or ()):
        name, text = call["function"]["name"], call["function"]["arguments"]
        id_ = call.get("id") or f"call-{number}"
        arguments = arguments_of(text)
        if arguments is None:
            malformed[id_] = text
        calls.append({"tool_call_id": id_, "function_name": name, "arguments": arguments or {}})
    parts: _Json = {"tool_calls": calls} if calls else {}
    return parts | ({"extra": {"rollmesh": {"malformed_calls": malformed}}} if malformed else {})


def _content(content: Any, known: Mapping[str, session_pb2.SessionImage]) -> Any:
    """Returns the text of a message, or its parts if it has images."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = [_part(one, known) for one in content]
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def _part(part: Mapping[str, Any], known: Mapping[str, session_pb2.SessionImage]) -> _Json:
    if part.get("type") == "text":
        return {"type": "text", "text": part["text"]}
    url = part.get("image_url", {}).get("url", "") if part.get("type") == "image_url" else ""
    image = known.get(url.removeprefix(_SHA256))
    if image is None:
        return {"type": "text", "text": json.dumps(part, ensure_ascii=False)}
    path = f"{_IMAGES}/{beside.image_name(image.sha256, image.media_type)}"
    return {"type": "image", "source": {"media_type": image.media_type, "path": path}}


# Steps of tokens, where no messages were recorded.


def _token_steps(turns: _Turns, decode: Decode) -> Iterator[_Json]:
    """Yields a step for each segment. The text of a result has the template's tokens, too."""
    steps: list[_Json] = []
    caller: _Json | None = None
    for one in turns.trajectory.path.segments:
        role = name_of(chat_pb2.Role.DESCRIPTOR, one.role).lower()
        text = decode(turns.trajectory.token_ids[one.start : one.end].tolist())
        if role == "tool" and caller is not None:
            caller.setdefault("observation", {"results": []})["results"].append({"content": text})
        elif one.sampled:
            caller = turns.agent_step(one.node_id, text)
            steps.append(caller)
        elif role == "assistant" and turns.sampled(one.node_id) is None:
            steps.append(turns.agent_step(one.node_id, text))
        else:  # also the template's tokens before an answer
            source = "user" if role == "user" else "system"
            steps.append({"source": source, "message": text, **turns.copied(one.node_id)})
    yield from steps


def _final(steps: Sequence[_Json]) -> _Json:
    """Returns the totals of the steps that are no copies."""
    own = [one["metrics"] for one in steps if "metrics" in one and "is_copied_context" not in one]
    return {
        "total_prompt_tokens": sum(one["prompt_tokens"] for one in own),
        "total_completion_tokens": sum(one["completion_tokens"] for one in own),
        "total_steps": len(steps),
    }


def _embed(session: SessionResult, made: Sequence[tuple[Trajectory, _Json]]) -> None:
    """Embeds the documents of sub-agents in those of their callers, whose steps refer to them.

    A sub-agent without a caller is embedded in the first document.
    """
    caller_of: dict[int, tuple[_Json, _Json]] = {}
    for _, document in made:
        for step in document["steps"]:
            node_id = step.get("extra", {}).get("rollmesh", {}).get("node_id")
            if node_id is not None and "is_copied_context" not in step:
                caller_of.setdefault(node_id, (document, step))
    parents: dict[str, str] = {}
    for trajectory, document in made[1:]:
        if trajectory.lineage != "SUB_AGENT":
            continue
        own = {one.node_id for one in trajectory.path.segments}
        callers = [
            caller_of[node_id]
            for one in session.edges
            if one.edge.type == "subagent_call" and own.intersection(one.target_node_ids)
            for node_id in one.source_node_ids
            if node_id in caller_of
        ]
        id_, parent = trajectory.trajectory_id, made[0][1]
        for caller, step in callers:
            if id_ not in _up(caller["trajectory_id"], parents):  # edges may form a circle
                parent = caller
                reference = {"subagent_trajectory_ref": [{"trajectory_id": id_}]}
                step.setdefault("observation", {"results": []})["results"].append(reference)
                break
        parents[id_] = parent["trajectory_id"]
        parent.setdefault("subagent_trajectories", []).append(document)


def _up(id_: str, parents: Mapping[str, str]) -> Iterator[str]:
    """Yields a document's id, and the ids of those that it is embedded in."""
    yield id_
    while id_ in parents:
        yield (id_ := parents[id_])
