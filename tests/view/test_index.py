import json
from functools import partial

import numpy as np
import pytest

from rollmesh.runtime.errors import InvalidFieldError
from rollmesh.v1 import collector_pb2, sampling_pb2, session_pb2, trajectory_pb2
from rollmesh.view import Index, Selection, closed_session
from tests.collector.records import record as stored, tree
from tests.costs import steps
from tests.token_arrays import pack_tokens

_RUN = 10**12
_EVAL = session_pb2.SESSION_PURPOSE_EVAL
_CUT = trajectory_pb2.FIDELITY_REASON_LENGTH_CUT


def record(
    name: str, reward: float | None = None, *, group: str = "", version: int = 0, **fields: object
) -> session_pb2.SessionRecord:
    """A session with one sampled node of 5 tokens after a prompt of 3."""
    reasons = [_CUT] if "cut" in name else [trajectory_pb2.FIDELITY_REASON_EXACT]
    node = trajectory_pb2.TrajectorySegment
    trajectory = trajectory_pb2.Trajectory(
        trajectory_id=f"{name}-t",
        segments=[
            node(start=0, end=3, node_id=1),
            node(start=3, end=8, node_id=2, sampled=True, trained=True, reasons=reasons),
        ],
        version_spans=[sampling_pb2.VersionSpan(start=3, end=8, policy_version=version)],
        reasons=reasons,
    )
    given = {"run_id": "a", "closed_unix_ms": 2_000, "opened_unix_ms": 1_000} | fields
    return session_pb2.SessionRecord(
        session_id=name,
        group_id=group,
        group_size=2,
        outcome=session_pb2.SESSION_OUTCOME_COMPLETED,
        reward=reward,
        turns=1,
        trajectories=[trajectory],
        **given,  # type: ignore[arg-type]
    )


@pytest.fixture
def index() -> Index:
    found = Index()
    found.add(
        [
            record("s1", 1.0, group="even", version=1),
            record("s2", 1.0, group="even", version=1, run_id="a"),
            record("s3", 0.0, group="mixed", version=2, metadata={"task": "sort the shelves"}),
            record("s4-cut", 1.0, group="mixed", version=_RUN + 1, closed_unix_ms=9_000),
            record("s5", None, run_id="b", closed_unix_ms=5_000, reward_timeout_ms=1_000),
            record("s6", None, run_id="c", closed_unix_ms=5_000, purpose=_EVAL),
        ]
    )
    return found


def ids(found: dict[str, list[dict[str, str]]]) -> list[str]:
    return [one["session_id"] for one in found["rows"]]


def test_sessions_without_a_run_or_a_group_are_found(index: Index) -> None:
    index.add([record("s7", 1.0, run_id="")])
    assert ids(index.sessions(Selection(run_id=""))) == ["s7"]
    assert "" in index.choices()["run_id"]
    assert index.sessions(Selection.read({"run_id": "", "where": "reward=1"}))["total"] == 1
    assert ids(index.sessions(Selection.read({"group_id": "", "run_id": "b"}))) == ["s5"]


def test_sessions_are_found_by_field_by_reason_and_by_word(index: Index) -> None:
    assert ids(index.sessions(Selection(run_id="b"))) == ["s5"]
    assert ids(index.sessions(Selection(purpose="EVAL"))) == ["s6"]
    assert ids(index.sessions(Selection(reason="LENGTH_CUT"))) == ["s4-cut"]
    assert ids(index.sessions(Selection(words="shel sort"))) == ["s3"]
    assert ids(index.sessions(Selection(words='she"l'))) == []
    assert index.sessions(Selection())["total"] == 6
    assert ids(index.sessions(Selection(), "lowest reward", 0, 1)) == ["s3"]
    assert ids(index.sessions(Selection(), "oldest", 5)) == ["s4-cut"]


def test_a_group_without_variance_comes_before_the_others(index: Index) -> None:
    found = index.groups(Selection(), "all right")
    assert [one["group_id"] for one in found["rows"]] == ["even", "mixed"]
    assert found["total"] == 2
    assert [one["variance"] for one in found["rows"]] == [0.0, 0.25]
    (mixed,) = index.groups(Selection(), "largest spread", 0, 1)["rows"]
    assert (mixed["mean"], mixed["lowest"], mixed["highest"], mixed["tokens"]) == (0.5, 0, 1, 16)


