"""The rules of the mesh, on observations as they may be: whatever is missing raises nothing."""

from dataclasses import replace
from typing import Any

import pytest

from rollmesh.runtime import (
    ALARM_RULES,
    MESH_RULES,
    Alarm,
    AlarmLimits,
    Observation,
    Server,
    alarms_of,
    raised,
)
from rollmesh.v1 import collector_pb2 as pb, gateway_pb2, router_pb2

Values = dict[str, float]
TOKENS, TURNS = "rollmesh_gateway_tokens_total", "rollmesh_gateway_turns_total"
REASONS, QUEUE = "rollmesh_gateway_fidelity_reasons_total", "rollmesh_router_queue_length"
SAMPLED, TIME = "rollmesh_engine_tokens_total", "rollmesh_engine_generating_seconds_total"
ENDED, BAD = "rollmesh_engine_generations_total", "rollmesh_gateway_not_finite_logprobs_total"


def server(kind: str, values: Values | None = None, name: str = "", **given: Any) -> Server:
    """A server. Values are by `metric` or `metric label=value`."""
    samples: dict[str, Any] = {}
    for key, value in (values or {}).items():
        metric, _, label = key.partition(" ")
        labels = (tuple(label.split("=")),) if label else ()
        samples.setdefault(metric, {})[labels] = value
    return Server(kind=kind, name=name or kind, samples=samples, **given)


def engine(name: str = "engine", version: int = 1, **given: Any) -> router_pb2.Replica:
    hello = router_pb2.ReplicaHello(
        replica_id=name, kind=router_pb2.REPLICA_KIND_ENGINE, model="policy"
    )
    hello.load.policy_version = version
    return router_pb2.Replica(hello=hello, **given)


def members(*engines: router_pb2.Replica, target: int = 1) -> router_pb2.ListReplicasResponse:
    models = [router_pb2.ModelWeights(model="policy", target_policy_version=target)]
    return router_pb2.ListReplicasResponse(replicas=engines, models=models)


def looks(*of: Observation, every_ms: int = 15_000) -> list[Observation]:
    return [replace(one, at_ms=at * every_ms) for at, one in enumerate(of)]


def look(*servers: Server, **given: Any) -> Observation:
    return Observation(at_ms=0, servers=servers, **given)


def gauges(kind: str, metric: str, *values: float) -> list[Observation]:
    return looks(*(look(server(kind, {metric: value})) for value in values))


def counted(*of: Values, kind: str = "gateway", **given: Any) -> list[Observation]:
    return looks(*(look(server(kind, values), **given) for values in of))


def consumers(*streams: int, ready: int = 2, acknowledged: int = 0) -> list[Observation]:
    found = []
    for at, count in enumerate(streams):
        stats = pb.ConsumerStats(
            name="c", streams=count, ready=ready, acknowledged=at * acknowledged
        )
        found.append(look(stores=[pb.GetStatsResponse(consumers=[stats])]))
    return looks(*found)


def engines_at(slow: float, **given: float) -> list[Observation]:
    """Two engines after generations of 100 tokens: one at 10 tokens per second."""
    done = {f"{ENDED} end=stop": 50.0, f"{SAMPLED} kind=sampled": 5000.0, TIME: 500.0}
    other = done | {TIME: 5000 / slow} | given
    pair = [server("engine", done, "a"), server("engine", other, "b")]
    listed = members(engine("a"), engine("b"))
    none = [server("engine", dict.fromkeys(done, 0.0), name) for name in ("a", "b")]
    return looks(look(*none, members=listed), look(*pair, members=listed))


def cached(*pairs: tuple[float, float], versions: tuple[int, ...] = (1, 1)) -> list[Observation]:
    return looks(
        *(
            look(
                server("gateway", {f"{TOKENS} kind=prompt": prompt, f"{TOKENS} kind=cached": hits}),
                members=members(engine(version=version)),
            )
            for (prompt, hits), version in zip(pairs, versions, strict=True)
        )
    )


