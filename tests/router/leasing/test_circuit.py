import pytest

from rollmesh.internal.v1 import leases_pb2
from rollmesh.router import Circuit, CircuitLimits
from rollmesh.v1 import router_pb2 as pb

LIMITS = CircuitLimits(losses=3, first_ms=100, longest_ms=350)
LOST, ANSWERED = leases_pb2.LEASE_OUTCOME_LOST, leases_pb2.LEASE_OUTCOME_ANSWERED
NOTHING = leases_pb2.LEASE_OUTCOME_UNSPECIFIED
CLOSED, OPEN = pb.CIRCUIT_STATE_CLOSED, pb.CIRCUIT_STATE_OPEN
HALF_OPEN = pb.CIRCUIT_STATE_HALF_OPEN


def turn(
    circuit: Circuit, outcome: leases_pb2.LeaseOutcome.ValueType, now_ms: int = 0
) -> tuple[bool, pb.CircuitState.ValueType]:
    changed = circuit.end(circuit.grant(), outcome, now_ms, LIMITS)
    return changed, circuit.state


def opened(now_ms: int = 0) -> Circuit:
    circuit = Circuit()
    for _ in range(3):
        turn(circuit, LOST, now_ms)
    return circuit


@pytest.mark.parametrize(
    ("outcomes", "state"),
    [
        pytest.param([LOST, LOST], CLOSED, id="too-few"),
        pytest.param([LOST, LOST, LOST], OPEN, id="in-a-row"),
        pytest.param([LOST, LOST, ANSWERED, LOST, LOST], CLOSED, id="an-answer-between"),
        pytest.param([LOST, LOST, NOTHING, LOST], OPEN, id="a-cancelled-turn-says-nothing"),
        pytest.param([NOTHING] * 9, CLOSED, id="errors-of-clients"),
    ],
)
def test_turns_lost_in_a_row_open_it(
    outcomes: list[leases_pb2.LeaseOutcome.ValueType], state: pb.CircuitState.ValueType
) -> None:
    circuit = Circuit()
    for outcome in outcomes:
        turn(circuit, outcome)
    assert circuit.state == state
    assert circuit.admits is (state == CLOSED)


def test_turns_that_are_lost_together_open_it_once() -> None:
    circuit = Circuit()
    epochs = [circuit.grant() for _ in range(50)]
    changes = [circuit.end(epoch, LOST, 7, LIMITS) for epoch in epochs]
    assert changes == [False, False, True] + [False] * 47
    assert circuit.until_ms == 107


def test_an_answer_of_a_turn_from_before_does_not_close_it() -> None:
    circuit = Circuit()
    before = circuit.grant()
    for _ in range(3):
        turn(circuit, LOST)
    assert not circuit.end(before, ANSWERED, 0, LIMITS)
    circuit.half_open()
    assert not circuit.end(before, ANSWERED, 0, LIMITS)
    assert circuit.state == HALF_OPEN


def test_a_half_open_circuit_admits_single_probes_until_one_is_answered() -> None:
    circuit = opened()
    circuit.half_open()
    assert circuit.admits
    probe = circuit.grant()
    assert not circuit.admits
    assert not circuit.end(probe, NOTHING, 0, LIMITS)  # cancelled: another may try
    assert (circuit.state, circuit.admits) == (HALF_OPEN, True)
    assert turn(circuit, ANSWERED) == (True, CLOSED)
    assert [turn(circuit, LOST) for _ in range(3)][1:] == [(False, CLOSED), (True, OPEN)]


def test_it_stays_open_for_longer_each_time_up_to_a_limit() -> None:
    circuit, waits = opened(), [100]
    for _ in range(4):
        circuit.half_open()
        assert turn(circuit, LOST, 1000) == (True, OPEN)
        waits.append(circuit.until_ms - 1000)
    assert waits == [100, 200, 350, 350, 350]
    circuit.half_open()
    turn(circuit, ANSWERED)
    for _ in range(3):
        turn(circuit, LOST, 1000)
    assert circuit.until_ms == 1100


def test_the_time_doubles_a_bounded_number_of_times() -> None:
    circuit, limits = Circuit(), CircuitLimits(losses=1, first_ms=1, longest_ms=1 << 62)
    for _ in range(40):
        circuit.end(circuit.grant(), LOST, 0, limits)
        circuit.half_open()
    assert circuit.until_ms == 1 << 30
