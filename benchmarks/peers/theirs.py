"""The records of other servers, read by their own documented routes."""

import base64
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx2
import numpy as np
import numpy.typing as npt
from aiohttp import web

from benchmarks.peers.door import Record, listening, span
from benchmarks.peers.engine import Engine

_TIMEOUT_S = 120


@dataclass
class Theirs:
    """A server in front of the scripted engine, or an engine that is a server itself."""

    url: str
    """Without a path."""
    engine: Engine | None = None
    http: httpx2.AsyncClient = field(
        default_factory=lambda: httpx2.AsyncClient(timeout=_TIMEOUT_S, trust_env=False)
    )

    async def call(self, method: str, path: str, body: Any = None, **query: Any) -> Any:
        """Returns the JSON answer of a route of the server."""
        answer = await self.http.request(method, self.url + path, json=body, params=query)
        answer.raise_for_status()
        return answer.json() if answer.content else None

    def begin(self) -> None:
        """Forgets the engine's calls so far."""
        if self.engine is not None:
            self.engine.calls.clear()

    def record(self, rows: list[Record]) -> Record:
        """Returns a record with the engine's calls."""
        calls = {} if self.engine is None else {"calls": list(self.engine.calls)}
        return {"rows": rows, **calls}

    async def renew(self) -> bool:
        """Most have no route for versions."""
        return False


class Rllm(Theirs):
    """rLLM's model gateway: the traces of a session."""

    async def open(self, _sampling: Record) -> Record:
        """Opens a session."""
        self.begin()
        found = (await self.call("POST", "/sessions", {}))["session_id"]
        return {"id": found, "base_url": f"{self.url}/sessions/{found}/v1", "key": "none"}

    async def close(self, session_id: str) -> Record:
        """Reads the traces."""
        await self.call("POST", "/admin/flush")
        traces = await self.call("GET", f"/sessions/{session_id}/traces")
        rows = [
            row(
                one["prompt_token_ids"],
                one["completion_token_ids"],
                one["logprobs"],
                ended(one["finish_reason"], _stop_reason(one["raw_response"])),
                (one["metadata"] or {}).get("weight_version"),
            )
            for one in traces
        ]
        return self.record(rows)


@dataclass
class AgentLightning(Theirs):
    """Agent Lightning's server: the events of a rollout as triplets."""

    version: int = 0
    upstream: str = ""
    """The engine's URL, without a path."""

    async def register(self) -> None:
        """Names the engine and its version."""
        entry = {"model": "policy", "endpoint": f"{self.upstream}/v1", "version": self.version}
        await self.call("POST", "/api/models", [entry])

    async def open(self, _sampling: Record) -> Record:
        """Creates a rollout."""
        self.begin()
        (made,) = await self.call("POST", "/api/rollouts", [{"input": {}}])
        found = made["rollout_id"]
        base = f"{self.url}/proxy/rollout/{found}/attempt/0/mode/train/openai/v1"
        return {"id": found, "base_url": base, "key": "none"}

    async def renew(self) -> bool:
        """Registers the engine with the next version."""
        self.version += 1
        await self.register()
        return True

    async def close(self, session_id: str) -> Record:
        """Reads the triplets. The reason for which an answer ended is in the whole events only."""
        path = f"/api/rollouts/{session_id}/events"
        ends: dict[tuple[int, ...], list[str]] = {}
        for event in await self.call("GET", path, event_type="model_request"):
            answer = event["data"]["response"]
            for choice in (answer.get("choices") or [])[:1]:
                labels = ended(choice.get("finish_reason"), choice.get("stop_reason"))
                ends[tuple(answer.get("prompt_token_ids") or ())] = labels
        rows = []
        triplets = await self.call("GET", path, event_type="model_request", format="triplet")
        for data in (one["data"] for one in triplets):
            prompt, labels = data["prompt_token_ids"], ends.get(tuple(data["prompt_token_ids"]), [])
            version = str(data["server"]["version"])
            logprobs = data["response_log_probs"]
            rows.append(row(prompt, data["response_token_ids"], logprobs, labels, version))
        return self.record(rows)