FENCED = engine(fenced=True)
SILENT = server("collector", silent="gone")
STALLED = gateway_pb2.OpenSession(session_id="s", idle_ms=2_000_000)
CASES: list[tuple[str, list[Observation], list[str]]] = [
    ("nothing was seen", [], []),
    ("nothing is known", looks(look(), look()), []),
    ("a server is silent", looks(look(SILENT), look(SILENT)), ["server_silent"]),
    ("a server was silent once", looks(look(server("collector")), look(SILENT)), []),
    ("a server answers again", looks(look(SILENT), look(server("collector"))), []),
    (
        "an engine lies",
        looks(
            look(
                members=members(
                    engine(exclusion=router_pb2.Exclusion(reason=router_pb2.EXCLUSION_REASON_FAULT))
                )
            )
        ),
        ["engine_left_out"],
    ),
    (
        "an engine sleeps",
        looks(
            look(
                members=members(
                    engine(
                        exclusion=router_pb2.Exclusion(reason=router_pb2.EXCLUSION_REASON_SLEEPING)
                    )
                )
            )
        ),
        [],
    ),
    ("an engine is fenced", looks(*[look(members=members(FENCED))] * 4), ["engine_behind"]),
    ("an engine was fenced for a moment", looks(*[look(members=members(FENCED))] * 2), []),
    (
        "each push finds it fenced",
        looks(*(look(members=members(FENCED, target=at)) for at in range(4))),
        [],
    ),
    (
        "an engine was brought up to date",
        looks(*[look(members=members(FENCED))] * 3, look(members=members(engine()))),
        [],
    ),
    ("an engine is slower by half", engines_at(4.0), ["engine_slow"]),
    ("an engine is a little slower", engines_at(6.0), []),
    ("an engine has done little", engines_at(4.0, **{f"{ENDED} end=stop": 9.0}), []),
    ("the cache collapses", cached((10_000, 8_000), (20_000, 8_100)), ["cache_collapses"]),
    (
        "the cache collapses at a push",
        cached((10_000, 8_000), (20_000, 8_100), versions=(1, 2)),
        [],
    ),
    ("the cache was never hit", cached((10_000, 0), (20_000, 0)), []),
    ("few prompts miss the cache", cached((10_000, 8_000), (12_000, 8_000)), []),
    ("a gateway began anew", cached((10_000, 8_000), (6_000, 4_800)), []),
    ("the queue only grows", gauges("router", QUEUE, 1, 2, 2, 3, 4, 5), ["queue_grows"]),
    ("the queue grew and stays", gauges("router", QUEUE, 1, 5, 5, 5, 5, 5), []),
    ("the queue empties", gauges("router", QUEUE, 1, 2, 3, 5, 4, 6), []),
    ("the queue grows for a moment", gauges("router", QUEUE, 1, 2, 3, 4), []),
    (
        "the outbox only grows",
        gauges("gateway", "rollmesh_gateway_undelivered_sessions", 0, 1, 1, 2, 3, 4),
        ["outbox_grows"],
    ),
    ("a dead letter", gauges("gateway", "rollmesh_gateway_dead_letters", 1), ["dead_letters"]),
    ("no dead letter", gauges("gateway", "rollmesh_gateway_dead_letters", 0), []),
    (
        "a disk is full",
        counted({"rollmesh_disk_total_bytes": 1e12, "rollmesh_disk_free_bytes": 1e9}),
        ["disk_low"],
    ),
    (
        "a large disk has a few per cent left",
        counted({"rollmesh_disk_total_bytes": 1e14, "rollmesh_disk_free_bytes": 1e12}),
        [],
    ),
    (
        "a service has no folder",
        counted({"rollmesh_disk_total_bytes": 0, "rollmesh_disk_free_bytes": 0}),
        [],
    ),
    (
        "a disk cannot be read",
        counted(
            dict.fromkeys(("rollmesh_disk_total_bytes", "rollmesh_disk_free_bytes"), float("nan"))
        ),
        [],
    ),
    (
        "a clock is ahead",
        looks(look(server("router", ahead_ms=5_000, doubt_ms=10), server("gateway", doubt_ms=1))),
        ["clocks_apart"],
    ),
    (
        "a slow answer tells no time",
        looks(look(server("router", ahead_ms=4_000, doubt_ms=3_000))),
        [],
    ),
    ("a clock is not known", looks(look(server("router", ahead_ms=9_000))), []),
    ("a session is idle", looks(look(sessions=[STALLED])), ["session_stalls"]),
    (
        "a session waits for its answer",
        looks(look(sessions=[gateway_pb2.OpenSession(idle_ms=2_000_000, in_flight=1)])),
        [],
    ),
    ("nobody reads a consumer", consumers(0, 0, 0, 0), ["consumer_unread"]),
    ("nobody reads an empty consumer", consumers(0, 0, 0, 0, ready=0), []),
    ("a trainer comes", consumers(0, 0, 0, 1), []),
    ("a trainer comes and goes", consumers(0, 0, 0, 0, acknowledged=1), []),
    (
        "all answers are cut",
        counted({f"{TURNS} end=length": 30.0}),
        ["always_by_length"],
    ),
    (
        "answers were cut once, and no longer are",
        counted(
            {f"{TURNS} end=length": 90.0}, {f"{TURNS} end=length": 90.0, f"{TURNS} end=stop": 30.0}
        ),
        [],
    ),
    ("few answers are cut", counted({f"{TURNS} end=length": 5.0}), []),
    (
        "templates rewrite",
        counted({f"{TURNS} end=stop": 40.0, f"{REASONS} reason=template_rewrite": 20.0}),
        ["history_rewritten"],
    ),
    (
        "agents change answers",
        counted({f"{TURNS} end=stop": 40.0, f"{REASONS} reason=lenient_echo": 20.0}),
        ["echo_drifts"],
    ),
    (
        "other reasons",
        counted({f"{TURNS} end=stop": 40.0, f"{REASONS} reason=auxiliary": 40.0}),
        [],
    ),
    ("log-probs are no numbers", counted({f"{BAD} engine=e": 3.0}), ["logprobs_not_finite"]),
    (
        "log-probs were no numbers before",
        counted(*[{f"{BAD} engine=e": 3.0}] * 4),
        [],
    ),
]


