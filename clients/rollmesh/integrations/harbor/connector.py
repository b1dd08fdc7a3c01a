"""Answers the model calls of a Harbor server's agents with the sessions of a mesh.

    async with Client(addresses) as client:
        await Connector(client, "https://harbor.example:8390", "training-1", key).run()

Harbor runs agents in sandboxes that cannot reach the mesh. The connector dials the inference relay
of the server, which passes the requests of the agents on. Each rollout has a session, which the
connector opens at the first request and closes with the reward once the rollout has ended. The
attempts at one task are a group. One that ends without a request gets a session too, so that the
group is complete. The connector keeps nothing that is not in the mesh or in Harbor:
one that is started again finds the same sessions by the ids of the rollouts, and closes those of
rollouts that ended meanwhile.
"""

import asyncio
import base64
import json
import logging
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, NamedTuple, TypeAlias
from urllib.parse import unquote

import aiohttp
from yarl import URL

from rollmesh.client import Client, InfrastructureError, Outcome, Session
from rollmesh.integrations.harbor.details import ServedTrials
from rollmesh.runtime import Backoff
from rollmesh.runtime.errors import InvalidFieldError, RollmeshError, SessionClosedError
from rollmesh.runtime.telemetry import fields

_log = logging.getLogger(__name__)
Headers: TypeAlias = list[tuple[str, str]]

# Harbor's limits, as its relay of release 0.26 has them.

MOST_FRAME_BYTES = 24 * 1024 * 1024
"""Longest frame of the relay: 16 MiB of a body in base64, and its headers."""
_PIECE_BYTES = 512 * 1024
"""Longest part of an answer in a frame. The relay closes the connection at 16 MiB."""
_QUICK_FRAMES, _QUICK_S, _SLOW_S = 64, 0.02, 0.1
"""Shortest time between two frames of an answer, for its first frames and afterwards. The relay
cuts an answer of which 256 frames wait for the agent."""
_NOT_PASSED = {"accept-encoding", "host", "content-length", "connection", "transfer-encoding"}
_NOT_RETURNED = {"date", "server", "content-length", "content-encoding", "connection"} | {
    "transfer-encoding",
    "keep-alive",
    "set-cookie",
}
_GIVEN_UP = {"agent_disconnected", "rollout_closed"}
"""Reasons of a cancellation after which no agent waits for the answer or repeats its request."""
_BUFFER = "buffer_limit"
_RETRY, _KEY = "x-stainless-retry-count", "idempotency-key"
_MOST_LOST = 256
"""Lost answers that a rollout remembers: as many as the relay's requests."""
_MOST_ENDED = 1024
"""Answers that a connection remembers after their ends. Those in flight may be lost."""
_LOST_S = 600.0
"""How long an equal request of the rollout gets an answer that was lost."""
_SILENT_S, _FLIGHT_S = 60.0, 1.0
"""Longest time that a connection is silent before it is given up, and that a frame travels."""
_FULL = "256 frames or 16 MiB of an answer, or 64 MiB in all, waited for agents; the relay cut it"

# The end of a rollout.

_OF_THE_POLICY = {
    "AgentTimeoutError",
    "NonZeroAgentExitCodeError",
    "ContextWindowExceededError",
    "OutputTokenExceededError",
    "ContextLengthExceededError",
    "OutputLengthExceededError",
    "AgentSafetyRefusalError",
    "ContentPolicyViolationError",
}
"""Errors of Harbor that are results of the policy: the verifier's reward counts."""
_ENDED = {"finished", "cancelled"}
_UNKNOWN = "the Harbor server does not have the rollout"


class Ending(NamedTuple):
    """How the session of an ended rollout is closed."""

    outcome: Outcome
    reward: float | None
    metadata: dict[str, str]
    superseded: bool
    """Whether Harbor runs the rollout again under another id."""


_LOST = Ending("LOST", None, {"harbor_error": _UNKNOWN}, superseded=False)


