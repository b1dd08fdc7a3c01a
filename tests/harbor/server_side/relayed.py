"""Prints the agents that Harbor has, and the forms of the API in which its relay takes each."""

import json
import sys
from itertools import product
from typing import Any

from harbor.agents.agent_auth_resolution import resolve_agent_model_connection
from harbor.models.agent.name import AgentName
from harbor.models.model_api_format import ModelApiFormat
from harbor.models.trial.config import AgentConfig
from harbor.server.resolution import relay_agent_config

_PROVIDERS = ("openai", "anthropic", "google")


def takes(name: str, provider: str, form: Any) -> bool:
    """Whether the relay takes an agent in a form of the API."""
    config = AgentConfig(name=name, model_name=f"{provider}/policy", model_api_format=form)
    try:
        relayed = relay_agent_config(config, "http://127.0.0.1/inference", "token")
    except ValueError:
        return False
    return bool(resolve_agent_model_connection(relayed).model_api_format == form)


found: dict[str, list[str]] = {one.value: [] for one in AgentName}
forms: list[Any] = list(ModelApiFormat)
for agent, form in product(found, forms):
    if any(takes(agent, provider, form) for provider in _PROVIDERS):
        found[agent].append(form.value)
sys.stdout.write(json.dumps(found))
