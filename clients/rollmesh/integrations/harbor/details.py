"""Sampled tokens of a session in the forms of Harbor: `rollout_details` and ATIF."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from rollmesh.client import Client, SessionResult
from rollmesh.record import (
    Decode,
    beside,
    decoder,
    documents_of,
    facts_of,
    ids_of,
    leaves_as_result,
)
from rollmesh.runtime import Backoff
from rollmesh.runtime.errors import SessionUnknownError

_STORED_S = 30.0
"""How long a closed session is waited for at the collector."""


@cache
def decode_of(tokenizer: str | Path | None) -> Decode | None:
    """Returns the decode of a model's folder, None without one.

    Raises:
        ConfigError: The tokenizer, or the package for it, is missing.
    """
    return decoder(Path(tokenizer) if tokenizer is not None else None)


@dataclass(frozen=True, kw_only=True)
class ServedTrials:
    """The trials of a server whose files this process reaches. They get the sampled tokens."""

    data_dir: str | Path
    """The server's `--data-dir`."""
    tokenizer: str | Path | None = None
    """Folder of the model, for the text where sessions record no messages."""

    def __post_init__(self) -> None:
        """Reads the tokenizer.

        Raises:
            ConfigError: It is missing.
        """
        decode_of(self.tokenizer)

    def folder(self, session: SessionResult) -> Path:
        """Returns the folder of a session's trial."""
        names = (session.metadata.get(one, "") for one in ("harbor_rollout", "harbor_trial"))
        return Path(self.data_dir, "files", "rollouts", *names)

    async def write(self, client: Client, session_id: str) -> None:
        """Writes a closed session into its trial. Raises as `write_stored`."""
        await write_stored(client, session_id, self.folder, decode_of(self.tokenizer))


def rollout_details_of(session: SessionResult) -> list[dict[str, Any]]:
    """Returns Harbor's `rollout_details`: one for each trajectory, the main one first.

    There are none of a session that has no tokens, as of a model that is served elsewhere.

    Returns:
        For each turn `prompt_token_ids` (all before it), `completion_token_ids` and `logprobs`.
        `extra` has for each turn `policy_versions` (of each token), `trained`, `reasons` and
        `node_id`.
    """
    details = []
    ordered = sorted(session.trajectories, key=lambda one: one.lineage != "MAIN")
    for trajectory in ordered if session.capture == "TOKENS" else ():
        sampled = [one for one in trajectory.segments if one.sampled]
        turns = [ids_of(trajectory, one) for one in sampled]
        facts = [facts_of(trajectory, one) for one in sampled]
        names = ("prompt_token_ids", "completion_token_ids", "logprobs")
        further = ("policy_versions", "trained", "reasons", "node_id")
        extra = {name: [one[name] for one in facts] for name in further}
        details.append({name: [turn[name] for turn in turns] for name in names} | {"extra": extra})
    return details


def atif_of(session: SessionResult, decode: Decode | None = None) -> dict[str, Any]:
    """Returns a session as one document of ATIF 1.8. Further documents are embedded in the main.

    Args:
        session: With at least one trajectory.
        decode: Of the model's tokenizer. Without recorded messages, the text of a step is that of
            its tokens, with those of the template.

    Raises:
        ValueError: There is neither a decode nor a message.
    """
    if not (documents := documents_of(session, decode)):
        raise ValueError("the session has no messages; give decode, or record messages")
    main, *others = documents
    for one in (main, *others):
        one.pop("continued_trajectory_ref", None)  # which names a file
    embedded = [*main.get("subagent_trajectories", ()), *others]
    return main | ({"subagent_trajectories": embedded} if embedded else {})


async def write_stored(
    client: Client,
    session_id: str,
    folder_of: Callable[[SessionResult], Path],
    decode: Decode | None,
) -> None:
    """Writes a closed session as `write_details` does, once the collector has it.

    A trial that Harbor has not begun has no result, and a session without a turn no tokens: nothing
    is written for them.

    Raises:
        TimeoutError: The collector does not get the session in time.
        RollmeshError: It does not answer.
        OSError: A file cannot be written.
    """
    backoff = Backoff(0.05, 1.0)
    async with asyncio.timeout(_STORED_S):
        while True:
            try:
                (stored,) = await client.stored_sessions(session_id=session_id, arrays=True)
                break
            except SessionUnknownError:
                await asyncio.sleep(backoff.next_s())
    session = leaves_as_result(stored.session)
    folder = folder_of(session)
    if session.trajectories and (folder / "result.json").exists():
        await asyncio.to_thread(write_details, session, folder, decode)


def write_details(session: SessionResult, folder: str | Path, decode: Decode | None = None) -> None:
    """Writes a session's sampled tokens into the folder of an ended trial, as Harbor reads them.

    `result.json` gets the `rollout_details`. The ATIF document is `agent/trajectory.json`, or
    `agent/trajectory.sampled.json` if the agent has written the former. A repeat changes nothing.

    Args:
        session: A delivered session of `HarborTrialRunner` or `HarborRunner`.
        folder: The trial's.
        decode: As of `atif_of`. Without it and without messages there is no document.

    Raises:
        OSError: There is no such trial.
        ValueError: A log-probability is not finite.
    """
    if details := rollout_details_of(session):
        path = Path(folder) / "result.json"
        result = json.loads(path.read_bytes())
        result["agent_result"] = {**(result["agent_result"] or {}), "rollout_details": details}
        _write(path, result)
    if not documents_of(session, decode):
        return
    document = Path(folder) / "agent" / "trajectory.json"
    document.parent.mkdir(exist_ok=True)
    if (folder_of_images := document.parent / "images").is_symlink():
        folder_of_images.unlink()  # an agent may have left a link to another folder
    beside.write_images(session.images.values(), folder_of_images)
    if document.exists() and not _is_ours(document):
        document = document.with_name("trajectory.sampled.json")
    _write(document, atif_of(session, decode))


def _is_ours(document: Path) -> bool:
    """Returns whether an earlier call wrote a document."""
    try:  # a pipe would be read forever
        text = document.read_bytes() if document.is_file() else b"{}"
        return "rollmesh" in json.loads(text).get("extra", {})
    except (ValueError, AttributeError, TypeError, RecursionError):  # an agent writes anything
        return False


def _write(path: Path, document: object) -> None:
    """Replaces a file as a whole, so that neither a viewer nor a kill finds half of it."""
    part = path.with_name(f".{path.name}.part")
    text = json.dumps(document, allow_nan=False)
    part.unlink(missing_ok=True)  # an agent may have left a link to another file
    with part.open("x") as file:
        file.write(text)
    part.replace(path)
