"""The consumer's state in verl's checkpoints.

verl saves it if it is told to:

    trainer.checkpoint_callback_class=rollmesh.integrations.verl.checkpoints.Checkpoints

and the manager restores it when verl resumes from the checkpoint.
"""

import json
from pathlib import Path
from typing import Any, cast

from verl.trainer.ppo import checkpoint_callback
from verl.utils.checkpoint.checkpoint_manager import find_latest_ckpt_path

_FILE = "rollmesh.json"
_MOST = 64
"""Checkpoints that a consumer can have."""


class Checkpoints(checkpoint_callback.CheckpointCallback):  # type: ignore[misc]  # verl has no types
    """Writes the state into the folder of each checkpoint."""

    def on_save(self, trainer: Any, global_step: int, checkpoint_dir: str, **_: Any) -> None:
        """Makes a checkpoint of the manager's consumer. Called by verl in its driver.

        Raises:
            RollmeshError: The collector refuses or is unavailable.
        """
        keep = int(self.config.trainer.get("max_actor_ckpt_to_keep") or _MOST)
        state = trainer.agent_loop_manager.state_dict(keep=min(keep, _MOST))
        (Path(checkpoint_dir) / _FILE).write_text(json.dumps({**state, "global_step": global_step}))


def resumed_state(config: Any) -> dict[str, Any] | None:
    """Returns the state in the checkpoint that verl resumes from. None without one."""
    trainer = config.get("trainer") or {}
    match trainer.get("resume_mode"):
        case "auto":
            folder = find_latest_ckpt_path(str(Path(trainer["default_local_dir"]).absolute()))
        case "resume_path":
            folder = trainer["resume_from_path"]
        case _:
            folder = None
    if folder is None or not (path := Path(folder) / _FILE).exists():
        return None
    return cast("dict[str, Any]", json.loads(path.read_text()))
