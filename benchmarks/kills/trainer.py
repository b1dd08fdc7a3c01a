"""A trainer in a separate process: logs each delivery to a file, then acknowledges it.

It writes one JSON line for each delivery before sending the acknowledgement, and one once that is
durable. If it pushes weights, by difference, it writes a line before each push and one after it.
Arguments: the mesh's addresses as JSON, the file, the number of deliveries after which to print
`FAULT` and block before acknowledging (0: never), the seconds between two pushes of weights (0: it
pushes none), and the name of a further model (empty: none), to which it pushes an adapter, and
which is its teacher. It ends when its standard input does.
"""

import asyncio
import hashlib
import json
import os
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from rollmesh.client import Client, MeshAddresses, SessionResult, SubscribeOptions
from rollmesh.runtime.errors import RollmeshError
from rollmesh.v1 import trajectory_pb2

_CREDITS = 16
_LEASE_MS = 60_000
_WEIGHTS = {"w": np.zeros(1024, np.float32)}
ADAPTER = "tuned"
"""Name of the adapter."""
_CONFIG = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": ["q_proj"]}
_MIGRATED = trajectory_pb2.FIDELITY_REASON_MIGRATED


def describe(session: SessionResult) -> dict[str, Any]:
    """Returns the parts of a session that the audit needs, as JSON values."""
    digest = hashlib.sha256()
    turns: list[tuple[str, bool, bool, int, list[int | str]]] = []
    drift = 0
    scores: list[bool] = []
    for trajectory in session.trajectories:
        ids = np.ascontiguousarray(trajectory.token_ids, "<u4")
        for data in (ids, trajectory.logprobs, trajectory.loss_mask):
            digest.update(data.tobytes())
        if trajectory.teacher is not None:
            wanted = (ids % 97) / np.float32(-50)  # of a scripted engine
            found = trajectory.teacher.logprobs[trajectory.prompt_tokens :]
            scores.append(np.allclose(found, wanted[trajectory.prompt_tokens :]))
        for segment in trajectory.segments:
            if not segment.sampled:
                continue
            answer_id = f"chatcmpl-{session.session_id}-{segment.node_id}"
            crc = zlib.crc32(ids[segment.start : segment.end].tobytes())
            spans = [
                span
                for span in trajectory.version_spans
                if span.start < segment.end and segment.start < span.end
            ]
            versions = list(
                dict.fromkeys(_policy(one.policy_version, one.adapter) for one in spans)
            )
            is_migrated = _MIGRATED in segment.reasons
            turns.append((answer_id, segment.trained, is_migrated, crc, versions))
            drift += zlib.crc32(ids[: segment.start].tobytes()) != segment.prompt_crc32
    return {
        "session_id": session.session_id,
        "digest": digest.hexdigest(),
        "turns": turns,
        "drift": drift,
        "scores": scores,
    }


def _policy(version: int, adapter: str) -> int | str:
    """Returns how the log names a version of the weights, or of the adapter."""
    return f"{adapter} {version}" if adapter else version


async def main(
    addresses: str, log: str, fault_after: str, push_every_s: str = "0", student: str = ""
) -> None:
    """Processes deliveries, and pushes weights, until stopped."""
    file = os.open(Path(log), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    left = int(fault_after)

    def note(entry: dict[str, Any]) -> None:
        os.write(file, f"{json.dumps(entry)}\n".encode())

    async def consume(client: Client) -> None:
        nonlocal left
        async with client.subscribe(
            "trainer",
            unit="session",
            credits=_CREDITS,
            lease_ms=_LEASE_MS,
            options=SubscribeOptions(teacher=student),
        ) as deliveries:
            async for delivery in deliveries:
                sessions = [describe(session) for session in delivery.sessions]
                note({"received": delivery.delivery_id, "sessions": sessions})
                left -= 1
                if left == 0:
                    print("FAULT trainer-before-acknowledgement", flush=True)
                    await asyncio.Event().wait()
                await deliveries.acknowledge(delivery)
                note({"acknowledged": delivery.delivery_id})

    async def push(client: Client, every_s: float, model: str, adapter: str) -> None:
        while every_s:
            await asyncio.sleep(every_s)
            try:
                version = await client.policy_version(model, adapter) + 1
                policy = _policy(version, adapter)
                note({"pushing": policy, "at_s": time.monotonic()})
                if adapter:
                    await client.push_adapter(_WEIGHTS, adapter, version, _CONFIG, model=model)
                else:
                    _WEIGHTS["w"][version % 1024] = version
                    await client.push_weights(
                        _WEIGHTS, version, model=model, allow_partial=True, delta=True
                    )
            except RollmeshError as error:  # it may have reached some engines
                note({"not_pushed": error.reason})
            else:
                note({"pushed": policy})

    async with Client(MeshAddresses.from_json(addresses)) as client, asyncio.TaskGroup() as group:
        work = [
            group.create_task(consume(client)),
            group.create_task(push(client, float(push_every_s), "policy" if student else "", "")),
        ]
        if student:
            work.append(group.create_task(push(client, float(push_every_s), student, ADAPTER)))
        print("READY {}", flush=True)
        await asyncio.to_thread(sys.stdin.buffer.read)
        for task in work:
            task.cancel()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
