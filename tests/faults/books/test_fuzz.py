"""Messages and bodies that nobody should send: everything is refused by a reason or served."""

import random
from collections.abc import Set
from pathlib import Path
from typing import Any

import pytest

from benchmarks.fuzz.bodies import SEEDS, Bodies
from benchmarks.fuzz.callers import Caller
from benchmarks.fuzz.fuzz import WRONG, run_fuzz
from benchmarks.fuzz.messages import Messages
from rollmesh.internal.v1 import leases_pb2
from rollmesh.runtime.access import CallerConfig, Identity, Role
from rollmesh.v1 import gateway_pb2


def figures(found: dict[str, Any], folder: Path) -> dict[str, Any]:
    kept = [path.read_text() for path in sorted(folder.glob("findings-*"))]
    return {name: found[name] for name in WRONG} | {"kept": "".join(kept)[:4000]}


@pytest.mark.long
async def test_a_few_seconds_of_it_break_nothing(tmp_path: Path) -> None:
    found = await run_fuzz(tmp_path, 8, seed=11)
    assert found["doors"] == "tls"
    assert found["inputs"] > 0
    assert found["answered"] > 0
    assert figures(found, tmp_path) == {**dict.fromkeys(WRONG, 0), "kept": ""}, found


@pytest.mark.long
@pytest.mark.parametrize(("doors", "seed"), [("open", 12), ("tokens", 13), ("tls", 14)])
async def test_two_minutes_of_it_break_nothing(tmp_path: Path, doors: str, seed: int) -> None:
    found = await run_fuzz(tmp_path, 40, seed)
    assert found["doors"] == doors
    assert found["inputs"] > 10_000
    assert found["answered"] > 50
    assert figures(found, tmp_path) == {**dict.fromkeys(WRONG, 0), "kept": ""}, found


SHUT, OPEN = "/rollmesh.v1.GatewayService/Chat", "/grpc.health.v1.Health/Check"
NOBODY = frozenset[Role]()


RIGHT: list[tuple[Set[Role] | None, str, str]] = [
    (None, SHUT, "OK"),
    ({Role.SIDECAR}, SHUT, "OK"),
    ({Role.SIDECAR}, SHUT, "SESSION_UNKNOWN"),
    ({Role.ENGINE}, SHUT, "ROLE_REFUSED"),
    (NOBODY, SHUT, "CALLER_UNKNOWN"),
    (NOBODY, OPEN, "OK"),
]
WRONG_OUTCOMES: list[tuple[Set[Role] | None, str, str]] = [
    ({Role.SIDECAR}, SHUT, "ROLE_REFUSED"),
    ({Role.ENGINE}, SHUT, "CALLER_UNKNOWN"),
    ({Role.ENGINE}, SHUT, "OK"),
    ({Role.ENGINE}, SHUT, "INVALID_FIELD"),
    ({Role.ENGINE}, SHUT, "UNDECODABLE"),
    (NOBODY, SHUT, "ROLE_REFUSED"),
    (NOBODY, OPEN, "CALLER_UNKNOWN"),
]


def violation(roles: Set[Role] | None, method: str, outcome: str) -> str:
    shown = None if roles is None else frozenset(roles)
    return Caller("somebody", shown, Identity(CallerConfig())).violation(method, outcome)


def test_the_table_of_roles_decides_which_outcome_is_right() -> None:
    assert [one for one in RIGHT if violation(*one)] == []
    assert [one for one in WRONG_OUTCOMES if not violation(*one)] == []


def test_whoever_cannot_shake_hands_gets_no_answer() -> None:
    caller = Caller("somebody", NOBODY, Identity(CallerConfig()), is_met=False)
    assert caller.violation(OPEN, "OK")
    assert not caller.violation(OPEN, "UNAVAILABLE")
    assert not caller.may_call(OPEN)


def test_a_seed_gives_the_same_inputs_and_another_one_others() -> None:
    def inputs(seed: int) -> list[bytes]:
        rng = random.Random(seed)
        bodies, messages = Bodies(rng, ["s"]), Messages(rng, ["s"], frozenset())
        made = [
            messages.made(gateway_pb2.ChatRequest.DESCRIPTOR).SerializeToString(deterministic=True)
            for _ in range(20)
        ]
        return [*made, *(bodies.made(route) for route in SEEDS)]

    assert inputs(1) == inputs(1)
    assert inputs(1) != inputs(2)


def test_what_belongs_to_others_is_never_sent() -> None:
    messages = Messages(random.Random(1), ["trainer"], frozenset(["trainer"]))
    for _ in range(300):
        made = messages.made(gateway_pb2.CreateSessionRequest.DESCRIPTOR)
        assert b"\x07trainer" not in made.SerializeToString()


def test_no_engine_is_taken_out_of_service_by_word() -> None:
    messages = Messages(random.Random(1), ["engine-0"], frozenset())
    for _ in range(300):
        made: Any = messages.made(leases_pb2.ReleaseLease.DESCRIPTOR)
        assert not made.engine_fault
