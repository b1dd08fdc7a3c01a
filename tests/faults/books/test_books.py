"""The books of kills, soak and chaos: what is wrong in the logs is found."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.kills.audit import Audit, Interval

_TURN = ["chatcmpl-s-2", True, False, 17, [0]]


def session(*turns: list[Any], digest: str = "d", drift: int = 0) -> dict[str, Any]:
    return {"session_id": "s", "digest": digest, "turns": turns, "drift": drift}


def received(*sessions: dict[str, Any], delivery: str = "s") -> dict[str, Any]:
    return {"received": delivery, "sessions": sessions}


@pytest.fixture
def audited(tmp_path: Path) -> Any:
    """Audits a log of agents and one of a trainer."""

    def audit(agents: list[str], trainer: list[dict[str, Any]]) -> Audit:
        (tmp_path / "agents").write_text("".join(f"{line}\n" for line in agents))
        (tmp_path / "trainer").write_text("".join(f"{json.dumps(one)}\n" for one in trainer))
        return Audit.read(tmp_path / "agents", tmp_path / "trainer")

    return audit


def test_an_answer_that_arrives_once_is_in_order(audited: Any) -> None:
    found = audited(["OPEN s key", "ANSWERED chatcmpl-s-2 17"], [received(session(_TURN))])
    assert (found.delivered, found.lost, found.doubled, found.wrong_tokens) == (1, 0, 0, 0)


def test_an_answer_that_does_not_arrive_is_lost(audited: Any) -> None:
    found = audited(["ANSWERED chatcmpl-s-4 17"], [received(session(_TURN))])
    assert (found.delivered, found.lost) == (0, 1)


def test_a_turn_that_is_trained_in_two_rows_is_doubled(audited: Any) -> None:
    assert audited([], [received(session(_TURN, _TURN))]).doubled == 1


def test_a_turn_that_is_excluded_for_a_reason_has_arrived(audited: Any) -> None:
    turn = ["chatcmpl-s-2", False, False, 17, [0]]
    found = audited(["ANSWERED chatcmpl-s-2 17"], [received(session(turn))])
    assert (found.lost, found.doubled) == (0, 0)


def test_other_tokens_than_the_agent_received_are_wrong(audited: Any) -> None:
    found = audited(["ANSWERED chatcmpl-s-2 18"], [received(session(_TURN))])
    assert (found.lost, found.wrong_tokens) == (0, 1)


def test_a_redelivery_is_in_order_unless_it_differs_or_was_acknowledged(audited: Any) -> None:
    one, other = received(session(_TURN)), received(session(_TURN, digest="e"))
    again = audited([], [one, one])
    assert (again.redelivered, again.doubled) == (1, 0)
    assert audited([], [one, other]).doubled == 1
    assert audited([], [one, {"acknowledged": "s"}, one]).doubled == 1


def test_a_line_that_a_kill_cut_off_is_not_read(audited: Any, tmp_path: Path) -> None:
    audited(["ANSWERED chatcmpl-s-2 17"], [])
    with (tmp_path / "agents").open("a") as log:
        log.write("ANSWERED chatcmpl-s-4 1")
    assert Audit.read(tmp_path / "agents", tmp_path / "trainer").lost == 1


def test_an_error_is_explained_by_an_outage_that_it_overlaps_or_soon_follows(audited: Any) -> None:
    lines = ["FAILED 1.0 2.0 APIError", "FAILED 6.0 7.0 APIError", "FAILED 9.0 9.5 APIError"]
    found = audited(lines, [])
    assert found.unexplained([], 0) == 3
    assert found.unexplained([Interval(1.5, 5.0)], 0) == 2
    assert found.unexplained([Interval(1.5, 5.0)], 1.0) == 1
    assert found.unexplained([Interval(1.5, 5.0), Interval(9.2, 9.3)], 1.0) == 0


def test_a_version_that_nobody_had_pushed_when_the_answer_was_there_is_wrong(audited: Any) -> None:
    turn, agents = [*_TURN[:4], [0, 3]], ["ANSWERED chatcmpl-s-2 17 5.0"]
    assert audited(agents, [received(session(turn))]).wrong_versions == 1
    early, late = {"pushing": 3, "at_s": 4.0}, {"pushing": 3, "at_s": 6.0}
    found = audited(agents, [early, {"pushed": 3}, received(session(turn))])
    assert (found.wrong_versions, found.pushed) == (0, {3})
    assert audited(agents, [late, received(session(turn))]).wrong_versions == 1
    assert audited([], [late, received(session(turn))]).wrong_versions == 0  # nobody has it
