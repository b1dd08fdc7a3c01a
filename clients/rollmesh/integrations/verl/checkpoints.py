"""The run of a verl job, and the consumer's state in verl's checkpoints.

verl uses it if it is told to:

    trainer.checkpoint_callback_class=rollmesh.integrations.verl.checkpoints.Checkpoints

and the manager restores the state when verl resumes from the checkpoint.
"""

import json
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from verl.trainer.ppo import checkpoint_callback
from verl.utils.checkpoint.checkpoint_manager import find_latest_ckpt_path

from rollmesh.client import state_of_run
from rollmesh.client.sync import Client
from rollmesh.integrations.verl.settings import RUN, Settings

_FILE = "rollmesh.json"
_STEP = "global_step_"
_MOST = 64
"""Checkpoints that a consumer can have."""


class Checkpoints(checkpoint_callback.CheckpointCallback):  # type: ignore[misc]  # verl has no types
    """Opens a run for the job, and writes the state into the folder of each checkpoint.

    verl creates it in its driver, before the processes that roll out and push. They find the run in
    the configuration.
    """

    def __init__(self, config: Any) -> None:
        """Opens a run at the step that verl begins or resumes with.

        Raises:
            InvalidFieldError: The settings are invalid, or the mesh lacks the model.
            RollmeshError: The router is unavailable.
        """
        super().__init__(config)
        settings = Settings.from_config(config.get("rollmesh"))
        step, state = resumed(config)
        version = step + bool(settings.adapter)  # an adapter's first version is 1
        with Client(settings.addresses) as client:
            run = client.open_run(
                version, state=state, model=settings.model, adapter=settings.adapter
            )
        name = "engine_kwargs.rollmesh"
        rollout = config.actor_rollout_ref.rollout
        OmegaConf.update(rollout, f"{name}.{RUN}", state_of_run(run), force_add=True)
        if OmegaConf.select(rollout, "checkpoint_engine.backend") == "rollmesh":
            settings_of_weights = OmegaConf.to_container(OmegaConf.select(rollout, name))
            OmegaConf.update(rollout.checkpoint_engine, name, settings_of_weights, force_add=True)

    def on_save(self, trainer: Any, global_step: int, checkpoint_dir: str, **_: Any) -> None:
        """Makes a checkpoint of the manager's consumer. Called by verl in its driver.

        Raises:
            RollmeshError: The collector refuses or is unavailable.
        """
        keep = int(self.config.trainer.get("max_actor_ckpt_to_keep") or _MOST)
        state = trainer.agent_loop_manager.state_dict(keep=min(keep, _MOST))
        (Path(checkpoint_dir) / _FILE).write_text(json.dumps({**state, "global_step": global_step}))


def resumed(config: Any) -> tuple[int, dict[str, Any] | None]:
    """Returns the step that verl resumes from, and the state in that checkpoint.

    The step is 0 without a checkpoint. The state is None if the checkpoint has none.
    """
    trainer = config.get("trainer") or {}
    match trainer.get("resume_mode"):
        case "auto":
            folder = find_latest_ckpt_path(str(Path(trainer["default_local_dir"]).absolute()))
        case "resume_path":
            folder = trainer["resume_from_path"]
        case _:
            folder = None
    if folder is None:
        return 0, None
    step, path = int(str(folder).rpartition(_STEP)[2]), Path(folder) / _FILE
    return step, json.loads(path.read_text()) if path.exists() else None