def ending_of(row: Mapping[str, Any], rewards: Mapping[str, Any], reward: str) -> Ending | None:
    """Returns how the session of a rollout is closed. None while the rollout runs.

    A rollout that failed by its infrastructure has no reward, whatever Harbor's verifier says of
    it: a time-out of a sandbox is not the policy's 0. A reward that Harbor holds invalid is
    None.
    """
    if row["state"] not in _ENDED:
        return None
    error = row["error_type"] or ""
    some = list(rewards.items())[:32]  # a verifier writes anything, and metadata has 64 KiB
    others = {f"harbor_reward.{name[:200]}": repr(value)[:200] for name, value in some}
    metadata = others | ({"harbor_error": error} if error else {})
    superseded = not row["is_latest_attempt"]
    value = rewards.get(reward)
    if row["state"] == "cancelled" or error == "CancelledError":
        return Ending("ABORTED", None, metadata, superseded)
    if (error and error not in _OF_THE_POLICY) or not isinstance(value, int | float):
        return Ending("LOST", None, metadata, superseded)
    return Ending("COMPLETED", float(value), metadata, superseded)


def path_of(target: str) -> str:
    """Returns the path of a request within its session. Empty if it would leave the session.

    The version is missing in the requests of clients whose base URL lacks it.
    """
    path, *_ = target.partition("?")
    if any(part in {".", ".."} for part in unquote(path).replace("\\", "/").split("/")):
        return ""
    return target if target.startswith(("/v1/", "/v1beta/")) else f"/v1{target}"


# Rollouts as Harbor's SQL views have them.

_ROWS = (
    "SELECT id, job_id, name, state, error_type, is_latest_attempt, retry_ids, task_name, "
    "task_digest, agent_name, json_extract(config, '$.agent') AS agent FROM rollout WHERE id IN (?)"
)
_REWARDS = "SELECT * FROM rollout_reward WHERE rollout_id IN (?)"
_SEATS = (
    "SELECT id FROM rollout WHERE job_id = ? AND task_name = ? AND task_digest = ? "
    "AND json_extract(config, '$.agent') = ? AND retry_index = 0 ORDER BY created_at, id"
)
_MOST_ASKED = 500
"""Rollouts of one question."""
_ENDS = (
    "SELECT id, job_id, updated_at, (SELECT finished_at FROM job WHERE id = job_id) AS finished_at "
    "FROM rollout WHERE state IN ('finished', 'cancelled') AND (updated_at, id) > (?, ?) "
    "AND job_id IN (SELECT id FROM job WHERE finished_at IS NULL OR finished_at >= ?) "
    "ORDER BY updated_at, id LIMIT 500"
)
_NOW = (
    "SELECT strftime('%Y-%m-%dT%H:%M:%f+00:00', 'now') AS now, "
    "strftime('%Y-%m-%dT%H:%M:%f+00:00', 'now', '-1 day') AS yesterday"
)
"""The times of the server's clock, in the form of its rows. A gateway ends an idle session after a
day, so that sessions of earlier rollouts are closed."""
_OF_JOB = "SELECT id FROM rollout WHERE job_id = ?"
_CLOSED_AT_ONCE = 16
_MOST_JOBS = 10_000
"""Jobs of which it is remembered whether they use this session of the relay."""
_POLL_S = 1.0
_ANSWER = aiohttp.ClientTimeout(total=1800.0)  # the relay waits as long
_QUERY = aiohttp.ClientTimeout(total=30.0)
_SIDECAR_S = 30.0
"""How long a request waits for a sidecar. The relay waits as long for a connector."""


class HarborError(InfrastructureError):
    """The server refuses the connector, or does not answer."""


class RolloutEndedError(HarborError):
    """The rollout has ended, or the server does not have it."""


class Lost(NamedTuple):
    """A request whose answer was recorded, as far as anybody knows, and never reached the relay."""

    digest: bytes
    tries: int
    """How often the answer was lost."""
    until_s: float