@pytest.mark.parametrize(
    ("order", "first"),
    [
        ("newest", "slow"),
        ("all wrong", "wrong"),
        ("all right", "even"),
        ("largest spread", "mixed"),
        ("most tokens", "even"),
        ("most malformed calls", "bad"),
        ("longest", "slow"),
    ],
)
def test_groups_that_stand_out_come_first(index: Index, order: str, first: str) -> None:
    bad = record("bad", 0.5, group="bad")
    bad.trajectories[0].segments[1].reasons.append(
        trajectory_pb2.FIDELITY_REASON_MALFORMED_TOOL_CALL
    )
    wrong = [record(f"wrong-{at}", 0.0, group="wrong", opened_unix_ms=1_900) for at in range(2)]
    index.add([bad, *wrong, record("slow", 0.5, group="slow", closed_unix_ms=99_000)])
    index.add([record("s7", 1.0, group="even", version=1)])
    assert index.groups(Selection(), order)["rows"][0]["group_id"] == first
    assert order in index.choices()["group_order"]


@pytest.mark.parametrize(
    ("chosen", "groups"),
    [
        ({"words": "shelves"}, ["mixed"]),
        ({"reason": "LENGTH_CUT"}, ["mixed"]),
        ({"outcome": "COMPLETED"}, ["mixed", "even"]),
        ({"outcome": "FAILED"}, []),
        ({"words": "shelves", "reason": "LENGTH_CUT"}, []),
        ({"run_id": "b"}, []),
        ({"purpose": "EVAL"}, []),
    ],
)
def test_a_group_with_one_session_that_is_meant_is_there_with_all_of_them(
    index: Index, chosen: dict[str, str], groups: list[str]
) -> None:
    found = index.groups(Selection(**chosen))
    assert ([one["group_id"] for one in found["rows"]], found["total"]) == (groups, len(groups))
    assert {one["sessions"] for one in found["rows"]} <= {2}


@pytest.mark.parametrize(
    ("where", "sessions"),
    [
        ('task="sort the shelves"', ["s3"]),
        ("task=sort", []),
        ("reward<1", ["s3", "s7"]),
        ("reward>=1 lag=0", ["s4-cut", "s2", "s1"]),
        ("reward=none", ["s6", "s5"]),
        ("turns>1", []),
        ("tokens=8 sampled<=5 trained>4 malformed=0 seconds>=8", ["s4-cut"]),
        ("lag>0", []),
        ("metadata.turns=many", ["s7"]),
        ("metadata.a<b=x=y", ["s7"]),
        (f"long={'l' * 500}", ["s7"]),
    ],
)
def test_sessions_and_groups_are_found_by_their_metadata_and_by_bounds(
    index: Index, where: str, sessions: list[str]
) -> None:
    metadata = {"turns": "many", "a<b": "x=y", "long": "l" * 600}
    index.add([record("s7", 0.5, group="more", closed_unix_ms=500, metadata=metadata)])
    chosen = Selection(where=where)
    assert ids(index.sessions(chosen)) == sessions
    group_of = {"s1": "even", "s2": "even", "s3": "mixed", "s4-cut": "mixed", "s7": "more"}
    groups = {one["group_id"] for one in index.groups(chosen)["rows"]}
    assert groups == {group_of[one] for one in sessions if one in group_of}
    assert sum(one["sessions"] for one in index.series(chosen)["points"]) == len(sessions)


@pytest.mark.parametrize(
    "where", ["task", "task>1", 'task="a', "reward>x", "reward>nan", "a=b " * 21]
)
def test_a_term_that_is_none_is_refused(index: Index, where: str) -> None:
    for read in (index.sessions, index.groups):
        with pytest.raises(InvalidFieldError, match="where"):
            read(Selection(where=where))


def test_a_superseded_session_is_listed_and_does_not_count_in_its_group(index: Index) -> None:
    index.add([record("old", 9.0, group="even", superseded=True, version=1)])
    chosen = Selection(group_id="even")
    assert len(ids(index.sessions(chosen))) == 3
    (group,) = index.groups(chosen)["rows"]
    assert (group["sessions"], group["highest"], group["variance"]) == (2, 1.0, 0.0)
    index.add([record("former", 9.0, run_id="c", purpose=_EVAL, superseded=True)])
    assert [(one["sessions"], one["pass_at"]) for one in index.evaluations()] == [(1, {})]


def test_tasks_whose_long_names_begin_alike_are_several(index: Index) -> None:
    exams = [record(f"exam-{at}", float(at), run_id="long") for at in range(2)]
    for at, one in enumerate(exams):
        one.purpose = session_pb2.SESSION_PURPOSE_EVAL
        one.metadata["task_id"] = f"{'Solve this. ' * 60}{at}"
    index.add(exams)
    (found,) = (one for one in index.evaluations() if one["run_id"] == "long")
    assert (found["tasks"], found["pass_at"][1]["value"]) == (2, 0.5)