class OpenEnv(Theirs):
    """OpenEnv's capture server: the sequences of a rollout."""

    async def open(self, _sampling: Record) -> Record:
        """Opens a session, whose id is the agent's key."""
        self.begin()
        found = (await self.call("POST", "/sessions", {}))["session_id"]
        return {"id": found, "base_url": f"{self.url}/v1", "key": found}

    async def close(self, session_id: str) -> Record:
        """Reads the rollout, with the sequences that it discards."""
        path = f"/sessions/{session_id}/rollout"
        found = await self.call("GET", path, include_discarded="true")
        turns = {one["node_id"]: one for one in found["turns"]}
        rows = [self._row(one, turns, found["validation"]) for one in found["sequences"]]
        return self.record(rows)

    def _row(self, found: Any, turns: dict[str, Any], findings: list[str]) -> Record:
        labels = [] if found["role"] == "agent" else [found["role"]]
        spans = []
        for turn in (turns[one] for one in found["node_ids"]):
            start, end = turn["n_prompt"], turn["n_prompt"] + turn["n_sampled"]
            trained = found["trainable"] and end > start and all(found["loss_mask"][start:end])
            discarded = ["discarded"] if turn["discarded"] else []
            spans.append(
                span(
                    start,
                    end,
                    found["logprobs"][start:end],
                    trained=trained,
                    labels=[*ended(turn["finish_reason"], None), *discarded],
                )
            )
        labels += [*found["validation"], *findings]
        return {"token_ids": found["input_ids"], "labels": labels, "sampled": spans}


@dataclass
class AReaL(Theirs):
    """AReaL's data proxy: the tensors of a trajectory, joined."""

    version: int = 0

    async def open(self, _sampling: Record) -> Record:
        """Starts a session."""
        self.begin()
        made = await self.call("POST", "/rl/start_session", {"task_id": "conformance"})
        (session,) = made["sessions"]
        key = session["session_api_key"]
        return {"id": f"{session['session_id']} {key}", "base_url": self.url, "key": key}

    async def renew(self) -> bool:
        """Tells the version of the engine."""
        self.version += 1
        await self.call("POST", "/set_version", {"version": self.version})
        return True

    async def close(self, session_id: str) -> Record:
        """Rewards the session, which ends its trajectory, and reads the tensors.

        A session without an answer has no trajectory.
        """
        session, _, key = session_id.rpartition(" ")
        rewarded = {"authorization": f"Bearer {key}"}
        answer = await self.http.post(
            f"{self.url}/rl/set_reward", json={"reward": 1.0}, headers=rewarded
        )
        if answer.status_code == 400:
            return self.record([])
        wanted = {"session_ids": [session], "style": "concat"}
        found = (await self.call("POST", "/export_trajectories", wanted))["traj"]
        tensors = {name: await self._tensor(one) for name, one in found.items()}
        return self.record([_leaf(tensors, at) for at in range(len(tensors["input_ids"]))])

    async def _tensor(self, found: Any) -> npt.NDArray[Any]:
        shard = found["data"]["shard"]["data"]["shard_id"]
        one = await self.call("GET", f"/data/{shard}")
        raw = np.frombuffer(base64.b64decode(one["data"]), one["dtype"].removeprefix("torch."))
        return raw.reshape(one["shape"])


def _leaf(tensors: Mapping[str, npt.NDArray[Any]], at: int) -> Record:
    """Returns a row of the batch: its answers are what the loss mask has."""
    edges = np.flatnonzero(np.diff(tensors["loss_mask"][at], prepend=0, append=0)).reshape(-1, 2)
    spans = [
        span(
            start,
            end,
            tensors["logprobs"][at][start:end].tolist(),
            version=str(tensors["versions"][at][start]),
        )
        for start, end in edges.tolist()
    ]
    ids = tensors["input_ids"][at][: tensors["attention_mask"][at].sum()].tolist()
    return {"token_ids": ids, "labels": [f"leaf {at}"] if at else [], "sampled": spans}


