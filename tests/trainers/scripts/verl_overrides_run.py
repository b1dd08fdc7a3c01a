"""Composes verl's own configuration with overrides, as verl's command line does."""

import json
import sys
from importlib.resources import files

from hydra import compose, initialize_config_dir

overrides = json.loads(sys.argv[1])["overrides"]
with initialize_config_dir(str(files("verl.trainer") / "config"), version_base=None):
    config = compose("ppo_trainer", overrides=overrides)
agent = config.actor_rollout_ref.rollout.agent
found = {"manager": agent.agent_loop_manager_class, "router": config.rollmesh.router}
sys.stdout.write(json.dumps(found))
