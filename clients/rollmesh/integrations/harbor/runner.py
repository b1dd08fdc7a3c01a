"""Runs agents of Harbor as the agents of a rollout: on a server, or as trials on this machine.

    runner = HarborRunner("https://harbor.example:8390", key, agent={"name": "claude-code"})
    await rollout(client, ["/tasks/one", "/tasks/two"], runner=runner, n=8)

A sample is a task of Harbor. Each session of its group is a job of one attempt. The session answers
its agent through the server's relay, and gets the reward of its verifier.

    runner = HarborTrialRunner(
        python=".venv-harbor/bin/python", folder="trials", agent={"name": "codex", ...}
    )

Without a server, each session is a trial in a process of Harbor's own environment, whose agent
calls the session's base URL. The sandbox must reach it.
"""

import asyncio
import json
import logging
import math
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import aiohttp

from rollmesh.client import (
    AgentStoppedError,
    Client,
    InfrastructureError,
    Reaper,
    Session,
    inherited,
    shielded,
)
from rollmesh.integrations.harbor.connector import (
    HarborError,
    RelayClient,
    Rollout,
    ending_of,
    refusal,
)
from rollmesh.integrations.harbor.details import ServedTrials, decode_of, write_stored
from rollmesh.runtime import Backoff
from rollmesh.runtime.errors import InvalidFieldError
from rollmesh.runtime.telemetry import fields

_log = logging.getLogger(__name__)
_POLL_S = 1.0
_ANSWER = aiohttp.ClientTimeout(total=60.0)
_LEAVE_S = 90.0
_AWAY_S = 30.0
"""How long after its first failure a call is repeated. The relay waits as long for a connector."""
_TEXT_CHARS = 1000
_PROGRAMS = Path(__file__).with_name("programs.py")
_REAPER = Reaper(str(_PROGRAMS))
_PHASES = ("environment_setup", "agent_setup", "agent_execution", "verifier")
_JOBS = "SELECT id FROM job WHERE name = ?"
_STATES = "SELECT id, job_id, state FROM rollout WHERE job_id IN (?)"
_TASK = ("path", "git_url", "git_commit_id", "name", "ref")

_LIMITS = {
    "Too many pending inference requests": "256 requests at once; run fewer attempts",
    "Request buffering limit exceeded": "64 MiB of requests at once; run fewer attempts",
    "Inference request body is too large": "16 MiB in a request; bound what agents put into one",
}
"""What Harbor's relay says when it refuses a request, and its limit."""


class HarborRolloutError(InfrastructureError):
    """A rollout failed by its sandbox, its verifier or its model calls, not by the policy."""


# Tasks, jobs and results of Harbor.


def task_of(sample: Any) -> dict[str, str]:
    """Returns the task of a sample.

    Args:
        sample: A path on the server, which begins with "/" or ".", a name of a registry
            (`org/name` or `org/name@ref`), or a mapping with `path`, `git_url` and
            `git_commit_id`, or with `name` and `ref`. A mapping may have one of these as `task`.

    Raises:
        InvalidFieldError: It is none of these.
    """
    given = sample.get("task", sample) if isinstance(sample, Mapping) else sample
    if isinstance(given, str | Path) and str(given):
        text = str(given)
        if text.startswith(("/", ".")):
            return {"path": text}
        name, _, ref = text.partition("@")
        return {"name": name, **({"ref": ref} if ref else {})}
    if isinstance(given, Mapping):
        task = {name: str(given[name]) for name in _TASK if given.get(name)}
        if "path" in task or "name" in task:
            return task
    raise InvalidFieldError(
        "sample", f"{sample!r:.200} is no task of Harbor; give a path, a name, or a mapping of them"
    )


