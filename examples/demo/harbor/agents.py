"""The demo's agent as an agent of Harbor. Harbor's server imports it.

The agent runs in the server's process, which calls the model at the relay.
"""

import json
import ssl
from dataclasses import asdict
from typing import Any

from harbor.agents.agent_auth_resolution import ModelConnectionSpec
from harbor.agents.base import BaseAgent
from harbor.agents.capabilities import AgentCapabilities
from harbor.models.model_api_format import ModelApiFormat
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from examples.demo.agent import ask

_TLS = ssl.create_default_context()  # shared, because one takes longer than an answer
_TIMEOUT_S = 300.0
_RETRIES = 20


class Calculating(BaseAgent):  # type: ignore[misc]
    """Asks the instruction as the demo's agent does, and leaves its attempt in the sandbox."""

    capabilities = AgentCapabilities(base_url=True)
    MODEL_CONNECTION = ModelConnectionSpec(
        supported_api_formats=[ModelApiFormat.OPENAI_CHAT_COMPLETIONS],
        base_url_destination_names={"default": "OPENAI_BASE_URL"},
        default_api_format_by_provider={},
    )

    @staticmethod
    def name() -> str:
        """Returns the agent's name."""
        return "calculating"

    def version(self) -> str:
        """Returns the agent's version."""
        return "1"

    async def setup(self, environment: Any) -> None:
        """Installs nothing."""

    async def run(self, instruction: str, environment: Any, context: Any) -> None:
        """Runs the attempt. Counts the requests that were repeated."""
        repeated = 0

        async def count(request: Any) -> None:
            nonlocal repeated
            repeated += request.headers.get("x-stainless-retry-count", "0") != "0"

        connection = self.model_connection
        async with (
            DefaultAsyncHttpxClient(verify=_TLS, event_hooks={"request": [count]}) as http,
            AsyncOpenAI(
                base_url=connection.resolved_base_url,
                api_key=connection.api_key,
                max_retries=_RETRIES,
                timeout=_TIMEOUT_S,
                http_client=http,
            ) as client,
        ):
            attempt = await ask(client, instruction.strip())
        left = self.logs_dir / "attempt.json"
        left.write_text(json.dumps({**asdict(attempt), "repeated": repeated}))
        await environment.upload_file(left, "/app/attempt.json")
