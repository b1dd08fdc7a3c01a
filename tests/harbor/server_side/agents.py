"""Agents that Harbor's server runs: one in its own process, and programs in sandboxes."""

import asyncio
import json
import shlex
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

from harbor.agents.agent_auth_resolution import ModelConnectionSpec
from harbor.agents.base import BaseAgent
from harbor.agents.capabilities import AgentCapabilities
from harbor.models.model_api_format import ModelApiFormat
from openai import (
    APIConnectionError,
    APIError,
    AsyncOpenAI,
    DefaultAsyncHttpxClient,
    InternalServerError,
    RateLimitError,
)


class _Agent(BaseAgent):  # type: ignore[misc]
    """An agent of the tests, which takes every API."""

    capabilities = AgentCapabilities(base_url=True)
    MODEL_CONNECTION = ModelConnectionSpec(
        supported_api_formats=list(ModelApiFormat),
        base_url_destination_names={"default": "OPENAI_BASE_URL"},
        default_api_format_by_provider={},
    )

    @staticmethod
    def name() -> str:
        return "asking"

    def version(self) -> str:
        return "1"

    async def setup(self, environment: Any) -> None:
        pass


class Program(_Agent):
    """Runs a program in the sandbox, which has the base URL and the key where SDKs look."""

    def __init__(self, *args: Any, command: list[str], env: dict[str, str], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._command, self._env = command, env

    async def run(self, instruction: str, environment: Any, context: Any) -> None:
        connection = self.model_connection
        base_url = str(connection.resolved_base_url).removesuffix("/v1")
        settings = {
            "OPENAI_BASE_URL": f"{base_url}/v1",
            "OPENAI_API_KEY": connection.api_key,
            "ANTHROPIC_BASE_URL": base_url,
            "ANTHROPIC_API_KEY": connection.api_key,
        }
        done = await environment.exec(shlex.join(self._command), env={**settings, **self._env})
        (self.logs_dir / "said").write_text(done.stdout or "")
        assert done.return_code == 0, done.stderr
        await environment.exec("echo done > /app/done.txt")


class Asking(_Agent):
    """Asks the same question again and again, and writes down the ids of its answers.

    An answer that breaks off is asked for again, as the SDK does: with the same key. While a
    streamed answer arrives, there is a file `begun`. `statuses.json` has the number of responses
    by status, and of streams that broke off.
    """

    def __init__(
        self,
        *args: Any,
        turns: int = 3,
        at_once: int = 1,
        stream: bool = False,
        fails: str = "",
        until: str = "",
        waits_for: str = "",
        alone: str = "",
        **kwargs: Any,
    ) -> None:
        """Asks each turn `at_once` times. Reads a stream on once the file `waits_for` exists.

        Fails with an error of the name `fails`, as long as the file `until` is missing. With the
        file `alone`, which the first agent makes, the others fail before they ask. With
        `own_trajectory` it leaves a document. With `unmarked` its repeats are as its first
        requests.
        """
        self._own_trajectory = bool(kwargs.pop("own_trajectory", False))
        self._unmarked = bool(kwargs.pop("unmarked", False))
        super().__init__(*args, **kwargs)
        self._turns, self._at_once, self._stream, self._fails = turns, at_once, stream, fails
        self._until = Path(until) if until else None
        self._waits_for = Path(waits_for) if waits_for else None
        self._alone = Path(alone) if alone else None
        self._statuses = Counter[str]()

    async def run(self, instruction: str, environment: Any, context: Any) -> None:
        if self._alone:
            try:
                self._alone.touch(exist_ok=False)
            except FileExistsError:
                raise type("SandboxError", (Exception,), {})("before its first request") from None
        connection = self.model_connection
        messages: list[dict[str, str]] = []
        ids: list[str] = []
        async with (
            DefaultAsyncHttpxClient(event_hooks={"response": [self._count]}) as http,
            AsyncOpenAI(
                base_url=connection.resolved_base_url,
                api_key=connection.api_key,
                max_retries=0 if self._unmarked else 40,
                timeout=120,
                http_client=http,
            ) as client,
        ):
            for turn in range(self._turns):
                messages.append({"role": "user", "content": instruction.strip()})
                answers = await asyncio.gather(
                    *(
                        self._answer(client, messages, f"{self.context_id}-{turn}-{at}")
                        for at in range(self._at_once)
                    )
                )
                ids += [id_ for id_, _ in answers]
                messages.append({"role": "assistant", "content": answers[0][1]})
        if self._fails and not (self._until and self._until.exists()):
            if self._until:
                self._until.touch()
            raise type(self._fails, (Exception,), {})("as the test wants")
        if self._own_trajectory:
            (self.logs_dir / "trajectory.json").write_text("{}")
        for name, what in ("statuses", self._statuses), ("answers", ids):
            written = self.logs_dir / f"{name}.part"  # tests that poll see whole files only
            written.write_text(json.dumps(what))
            written.rename(self.logs_dir / f"{name}.json")
        await environment.exec("echo done > /app/done.txt")

    async def _count(self, response: Any) -> None:
        self._statuses[str(response.status_code)] += 1

    async def _answer(
        self, client: Any, messages: list[dict[str, str]], key: str
    ) -> tuple[str, str]:
        asked = {"model": "policy", "messages": messages}
        headers = {} if self._unmarked else {"Idempotency-Key": key}
        while True:
            if not self._stream and self._unmarked:
                with suppress(InternalServerError, RateLimitError, APIConnectionError):
                    whole = await client.chat.completions.create(**asked)
                    return whole.id, whole.choices[0].message.content or ""
                await asyncio.sleep(0.1)
                continue
            if not self._stream:
                whole = await client.chat.completions.create(**asked, extra_headers=headers)
                return whole.id, whole.choices[0].message.content or ""
            try:
                if found := await self._streamed(client, asked, headers):
                    return found
            except APIError:
                self._statuses["broken"] += 1
                await asyncio.sleep(0.1)
            except Exception as error:  # a stream that breaks off
                if "peer closed" not in str(error) and "incomplete" not in str(error):
                    raise
                self._statuses["broken"] += 1

    async def _streamed(
        self, client: Any, asked: dict[str, Any], headers: dict[str, str]
    ) -> tuple[str, str] | None:
        """Returns an answer, or None if it ends early."""
        id_, text, ended, begun = "", "", False, self.logs_dir / "begun"
        stream = await client.chat.completions.create(**asked, stream=True, extra_headers=headers)
        try:
            async for chunk in stream:
                begun.touch()
                id_ = chunk.id
                while self._waits_for:
                    if self._waits_for.exists():
                        break
                    await asyncio.sleep(0.05)
                for choice in chunk.choices:
                    text += choice.delta.content or ""
                    ended = ended or choice.finish_reason is not None
        finally:
            begun.unlink(missing_ok=True)
        return (id_, text) if ended else None
