"""The response object: what a request asked for, and what became of it."""

from collections.abc import Sequence
from typing import Any

import orjson

from rollmesh.runtime.codec.enums import name_of
from rollmesh.runtime.errors import RollmeshError
from rollmesh.sidecar.openai_responses import ids
from rollmesh.sidecar.openai_responses.outputs import (
    COMPLETED,
    IN_PROGRESS,
    INCOMPLETE,
    Items,
    Segment,
    segments_of,
)
from rollmesh.v1 import gateway_pb2, sampling_pb2

_STATUSES = {
    sampling_pb2.FINISH_REASON_STOP: COMPLETED,
    sampling_pb2.FINISH_REASON_LENGTH: INCOMPLETE,
}


def status_of(done: gateway_pb2.ChatAnswer) -> str:
    """Returns the status of an answer: completed, or incomplete if a limit cut it.

    Raises:
        RollmeshError: The answer was aborted; no turn ends this way.
    """
    if done.finish_reason not in _STATUSES:
        name = name_of(sampling_pb2.FinishReason.DESCRIPTOR, done.finish_reason)
        raise RollmeshError(f"finish_reason: the gateway sent {name}, which cannot end a turn")
    return _STATUSES[done.finish_reason]


class ResponseWriter:
    """Writes the response object of one request."""

    def __init__(self, settings: bytes, model: str, *, instructed: bool) -> None:
        """Takes what a response repeats of its request.

        Args:
            settings: The members of the object that the request gives, as JSON without braces:
                they are written once, because tools are large.
            model: Name under which the model answers.
            instructed: Whether the request has instructions.
        """
        self._settings = settings
        self._model = model
        self._instructed = instructed

    def begun(self, answer_id: str, created: int) -> bytes:
        """Returns the object of an answer that has begun."""
        return self._object(answer_id, created, IN_PROGRESS, [])

    def done(
        self, done: gateway_pb2.ChatAnswer, segments: Sequence[Segment], items: Items, created: int
    ) -> bytes:
        """Returns the object of a complete answer.

        Args:
            done: The answer.
            segments: Its segments, in order.
            items: Writes its items.
            created: When it was created, seconds since 1970 UTC.
        """
        status = status_of(done)
        output = written(segments, items, status)
        return self._object(
            done.answer_id,
            created,
            status,
            output,
            usage=_usage(done),
            incomplete_details={"reason": "max_output_tokens"} if status == INCOMPLETE else None,
            completed_at=done.created_unix_ms // 1000 if status == COMPLETED else None,
        )

    def whole(self, done: gateway_pb2.ChatAnswer, items: Items) -> bytes:
        """Returns the object of a complete answer that is not streamed."""
        segments = list(segments_of(done.message))
        return self.done(done, segments, items, done.created_unix_ms // 1000)

    def _object(
        self,
        answer_id: str,
        created: int,
        status: str,
        output: list[dict[str, Any]],
        **others: Any,
    ) -> bytes:
        own = {
            "id": ids.response_id(answer_id, instructed=self._instructed),
            "object": "response",
            "created_at": created,
            "status": status,
            "model": self._model,
            "output": output,
            "error": None,
            "incomplete_details": None,
            "usage": None,
            **others,
        }
        return orjson.dumps(own)[:-1] + b"," + self._settings + b"}"


def written(segments: Sequence[Segment], items: Items, status: str) -> list[dict[str, Any]]:
    """Returns the items of a complete answer; a limit leaves the last one incomplete."""
    last = len(segments) - 1
    return [items.done(one, status if at == last else COMPLETED) for at, one in enumerate(segments)]


def _usage(done: gateway_pb2.ChatAnswer) -> dict[str, Any]:
    return {
        "input_tokens": done.prompt_tokens,
        "input_tokens_details": {"cached_tokens": done.cached_tokens},
        "output_tokens": done.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": done.prompt_tokens + done.completion_tokens,
    }