def test_lag_is_of_one_run_and_shares_are_of_sessions(index: Index) -> None:
    late = record("late", run_id="lag", version=3)
    over = record("over", run_id="lag", version=_RUN + 1)
    for one, first in ((late, 1), (over, 2)):
        one.trajectories[0].version_spans.add(start=3, end=4, policy_version=first)
    malformed = trajectory_pb2.FIDELITY_REASON_MALFORMED_TOOL_CALL
    wrong = [malformed, _CUT]
    late.trajectories[0].segments[1].reasons.extend(wrong)
    late.trajectories[0].segments.add(start=8, end=9, node_id=3, sampled=True, reasons=wrong)
    index.add([late, over])
    found = index.series(Selection(run_id="lag"))
    assert found["lags"] == [{"lag": 2, "sessions": 1}]
    assert [one["lag"] for one in found["points"]] == [2, None]
    assert ids(index.sessions(Selection(where="lag>0"))) == ["late"]
    assert ids(index.sessions(Selection(run_id="lag", where="lag=none"))) == ["over"]
    assert (found["points"][0]["malformed"], found["points"][0]["cut"]) == (1.0, 1.0)
    assert ids(index.sessions(Selection(where="lag=2 malformed=2"))) == ["late"]


def test_a_session_of_a_mesh_keeps_the_reward_of_the_mesh(index: Index) -> None:
    index.add([record("s1", 0.0)], "file")
    index.set_rewards({"s1": 0.25})
    rewards = {one["session_id"]: one["reward"] for one in index.sessions(Selection())["rows"]}
    assert rewards["s1"] == 1.0
    index.add([record("s1", 1.0)])
    assert index.file_of("s1") == "file"


def test_groups_without_rewards_come_after_those_that_stand_out(index: Index) -> None:
    index.add([record("none", None, group="none"), record("wrong", 0.0, group="wrong")])
    for order, first in (("all wrong", "wrong"), ("all right", "even")):
        found = [one["group_id"] for one in index.groups(Selection(), order)["rows"]]
        assert (found[0], found[-1]) == (first, "none")


@pytest.mark.parametrize(
    "words", ["second", "cat readme", "deeper", "shelves", "排序", "书架", "12345"]
)
def test_words_are_found_behind_escapes_in_json_in_arguments_and_in_chinese(
    words: str, index: Index
) -> None:
    arguments = json.dumps({"command": "ls\ncat README.md", "inner": json.dumps(["deeper"])})
    said = [
        {"role": "assistant", "content": "first\nsecond\ud800 请按颜色排序书架",
         "tool_calls": [{"function": {"name": "run", "arguments": arguments}}]},
        {"role": "tool", "content": "{broken\nshelves", "n": 12345},
    ]  # fmt: skip
    session = record("said")
    session.messages.add(node_id=1, data=json.dumps(said).encode())
    index.add([session])
    assert "said" in ids(index.sessions(Selection(words=words)))


@pytest.mark.parametrize("words", ['"', "a\0b", "?!", "NEAR(a b)", "a*", "-a", "[" * 5_000])
def test_words_of_any_signs_are_no_error(index: Index, words: str) -> None:
    session = record("deep")
    session.messages.add(node_id=1, data=b"[" * 50_000)
    index.add([session])
    index.sessions(Selection(words=words))


def test_rewards_that_are_no_numbers_and_huge_ones_leave_the_sums(index: Index) -> None:
    for at, reward in enumerate((float("nan"), float("inf"), -1e300, 1e300)):
        index.add([record(f"odd-{at}", reward, group="odd", run_id="odd")])
    found = index.sessions(Selection(run_id="odd"), "lowest reward")["rows"]
    assert [one["reward"] for one in found] == [-1e300, 1e300, None, None]
    (group,) = index.groups(Selection(run_id="odd"))["rows"]
    assert (group["mean"], group["lowest"], group["highest"]) == (0.0, -1e300, 1e300)


def test_versions_of_two_runs_of_a_policy_are_two_series(index: Index) -> None:
    points = index.series(Selection(run_id="a"))["points"]
    assert [(one["run"], one["at"], one["sessions"], one["reward"]) for one in points] == [
        (0, 1, 2, 1.0),
        (0, 2, 1, 0.0),
        (1, 1, 1, 1.0),
    ]
    assert [one["passed"] for one in points] == [1.0, 0.0, 1.0]
    assert points[2]["cut"] == 1.0
    assert points[0]["sampled_sum"] == points[0]["trained_sum"] == 10


def test_points_over_time_are_at_most_200(index: Index) -> None:
    index.add(record(f"t{n}", 0.5, closed_unix_ms=10_000 * n) for n in range(500))
    found = index.series(Selection(), "time")
    assert found["lags"] == [{"lag": 0, "sessions": 506}]
    assert 100 < len(found["points"]) <= 201
    assert sum(one["sessions"] for one in found["points"]) == 506
    reasons = {one["reason"]: one["sessions"] for one in found["reasons"]}
    assert reasons == {"EXACT": 505, "LENGTH_CUT": 1}


