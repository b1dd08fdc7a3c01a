"""Which engines hold the beginning of a prompt."""

from rollmesh.router.leasing.engines import Engine
from rollmesh.router.leasing.leases import LeaseTable
from rollmesh.router.leasing.policies import POLICIES
from rollmesh.router.leasing.prefixes import Prefixes
from rollmesh.v1 import router_pb2


def engine(name: str) -> Engine:
    return Engine(name, f"{name}:1", "m", 64)


def held(prefixes: Prefixes, *asked: int) -> list[list[str]]:
    return [[one.engine_id for one in engines] for engines in prefixes.holders(asked)]


def test_the_engines_of_the_longest_prefix_come_first() -> None:
    prefixes = Prefixes()
    prefixes.used([1, 2], engine("a"))
    prefixes.used([1, 3], engine("b"))
    assert held(prefixes, 1, 2, 9) == [["a"], ["a", "b"]]
    assert held(prefixes, 9) == []
    assert held(prefixes) == []


def test_new_weights_empty_the_cache_of_an_engine() -> None:
    prefixes, one = Prefixes(), engine("a")
    prefixes.used([1], one)
    one.policy_version = 2
    assert held(prefixes, 1) == [[]]
    prefixes.used([1], one)
    assert held(prefixes, 1) == [["a"]]


def test_what_was_not_used_for_longest_is_forgotten() -> None:
    prefixes, one = Prefixes(2), engine("a")
    for prefix in (1, 2, 1, 3):
        prefixes.used([prefix], one)
    assert len(prefixes) == 2
    assert held(prefixes, 1, 2, 3) == [["a"], ["a"]]
    assert held(prefixes, 2) == []


def test_of_many_engines_the_last_ones_are_kept() -> None:
    prefixes = Prefixes()
    for number in range(20):
        prefixes.used([1], engine(f"e{number}"))
    assert held(prefixes, 1) == [[f"e{number}" for number in range(4, 20)]]


def test_an_engine_that_left_is_forgotten() -> None:
    prefixes, gone = Prefixes(), engine("a")
    prefixes.used([1], gone)
    prefixes.used([1], engine("b"))
    prefixes.forget(gone)
    assert held(prefixes, 1) == [["b"]]


def granted(table: LeaseTable, session: str, *prefixes: int) -> str:
    grant = table.acquire("g", session, session, prefixes=prefixes)
    assert grant is not None
    return grant.engine_id


def table_of(policy: str) -> LeaseTable:
    table = LeaseTable(policy=POLICIES[policy])
    table.open_stream("g", router_pb2.DispatchHello(gateway_id="g", model="m"))
    for name in ("a", "b"):
        table.add_engine(engine(name))
    return table


def test_sessions_whose_prompts_begin_alike_share_an_engine_within_the_margin() -> None:
    table = table_of("prefix_affinity")
    first = granted(table, "s0", 1, 2)
    other = "b" if first == "a" else "a"
    assert granted(table, "s1", 1, 2) == first
    assert granted(table, "s2", 7) == other
    assert granted(table, "s3", 1, 2) == first  # 2 of them, and 1.5 in the mean
    assert granted(table, "s4", 1, 2) == first  # 3, and 2 in the mean
    assert granted(table, "s5", 1, 2) == other  # 4 would be too many above 2.5
    assert granted(table, "s6", 1, 5) == other  # which holds the beginning too, and has fewer


def test_other_policies_do_not_look_at_prompts() -> None:
    table = table_of("least_active_sticky")
    first = granted(table, "s0", 1, 2)
    assert granted(table, "s1", 1, 2) != first
