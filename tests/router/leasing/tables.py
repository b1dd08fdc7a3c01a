"""Lease tables of the tests."""

from typing import Any

from rollmesh.internal.v1 import leases_pb2
from rollmesh.router import Engine, LeaseTable


def table(*names: str, capacity: int = 8) -> LeaseTable:
    result = LeaseTable()
    for name in names:
        result.add_engine(Engine(name, f"{name}:1", "m", capacity))
    result.open_stream("g", hello())
    return result


def acquire(
    leases: LeaseTable,
    stream: str,
    lease_id: str,
    session_id: str,
    *,
    now_ms: int = 0,
    **asked: Any,
) -> leases_pb2.LeaseGrant | None:
    """Asks for a lease. `asked` are fields of AcquireLease."""
    request = leases_pb2.AcquireLease(lease_id=lease_id, session_id=session_id, **asked)
    return leases.acquire(stream, request, now_ms=now_ms)


def change(leases: LeaseTable, name: str, **state: Any) -> None:
    for attribute, value in state.items():
        setattr(leases.engines[name], attribute, value)
    leases.fleet.changed(leases.engines[name])


def granted(grant: leases_pb2.LeaseGrant | None) -> str:
    assert grant is not None
    return grant.engine_id


def hello(
    model: str = "", sha256: str = "", tokens: int = 0, *, name: str = "g"
) -> leases_pb2.DispatchHello:
    return leases_pb2.DispatchHello(
        gateway_id=name, model=model, tokenizer_sha256=sha256, vocabulary_tokens=tokens
    )


def is_clear(leases: LeaseTable) -> bool:
    """Whether nothing is kept of any gateway, session or lease."""
    dicts = [one for one in vars(leases).values() if isinstance(one, dict)]
    kept = any(one for one in dicts if one is not leases.engines) or leases.fleet.pools
    return not (kept or leases.sessions or leases.waiting or leases.leases)


def ended(leases: LeaseTable, now_ms: int) -> dict[str, str]:
    """Ends the waits that can end: the engine of each lease, or the reason of its refusal."""
    return {
        one.lease_id: one.result.engine_id
        if isinstance(one.result, leases_pb2.LeaseGrant)
        else one.result.reason
        for one in leases.end_waits(now_ms)
    }