def test_a_session_with_an_impossible_time_leaves_the_others(index: Index) -> None:
    wrong = record("wrong", closed_unix_ms=2**63 - 1, reward_timeout_ms=1_000)
    assert index.add([wrong, record("right")]) == 1
    assert ids(index.sessions(Selection(), "newest", 0, 1)) == ["s4-cut"]
    assert index.sessions(Selection())["total"] == 7


def test_a_reward_that_comes_late_replaces_none(index: Index) -> None:
    assert index.waiting(0) == ["s5"]
    assert index.waiting(6_000) == []
    index.add([record("s5", 0.25, run_id="b")])
    assert index.waiting(0) == []
    assert index.sessions(Selection(run_id="b"))["rows"][0]["reward"] == 0.25
    assert index.sessions(Selection())["total"] == 6


def test_an_unknown_order_is_refused_with_the_known_ones(index: Index) -> None:
    with pytest.raises(InvalidFieldError, match="newest, oldest"):
        index.sessions(Selection(), "reward; DROP TABLE sessions")
    with pytest.raises(InvalidFieldError, match="limit"):
        index.sessions(Selection(), "newest", 0, 5_000)
    with pytest.raises(InvalidFieldError, match="by"):
        index.series(Selection(), "step")


def test_a_shared_node_is_shown_as_in_the_path_that_trains_it() -> None:
    one = stored("shared")
    one.trajectories.add().CopyFrom(one.trajectories[0])
    one.trajectories[0].segments[1].trained = False
    shown = closed_session(collector_pb2.ReadSessionsResponse(session=one), None)
    assert [(node["trained"], node["scaffold"]) for node in shown["nodes"]] == [
        (False, 2),
        (True, 0),
    ]


def test_the_path_of_a_tree_with_an_id_twice_ends() -> None:
    one = session_pb2.SessionRecord(session_id="twice", tree=tree())
    one.tree.nodes[1].node_id = 1
    shown = closed_session(collector_pb2.ReadSessionsResponse(session=one), None)
    assert [path["nodes"] for path in shown["paths"]] == [[1, 3]]


def test_a_session_that_is_recorded_as_text_has_its_messages_as_nodes() -> None:
    said = [{"role": "user", "content": "2 + 2?"}], [{"role": "assistant", "content": "4"}]
    messages = [
        session_pb2.NodeMessages(node_id=at + 1, parent_node_id=at, data=json.dumps(one).encode())
        for at, one in enumerate(said)
    ]
    text = session_pb2.SessionRecord(
        session_id="s", capture=session_pb2.CAPTURE_TEXT, messages=messages
    )
    shown = closed_session(collector_pb2.ReadSessionsResponse(session=text), None)
    assert [one["messages"] for one in shown["nodes"]] == list(said)
    assert [one["sampled"] for one in shown["nodes"]] == [False, True]
    assert [one["nodes"] for one in shown["paths"]] == [[1, 2]]
    index = Index()
    index.add([text])
    assert ids(index.sessions(Selection(words="assistant"))) == ["s"]


def long_session(turns: int) -> session_pb2.SessionRecord:
    """Turns of 2 tokens after 2 others, each of a policy version and with an image of its own."""
    found = session_pb2.SessionRecord(session_id="long", turns=turns)
    path = found.trajectories.add(trajectory_id="long-1", session_id="long")
    for at in range(turns):
        start, node = 4 * at, path.segments.add
        node(start=start, end=start + 2, node_id=2 * at + 1)
        node(start=start + 2, end=start + 4, node_id=2 * at + 2, sampled=True, trained=True)
        path.version_spans.add(start=start + 2, end=start + 4, policy_version=at)
        path.images.add(sha256=f"{at}", start=start + 1, tokens=1)
    ids = np.arange(4 * turns, dtype=np.uint32)
    path.tokens.CopyFrom(pack_tokens(ids, np.zeros(len(ids), np.float32), ids % 4 > 1))
    return found


def test_the_cost_of_a_long_session_grows_with_its_turns() -> None:
    taken = dict[int, int]()
    for turns in (50, 500):
        given = collector_pb2.ReadSessionsResponse(session=long_session(turns))
        nodes = closed_session(given, None)["nodes"]
        taken[turns] = steps(partial(closed_session, given, None))
        for at, (context, sampled) in enumerate(zip(nodes[::2], nodes[1::2], strict=True)):
            assert context["versions"] == sampled["images"] == []
            (shown,), (image,) = sampled["versions"], context["images"]
            assert (shown["start"], shown["end"], shown["version"]) == (0, 2, at)
            assert image == {"sha256": f"{at}", "start": 1, "tokens": 1}
    assert taken[500] < 20 * taken[50]