def settle(
    session: Session, result: Mapping[str, Any], reward: str, *, is_cancelled: bool = False
) -> dict[str, float]:
    """Returns the rewards of an ended trial. Its end, its error and its times become metadata.

    The result is Harbor's `TrialResult` as JSON values, empty if the trial has not begun.

    Raises:
        HarborRolloutError: It failed by its infrastructure. There is no reward.
        AgentStoppedError: It was cancelled.
    """
    error = result.get("exception_info") or {}
    agent = result.get("agent_info") or {}
    kind, said = error.get("exception_type", ""), str(error.get("exception_message", ""))
    limits = [limit for text, limit in _LIMITS.items() if text in said]
    said = "".join(f"(Harbor's relay takes {limit}) " for limit in limits) + said
    rewards: dict[str, Any] = (result.get("verifier_result") or {}).get("rewards") or {}
    if not result.get("reward_valid"):
        rewards = dict.fromkeys(rewards)
    is_counted = (error.get("policy_override") or {}).get("has_valid_reward")
    row = {
        "state": "cancelled" if is_cancelled else "finished",
        "error_type": "" if is_counted else kind,
        "is_latest_attempt": True,
    }
    ending = ending_of(row, rewards, reward)
    assert ending is not None
    session.metadata.update(ending.metadata)
    for name, text in (
        ("harbor_error", kind),
        ("harbor_error_text", said[:_TEXT_CHARS]),
        ("harbor_trial", result.get("trial_name")),
        ("harbor_task", result.get("task_name")),
        ("harbor_agent", agent.get("name")),
        ("harbor_agent_version", agent.get("version")),
    ):
        if text:
            session.metadata[name] = text
    for phase in _PHASES:
        if (seconds := _seconds(result.get(phase))) is not None:
            session.metadata[f"harbor_seconds.{phase}"] = f"{seconds:.3f}"
    match ending.outcome:
        case "COMPLETED":
            others = {f"harbor_reward.{name}": float(value) for name, value in rewards.items()}
            return {**others, "reward": float(rewards[reward])}
        case "ABORTED":
            raise AgentStoppedError("the rollout was cancelled at the Harbor server")
        case _:
            missing = f"the verifier gave no valid reward {reward!r}"
            raise HarborRolloutError(f"{kind}: {said}"[:_TEXT_CHARS] if kind else missing)


def _seconds(timing: Mapping[str, str] | None) -> float | None:
    ends = [(timing or {}).get(name) for name in ("started_at", "finished_at")]
    begun, ended = (datetime.fromisoformat(end) if end else None for end in ends)
    return (ended - begun).total_seconds() if begun and ended else None


class _OneSession(RelayClient):
    """Answers the rollout of one job with a session that is open."""

    def __init__(self, session: Session, server: str, key: str) -> None:
        super().__init__(server, session.session_id, key)
        self._open_session = session

    async def _session(self, rollout: Rollout) -> Session:
        return self._open_session

    async def _close_ended(self) -> None:
        """Closes none: the rollout of the mesh closes its session."""


