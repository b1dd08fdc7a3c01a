"""The record of a session, as a trainer reads it, from the capture URL.

    POST   {capture}/sessions               {"id", "base_url", "key"} of a new session
    POST   {capture}/sessions/{id}/version  new weights for the engine. 404 or 501: not here
    DELETE {capture}/sessions/{id}          ends the session: {"rows": [...], "calls": [...]}

A row is one sequence that a trainer would train on:

    {"token_ids": [int], "labels": [str], "sampled": [{"start": int, "end": int, "trained": bool,
     "labels": [str], "version": str or null, "logprobs": [float]}]}

Labels set a row or an answer apart from a plain sample: a split, a cut, an error. A server that
records each request by itself has one row for each. `calls` is the engine's own log of its prompts
and samples: {"prompt": [int], "sampled": [[int] for each choice]}, null where it showed no ids. It
may be missing where answers show ids on `return_token_ids`.

A session is opened with {"sampling": {...}}: fields that each of its requests will have, for a
server that takes them from the session.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from rollmesh.conformance.chat.requests import PATH, checked, message_of, request
from rollmesh.conformance.checks import NotSeenError
from rollmesh.conformance.server import Answer, Server, mapping, need

_NO_VERSIONS = {404, 405, 501}


@dataclass(frozen=True, slots=True)
class Call:
    """One sample of the engine."""

    prompt: tuple[int, ...]
    sampled: tuple[int, ...]
    """Empty if the engine showed no ids."""


@dataclass(frozen=True, slots=True)
class Span:
    """The ids of one answer within a row."""

    row: tuple[int, ...]
    start: int
    end: int
    trained: bool
    labels: tuple[str, ...]
    """Those of the answer, and of its row."""
    version: str | None
    logprobs: int
    """Number of log-probabilities."""

    def holds(self, call: Call) -> bool:
        """Whether these are ids of the sample, after exactly the prompt that the engine had."""
        ids = self.row[self.start : self.end]
        same = ids == call.sampled[: len(ids)] and (self.labels or len(ids) == len(call.sampled))
        return bool(ids) and bool(same) and self.row[: self.start] == call.prompt


@dataclass(slots=True)
class Episode:
    """A session of the server under test."""

    server: Server
    base_url: str
    key: str
    at: str
    """URL of the session at the capture."""
    sampling: dict[str, Any]
    """Fields of each of its requests."""
    shown: list[dict[str, Any]] = field(default_factory=list)
    """The different answers so far, in order."""
    calls: list[Call] = field(default_factory=list)
    """The samples of the engine, in order. Empty before `close`."""
    spans: list[Span] = field(default_factory=list)
    """The answers of the record. Empty before `close`."""

    async def post(self, *messages: dict[str, Any], **fields: Any) -> Answer:
        """Asks in the session."""
        fields = {**self.sampling, **fields}
        body = request(self.server, *messages, return_token_ids=True, logprobs=True, **fields)
        marks = fields.pop("marks", None) or {}
        body.pop("marks", None)
        headers = {**({"authorization": f"Bearer {self.key}"} if self.key else {}), **marks}
        return await self.server.post(f"{self.base_url}/{PATH}", body, headers)

    async def ask(self, *messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
        """Returns the message of a complete answer, as agents echo it."""
        return self.took((await self.post(*messages, **fields)).body())

    def took(self, body: dict[str, Any], choice: int = 0) -> dict[str, Any]:
        """Notes an answer. Returns the message of a choice, as agents echo it."""
        if all(body.get("id") != one.get("id") for one in self.shown):
            self.shown.append(checked(body))
        message = message_of({**body, "choices": body["choices"][choice:]})
        return {"role": "assistant", "content": message.get("content") or ""}

    async def next_version(self) -> None:
        """Has the engine's weights updated.

        Raises:
            NotSeenError: The server has no versions.
        """
        answer = await self.server.post(f"{self.at}/version", {})
        if answer.status in _NO_VERSIONS:
            raise NotSeenError(f"no new version can be told to the server: {answer}")
        need(answer.status == 200, f"a new version: status {answer.status}: {answer}")

    async def close(self) -> None:
        """Ends the session and reads its record."""
        record = (await self.server.send("DELETE", self.at)).body()
        self.spans = [span for row in record["rows"] for span in _spans(mapping(row, "a row"))]
        logged = record.get("calls")
        found = [_shown(one) for one in self.shown] if logged is None else map(_logged, logged)
        self.calls = [call for calls in found for call in calls]


@asynccontextmanager
async def episode(server: Server, **sampling: Any) -> AsyncIterator[Episode]:
    """Opens a session. It is read at the end of the block.

    Args:
        server: The server under test.
        sampling: Fields of each request of the session.

    Raises:
        FailedError: The capture gives no session, or no record of it.
    """
    opened = (await server.post(f"{server.capture_url}/sessions", {"sampling": sampling})).body()
    base_url, key = str(opened["base_url"]).rstrip("/"), str(opened.get("key") or "")
    at = f"{server.capture_url}/sessions/{opened['id']}"
    found = Episode(server, base_url, key, at, sampling)
    try:
        yield found
    except BaseException:
        await server.send("DELETE", found.at)
        raise
    await found.close()


def _spans(row: dict[str, Any]) -> list[Span]:
    ids, labels = tuple(row["token_ids"]), tuple(row.get("labels") or ())
    return [
        Span(
            ids,
            one["start"],
            one["end"],
            one["trained"],
            (*labels, *(one.get("labels") or ())),
            one.get("version"),
            len(one.get("logprobs") or ()),
        )
        for one in row["sampled"]
    ]


def _shown(body: dict[str, Any]) -> list[Call]:
    prompt = body.get("prompt_token_ids")
    if not isinstance(prompt, list):
        raise NotSeenError("neither the answers nor the capture show what the engine received")
    return [Call(tuple(prompt), tuple(one.get("token_ids") or ())) for one in body["choices"]]


def _logged(call: dict[str, Any]) -> list[Call]:
    return [Call(tuple(call["prompt"] or ()), tuple(one or ())) for one in call["sampled"]]
