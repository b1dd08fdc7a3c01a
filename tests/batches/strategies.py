"""Groups of sessions of every shape."""

from dataclasses import replace

from hypothesis import strategies as st

from rollmesh.client import SessionResult
from tests.batches.records import session, trajectory

_PART = st.tuples(st.integers(1, 9), st.booleans(), st.booleans()).map(
    lambda part: (part[0], part[1], part[1] and part[2])
)
_TRAJECTORIES = st.lists(_PART, max_size=5).map(
    lambda parts: trajectory("t", [(2, False, False), *parts])
)


@st.composite
def sessions(draw: st.DrawFn) -> list[SessionResult]:
    """Groups of sessions with trajectories of every shape."""
    found: list[SessionResult] = []
    for group in range(draw(st.integers(1, 3))):
        for index in range(draw(st.integers(1, 3))):
            name = f"g{group}-{index}"
            made = draw(st.lists(_TRAJECTORIES, min_size=0, max_size=3))
            named = [replace(one, trajectory_id=f"{name}-{at}") for at, one in enumerate(made)]
            reward = draw(st.floats(-4, 4, width=32))
            found.append(session(name, named, group=f"g{group}", index=index, reward=reward))
    return found
