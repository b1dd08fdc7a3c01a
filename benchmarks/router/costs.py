"""CPU time and memory of the lease table: no gRPC, no processes."""

import os
import random
import subprocess
import sys
import time
from statistics import median

from benchmarks.harness.memory import rss_bytes
from rollmesh.internal.v1 import leases_pb2
from rollmesh.router import Engine, LeaseTable

_SESSIONS = 100_000
_HELD = 64
_TURNS = 20_000
_NEW = 0.1
_GROUP = 8
_ROUNDS = 5
_SIZES = (4, 64, 1000)


def lease_costs() -> dict[str, float]:
    """Measures the CPU time of an acquire and its release, microseconds, in interleaved rounds.

    With 4 and 64 engines 1,000 sessions are placed, with 1,000 engines 100,000. One turn in ten is
    the first of its session, which has to be placed. 64 leases are held at a time.
    """
    tables = {size: filled(size, _SESSIONS if size == _SIZES[-1] else 1000) for size in _SIZES}
    seen: dict[int, list[float]] = {size: [] for size in _SIZES}
    for round_ in range(_ROUNDS):
        for size, table in tables.items():
            seen[size].append(_turns(table, round_))
            print(f"{size} engines: {seen[size][-1]:.1f} us a lease")
    return {f"lease_cpu_us_{size}": round(median(times), 1) for size, times in seen.items()}


def filled(engines: int, sessions: int) -> LeaseTable:
    """Returns a table with engines, and with sessions that are placed and hold no lease."""
    table = LeaseTable()
    table.open_stream("g", leases_pb2.DispatchHello(gateway_id="g", model="policy"))
    for number in range(engines):
        name = f"engine-{number:04}"
        table.add_engine(Engine(name, f"10.0.{number // 256}.{number % 256}:7400", "policy", 256))
    for number in range(sessions):
        asked = leases_pb2.AcquireLease(
            lease_id="fill", session_id=_name(number), group_id=_group(number)
        )
        table.acquire("g", asked)
        table.release("g", "fill", leases_pb2.LEASE_OUTCOME_ANSWERED)
    return table


def rss_mb() -> float:
    """Measures the memory of 100,000 placed sessions on 1,000 engines, in a process of its own."""
    code = "from benchmarks.router.costs import print_growth; print_growth()"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return round(float(done.stdout), 1)


def print_growth() -> None:
    """Prints by how many MB this process grows."""
    before = rss_bytes(os.getpid())
    table = filled(_SIZES[-1], _SESSIONS)
    print((rss_bytes(os.getpid()) - before) / 1e6)
    del table


def _turns(table: LeaseTable, round_: int) -> float:
    chance = random.Random(round_)
    sessions = table.sessions
    turns = []
    for number in range(_TURNS):
        known = chance.random() >= _NEW
        turns.append(chance.randrange(sessions) if known else 10**9 * (round_ + 1) + number)
    asked = [
        leases_pb2.AcquireLease(
            lease_id=f"{round_}-{at}", session_id=_name(one), group_id=_group(one), wait_ms=30_000
        )
        for at, one in enumerate(turns)
    ]
    started = time.process_time()
    for at, one in enumerate(asked):
        table.acquire("g", one, now_ms=at)
        if at >= _HELD:
            table.release(
                "g", asked[at - _HELD].lease_id, leases_pb2.LEASE_OUTCOME_ANSWERED, now_ms=at
            )
            table.end_waits(at)
    spent = time.process_time() - started
    for one in asked[-_HELD:]:
        table.release("g", one.lease_id)
    for number in turns:
        if number >= 10**9:
            table.forget(_name(number))
    return spent / _TURNS * 1e6


def _name(number: int) -> str:
    return f"session-{number:032x}"


def _group(number: int) -> str:
    return f"group-{number // _GROUP:032x}"
