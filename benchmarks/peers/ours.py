"""The record of a session of rollmesh: its trajectories, as the collector delivers them."""

import asyncio
import uuid
from dataclasses import dataclass, field

import numpy as np

from benchmarks.peers.door import Record, span
from rollmesh.client import Client, Session, Trajectory
from rollmesh.v1 import gateway_pb2, trajectory_pb2

_TIMEOUT_S = 60
_PREFIX = "FIDELITY_REASON_"
_PLAIN = {f"{_PREFIX}{one}" for one in ("EXACT", "SHARED_PREFIX")}


@dataclass
class Ours:
    """A mesh, and its sessions."""

    client: Client
    sessions: dict[str, Session] = field(default_factory=dict)

    async def open(self, _sampling: Record) -> Record:
        """Opens a session at the gateway."""
        session = await self.client.open_session(gateway_pb2.CreateSessionRequest())
        self.sessions[session.session_id] = session
        return {
            "id": session.session_id,
            "base_url": session.keyless_url,
            "key": session.api_key,
        }

    async def renew(self) -> bool:
        """Pushes weights."""
        version = await self.client.policy_version() + 1
        await self.client.push_weights({"weight": np.zeros(4, np.float32)}, version)
        return True

    async def close(self, session_id: str) -> Record:
        """Closes a session and takes it from the collector."""
        await self.client.close_session(self.sessions.pop(session_id))
        consumer = f"conformance-{uuid.uuid4().hex}"
        async with (
            asyncio.timeout(_TIMEOUT_S),
            self.client.subscribe(consumer, unit="session") as deliveries,
        ):
            async for delivery in deliveries:
                await deliveries.acknowledge(delivery)
                for found in delivery.sessions:
                    if found.session_id == session_id:
                        return {"rows": [_row(one) for one in found.trajectories]}
        raise AssertionError("the deliveries ended without the session")


def _row(found: Trajectory) -> Record:
    labels = [] if found.lineage == "MAIN" else [found.lineage]
    spans = [_span(found, one) for one in found.segments if one.sampled]
    return {"token_ids": found.token_ids.tolist(), "labels": labels, "sampled": spans}


def _span(found: Trajectory, segment: trajectory_pb2.TrajectorySegment) -> Record:
    sampled = np.flatnonzero(found.policy_versions[segment.start : segment.end] >= 0)
    start, end = segment.start + int(sampled[0]), segment.start + int(sampled[-1]) + 1
    reasons = {trajectory_pb2.FidelityReason.Name(one) for one in segment.reasons}
    versions = sorted(set(found.policy_versions[start:end].tolist()))
    return span(
        start,
        end,
        found.logprobs[start:end].tolist(),
        trained=bool(found.loss_mask[start:end].all()),
        labels=sorted(one.removeprefix(_PREFIX) for one in reasons - _PLAIN),
        version=" ".join(map(str, versions)),
    )
