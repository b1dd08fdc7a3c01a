"""Which engine a turn gets, as a table."""

import pytest

from rollmesh.internal.v1 import leases_pb2
from rollmesh.router import Engine, Lease, LeaseTable
from tests.router.leasing.tables import acquire, hello


def engine(
    name: str, sessions: int = 0, leases: int = 0, picked: int = 0, *, paused: bool = False
) -> Engine:
    held = {f"{name}-{at}" for at in range(sessions)}
    made = Engine(name, f"{name}:1", "m", 8, sessions=held, last_picked=picked, paused=paused)
    made.held = {Lease("other", str(at), made, 0) for at in range(leases)}
    return made


# A placed session and a sibling are one more session of their engine.
@pytest.mark.parametrize(
    ("engines", "placed", "sibling", "chosen"),
    [
        pytest.param([], "", "", "", id="no-engine"),
        pytest.param([engine("a", 2), engine("b", 1)], "", "", "b", id="fewest-sessions"),
        pytest.param([engine("a", 1, 3), engine("b", 1, 2)], "", "", "b", id="fewest-leases"),
        pytest.param([engine("a", picked=2), engine("b", picked=1)], "", "", "b", id="ties-rotate"),
        pytest.param([engine("a", 4), engine("b")], "a", "", "a", id="sticky"),
        pytest.param([engine("a", 4, 8), engine("b")], "a", "", "b", id="full"),
        pytest.param([engine("a", 4), engine("b")], "", "a", "a", id="sibling-shares"),
        pytest.param([engine("a", 4), engine("b", 6)], "b", "a", "b", id="sticky-before-sibling"),
        pytest.param([engine("a", 19), engine("b")], "a", "", "b", id="overloaded"),
        pytest.param([engine("a", 11), engine("b")], "a", "", "a", id="factor-without-margin"),
        pytest.param([engine("a", 29), engine("b", 26)], "a", "", "a", id="neither-bound"),
        pytest.param([engine("a", 19), engine("b")], "", "a", "b", id="sibling-overloaded"),
        pytest.param([engine("a", 23), engine("b", 8)], "a", "", "a", id="margin-and-at-factor"),
        pytest.param([engine("a", 17), engine("b", 2)], "a", "", "b", id="factor-and-at-margin"),
        pytest.param(
            [engine("a", paused=True), engine("b", 2)], "a", "", "b", id="leaves-a-paused-engine"
        ),
        pytest.param(
            [engine("a", 1, paused=True), engine("b", 1, paused=True)],
            "b",
            "",
            "b",
            id="stays-if-all-are-paused",
        ),
        pytest.param(
            [engine("a", 3, paused=True), engine("b", 2, 8)],
            "",
            "",
            "a",
            id="paused-rather-than-none",
        ),
    ],
)
def test_picking(engines: list[Engine], placed: str, sibling: str, chosen: str) -> None:
    assert picked(LeaseTable(), engines, placed, sibling) == chosen


def test_a_large_margin_keeps_groups_together() -> None:
    engines = [engine("a", 19), engine("b")]
    assert picked(LeaseTable(imbalance_margin=1_000), engines, "", "a") == "a"


def picked(leases: LeaseTable, engines: list[Engine], placed: str, sibling: str) -> str:
    leases.open_stream("g", hello())
    for one in engines:
        leases.add_engine(one)
    for session_id, engine_id in (("sibling", sibling), ("s", placed)):
        stated = leases_pb2.PlacedSession(session_id=session_id, group_id="x")
        if engine_id:
            leases.restate("g", [leases_pb2.EngineHoldings(engine_id=engine_id, sessions=[stated])])
    grant = acquire(leases, "g", "1", "s", group_id="x", wait_ms=1)
    return "" if grant is None else grant.engine_id
