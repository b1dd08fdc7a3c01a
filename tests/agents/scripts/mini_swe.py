"""mini-swe-agent in the folder it is started in. Arguments: config, model class, task."""

import json
import sys
from pathlib import Path

from minisweagent.agents.default import DefaultAgent
from minisweagent.config import get_config_from_spec
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models import get_model


def main(name: str, model_class: str, task: str) -> None:
    config = get_config_from_spec(name)
    model = get_model("openai/policy", {**config["model"], "model_class": model_class})
    environment = LocalEnvironment(cwd=str(Path.cwd()), env=config["environment"]["env"])
    agent = DefaultAgent(model, environment, **config["agent"])
    sys.stdout.write("\n" + json.dumps(agent.run(task)))


main(*sys.argv[1:])
