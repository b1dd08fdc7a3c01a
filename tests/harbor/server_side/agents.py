"""An agent that Harbor's server runs in its own process, with OpenAI's SDK."""

import json
from pathlib import Path
from typing import Any

from harbor.agents.agent_auth_resolution import ModelConnectionSpec
from harbor.agents.base import BaseAgent
from harbor.agents.capabilities import AgentCapabilities
from harbor.models.model_api_format import ModelApiFormat
from openai import APIError, AsyncOpenAI


class Asking(BaseAgent):  # type: ignore[misc]
    """Asks the same question again and again, and writes down the ids of its answers.

    An answer that breaks off is asked for again, as the SDK does: with the same key.
    """

    capabilities = AgentCapabilities(base_url=True)
    MODEL_CONNECTION = ModelConnectionSpec(
        supported_api_formats=list(ModelApiFormat),
        base_url_destination_names={"default": "OPENAI_BASE_URL"},
        default_api_format_by_provider={},
    )

    def __init__(
        self,
        *args: Any,
        turns: int = 3,
        stream: bool = False,
        fails: str = "",
        until: str = "",
        **kwargs: Any,
    ) -> None:
        """Fails with an error of the name `fails`, as long as the file `until` is missing."""
        super().__init__(*args, **kwargs)
        self._turns, self._stream, self._fails = turns, stream, fails
        self._until = Path(until) if until else None

    @staticmethod
    def name() -> str:
        return "asking"

    def version(self) -> str:
        return "1"

    async def setup(self, environment: Any) -> None:
        pass

    async def run(self, instruction: str, environment: Any, context: Any) -> None:
        connection = self.model_connection
        messages: list[dict[str, str]] = []
        ids: list[str] = []
        async with AsyncOpenAI(
            base_url=connection.resolved_base_url,
            api_key=connection.api_key,
            max_retries=40,
            timeout=60,
        ) as client:
            for turn in range(self._turns):
                messages.append({"role": "user", "content": instruction.strip()})
                key = f"{self.context_id}-{turn}"
                id_, text = await self._answer(client, messages, key)
                ids.append(id_)
                messages.append({"role": "assistant", "content": text})
        if self._fails and not (self._until and self._until.exists()):
            if self._until:
                self._until.touch()
            raise type(self._fails, (Exception,), {})("as the test wants")
        (self.logs_dir / "answers.json").write_text(json.dumps(ids))
        await environment.exec("echo done > /app/done.txt")

    async def _answer(
        self, client: Any, messages: list[dict[str, str]], key: str
    ) -> tuple[str, str]:
        asked = {"model": "policy", "messages": messages}
        headers = {"Idempotency-Key": key}
        while True:
            if not self._stream:
                whole = await client.chat.completions.create(**asked, extra_headers=headers)
                return whole.id, whole.choices[0].message.content or ""
            try:
                text, ended, id_ = "", False, ""
                stream = await client.chat.completions.create(
                    **asked, stream=True, extra_headers=headers
                )
                async for chunk in stream:
                    id_ = chunk.id
                    for choice in chunk.choices:
                        text += choice.delta.content or ""
                        ended = ended or choice.finish_reason is not None
                if ended:
                    return id_, text
            except APIError:
                continue
            except Exception as error:  # a stream that breaks off
                if "peer closed" not in str(error) and "incomplete" not in str(error):
                    raise
