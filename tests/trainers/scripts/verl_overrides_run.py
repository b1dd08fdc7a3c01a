"""Composes verl's own configuration with overrides, as verl's command line does."""

import json
import sys
from importlib.resources import files
from typing import Any

from hydra import compose, initialize_config_dir

from rollmesh.integrations.verl import sampling_of, served
from rollmesh.runtime.errors import InvalidFieldError


def found(overrides: list[str]) -> dict[str, Any]:
    """What our manager makes of a configuration."""
    config = compose("ppo_trainer", overrides=overrides)
    rollout = config.actor_rollout_ref.rollout
    try:
        settings = served(config)
    except InvalidFieldError as error:
        return {"error": str(error)}
    budget = settings.get("budget")
    return {
        "manager": rollout.agent.get("agent_loop_manager_class"),
        "router": config.get("rollmesh", {}).get("router"),
        "calls": budget and budget.calls,
        "columns": settings.get("columns"),
        "train": sampling_of(rollout, validate=False, greedy=False),
        "validation": sampling_of(rollout, validate=True, greedy=False),
    }


cases = json.loads(sys.argv[1])["cases"]
with initialize_config_dir(str(files("verl.trainer") / "config"), version_base=None):
    sys.stdout.write(json.dumps([found(overrides) for overrides in cases]))
