"""Sampled tokens of a session in the forms of Harbor: `rollout_details` and ATIF."""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rollmesh.client import SessionResult, Trajectory
from rollmesh.client.sessions import reason_names
from rollmesh.runtime.codec.enums import name_of
from rollmesh.v1 import chat_pb2, trajectory_pb2

_SOURCES = {"SYSTEM": "system", "USER": "user", "ASSISTANT": "agent"}

Decode = Callable[[Sequence[int]], str]
"""Returns the text of token ids, as a tokenizer's `decode`."""


def rollout_details_of(session: SessionResult) -> list[dict[str, Any]]:
    """Returns Harbor's `rollout_details`: one for each trajectory, the main one first.

    Returns:
        For each turn `prompt_token_ids` (all before it), `completion_token_ids` and `logprobs`.
        `extra` has for each turn `policy_versions` (of each token), `trained`, `reasons` and
        `node_id`.
    """
    details = []
    for trajectory in _ordered(session):
        turns = [_turn(trajectory, one) for one in trajectory.segments if one.sampled]
        names = ("prompt_token_ids", "completion_token_ids", "logprobs")
        extra = {name: [turn["extra"][name] for turn in turns] for name in _EXTRA}
        details.append({name: [turn[name] for turn in turns] for name in names} | {"extra": extra})
    return details


def atif_of(session: SessionResult, decode: Decode) -> dict[str, Any]:
    """Returns a session as a document of ATIF 1.8. Further trajectories are embedded in the main.

    Args:
        session: With at least one trajectory.
        decode: Of the model's tokenizer. The text of a step is that of its tokens, with those of
            the template.
    """
    main, *others = [_document(session, one, decode) for one in _ordered(session)]
    return main | ({"subagent_trajectories": others} if others else {})


def write_details(session: SessionResult, folder: str | Path, decode: Decode) -> None:
    """Writes a session's sampled tokens into the folder of an ended trial, as Harbor reads them.

    `result.json` gets the `rollout_details`. The ATIF document is `agent/trajectory.json`, or
    `agent/trajectory.sampled.json` if the agent has written the former.

    Args:
        session: A delivered session of `HarborTrialRunner`.
        folder: The trial's, whose name is the session's id.
        decode: As of `atif_of`.

    Raises:
        OSError: There is no such trial.
        ValueError: A log-probability is not finite.
    """
    path = Path(folder) / "result.json"
    result = json.loads(path.read_bytes())
    context = result["agent_result"] or {}
    result["agent_result"] = {**context, "rollout_details": rollout_details_of(session)}
    _write(path, result)
    document = Path(folder) / "agent" / "trajectory.json"
    document.parent.mkdir(exist_ok=True)
    if document.exists():
        document = document.with_name("trajectory.sampled.json")
    _write(document, atif_of(session, decode))


_EXTRA = ("policy_versions", "trained", "reasons", "node_id")


def _ordered(session: SessionResult) -> list[Trajectory]:
    return sorted(session.trajectories, key=lambda one: one.lineage != "MAIN")


def _turn(trajectory: Trajectory, one: trajectory_pb2.TrajectorySegment) -> dict[str, Any]:
    ids = trajectory.token_ids
    return {
        "prompt_token_ids": ids[: one.start].tolist(),
        "completion_token_ids": ids[one.start : one.end].tolist(),
        "logprobs": trajectory.logprobs[one.start : one.end].tolist(),
        "extra": {
            "policy_versions": trajectory.policy_versions[one.start : one.end].tolist(),
            "trained": one.trained,
            "reasons": list(reason_names(one.reasons)),
            "node_id": one.node_id,
        },
    }


def _document(session: SessionResult, trajectory: Trajectory, decode: Decode) -> dict[str, Any]:
    extra: dict[str, Any] = {"lineage": trajectory.lineage, "reasons": list(trajectory.reasons)}
    extra["reward"] = session.reward if trajectory.reward is None else trajectory.reward
    return {
        "schema_version": "ATIF-v1.8",
        "session_id": session.session_id,
        "trajectory_id": trajectory.trajectory_id,
        "agent": {
            "name": session.metadata.get("harbor_agent", "agent"),
            "version": session.metadata.get("harbor_agent_version", "unknown"),
            "model_name": session.model,
        },
        "steps": list(_steps(trajectory, decode)),
        "extra": extra,
    }


def _steps(trajectory: Trajectory, decode: Decode) -> Iterator[dict[str, Any]]:
    for number, one in enumerate(trajectory.segments, 1):
        role = name_of(chat_pb2.Role.DESCRIPTOR, one.role)
        text = decode(trajectory.token_ids[one.start : one.end].tolist())
        step: dict[str, Any] = {"step_id": number, "source": _SOURCES.get(role, "system")}
        if role == "TOOL":
            yield step | {"message": "", "observation": {"results": [{"content": text}]}}
        elif one.sampled:
            counts = {"prompt_tokens": one.start, "completion_tokens": one.end - one.start}
            metrics = counts | _turn(trajectory, one)
            yield step | {"message": text, "metrics": metrics, "llm_call_count": 1}
        elif role == "ASSISTANT":  # of the template, or of the agent
            yield step | {"message": text, "llm_call_count": 0}
        else:
            yield step | {"message": text}


def _write(path: Path, document: object) -> None:
    path.write_text(json.dumps(document, allow_nan=False))