class _Server:
    """The API of a Harbor server, for the attempts that run in one event loop."""

    def __init__(self, url: str, key: str) -> None:
        self.users = 0
        self._url = url
        self._http = aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"})
        self._ends: dict[str, asyncio.Future[str]] = {}
        self._polling = asyncio.get_running_loop().create_task(self._poll())

    async def close(self) -> None:
        self._polling.cancel()
        await asyncio.wait({self._polling})
        await self._http.close()

    async def submit(self, body: Mapping[str, Any]) -> str:
        """Submits a job. Returns its id.

        Raises:
            InvalidFieldError: The server refuses the job.
            HarborError: The server refuses the key, or does not answer.
        """
        key = {"Idempotency-Key": body["session_id"]}
        status, found = await self._call("POST", "/jobs/submit", json=body, headers=key)
        if status in {400, 413, 422}:
            raise InvalidFieldError("job", f"is refused by Harbor: {_said(found)}")
        if status not in {200, 409}:  # a repeat of the request gets a 409 with the id
            raise HarborError(_refused(status, found))
        return str(found["job_id"])

    async def ended(self, job_id: str) -> str:
        """Waits until the rollout of a job has ended. Returns its id.

        Raises:
            HarborError: The server does not have the job.
        """
        end: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._ends[job_id] = end
        try:
            ends: set[asyncio.Future[Any]] = {end, self._polling}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if not end.done():
                self._polling.result()
            return end.result()
        finally:
            del self._ends[job_id]
            end.cancel()

    async def rollout(self, rollout_id: str) -> dict[str, Any]:
        """Returns a rollout with its result.

        Raises:
            HarborError: The server does not have it, or does not answer.
        """
        rollout: dict[str, Any] = (await self._asked("GET", f"/rollouts/{rollout_id}"))["rollout"]
        return rollout

    async def cancel(self, name: str) -> None:
        """Cancels the jobs of a name, of which there is at most one.

        Raises:
            HarborError: The server refuses, or does not answer.
        """
        for job in await self._query(_JOBS, name):
            await self._asked("POST", f"/jobs/{job['id']}/cancel", json={})

    async def _query(self, sql: str, *values: str) -> list[dict[str, Any]]:
        found = await self._asked("POST", "/query", json=[[sql, *values]])
        rows: list[dict[str, Any]] = found["results"][0]["rows"]
        return rows

    async def _asked(self, method: str, path: str, **options: Any) -> Any:
        """Returns the JSON of an answer. Raises as `_call`, and if the server refuses."""
        status, found = await self._call(method, path, **options)
        if status != 200:
            raise HarborError(_refused(status, found))
        return found

    async def _poll(self) -> NoReturn:
        """Tells the waiting attempts the ends of their rollouts. Asks once for all of them."""
        while True:
            await asyncio.sleep(_POLL_S)
            if not (jobs := list(self._ends)):
                continue
            sql = _STATES.replace("?", ", ".join("?" * len(jobs)))
            try:
                rows = {row["job_id"]: row for row in await self._query(sql, *jobs)}
            except HarborError as error:
                _log.warning("rollouts were not read", extra=fields(error=str(error)))
                continue
            for job in jobs:
                end, row = self._ends.get(job), rows.get(job)
                if end is None or end.done():
                    continue
                if row is None:
                    end.set_exception(HarborError(f"the Harbor server does not have job {job}"))
                elif row["state"] in {"finished", "cancelled"}:
                    end.set_result(row["id"])

    async def _call(self, method: str, path: str, **options: Any) -> tuple[int, Any]:
        """Returns the status and the JSON of an answer. All calls may be repeated.

        Raises:
            HarborError: There is none, also after repeats on other connections.
        """
        url = f"{self._url}{path}"
        backoff, loop, deadline_s = Backoff(0.1, 2.0), asyncio.get_running_loop(), math.inf
        while True:
            try:
                async with self._http.request(method, url, timeout=_ANSWER, **options) as response:
                    return response.status, await response.json(content_type=None)
            except ValueError as error:
                raise HarborError(f"{url}: {error}") from error
            except (aiohttp.ClientError, TimeoutError) as error:
                deadline_s = min(deadline_s, loop.time() + _AWAY_S)
                if loop.time() > deadline_s:
                    raise HarborError(f"{url}: {error or 'no answer in time'}") from error
            await asyncio.sleep(backoff.next_s())


def _said(found: Any) -> str:
    return str(found.get("detail", found) if isinstance(found, dict) else found)[:_TEXT_CHARS]


def _refused(status: int, found: Any) -> str:
    return (
        refusal(status) if status == 401 else f"the Harbor server answers {status}: {_said(found)}"
    )


