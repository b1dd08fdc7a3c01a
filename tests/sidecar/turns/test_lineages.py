"""What the headers of agents say about their requests."""

import pytest

from rollmesh.runtime.errors import InvalidFieldError
from rollmesh.sidecar.turns.lineages import said_lineage
from rollmesh.v1 import trajectory_pb2

TURN = '{"request_kind": "turn"}'
COMPACTION = '{"request_kind": "compaction"}'


@pytest.mark.parametrize(
    ("headers", "said"),
    [
        pytest.param({}, "UNSPECIFIED", id="nothing"),
        pytest.param({"x-rollmesh-lineage": "Main"}, "MAIN", id="main"),
        pytest.param({"x-rollmesh-lineage": "auxiliary"}, "AUXILIARY", id="auxiliary"),
        pytest.param({"x-claude-code-agent-id": "a1b2"}, "SUB_AGENT", id="claude code"),
        pytest.param({"x-openai-subagent": "collab_spawn"}, "SUB_AGENT", id="codex sub-agent"),
        pytest.param({"x-codex-turn-metadata": COMPACTION}, "COMPACTION", id="codex compaction"),
        pytest.param({"x-codex-turn-metadata": TURN}, "UNSPECIFIED", id="codex turn"),
        pytest.param({"x-codex-turn-metadata": "[1"}, "UNSPECIFIED", id="not json"),
        pytest.param({"x-codex-turn-metadata": "[]"}, "UNSPECIFIED", id="no object"),
        pytest.param(
            {"x-rollmesh-lineage": "main", "x-openai-subagent": "review"}, "MAIN", id="ours wins"
        ),
    ],
)
def test_a_request_says_what_it_is(headers: dict[str, str], said: str) -> None:
    found = said_lineage({name.encode(): value for name, value in headers.items()})
    assert trajectory_pb2.Lineage.Name(found) == f"LINEAGE_{said}"


def test_an_unknown_lineage_is_refused_with_what_there_is() -> None:
    with pytest.raises(InvalidFieldError, match="x-rollmesh-lineage: is 'title'; give one of main"):
        said_lineage({b"x-rollmesh-lineage": "title"})
