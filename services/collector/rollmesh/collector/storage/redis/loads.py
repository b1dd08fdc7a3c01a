"""Units out of Redis as they are delivered: several with two trips.

What a filter takes out of them is listed with a third.
"""

from collections.abc import Sequence
from typing import NamedTuple

from rollmesh.collector.delivery.filters import Verdict
from rollmesh.collector.delivery.records import join, keep, read_head
from rollmesh.collector.storage.redis.client import RedisClient
from rollmesh.collector.storage.redis.ingest import add_filtered
from rollmesh.collector.storage.redis.logs import owner_of
from rollmesh.collector.storage.store import LOAD_BYTES, Judge, Loaded, Unit, set_aside
from rollmesh.runtime.errors import SessionDamagedError
from rollmesh.v1 import collector_pb2 as pb, types_pb2


class _Judged(NamedTuple):
    """A unit, the heads of its sessions, and what is said about them."""

    unit: Unit
    heads: list[types_pb2.SessionRecord]
    verdict: Verdict | SessionDamagedError | None
    """None: a session of it was removed; it was settled while it waited."""

    @property
    def delivers(self) -> bool:
        return isinstance(self.verdict, Verdict) and self.verdict.delivers


async def load(
    client: RedisClient, consumer: str, units: Sequence[Unit], judge: Judge, now_ms: int
) -> list[Loaded | None]:
    """Counts attempts to deliver the first of the units, up to `LOAD_BYTES`."""
    judged = await _judge(client, units, judge)
    out = [one for one in judged if one.delivers]
    key = client.key("attempts", consumer)
    heads = [head for one in out for head in one.heads]
    found = await client.run_all(
        [
            *(("HINCRBY", key, one.unit.unit_id, 1) for one in out),
            *(("HGET", client.key("session", head.session_id), "arrays") for head in heads),
        ]
    )
    counted = {one.unit.unit_id: int(at) for one, at in zip(out, found, strict=False)}
    arrays = iter(found[len(out) :])
    loaded = [
        _loaded(one, counted.get(one.unit.unit_id, 0), [next(arrays) or b"" for _ in one.heads])
        if one.delivers
        else _kept_back(one.verdict)
        for one in judged
    ]
    entries = [
        pb.FilteredEntry(delivery_id=one.unit.unit_id, unix_ms=now_ms, removed=made.verdict.removed)
        for one, made in zip(judged, loaded, strict=True)
        if made and made.attempt == 1 and made.verdict.removed
    ]
    await add_filtered(client, owner_of(consumer), entries)
    return loaded


def _loaded(judged: _Judged, attempt: int, arrays: Sequence[bytes]) -> Loaded:
    assert isinstance(judged.verdict, Verdict)
    response = pb.SubscribeResponse()
    try:
        for head, packed, places in zip(judged.heads, arrays, judged.verdict.kept, strict=True):
            session = response.delivery.sessions.add()
            session.CopyFrom(head)
            keep(join(session, packed), places)
    except SessionDamagedError as error:
        return set_aside(error)
    return Loaded(attempt, judged.verdict, response)


def _kept_back(verdict: Verdict | SessionDamagedError | None) -> Loaded | None:
    if isinstance(verdict, SessionDamagedError):
        return set_aside(verdict)
    return None if verdict is None else Loaded(0, verdict, pb.SubscribeResponse())


async def _judge(client: RedisClient, units: Sequence[Unit], judge: Judge) -> list[_Judged]:
    members = [unit.members or (unit.unit_id,) for unit in units]
    keys = [client.key("session", session_id) for ids in members for session_id in ids]
    asked = [("HGET", key, "head") for key in keys]
    asked += [("HSTRLEN", key, "arrays") for key in keys]
    found = await client.run_all(asked)
    stored = iter(zip(found[: len(found) // 2], found[len(found) // 2 :], strict=True))
    judged: list[_Judged] = []
    size = 0
    for unit, ids in zip(units, members, strict=True):
        rows = [next(stored) for _ in ids]
        judged.append(_judged(unit, ids, [head for head, _ in rows], judge))
        size += sum(length for _, length in rows)
        if size >= LOAD_BYTES:
            break
    return judged


def _judged(unit: Unit, ids: Sequence[str], rows: Sequence[bytes | None], judge: Judge) -> _Judged:
    heads: list[types_pb2.SessionRecord] = []
    for session_id, head in zip(ids, rows, strict=True):
        if head is None:
            return _Judged(unit, [], None)
        try:
            heads.append(read_head(session_id, head))
        except SessionDamagedError as error:
            return _Judged(unit, [], error)
    return _Judged(unit, heads, judge(heads))
