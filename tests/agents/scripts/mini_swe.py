"""mini-swe-agent in the folder it is started in; arguments: which of its configs, and the task."""

import json
import sys
from pathlib import Path

from minisweagent.agents.default import DefaultAgent
from minisweagent.config import get_config_from_spec
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel


def main(name: str, task: str) -> None:
    config = get_config_from_spec(name)
    model = LitellmModel(**{**config["model"], "model_name": "openai/policy"})
    environment = LocalEnvironment(cwd=str(Path.cwd()), env=config["environment"]["env"])
    agent = DefaultAgent(model, environment, **config["agent"])
    sys.stdout.write("\n" + json.dumps(agent.run(task)))


main(*sys.argv[1:])
