"""The checkpoint of a run: the trainer, its place in the deliveries, and the record so far."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from examples.demo.audit import Audit
from examples.demo.grpo import Trainer
from examples.demo.run import Run


@dataclass(frozen=True, slots=True)
class Restored:
    """The rest of a checkpoint, once the trainer has its part."""

    run: Run
    steps: int
    """Number of steps that were made."""
    job: str
    """Id of its rollouts' run."""
    mesh: dict[str, Any]
    """State of the consumer, as of `Client.state_dict`."""


def save(path: Path, trainer: Trainer, run: Run, job: str, mesh: dict[str, Any]) -> None:
    """Replaces the checkpoint after a step."""
    audit = run.audit
    record = {
        "audit": {
            "answered": sorted(audit.answered),
            "trained": dict(audit.trained),
            "kept_back": sorted(audit.kept_back),
            "sessions": audit.sessions,
            "trajectories": audit.trajectories,
            "drift_tokens": audit.drift_tokens,
        },
        "rewards": run.rewards,
        "differences": run.differences,
        "seconds": run.seconds,
    }
    part = path.with_suffix(".part")
    saved = {"trainer": trainer.state(), "run": record, "job": job, "mesh": mesh}
    torch.save(saved, part)
    part.replace(path)


def load(path: Path, trainer: Trainer) -> Restored | None:
    """Restores the trainer. Returns the rest, or None if there is no checkpoint."""
    if not path.exists():
        return None
    saved = torch.load(path, weights_only=True)
    trainer.load_state(saved["trainer"])
    record, audit = saved["run"], saved["run"].pop("audit")
    audit |= {name: set(audit[name]) for name in ("answered", "kept_back")}
    run = Run(audit=Audit(**audit | {"trained": Counter(audit["trained"])}), **record)
    return Restored(run, len(run.rewards), saved["job"], saved["mesh"])