@dataclass(eq=False)
class Rollout:
    """A rollout that has called the model or has ended."""

    id: str
    opening: asyncio.Task[Session] | None = None
    answers: set[asyncio.Task[None]] = field(default_factory=set)
    has_ended: bool = False
    lost: deque[Lost] = field(default_factory=lambda: deque(maxlen=_MOST_LOST))

    def tries(self, digest: bytes, now_s: float) -> int:
        """Returns how often the answer to such a request was lost. Forgets one of them."""
        found = next((it for it in self.lost if it.digest == digest and it.until_s > now_s), None)
        if found is None:
            return 0
        self.lost.remove(found)
        return found.tries


class _Request:
    """A request of a rollout, and its answer in frames."""

    def __init__(
        self,
        rollout: Rollout,
        frame: Mapping[str, Any],
        relay: aiohttp.ClientWebSocketResponse,
        now_s: float,
    ) -> None:
        self.rollout = rollout
        self.frame = frame
        self.number: str = frame.get("request_id", "")
        self.ended_s = math.inf
        text = "\n".join(frame[name] for name in ("method", "target", "body_b64"))
        self._digest = sha256(text.encode()).digest()
        self._tries = rollout.tries(self._digest, now_s)
        self._relay = relay
        self._frames = 0
        self._begun = False

    def headers(self) -> Headers:
        """Returns the headers that are passed on. A retry is marked, also if the agent does not."""
        passed = [(name, text) for name, text in self.frame["headers"] if name not in _NOT_PASSED]
        marks = {name for name, text in passed if name == _KEY or (name == _RETRY and text != "0")}
        if not self._tries or marks:
            return passed
        return [one for one in passed if one[0] != _RETRY] + [(_RETRY, str(self._tries))]

    def lose(self, now_s: float) -> None:
        """Notes that the answer did not reach the relay."""
        self.rollout.lost.append(Lost(self._digest, self._tries + 1, now_s + _LOST_S))

    async def begin(self, status: int, headers: Headers) -> None:
        """Sends the status and the headers."""
        self._begun = True
        await self._send("response_start", status=status, headers=headers[:128])

    async def pass_on(self, content: aiohttp.StreamReader) -> None:
        """Sends the body as it arrives, in few frames."""
        loop = asyncio.get_running_loop()
        next_s = 0.0
        while data := await content.readany():
            if (wait_s := next_s - loop.time()) > 0:
                await asyncio.sleep(wait_s)
                data += content.read_nowait()
            for start in range(0, len(data), _PIECE_BYTES):
                piece = base64.b64encode(data[start : start + _PIECE_BYTES]).decode()
                await self._send("response_chunk", body_b64=piece)
                self._frames += 1
            next_s = loop.time() + (_QUICK_S if self._frames < _QUICK_FRAMES else _SLOW_S)
        await self._send("response_end")

    async def fail(self, status: int, code: str, message: str) -> None:
        """Answers with an error, or cuts an answer that has begun."""
        if self._begun:
            await self._send("error", code=code[:200], message=message[:4096])
            return
        body = json.dumps({"error": {"code": code, "message": message}}).encode()
        await self.begin(status, [("content-type", "application/json"), ("retry-after", "1")])
        await self._send("response_chunk", body_b64=base64.b64encode(body).decode())
        await self._send("response_end")

    async def _send(self, kind: str, **values: Any) -> None:
        """Sends a frame. An answer whose connection is lost is only read."""
        if self._relay.closed:
            return
        with suppress(ConnectionError, aiohttp.ClientError):
            await self._relay.send_json({"type": kind, "request_id": self.number, **values})


