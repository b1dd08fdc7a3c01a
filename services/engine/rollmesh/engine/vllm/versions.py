"""Tells which weights sampled the tokens of a running request.

vLLM's outputs say it only at the end of a request, which a killed engine never sends. Its output
processor records it from the first token on (`RequestState.weight_version_starts`, vLLM 0.32).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple


class VersionStart(NamedTuple):
    """Where the tokens of a policy version begin."""

    policy_version: int
    start: int
    """Index in the generation."""


class RunningVersions:
    """The policy versions of one request."""

    def __init__(self, output_processor: Any, request_id: str) -> None:
        """Takes vLLM's output processor, and the id that the request was given."""
        self._processor = output_processor
        self._request_id = request_id
        self._state: Any = None

    def starts(self, completion: Any) -> Sequence[VersionStart] | None:
        """Returns where the versions begin; None if vLLM tells it only with the next output.

        Args:
            completion: The latest `CompletionOutput` of the request.
        """
        if completion.weight_versions is not None:
            return [VersionStart(int(one.version), one.start) for one in completion.weight_versions]
        if self._state is None:
            ids = self._processor.external_req_ids.get(self._request_id)
            self._state = self._processor.request_states.get(ids[0]) if ids else None
        if self._state is None:  # the request has ended, and its last output is on its way
            return None
        return [VersionStart(int(name), at) for name, at in self._state.weight_version_starts]
