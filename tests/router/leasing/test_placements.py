"""Which engine serves which session."""

from collections import Counter

from rollmesh.router.leasing.engines import Engine
from rollmesh.router.leasing.placements import Placements


def test_the_sessions_of_an_engine_join_those_of_the_one_that_takes_its_place() -> None:
    moved: Counter[str] = Counter()

    def count(engine: Engine, sessions: int) -> None:
        moved[engine.engine_id] += sessions

    placements = Placements(count)
    former, other = Engine("former", "", "", 1), Engine("other", "", "", 1)
    for session_id, engine in (("a", former), ("b", former), ("c", other)):
        placements.place(session_id, engine, stream_id="g", group_id="")
    placements.move(former, other)
    assert [placements.engine_of(session_id) for session_id in "abc"] == [other] * 3
    assert (former.sessions, other.sessions) == (set(), {"a", "b", "c"})
    assert (moved["former"], moved["other"], placements.placed) == (0, 3, 3)
    placements.forget_engine(other)
    assert (other.sessions, placements.placed, moved["other"]) == (set(), 0, 0)