class RelayClient(ABC):
    """Answers the requests of one session of a Harbor server's relay."""

    def __init__(self, server: str, name: str, key: str) -> None:
        """Connects nothing yet.

        `name` is the `session_id` with which jobs are submitted. One connection at a time has it.
        """
        self._server = server.rstrip("/")
        self._name = name
        self._headers = {"Authorization": f"Bearer {key}"}
        self._rollouts: dict[str, Rollout] = {}
        self._openings: set[asyncio.Task[Session]] = set()
        self._http: Any = None  # an `aiohttp.ClientSession` while it runs
        self.connected = asyncio.Event()
        """Set while the relay is connected."""

    async def run(self) -> None:
        """Answers until it is cancelled. A connection that is lost is made again.

        Raises:
            HarborError: The server does not know the key, or has no relay.
        """
        refusal: HarborError | None = None
        try:
            # The relay has a bound on requests of its own.
            async with (
                aiohttp.ClientSession(
                    connector=aiohttp.TCPConnector(limit=0), timeout=_QUERY
                ) as self._http,
                asyncio.TaskGroup() as tasks,
            ):
                tasks.create_task(self._close_ended())
                await self._stay_connected(tasks)
        except* HarborError as errors:
            refusal = next(one for one in errors.exceptions if isinstance(one, HarborError))
        finally:
            for opening in self._openings:
                opening.cancel()
        if refusal is not None:
            raise refusal

    async def _stay_connected(self, tasks: asyncio.TaskGroup) -> None:
        backoff = Backoff(0.2, 5.0)
        while True:
            try:
                async with self._http.ws_connect(
                    f"{self._server}/connect",
                    params={"session_id": self._name},
                    headers=self._headers,
                    compress=0,  # frames are base64 of tokens: deflate costs more than it saves
                    max_msg_size=MOST_FRAME_BYTES,
                    heartbeat=20.0,
                ) as relay:
                    _log.info("connected to Harbor's relay", extra=self._what())
                    backoff.reset()
                    self.connected.set()
                    await self._answer_all(relay, tasks)
                reason = f"closed with {relay.close_code}"
            except aiohttp.WSServerHandshakeError as error:
                if error.status in {400, 401, 403, 404}:
                    raise HarborError(refusal(error.status)) from error
                reason = "another connector is connected" if error.status == 409 else str(error)
            except (aiohttp.ClientError, OSError) as error:
                reason = str(error) or type(error).__name__
            finally:
                self.connected.clear()
            _log.warning("Harbor's relay is not connected", extra=self._what(reason=reason))
            await asyncio.sleep(backoff.next_s())

    async def _answer_all(
        self, relay: aiohttp.ClientWebSocketResponse, tasks: asyncio.TaskGroup
    ) -> None:
        """Answers the requests of one connection.

        Answers that run when it is lost are read to their end: the mesh records them whole, and the
        agent that repeats its request gets them again. The mesh takes them for sent, so that the
        connector marks such repeats.
        """
        loop = asyncio.get_running_loop()
        running: dict[str, tuple[asyncio.Task[None], _Request]] = {}
        ended: deque[_Request] = deque(maxlen=_MOST_ENDED)
        heard_s = loop.time()

        def end(answer: asyncio.Task[None]) -> None:
            _, request = running.pop(answer.get_name())
            request.ended_s, request.frame = loop.time(), {}  # its body may have 16 MiB
            ended.append(request)

        try:
            async for message in relay:
                heard_s = loop.time()
                if message.type is not aiohttp.WSMsgType.TEXT:
                    continue
                frame = json.loads(message.data)
                number = frame.get("request_id", "")
                if frame.get("type") == "request":
                    rollout_id = frame["rollout_id"]
                    rollout = self._rollouts.setdefault(rollout_id, Rollout(rollout_id))
                    request = _Request(rollout, frame, relay, heard_s)
                    work = self._answer(request)
                    running[number] = (tasks.create_task(work, name=number), request)
                    running[number][0].add_done_callback(end)
                elif frame.get("reason") in _GIVEN_UP and number in running:
                    running[number][0].cancel()
                elif frame.get("reason") == _BUFFER:
                    _log.warning(_FULL, extra=self._what())
                    for request in [*ended, *(one for _, one in running.values())]:
                        if request.number == number:
                            request.lose(heard_s)
        finally:
            now_s = loop.time()
            since_s = max(heard_s - _FLIGHT_S, now_s - _SILENT_S)
            for request in [*ended, *(one for _, one in running.values())]:
                if request.ended_s >= since_s:
                    request.lose(now_s)

    async def _answer(self, request: _Request) -> None:
        """Answers a request through the session of its rollout."""
        rollout = request.rollout
        this = asyncio.current_task()
        assert this is not None
        rollout.answers.add(this)
        backoff = Backoff(0.1, 2.0)
        deadline_s = asyncio.get_running_loop().time() + _SIDECAR_S
        try:
            while True:
                try:
                    session = await asyncio.shield(self._opening(rollout))
                    if rollout.has_ended:  # the session was opened to be closed
                        raise RolloutEndedError(f"rollout {rollout.id} has ended")
                    return await self._forward(session.base_url, request)
                except aiohttp.ClientConnectorError:  # the sidecar is gone, and has no request
                    if asyncio.get_running_loop().time() > deadline_s:
                        raise
                await asyncio.sleep(backoff.next_s())
                rollout.opening = None
        except (RollmeshError, HarborError) as error:
            if isinstance(error, RolloutEndedError) and not rollout.has_ended:
                self._rollouts.pop(rollout.id, None)  # its end was noted long ago
            status = 400 if isinstance(error, InvalidFieldError) else 503
            if isinstance(error, SessionClosedError | RolloutEndedError):
                status = 410
            await request.fail(status, getattr(error, "reason", "unavailable").lower(), str(error))
        except (aiohttp.ClientError, TimeoutError) as error:
            await request.fail(503, "unavailable", str(error) or type(error).__name__)
        finally:
            rollout.answers.discard(this)

    async def _forward(self, base_url: str, request: _Request) -> None:
        frame = request.frame
        if not (path := path_of(frame["target"])):
            await request.fail(404, "invalid_target", f"there is no {frame['target'][:200]}")
            return
        async with self._http.request(
            frame["method"],
            URL(base_url.removesuffix("/v1") + path, encoded=True),
            headers=request.headers(),
            data=base64.b64decode(frame["body_b64"]),
            timeout=_ANSWER,
            allow_redirects=False,
        ) as response:
            headers = [
                (name.lower(), text)
                for name, text in response.headers.items()
                if name.lower() not in _NOT_RETURNED
            ]
            await request.begin(response.status, headers)
            await request.pass_on(response.content)

    def _opening(self, rollout: Rollout) -> asyncio.Task[Session]:
        """Returns the opening of a rollout's session. One that has failed is tried again."""
        opening = rollout.opening
        if opening is None or (
            opening.done() and (opening.cancelled() or opening.exception() is not None)
        ):
            opening = asyncio.get_running_loop().create_task(self._session(rollout))
            self._openings.add(opening)
            opening.add_done_callback(self._opened)
            rollout.opening = opening
        return opening

    def _opened(self, opening: asyncio.Task[Session]) -> None:
        self._openings.discard(opening)
        if not opening.cancelled():
            opening.exception()  # each waiting request has it

    @abstractmethod
    async def _session(self, rollout: Rollout) -> Session:
        """Returns the session of a rollout.

        Raises:
            HarborError: There is none, or the server does not answer.
            RollmeshError: The mesh cannot open it.
        """

    @abstractmethod
    async def _close_ended(self) -> None:
        """Closes the sessions of rollouts that have ended, if the relay opened them."""

    def _what(self, **more: object) -> dict[str, dict[str, object]]:
        return fields(server=self._server, session=self._name, **more)