class Verifiers(Theirs):
    """verifiers' interception server, behind `intercept.py`: the branches of a trace."""

    async def open(self, sampling: Record) -> Record:
        """Opens a session. Its sampling is not the agent's."""
        self.begin()
        return dict(await self.call("POST", "/sessions", sampling))

    async def close(self, session_id: str) -> Record:
        """Reads the branches."""
        return self.record(list(map(_branch, await self.call("DELETE", f"/sessions/{session_id}"))))


def _branch(found: Any) -> Record:
    ids: list[int] = []
    spans, labels = [], [f"branch {found['index']}"] if found["index"] else []
    for node in found["nodes"]:
        end = len(ids) + len(node["token_ids"])
        labels += node["links"]
        if node["sampled"]:
            spans.append(
                span(
                    end - sum(node["mask"]),
                    end,
                    node["logprobs"],
                    trained=found["trainable"],
                    labels=ended(node["finish_reason"], None),
                )
            )
        ids += node["token_ids"]
    return {"token_ids": ids, "labels": labels, "sampled": spans}


@dataclass
class Answers(Theirs):
    """A server that keeps no record for trainers: the answers with `return_token_ids`, as sent."""

    door: str = ""
    added: Callable[[Any], Record] = lambda _body: {}
    """Fields that are added to a request."""
    answers: dict[str, list[Any]] = field(default_factory=dict)

    async def open(self, _sampling: Record) -> Record:
        """Begins a log of answers."""
        self.begin()
        found = uuid.uuid4().hex
        self.answers[found] = []
        return {"id": found, "base_url": f"{self.door}/{found}/v1", "key": "none"}

    async def forward(self, request: web.Request) -> web.Response:
        """Passes a request on and keeps its answer."""
        url = f"{self.url}/v1/chat/completions"
        keep = ("idempotency-key", "x-stainless-retry-count")
        headers = {name: request.headers[name] for name in keep if name in request.headers}
        body = await request.json()
        answer = await self.http.post(url, json=body | self.added(body), headers=headers)
        if answer.status_code == 200:
            self.answers[request.match_info["id"]].append(answer.json())
        return web.Response(
            status=answer.status_code, body=answer.content, content_type="application/json"
        )

    async def close(self, session_id: str) -> Record:
        """Returns one row for each choice."""
        rows = []
        for answer in self.answers.pop(session_id):
            for choice in answer["choices"]:
                given = choice.get("provider_specific_fields") or {}
                ids = choice.get("token_ids") or given.get("token_ids") or []
                entries = (choice.get("logprobs") or {}).get("content") or []
                logprobs = [one["logprob"] for one in entries]
                stop = choice.get("stop_reason") or given.get("stop_reason")
                labels = ended(choice["finish_reason"], stop)
                rows.append(row(answer.get("prompt_token_ids") or [], ids, logprobs, labels))
        return self.record(rows)


@asynccontextmanager
async def logged(server: Answers) -> AsyncIterator[None]:
    """Serves the door through which answers are logged."""
    async with listening({("POST", "/{id}/v1/chat/completions"): server.forward}) as url:
        server.door = url
        yield


def row(
    prompt: list[int],
    sampled: list[int],
    logprobs: list[float] | None,
    labels: list[str],
    version: str | None = None,
) -> Record:
    """Returns the row of one request."""
    start, end = len(prompt), len(prompt) + len(sampled)
    one = span(start, end, logprobs or [], labels=labels, version=version)
    return {"token_ids": [*prompt, *sampled], "sampled": [one]}


def _stop_reason(answer: Any) -> Any:
    choices = (answer or {}).get("choices") or [{}]
    return choices[0].get("stop_reason")


def ended(finish_reason: str | None, stop_reason: Any) -> list[str]:
    """Returns the labels of an answer that did not end by itself."""
    finish = [] if finish_reason in {"stop", None} else [finish_reason]
    return [*finish, *([f"stop {stop_reason}"] if isinstance(stop_reason, str) else [])]
