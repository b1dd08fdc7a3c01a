"""Which engine is picked, as a table."""

from dataclasses import dataclass

import pytest

from rollmesh.router.leasing.engines import Engine, Lease
from rollmesh.router.leasing.policies import POLICIES, pick
from tests.router.leasing.candidates import Plain


@dataclass
class Given(Plain):
    """Candidates among engines that a test does not list."""

    mean: float = 0

    @property
    def mean_sessions(self) -> float:
        return self.mean


def engine(
    name: str, sessions: int = 0, leases: int = 0, picked: int = 0, *, paused: bool = False
) -> Engine:
    held = {f"{name}-{at}" for at in range(sessions)}
    made = Engine(name, f"{name}:1", "m", 8, sessions=held, last_picked=picked, paused=paused)
    made.held = {Lease("g", str(at), made, 0) for at in range(leases)}
    return made


STICKY, GROUPS, ROUND = "least_active_sticky", "group_affinity", "round_robin"


@pytest.mark.parametrize(
    ("policy", "engines", "placed", "sibling", "mean", "chosen"),
    [
        pytest.param(STICKY, [], None, None, 0, None, id="nobody"),
        pytest.param(
            STICKY, [engine("a", 2), engine("b", 1)], None, None, 1.5, "b", id="fewest-sessions"
        ),
        pytest.param(
            STICKY, [engine("a", 1, 3), engine("b", 1, 2)], None, None, 1, "b", id="fewest-leases"
        ),
        pytest.param(
            STICKY,
            [engine("a", picked=2), engine("b", picked=1)],
            None,
            None,
            0,
            "b",
            id="ties-rotate",
        ),
        pytest.param(STICKY, [engine("a", 5), engine("b")], 0, None, 2.5, "a", id="sticky"),
        pytest.param(STICKY, [engine("a", 5, 8), engine("b")], 0, None, 2.5, "b", id="full"),
        pytest.param(STICKY, [engine("a", 5), engine("b")], None, 0, 2.5, "a", id="sibling-shares"),
        pytest.param(
            STICKY, [engine("a", 20), engine("b")], 0, None, 10, "b", id="sticky-but-overloaded"
        ),
        pytest.param(
            STICKY, [engine("a", 12), engine("b")], 0, None, 6, "a", id="factor-without-margin"
        ),
        pytest.param(
            STICKY, [engine("a", 30), engine("b", 26)], 0, None, 28, "a", id="neither-bound"
        ),
        pytest.param(
            STICKY, [engine("a", 20), engine("b")], None, 0, 10, "b", id="sibling-overloaded"
        ),
        pytest.param(
            STICKY, [engine("a", 24), engine("b")], 0, None, 16, "a", id="margin-and-at-factor"
        ),
        pytest.param(
            STICKY, [engine("a", 18), engine("b")], 0, None, 10, "b", id="factor-and-at-margin"
        ),
        pytest.param(
            STICKY,
            [engine("a", 1, paused=True), engine("b", 2)],
            0,
            None,
            1.5,
            "b",
            id="leaves-a-paused-engine",
        ),
        pytest.param(
            STICKY,
            [engine("a", 1, paused=True), engine("b", 2, paused=True)],
            1,
            None,
            1.5,
            "b",
            id="stays-where-all-are-paused",
        ),
        pytest.param(
            STICKY,
            [engine("a", 3, paused=True), engine("b", 2, 8)],
            None,
            None,
            2.5,
            "a",
            id="paused-rather-than-none",
        ),
        pytest.param(
            GROUPS, [engine("a", 20), engine("b")], None, 0, 10, "a", id="group-however-loaded"
        ),
        pytest.param(GROUPS, [engine("a", 2, 8), engine("b")], None, 0, 1, "b", id="group-is-full"),
        pytest.param(
            ROUND,
            [engine("a", picked=2), engine("b", 9, picked=1)],
            0,
            0,
            5,
            "b",
            id="round-robin",
        ),
    ],
)
def test_picking(
    policy: str,
    engines: list[Engine],
    placed: int | None,
    sibling: int | None,
    mean: float,
    chosen: str | None,
) -> None:
    chosen_policy = POLICIES[policy]
    found = pick(
        Given(engines, chosen_policy.rank, mean),
        chosen_policy,
        placed=None if placed is None else engines[placed],
        sibling=None if sibling is None else engines[sibling],
    )
    assert (found and found.engine_id) == chosen
