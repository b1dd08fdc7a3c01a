"""Sampled tokens of a session in the forms of Harbor: `rollout_details` and ATIF."""

import json
from pathlib import Path
from typing import Any

from rollmesh.client import SessionResult, Trajectory
from rollmesh.record.atif import Decode, documents_of, facts_of, ids_of


def rollout_details_of(session: SessionResult) -> list[dict[str, Any]]:
    """Returns Harbor's `rollout_details`: one for each trajectory, the main one first.

    Returns:
        For each turn `prompt_token_ids` (all before it), `completion_token_ids` and `logprobs`.
        `extra` has for each turn `policy_versions` (of each token), `trained`, `reasons` and
        `node_id`.
    """
    details = []
    for trajectory in _ordered(session):
        sampled = [one for one in trajectory.segments if one.sampled]
        turns = [ids_of(trajectory, one) for one in sampled]
        facts = [facts_of(trajectory, one) for one in sampled]
        names = ("prompt_token_ids", "completion_token_ids", "logprobs")
        extra = {name: [one[name] for one in facts] for name in _EXTRA}
        details.append({name: [turn[name] for turn in turns] for name in names} | {"extra": extra})
    return details


def atif_of(session: SessionResult, decode: Decode) -> dict[str, Any]:
    """Returns a session as one document of ATIF 1.8. Further documents are embedded in the main.

    Args:
        session: With at least one trajectory.
        decode: Of the model's tokenizer. Without recorded messages, the text of a step is that of
            its tokens, with those of the template.
    """
    main, *others = documents_of(session, decode)
    for one in (main, *others):
        one.pop("continued_trajectory_ref", None)  # which names a file
    embedded = [*main.get("subagent_trajectories", ()), *others]
    return main | ({"subagent_trajectories": embedded} if embedded else {})


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


def _write(path: Path, document: object) -> None:
    """Replaces a file as a whole, so that neither a viewer nor a kill finds half of it."""
    part = path.with_name(f".{path.name}.part")
    part.write_text(json.dumps(document, allow_nan=False))
    part.replace(path)