class Connector(RelayClient):
    """Opens a session for each rollout that uses the relay's session, and closes it."""

    def __init__(
        self,
        client: Client,
        server: str,
        name: str,
        key: str,
        *,
        reward: str = "reward",
        run_id: str = "",
        trials: ServedTrials | None = None,
    ) -> None:
        """Connects nothing yet.

        Args:
            client: Of the mesh.
            server: URL of the Harbor server.
            name: The `session_id` with which jobs are submitted. One connector at a time has it.
            key: The server's API key.
            reward: Name of the verifier's reward that is the session's. The others are metadata.
            run_id: The run of the sessions.
            trials: Where the server keeps its trials, if this process reaches them. They get the
                sampled tokens.
        """
        super().__init__(server, name, key)
        self._client = client
        self._trials = trials
        self._reward = reward
        self._run_id = run_id
        self._begun = ""
        """Time of the server when this connector asked it first."""
        self._noted = ("", "")
        """Time and id of the last rollout whose end is noted."""
        self._jobs: dict[str, bool] = {}
        """Whether the sessions of a job's rollouts are this connector's, by the id of the job."""

    async def _session(self, rollout: Rollout) -> Session:
        """Opens the session of a rollout, or finds it.

        Raises:
            RolloutEndedError: A request came after the end, or the server lacks the rollout.
            HarborError: The server does not answer.
            RollmeshError: The mesh cannot open it.
        """
        (found,) = await self._query([[_ROWS, rollout.id]])
        if not found:
            raise RolloutEndedError(f"{_UNKNOWN} {rollout.id}")
        (row,) = found
        if row["state"] in _ENDED and not rollout.has_ended:
            raise RolloutEndedError(f"rollout {rollout.id} has ended")
        policy = [row[name] for name in ("job_id", "task_name", "task_digest", "agent")]
        (seats,) = await self._query([[_SEATS, *policy]])
        first = json.loads(row["retry_ids"])[-1]
        ids = [one["id"] for one in seats]
        request = self._client.session_request(
            request_id=_request_id(rollout.id),
            group_id=f"{row['job_id']}/{sha256(json.dumps(policy).encode()).hexdigest()[:16]}",
            sample_index=ids.index(first),
            group_size=len(ids),
            run_id=self._run_id,
            metadata={
                "harbor_rollout": rollout.id,
                "harbor_job": row["job_id"],
                "harbor_trial": row["name"],
                "harbor_task": row["task_name"],
                "harbor_agent": row["agent_name"] or "",
            },
        )
        return await self._client.open_session(request)

    async def _query(self, statements: Sequence[Sequence[Any]]) -> list[list[dict[str, Any]]]:
        """Returns the rows of each statement.

        Raises:
            HarborError: The server does not answer, or refuses.
        """
        try:
            async with self._http.post(
                f"{self._server}/query", json=statements, headers=self._headers
            ) as response:
                found = await response.json(content_type=None)
                results = found["results"] if response.status == 200 else []
                rows: list[list[dict[str, Any]]] = [one["rows"] for one in results]
        except (aiohttp.ClientError, TimeoutError, ValueError, KeyError) as error:
            raise HarborError(f"{self._server}/query: {error or 'no answer in time'}") from error
        if not rows:
            refused = json.dumps(found)[:500]
            raise HarborError(f"the Harbor server refuses a question: {refused}")
        return rows

    async def _close_ended(self) -> None:
        """Closes the sessions of rollouts that have ended, while the connector has the relay."""
        while True:
            try:
                if not self._begun:
                    ((times,),) = await self._query([[_NOW]])
                    self._begun, self._noted = times["now"], (times["yesterday"], "")
                if self.connected.is_set():  # else another connector may have it
                    await self._note_ends()
            except (RollmeshError, HarborError) as error:
                _log.warning("ends were not read", extra=self._what(error=str(error)))
            known = list(self._rollouts) if self.connected.is_set() else []
            for start in range(0, len(known), _MOST_ASKED):
                await self._close_those_of(known[start : start + _MOST_ASKED])
            await asyncio.sleep(_POLL_S)

    async def _note_ends(self) -> None:
        """Notes the next rollouts that have ended, also those that never called the model.

        Raises:
            HarborError: The server does not answer, or refuses.
            RollmeshError: The mesh does not say whether it has sessions of a job.
        """
        (rows,) = await self._query([[_ENDS, *self._noted, self._noted[0]]])
        for row in rows:
            if row["id"] in self._rollouts or await self._is_own(row):
                self._rollouts.setdefault(row["id"], Rollout(row["id"])).has_ended = True
            self._noted = (row["updated_at"], row["id"])

    async def _is_own(self, row: Mapping[str, Any]) -> bool:
        """Returns whether the sessions of a rollout's job are to be closed by this connector.

        A job that ended before the connector began may belong to an earlier mesh. So this mesh must
        have a session of it.
        """
        job_id = row["job_id"]
        if job_id not in self._jobs:
            url = f"{self._server}/jobs/{job_id}"
            try:
                async with self._http.get(url, headers=self._headers) as response:
                    found = await response.json(content_type=None)
                    name = found["job"].get("session_id") if response.status == 200 else None
            except (aiohttp.ClientError, TimeoutError, ValueError, KeyError) as error:
                raise HarborError(f"{url}: {error or 'no answer in time'}") from error
            is_own = name == self._name
            if is_own and row["finished_at"] is not None and row["finished_at"] < self._begun:
                (rollouts,) = await self._query([[_OF_JOB, job_id]])
                is_own = False
                for one in rollouts:
                    if await self._client.find_session(_request_id(one["id"])):
                        is_own = True
                        break
            if len(self._jobs) >= _MOST_JOBS:
                self._jobs.clear()
            self._jobs[job_id] = is_own
        return self._jobs[job_id]

    async def _close_those_of(self, ids: Sequence[str]) -> None:
        """Closes the sessions of those rollouts that have ended."""
        marks = ", ".join("?" * len(ids))
        asked = [[one.replace("?", marks), *ids] for one in (_ROWS, _REWARDS)]
        try:
            rows, rewards = await self._query(asked)
        except HarborError as error:
            _log.warning("rollouts were not read", extra=self._what(error=str(error)))
            return
        named: dict[str, dict[str, Any]] = {}
        for one in rewards:
            named.setdefault(one["rollout_id"], {})[one["reward_key"]] = one["value"]
        endings = dict.fromkeys(ids, _LOST) | {
            row["id"]: ending_of(row, named.get(row["id"], {}), self._reward) for row in rows
        }
        ended = [
            (self._rollouts[one], ending)
            for one, ending in endings.items()
            if ending is not None and (ending is _LOST or self._rollouts[one].has_ended)
        ]
        for start in range(0, len(ended), _CLOSED_AT_ONCE):
            batch = ended[start : start + _CLOSED_AT_ONCE]
            await asyncio.gather(*(self._close(*one) for one in batch))

    async def _close(self, rollout: Rollout, ending: Ending) -> None:
        """Closes a session. If the mesh is away, the next round tries again."""
        rollout.has_ended = True
        for answer in rollout.answers:  # no agent waits for them
            answer.cancel()
        try:
            session = await asyncio.shield(self._opening(rollout))
            session.reward = ending.reward
            await self._client.close_session(
                session,
                outcome=ending.outcome,
                metadata=ending.metadata,
                superseded=ending.superseded,
            )
        except (SessionClosedError, RolloutEndedError) as error:
            what = self._what(rollout=rollout.id, error=str(error))
            _log.info("session was closed before", extra=what)
        except (RollmeshError, HarborError) as error:
            what = self._what(rollout=rollout.id, error=str(error))
            _log.warning("session was not closed, will retry", extra=what)
            return
        else:
            try:
                if self._trials is not None:
                    await self._trials.write(self._client, session.session_id)
            except (RollmeshError, TimeoutError, OSError, ValueError) as error:
                what = self._what(session_id=session.session_id, error=str(error))
                _log.warning("sampled tokens were not written", extra=what)
        self._rollouts.pop(rollout.id, None)


def _request_id(rollout_id: str) -> str:
    """Returns the request id of a rollout's session."""
    return f"harbor-{rollout_id}"


def refusal(status: int) -> str:
    """Returns why the server refuses a connection, and the remedy."""
    match status:
        case 401:
            return "the Harbor server does not know the API key; give that of HARBOR_API_KEY there"
        case 404:
            return "the Harbor server has no relay; start it with --relay-url"
        case _:
            return (
                f"the Harbor server refuses the connection ({status}); a session has 1 to 200 "
                "letters, digits, - and _"
            )
