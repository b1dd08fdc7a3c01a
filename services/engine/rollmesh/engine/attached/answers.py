"""Writes requests for `/inference/v1/generate` of vLLM 0.32, and reads and checks its answers."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from rollmesh.engine.backend import GenerateInput, message
from rollmesh.engine.scores import ScoreInput, Scores
from rollmesh.runtime.errors import EngineFaultError
from rollmesh.v1 import engine_pb2, sampling_pb2

_FINISHES = {
    "stop": sampling_pb2.FINISH_REASON_STOP,
    "length": sampling_pb2.FINISH_REASON_LENGTH,
    "abort": sampling_pb2.FINISH_REASON_ABORT,
}
_NO_NUMBER = -9999.0
"""vLLM writes it in place of NaN and of minus infinity."""
_MALFORMED = (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError)
_REST_BYTES, _TOKEN_BYTES, _CANDIDATE_BYTES = 64 * 1024, 256, 128


def generate_body(request: GenerateInput, request_id: str) -> dict[str, Any]:
    """Returns the request for a generation. `request_id` is its id at the server."""
    generate, sampling = request.generate, request.generate.sampling
    params: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "max_tokens": sampling.max_tokens,
        "min_tokens": sampling.min_tokens,
        "stop_token_ids": list(sampling.stop_token_ids),
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "ignore_eos": sampling.ignore_eos,
        "logprobs": candidates(generate.top_logprobs),
        "detokenize": False,
    }
    if sampling.HasField("seed"):
        params["seed"] = sampling.seed
    if sampling.allowed_token_ids:
        params["allowed_token_ids"] = list(dict.fromkeys(sampling.allowed_token_ids))
    if sampling.logit_bias:
        params["logit_bias"] = {str(id_): bias for id_, bias in sampling.logit_bias.items()}
    body: dict[str, Any] = {
        "request_id": request_id,
        "token_ids": request.token_ids.tolist(),
        "sampling_params": params,
    }
    if request.max_chunk_tokens:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return body


def candidates(top: int) -> int:
    """Returns the number of candidates to ask for at each position.

    The server leaves out the last one where the sampled token is none of them, so one more is
    asked for.
    """
    return top + 1 if top else 0


def score_body(request: ScoreInput, request_id: str, *, samples_last: bool) -> dict[str, Any]:
    """Returns the request to score a sequence.

    Args:
        request: The sequence.
        request_id: Its id at the server.
        samples_last: Whether the prompt lacks the last id, which is the only one to be sampled.
    """
    ids = request.token_ids[:-1] if samples_last else request.token_ids
    params: dict[str, Any] = {"temperature": 0.0, "max_tokens": 1, "detokenize": False}
    params["prompt_logprobs"] = request.top_k
    if samples_last:
        last = int(request.token_ids[-1])
        params |= {"logprobs": candidates(request.top_k), "allowed_token_ids": [last]}
    return {"request_id": request_id, "token_ids": ids.tolist(), "sampling_params": params}


def most_bytes(tokens: int, top: int) -> int:
    """Returns the size that an answer with log-probabilities has at most."""
    return _REST_BYTES + tokens * (_TOKEN_BYTES + _CANDIDATE_BYTES * (2 + top))


class Answer:
    """The answer to one request to generate, whole or in parts."""

    def __init__(
        self, request: GenerateInput, vocabulary_tokens: int, version_of: Callable[[str], int]
    ) -> None:
        """Starts without tokens.

        Args:
            request: The request.
            vocabulary_tokens: Exclusive upper bound of ids.
            version_of: Returns the policy version of weights by the server's name for them. It
                raises if the name is another one.
        """
        self._request = request
        self._vocabulary = vocabulary_tokens
        self._version_of = version_of
        self._rows: list[_Row] = []  # not taken yet
        self._taken = 0
        self.finish: engine_pb2.GenerateFinish | None = None
        """How the answer ended."""

    @property
    def sampled(self) -> int:
        """Returns the number of tokens so far."""
        return self._taken + len(self._rows)

    def add(self, part: Any) -> None:
        """Adds the whole answer, or an event of its stream.

        Raises:
            EngineFaultError: It cannot be right.
        """
        try:
            self._add(part)
        except _MALFORMED as error:
            raise EngineFaultError(
                f"the server's answer is malformed: {type(error).__name__}: {error}"
            ) from error

    def messages(self, policy_version: int | None) -> Iterator[engine_pb2.TokenChunk]:
        """Yields the tokens that were added. The last message of an answer has its finish.

        Args:
            policy_version: Version of the tokens. None if only the end of the answer tells it.
        """
        spans: list[tuple[int | None, int]] = [(policy_version, self.sampled)]
        if self.finish is not None:
            spans = [(one.policy_version, one.end) for one in self.finish.version_spans]
        parts = [part for version, end in spans for part in self._take(version, end)]
        if self.finish is not None:
            parts = parts or [engine_pb2.TokenChunk()]
            parts[-1].finish.CopyFrom(self.finish)
        yield from parts

    def _take(self, version: int | None, end: int) -> Iterator[engine_pb2.TokenChunk]:
        """Yields the tokens up to an index, in messages of at most the requested size."""
        top = self._request.generate.top_logprobs
        while (count := end - self._taken) > 0:
            count = min(count, self._request.max_chunk_tokens or count)
            rows, self._rows = self._rows[:count], self._rows[count:]
            self._taken += count
            part = message(
                np.array([one.id for one in rows], np.uint32),
                np.array([one.logprob for one in rows], np.float32),
                np.array([one.top_ids for one in rows], np.uint32).reshape(count, top),
                np.array([one.top_logprobs for one in rows], np.float32).reshape(count, top),
                version or 0,
            )
            if version is None:
                part.ClearField("policy_version")
            yield part

    def _add(self, part: Any) -> None:
        choices = part["choices"]
        if not choices:  # the last event, with the usage
            self._note_usage(part)
            return
        (choice,) = choices
        _expect(choice["index"] == 0 and self.finish is None, "it goes on after its end")
        ids = choice["token_ids"]
        content = (choice["logprobs"] or {}).get("content") or []
        _expect(len(ids) == len(content), f"it has {len(content)} log-probs for {len(ids)} ids")
        top = self._request.generate.top_logprobs
        for id_, entry in zip(ids, content, strict=True):
            _expect(entry["token_id"] == id_, "a log-prob belongs to another id")
            self._rows.append(_Row(entry, top, self._vocabulary))
        most = self._request.generate.sampling.max_tokens
        _expect(self.sampled <= most, f"it has more ids than the {most} requested")
        if choice["finish_reason"] is not None:
            self.finish = self._finish_of(choice)
            self._note_usage(part)
        else:
            _expect(bool(ids), "a part of it is empty")

    def _finish_of(self, choice: Any) -> engine_pb2.GenerateFinish:
        finish = engine_pb2.GenerateFinish(reason=_FINISHES[choice["finish_reason"]])
        at = 0
        for span in choice["weight_versions"] or ():
            start, end = span["start"], span["end"]
            _expect(start == at <= end, "its version spans have gaps")
            if end > start:  # an empty one stands for weights that sampled nothing
                version = self._version_of(span["version"])
                finish.version_spans.add(policy_version=version, start=start, end=end)
            at = end
        _expect(at == self.sampled, "its version spans do not cover its tokens")
        if finish.reason == sampling_pb2.FINISH_REASON_STOP:
            last, stop = self._rows[-1].id, choice["stop_reason"]
            _expect(stop is None or stop == last, "it does not end with its stop token")
            finish.stop_token_id = last
        return finish

    def _note_usage(self, part: Any) -> None:
        usage = part.get("usage") or {}
        if self.finish is None or not usage:
            return
        count = usage["prompt_tokens"]
        _expect(count == len(self._request.token_ids), f"the server received {count} prompt ids")
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        self.finish.cached_tokens = cached


class _Row:
    """One token with its candidates."""

    __slots__ = ("id", "logprob", "top_ids", "top_logprobs")

    def __init__(self, entry: Any, top: int, vocabulary: int) -> None:
        found = sorted(entry["top_logprobs"], key=_rank)[:top] if top else []
        _expect(len(found) == top, f"{len(found)} of {top} most likely ids came")
        self.id = _id(entry["token_id"], vocabulary)
        self.logprob = _number(entry["logprob"], float("nan"))
        self.top_ids = [_id(one["token_id"], vocabulary) for one in found]
        self.top_logprobs = [_number(one["logprob"], float("-inf")) for one in found]


def _rank(entry: Any) -> int:
    """Returns the sort key of a candidate. A token without a number has no rank."""
    rank = entry["rank"]
    return 2**31 if rank is None else int(rank)


def _id(value: Any, vocabulary: int) -> int:
    _expect(type(value) is int and 0 <= value < vocabulary, f"{value!r:.20} is no id")
    return int(value)


def _number(value: Any, other: float) -> float:
    number = float(value)
    return other if number <= _NO_NUMBER else number


def _expect(holds: bool, problem: str) -> None:
    if not holds:
        raise EngineFaultError(f"the server's answer cannot be right: {problem}")


def read_scores(body: Any, request: ScoreInput, *, samples_last: bool) -> tuple[str, Scores] | None:
    """Returns the name of the weights and the scores. None if the request was aborted.

    Raises:
        EngineFaultError: The answer cannot be right.
    """
    try:
        (choice,) = body["choices"]
        if choice["finish_reason"] == "abort":
            return None
        return _scores(body, choice, request, samples_last)
    except _MALFORMED as error:
        raise EngineFaultError(
            f"the server's scores are malformed: {type(error).__name__}: {error}"
        ) from error


def _scores(body: Any, choice: Any, request: ScoreInput, samples_last: bool) -> tuple[str, Scores]:
    rows = [[{"token_id": int(id_), **one} for id_, one in row.items()] for row in _positions(body)]
    if samples_last:
        rows.append(choice["logprobs"]["content"][0]["top_logprobs"])
    ids = request.token_ids[request.start :]
    rows = rows[len(rows) - len(ids) :]
    _expect(len(rows) == len(ids), f"{len(rows)} of {len(ids)} positions were scored")
    logprobs = np.empty(len(ids), np.float32)
    top_ids = np.empty((len(ids), request.top_k), np.uint32)
    top_logprobs = np.empty((len(ids), request.top_k), np.float32)
    for at, (id_, row) in enumerate(zip(ids.tolist(), rows, strict=True)):
        (own,) = (one for one in row if one["token_id"] == id_)
        logprobs[at] = _number(own["logprob"], float("nan"))
        found = sorted(row, key=_rank)[: request.top_k]
        top_ids[at] = [one["token_id"] for one in found]
        top_logprobs[at] = [_number(one["logprob"], float("-inf")) for one in found]
    (span, *_) = choice["weight_versions"]
    return str(span["version"]), Scores(logprobs, top_ids, top_logprobs, 0)


def _positions(body: Any) -> list[Any]:
    first: Any
    rest: list[Any]
    first, *rest = body["prompt_logprobs"]
    _expect(first is None, "the first id has a score")
    return rest
