"""Runs trials of Harbor on this machine, without a server.

    runner = HarborTrialRunner(
        python=".venv-harbor/bin/python", folder="trials", agent={"name": "codex", ...}
    )

Each session is a trial in a process of Harbor's own environment, whose agent calls the session's
base URL. The sandbox must reach it.
"""

import asyncio
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollmesh.client import Client, Session, inherited, shielded
from rollmesh.integrations.harbor.details import decode_of, write_stored
from rollmesh.integrations.harbor.runner import HarborRolloutError, settle, task_of

_SCRIPT = Path(__file__).with_name("trial.py")
_KEY = "ROLLMESH_SESSION_KEY"
_LOG_BYTES = 2_000
_END_S = 60.0
_WAIT_S = 2.0


@dataclass(frozen=True, kw_only=True)
class HarborTrialRunner:
    """An `AgentRunner` that runs a trial of Harbor for each session."""

    python: str | Path
    """The interpreter of an environment with Harbor."""
    folder: str | Path
    """Folder of the trials. Each has a folder and a log with the session's id as its name."""
    agent: Mapping[str, Any]
    """Harbor's `AgentConfig`: `name` or `import_path`, `model_api_format` and others."""
    environment: Mapping[str, Any] = field(default_factory=dict)
    """Harbor's `EnvironmentConfig`. Empty: its default, Docker."""
    reward: str = "reward"
    """Name of the verifier's reward that is the session's."""
    trial: Mapping[str, Any] = field(default_factory=dict)
    """Further values of Harbor's `TrialConfig`."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to this process's environment, which it overrides: `PYTHONPATH` of your own agents."""
    details: bool = True
    """Whether to write the sampled tokens into the trials, as `write_details` does."""
    tokenizer: str | Path | None = None
    """Folder of the model, for the text of `details` where sessions record no messages."""

    def __post_init__(self) -> None:
        """Reads the tokenizer.

        Raises:
            ConfigError: It is missing.
        """
        decode_of(self.tokenizer)

    async def __call__(self, sample: Any, session: Session) -> dict[str, float]:
        """Runs a task once. Returns the `reward` and all rewards of the verifier.

        Raises:
            HarborRolloutError: The trial failed by its infrastructure.
            InvalidFieldError: The sample is no task.
        """
        config = self._config(task_of(sample), session)
        folder = self._folder()
        log = folder / f"{session.session_id}.log"
        with log.open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                *(str(self.python), "-P", str(_SCRIPT)),
                stdin=asyncio.subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=inherited(self.env),
                start_new_session=True,
            )
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(config).encode() + b"\n")
            with suppress(ConnectionError):  # it has ended. The log says why
                await process.stdin.drain()
            await process.wait()
        finally:
            process.stdin.close()
            await shielded(_ended(process), _END_S + _WAIT_S)
        try:
            result = json.loads((folder / session.session_id / "result.json").read_bytes())
        except (OSError, ValueError) as error:
            said = log.read_bytes()[-_LOG_BYTES:].decode(errors="replace").strip()
            raise HarborRolloutError(f"the trial left no result: {said}") from error
        return settle(session, result, self.reward)

    async def closed(self, client: Client, session_id: str) -> None:
        """Writes the sampled tokens of a closed session into its trial.

        Raises:
            TimeoutError: The collector does not get the session in time.
            RollmeshError: It does not answer.
            OSError: A file cannot be written.
        """
        if self.details:
            trial = self._folder() / session_id
            await write_stored(client, session_id, lambda _: trial, decode_of(self.tokenizer))

    def _folder(self) -> Path:
        folder = Path(self.folder).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _config(self, task: Mapping[str, str], session: Session) -> dict[str, Any]:
        base_url = session.keyless_url
        if self.agent.get("model_api_format") == "anthropic_messages":  # clients add the version
            base_url = base_url.removesuffix("/v1")
        return {
            **self.trial,
            "task": task,
            "trial_name": session.session_id,
            "trials_dir": str(self._folder()),
            "environment": dict(self.environment),
            "agent": {
                "model_name": "openai/policy",
                **self.agent,
                "base_url": base_url,
                "model_api_key_name": _KEY,
                "env": {**self.agent.get("env", {}), _KEY: session.api_key},
            },
        }


async def _ended(process: asyncio.subprocess.Process) -> None:
    """Waits until the trial has ended its sandbox, for a while."""
    try:
        async with asyncio.timeout(_END_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
