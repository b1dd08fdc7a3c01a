"""Every reason, label and mask of the contract has its sentence, the same in all windows."""

import pytest

from rollmesh.runtime import (
    ALARM_RULES,
    EXCLUDING,
    REASONS,
    RULES as BY_RULE,
    SHAPES,
    SOURCES,
    Labels,
    Observation,
    Server,
    label_words,
    line_of,
    mask_words,
    printable,
    raised,
    told_reasons,
    why,
    words_of,
)
from rollmesh.runtime.codec import name_of
from rollmesh.v1 import session_pb2, trajectory_pb2 as pb

HOSTILE = "\x1b[2J\u202e"


@pytest.mark.parametrize(
    ("words", "enum"),
    [
        (REASONS, pb.FidelityReason.DESCRIPTOR),
        (SHAPES, pb.Lineage.DESCRIPTOR),
        (SOURCES, pb.LineageSource.DESCRIPTOR),
        (BY_RULE, pb.LineageRule.DESCRIPTOR),
    ],
)
def test_every_name_of_the_contract_has_a_sentence(words: dict[str, str], enum: object) -> None:
    assert set(words) == {name_of(enum, one.number) for one in enum.values if one.number}  # type: ignore[attr-defined, arg-type]
    assert all(one.endswith(".") for one in words.values())
    assert len(set(words.values())) == len(words)


def test_a_label_tells_its_source_and_a_rule_its_shape() -> None:
    for lineage, sentence in SHAPES.items():
        assert label_words(lineage, "RULE") == f"{SOURCES['RULE']} {sentence}"
        assert label_words(lineage, "DECLARED") == SOURCES["DECLARED"]
        assert label_words(lineage, "") == ""
    assert label_words("UNKNOWN_99", "RULE") == SOURCES["RULE"]
    for rule, sentence in BY_RULE.items():
        assert label_words("MAIN", "RULE", rule) == f"{SOURCES['RULE']} {sentence}"
        assert label_words("MAIN", "HEADER", rule) == SOURCES["HEADER"]
    for unknown in ("UNSPECIFIED", "UNKNOWN_99"):
        assert label_words("MAIN", "RULE", unknown) == label_words("MAIN", "RULE")


def test_every_untrained_token_has_a_sentence() -> None:
    for one in EXCLUDING:
        assert mask_words(["LENGTH_CUT", one], trained=False)["untrained"] == REASONS[one]
    assert "context" in mask_words([], trained=True)["context"]
    assert mask_words(["IMPORTED"], trained=False)["context"] == REASONS["IMPORTED"]
    assert "closes" in mask_words([], trained=None)["untrained"]
    assert "newer release" in mask_words(["UNKNOWN_99"], trained=False)["untrained"]


def told(**given: object) -> list[str]:
    return list(why(session_pb2.SessionRecord(**given)))  # type: ignore[arg-type]


@pytest.mark.parametrize("reason", [one for one in pb.FidelityReason.values() if one])
def test_a_stored_turn_tells_each_reason_in_both_layouts(
    reason: pb.FidelityReason.ValueType,
) -> None:
    name = name_of(pb.FidelityReason.DESCRIPTOR, reason)
    turn = {"node_id": 2, "sampled": True, "reasons": [reason], "model_request_ids": ["ask"]}
    segment = pb.TrajectorySegment(**turn)  # type: ignore[arg-type]
    segment.sampling.temperature = 0.5
    node = pb.TrajectoryNode(**turn)  # type: ignore[arg-type]
    node.sampling.temperature = 0.5
    path = pb.Trajectory(leaf_node_id=2, segments=[segment])
    for given in ({"trajectories": [path]}, {"tree": pb.TrajectoryTree(nodes=[node])}):
        lines = told(**given)
        assert "node 2: not trained ask" in lines
        assert f"  {name}. {REASONS[name]}" in lines
        assert "  sampled with {'temperature': 0.5}" in lines


def test_a_stored_branch_tells_who_labelled_it() -> None:
    given = {
        "lineage": pb.LINEAGE_SUB_AGENT,
        "lineage_source": pb.LINEAGE_SOURCE_RULE,
        "lineage_rule": pb.LINEAGE_RULE_OTHER_TOOLS,
    }
    sentence = f"SUB_AGENT. {SOURCES['RULE']} {BY_RULE['OTHER_TOOLS']}"
    path = pb.Trajectory(leaf_node_id=4, **given)  # type: ignore[arg-type]
    assert told(trajectories=[path]) == [f"trajectory of node 4: {sentence}"]
    root = pb.TrajectoryNode(node_id=1)
    leaf = pb.TrajectoryNode(node_id=4, parent_index=0, **given)  # type: ignore[arg-type]
    assert told(tree=pb.TrajectoryTree(nodes=[root, leaf])) == [f"branch of node 4: {sentence}"]


def test_a_turn_is_told_once_and_as_it_is_trained() -> None:
    shared = pb.FIDELITY_REASON_SHARED_PREFIX
    parts = [
        pb.TrajectorySegment(node_id=2, sampled=True, trained=True),
        pb.TrajectorySegment(node_id=2, sampled=True, reasons=[shared]),
    ]
    for order in (parts, parts[::-1]):
        paths = [pb.Trajectory(segments=[one]) for one in order]
        assert not [one for one in told(trajectories=paths) if one.startswith("node")]


def test_alarms_about_reasons_have_their_sentences() -> None:
    def counted(reason: str) -> list[Observation]:
        samples: dict[str, dict[Labels, float]] = {
            "rollmesh_gateway_turns_total": {(("end", "stop"),): 40.0},
            "rollmesh_gateway_fidelity_reasons_total": {(("reason", reason.lower()),): 20.0},
        }
        return [Observation(at_ms=0, servers=[Server(kind="gateway", name="g", samples=samples)])]

    for reason in ("TEMPLATE_REWRITE", "LENIENT_ECHO"):
        (alarm,) = raised(counted(reason))
        assert f"{reason}: {REASONS[reason]}" in alarm.message
        remedy = next(one.remedy for one in ALARM_RULES if one.name == alarm.name)
        assert alarm.message.endswith(remedy)


def test_terminals_get_no_character_that_moves_their_cursor() -> None:
    record = session_pb2.SessionRecord(session_id=HOSTILE, abandoned=HOSTILE, group_id=HOSTILE)
    assert words_of(line_of(record)).isprintable()
    turn = pb.TrajectorySegment(node_id=2, sampled=True, model_request_ids=[HOSTILE])
    for line in told(trajectories=[pb.Trajectory(segments=[turn])]):
        assert line.isprintable()
    assert printable(HOSTILE) == " [2J "
    assert told_reasons([99]) == [
        "UNKNOWN_99. A newer release wrote why. See the reasons of the node."
    ]
