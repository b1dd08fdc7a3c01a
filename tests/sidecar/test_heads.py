"""What the headers of agents say about their requests, and which connections are admitted."""

import pytest

from rollmesh.runtime.errors import InvalidFieldError
from rollmesh.sidecar import address_of, read_head
from rollmesh.v1 import trajectory_pb2
from tests.sidecar.reading import KEY

TURN = '{"request_kind": "turn"}'
COMPACTION = '{"request_kind": "compaction"}'


def lineage(headers: dict[str, str]) -> str:
    given = [(name.encode(), value.encode()) for name, value in headers.items()]
    head = read_head({"headers": given, "path_params": {"session": KEY}})
    return trajectory_pb2.Lineage.Name(head.lineage).removeprefix("LINEAGE_")


@pytest.mark.parametrize(
    ("headers", "stated"),
    [
        pytest.param({}, "UNSPECIFIED", id="nothing"),
        pytest.param({"X-Rollmesh-Lineage": "Main"}, "MAIN", id="main"),
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
def test_headers_state_the_lineage(headers: dict[str, str], stated: str) -> None:
    assert lineage(headers) == stated


def test_an_unknown_lineage_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidFieldError, match="x-rollmesh-lineage: is 'title'; give one of main"):
        lineage({"x-rollmesh-lineage": "title"})


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        (("10.0.0.1", 4711), "10.0.0.1"),
        (("::ffff:10.0.0.1", 4711, 0, 0), "10.0.0.1"),
        (("2001:db8::1", 4711, 0, 0), "2001:db8::/64"),
        (("2001:db8::ffff:0:0:2", 1, 0, 0), "2001:db8::/64"),
        (("2001:db8:0:1::1", 4711, 0, 0), "2001:db8:0:1::/64"),
        (("fe80::1%eth0", 4711, 0, 2), "fe80::/64"),
        ("/run/sidecar.sock", ""),
        ("", ""),
        (None, ""),
    ],
)
def test_a_connection_counts_for_its_address_or_its_ipv6_network(
    peer: object, address: str
) -> None:
    assert address_of(peer) == address