@pytest.mark.parametrize(
    ("history", "names"), [pytest.param(*case[1:], id=case[0]) for case in CASES]
)
def test_an_observation_raises_its_alarm_and_no_other(
    history: list[Observation], names: list[str]
) -> None:
    assert [one.name for one in raised(history)] == names


def test_every_rule_of_the_mesh_is_raised_by_a_case() -> None:
    named = {name for _, _, names in CASES for name in names}
    assert named == {rule.name for rule in MESH_RULES}


def test_a_rule_has_a_name_of_its_own_and_looks_at_steps_or_at_the_mesh() -> None:
    assert len({rule.name for rule in ALARM_RULES}) == len(ALARM_RULES)
    for rule in ALARM_RULES:
        assert rule.when, rule.name
        assert rule.remedy.rstrip(".") == rule.remedy != "", rule.name


def test_a_consumer_is_read_at_another_collector() -> None:
    here, there = (
        pb.GetStatsResponse(consumers=[pb.ConsumerStats(name="c", ready=2, streams=streams)])
        for streams in (0, 1)
    )
    assert not raised(looks(*[look(stores=[here, there])] * 4))
    silent = server("collector", silent="gone", name="other")
    alarms = raised(looks(*[look(silent, stores=[here])] * 4))  # it may have the stream
    assert [one.name for one in alarms] == ["server_silent"]


def test_alarms_of_steps_name_their_consumer() -> None:
    alarm = pb.Alarm(name="not_finite", message="as the collector says")
    stats = pb.ConsumerStats(name="c", streams=1, alarms=[alarm])
    found = raised(looks(look(stores=[pb.GetStatsResponse(consumers=[stats])])))
    assert found == [Alarm("not_finite", "c", "as the collector says")]


def test_no_more_than_three_sessions_are_named() -> None:
    idle = [gateway_pb2.OpenSession(session_id=str(at), idle_ms=9_000_000 + at) for at in range(9)]
    found = raised(looks(look(sessions=idle)))
    assert [one.where for one in found] == ["8", "7", "6"]
    assert "as do 6 others" in found[0].message


def test_limits_say_how_long_a_state_may_last() -> None:
    history = gauges("router", QUEUE, 1, 2, 2, 3, 4, 5)
    assert not raised(history, AlarmLimits(patience_s=90))


@pytest.mark.parametrize(
    ("versions", "names"),
    [
        pytest.param([7.0] * 20, ["version_stands"], id="it stands"),
        pytest.param([7.0] * 19, [], id="few steps"),
        pytest.param([7.0] * 19 + [8.0], [], id="it advances"),
        pytest.param([], [], id="no steps"),
        pytest.param([None] * 20, [], id="it is not reported"),
    ],
)
def test_a_version_that_stands_is_told(versions: list[float | None], names: list[str]) -> None:
    steps = [
        pb.TrainingStep(step=at, metrics={} if one is None else {"policy_version": one})
        for at, one in enumerate(versions)
    ]
    assert [one.name for one in alarms_of(steps)] == names
