"""The server under test: requests to it, and its answers."""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httpx2

_EXCERPT = 300
_REFUSED = {400, 422}
_MOST_SEEN = 10_000


class FailedError(Exception):
    """A requirement does not hold. The message says how the server behaved."""


def need(condition: object, problem: str) -> None:
    """Fails the check unless `condition` holds.

    Raises:
        FailedError: It does not.
    """
    if not condition:
        raise FailedError(problem)


def mapping(value: Any, field: str) -> dict[str, Any]:
    """Returns a JSON object.

    Raises:
        FailedError: It is something else.
    """
    if isinstance(value, dict):
        return value
    raise FailedError(f"{field} is {value!r:.200}, not an object")


def numbers(value: Any, *names: str) -> list[int]:
    """Returns the counts of a `usage`, by their names.

    Raises:
        FailedError: One of them is missing, or is no integer.
    """
    found = mapping(value, "usage")
    for name in names:
        need(type(found.get(name)) is int, f"usage.{name} is {found.get(name)!r}")
    return [found[name] for name in names]


@dataclass(frozen=True, slots=True)
class Answer:
    """A complete HTTP answer."""

    status: int
    headers: httpx2.Headers
    text: str

    def value(self) -> Any:
        """Returns the JSON value of the body.

        Raises:
            FailedError: It is not JSON.
        """
        try:
            return json.loads(self.text)
        except ValueError:
            raise FailedError(f"status {self.status}, the body is not JSON: {self}") from None

    def body(self) -> dict[str, Any]:
        """Returns the JSON object of an answer with status 200.

        Raises:
            FailedError: The status is another, or the body is no JSON object.
        """
        need(self.status == 200, f"status {self.status}: {self}")
        value = self.value()
        need(isinstance(value, dict), f"the body is not a JSON object: {self}")
        return dict(value)

    def __str__(self) -> str:
        """Returns the beginning of the body, on one line."""
        return " ".join(self.text[:_EXCERPT].split()) or "an empty body"


def need_refused(answers: Mapping[str, Answer]) -> None:
    """Fails the check unless all answers, by what was asked, refuse a bad request.

    Raises:
        FailedError: Names the others and their statuses.
    """
    wrong = [f"{name}: {one.status}" for name, one in answers.items() if one.status not in _REFUSED]
    need(not wrong, f"not refused with 400 or 422: {'; '.join(wrong)}")


@dataclass(frozen=True, slots=True)
class Streamed:
    """A streamed answer as far as it was read."""

    answer: Answer
    """Status and headers. The text is that of an answer that is no stream."""
    events: list[httpx2.ServerSentEvent]
    broken: bool = False
    """Whether the connection ended in the middle."""

    def datas(self) -> list[dict[str, Any]]:
        """Returns the JSON objects of the events, `[DONE]` left out.

        Raises:
            FailedError: There is no stream with status 200, or an event is no JSON object.
        """
        need(self.answer.status == 200, f"status {self.answer.status}: {self.answer}")
        need(not self.broken, "the connection was closed before the stream ended")
        found: list[dict[str, Any]] = []
        for event in self.events:
            if event.data == "[DONE]":
                continue
            value: Any = None
            with suppress(ValueError):
                value = event.json()
            need(isinstance(value, dict), f"an event is no JSON object: {event.data[:_EXCERPT]!r}")
            found.append(dict(value))
        return found


@dataclass(slots=True)
class Server:
    """A server, and what all checks need to know of it."""

    client: httpx2.AsyncClient
    """Has the base URL and the key."""
    model: str
    context_tokens: int | None = None
    """Context length of the model. None if it is not known."""
    key: str = ""
    capture_url: str = ""
    """Where the records of sessions are read. Empty if there is no such place."""
    seen: list[tuple[int, httpx2.Headers]] = field(default_factory=list)
    """Status and headers of the answers so far."""

    async def send(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        """Sends a request. A body of bytes is sent as it is, any other as JSON."""
        response = await self.client.request(method, path, **_request(body, headers))
        return self._noted(Answer(response.status_code, response.headers, response.text))

    async def post(self, path: str, body: Any, headers: Mapping[str, str] | None = None) -> Answer:
        """Posts a request. See `send`."""
        return await self.send("POST", path, body, headers)

    async def stream(
        self,
        path: str,
        body: Any,
        headers: Mapping[str, str] | None = None,
        *,
        at_most: int | None = None,
    ) -> Streamed:
        """Posts a request and reads its stream. Leaves after `at_most` events if that is given."""
        events: list[httpx2.ServerSentEvent] = []
        request = _request(body, headers)
        async with self.client.stream("POST", path, **request) as response:
            if not response.headers.get("content-type", "").startswith("text/event-stream"):
                await response.aread()
                answer = Answer(response.status_code, response.headers, response.text)
                return Streamed(self._noted(answer), events)
            answer = self._noted(Answer(response.status_code, response.headers, ""))
            try:
                async for event in httpx2.EventSource(response):
                    events.append(event)
                    if at_most is not None and len(events) >= at_most:
                        break
            except httpx2.RemoteProtocolError:
                return Streamed(answer, events, broken=True)
        return Streamed(answer, events)

    def _noted(self, answer: Answer) -> Answer:
        if len(self.seen) < _MOST_SEEN:
            self.seen.append((answer.status, answer.headers))
        return answer


def _request(body: Any, headers: Mapping[str, str] | None) -> dict[str, Any]:
    fields: dict[str, Any] = {"headers": dict(headers or {})}
    if body is not None:
        fields["content"] = body if isinstance(body, bytes) else json.dumps(body).encode()
        fields["headers"].setdefault("content-type", "application/json")
    return fields
