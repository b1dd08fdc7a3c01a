"""What replays of agents share: where they ask, what the model calls, and the books at the end."""

from collections import Counter

import httpx2

from examples.demo.audit import Audit
from rollmesh.client import Session, SessionResult


class Replay:
    """Requests of an agent with the bodies and the headers that were seen on the wire."""

    path = ""
    """Where the agent asks, below the session's base URL."""

    def __init__(self, http: httpx2.AsyncClient, session: Session) -> None:
        self._http = http
        self._url = f"{session.base_url}/{self.path}"
        self._key = session.api_key


def called(name: str, arguments: str) -> str:
    """A call as the model writes it."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def check(result: SessionResult, **found: list[int]) -> None:
    """Asserts that nothing drifted, that all but auxiliary turns are trained, each once, and how
    many turns the trajectories of each lineage have."""
    audit = Audit()
    audit.received([result])
    assert (audit.drift_tokens, audit.duplicated) == (0, 0)
    assert sum(audit.trained.values()) == result.turns - sum(found.get("AUXILIARY", ()))
    assert Counter((t.lineage, t.turns) for t in result.trajectories) == Counter(
        (lineage, turns) for lineage, counts in found.items() for turns in counts
    )
