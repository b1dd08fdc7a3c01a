"""Units out of Redis as they are delivered: several with two trips.

What a filter takes out of them is listed with a third.
"""

from collections.abc import Sequence
from typing import NamedTuple

from rollmesh.collector.filters import Verdict
from rollmesh.collector.records import join, keep
from rollmesh.collector.redis_client import RedisClient
from rollmesh.collector.redis_ingest import add_filtered
from rollmesh.collector.redis_logs import owner_of
from rollmesh.collector.store import LOAD_BYTES, Judge, Loaded, Unit
from rollmesh.v1 import collector_pb2 as pb, types_pb2


class _Judged(NamedTuple):
    """A unit, the heads of its sessions, and what is said about them."""

    unit: Unit
    heads: list[types_pb2.SessionRecord]
    verdict: Verdict | None
    """None: a session of it was removed; it was settled while it waited."""

    @property
    def delivers(self) -> bool:
        return self.verdict is not None and self.verdict.delivers


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
    await add_filtered(
        client,
        owner_of(consumer),
        [
            pb.FilteredEntry(delivery_id=unit.unit_id, unix_ms=now_ms, removed=verdict.removed)
            for unit, _, verdict in out
            if verdict and verdict.removed and counted[unit.unit_id] == 1
        ],
    )
    arrays = iter(found[len(out) :])
    loaded: list[Loaded | None] = []
    for unit, sessions, verdict in judged:
        attempt, response = counted.get(unit.unit_id, 0), pb.SubscribeResponse()
        if verdict is None:
            loaded.append(None)
            continue
        for head, places in zip(sessions, verdict.kept, strict=True) if attempt else ():
            session = response.delivery.sessions.add()
            session.CopyFrom(head)
            keep(join(session, next(arrays)), places)
        loaded.append(Loaded(attempt, verdict, response))
    return loaded


async def _judge(client: RedisClient, units: Sequence[Unit], judge: Judge) -> list[_Judged]:
    keys = [
        [client.key("session", session_id) for session_id in unit.members or (unit.unit_id,)]
        for unit in units
    ]
    asked = [("HGET", key, "head") for members in keys for key in members]
    asked += [("HSTRLEN", key, "arrays") for members in keys for key in members]
    found = await client.run_all(asked)
    stored = iter(zip(found[: len(found) // 2], found[len(found) // 2 :], strict=True))
    judged: list[_Judged] = []
    size = 0
    for unit, members in zip(units, keys, strict=True):
        rows = [next(stored) for _ in members]
        heads = [types_pb2.SessionRecord.FromString(head) for head, _ in rows if head is not None]
        whole = len(heads) == len(members)
        judged.append(_Judged(unit, heads, judge(heads) if whole else None))
        size += sum(length for _, length in rows)
        if size >= LOAD_BYTES:
            break
    return judged