class HarborRunner:
    """An `AgentRunner` that runs a job of a Harbor server for each session."""

    def __init__(
        self,
        server: str,
        key: str,
        *,
        agent: Mapping[str, Any],
        environment: Mapping[str, Any] | None = None,
        reward: str = "reward",
        job: Mapping[str, Any] | None = None,
        trials: ServedTrials | None = None,
    ) -> None:
        """Connects nothing yet.

        Args:
            server: URL of the Harbor server, which has a relay.
            key: The server's API key.
            agent: Harbor's `AgentConfig`: `name` or `import_path`, `model_api_format`,
                `override_timeout_sec` and others.
            environment: Harbor's `EnvironmentConfig`. None: its default, Docker.
            reward: Name of the verifier's reward that is the session's.
            job: Further values of Harbor's `JobConfig`.
            trials: Where the server keeps its trials, if this process reaches them. They get the
                sampled tokens.

        Raises:
            InvalidFieldError: `agent` names no agent.
        """
        if not (agent.get("name") or agent.get("import_path")):
            raise InvalidFieldError("agent", "has no name; give a name or an import_path")
        self._server = server.rstrip("/")
        self._key = key
        self._reward = reward
        self._trials = trials
        self._job = {**(job or {}), "agents": [{"model_name": "openai/policy", **agent}]}
        if environment is not None:
            self._job["environment"] = dict(environment)
        self._servers: dict[asyncio.AbstractEventLoop, _Server] = {}

    async def __call__(self, sample: Any, session: Session) -> dict[str, float]:
        """Runs a task once. Returns the `reward` and all rewards of the verifier.

        Raises:
            HarborRolloutError: The rollout failed by its infrastructure.
            AgentStoppedError: Somebody cancelled it at the server.
            HarborError: The server refuses the key, has no relay, or does not answer.
            InvalidFieldError: The sample is no task, or the server refuses the job.
        """
        name = session.session_id
        config = {
            **self._job,
            "job_name": name,
            "n_attempts": 1,
            "n_concurrent_trials": 1,
            "quiet": True,
            "retry": {"max_retries": 0},  # a second attempt has a session of its own
            "tasks": [task_of(sample)],
        }
        body = {"config": config, "relay_inference": True, "session_id": name}
        relay = _OneSession(session, self._server, self._key)
        watched = json.dumps({"server": self._server, "key": self._key, "name": name})
        async with self._used() as server:
            _REAPER.watch(watched)
            answering = asyncio.get_running_loop().create_task(relay.run())
            submitting = asyncio.get_running_loop().create_task(server.submit(body))
            is_ended = False

            async def leave() -> None:
                if not is_ended:
                    await asyncio.wait({submitting})
                    try:
                        await server.cancel(name)
                    except HarborError as error:  # it is tried again when this process ends
                        where = fields(session_id=name, error=str(error))
                        _log.warning("job was not cancelled", extra=where)
                        return
                _REAPER.forget(watched)

            try:
                rollout = await self._ended(server, await asyncio.shield(submitting), answering)
                is_ended = True
                session.metadata |= {
                    "harbor_rollout": rollout["id"],
                    "harbor_job": rollout["job_id"],
                }
                is_cancelled = rollout["state"] == "cancelled"
                return settle(
                    session, rollout["result"] or {}, self._reward, is_cancelled=is_cancelled
                )
            finally:
                await shielded(leave(), _LEAVE_S)
                answering.cancel()
                await asyncio.wait({answering})

    async def closed(self, client: Client, session_id: str) -> None:
        """Writes the sampled tokens of a closed session into its trial, if it is reached.

        Raises:
            TimeoutError: The collector does not get the session in time.
            RollmeshError: It does not answer.
            OSError: A file cannot be written.
        """
        if self._trials is not None:
            await self._trials.write(client, session_id)

    @staticmethod
    async def _ended(server: _Server, job_id: str, answering: asyncio.Task[None]) -> dict[str, Any]:
        ending = asyncio.get_running_loop().create_task(server.ended(job_id))
        try:
            await asyncio.wait({ending, answering}, return_when=asyncio.FIRST_COMPLETED)
            if not ending.done():
                answering.result()  # the relay refuses
            return await server.rollout(await ending)
        finally:
            ending.cancel()

    @asynccontextmanager
    async def _used(self) -> AsyncIterator[_Server]:
        """Holds the server's API, which all attempts of an event loop share."""
        loop = asyncio.get_running_loop()
        server = self._servers.get(loop)
        if server is None:
            server = self._servers[loop] = _Server(self._server, self._key)
        server.users += 1
        try:
            yield server
        finally:
            server.users -= 1
            if not server.users:
                del self._servers[loop]
                await server.close()


# Trials on this machine, without a server.

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
        task = task_of(sample)
        try:
            folder, config = self._folder(), self._config(task, session)
            log = folder / f"{session.session_id}.log"
            with log.open("wb") as output:
                process = await asyncio.create_subprocess_exec(
                    *(str(self.python), "-P", str(_PROGRAMS)),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=output,
                    stderr=output,
                    env=inherited(self.env),
                    start_new_session=True,
                )
        except OSError as error:
            raise HarborRolloutError(f"the trial did not start: {error}") from error
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
