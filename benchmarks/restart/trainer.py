"""A GRPO trainer in a process of its own, which may be killed at any moment.

Each step rolls its groups out, sorts the deliveries, takes an optimizer step, and saves a
checkpoint. It logs one line of JSON for a step, before it acknowledges the deliveries. Arguments:
the mesh's addresses as JSON, a folder for log and checkpoints, the rollout's seed, the model's
folder (empty for a policy of one vector), and a checkpoint to go on from (empty: begin). It ends
after the number of steps in the file `stop`.
"""

import asyncio
import hashlib
import json
import os
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from openai import AsyncOpenAI
from safetensors.numpy import load_file

from rollmesh.client import (
    Client,
    Delivery,
    GroupOutcome,
    MeshAddresses,
    Session,
    SessionResult,
    Subscription,
    rollout_groups,
    state_of_run,
)

GROUPS, SAMPLES, KEPT = 4, 4, 3
CONSUMER, JOB = "trainer", "job"
_TRAINED = "model.norm.weight"
_RATE = 1e-3
_REQUEST_S, _TRIES = 20.0, 20
_REFILLS = 1000


class Policy:
    """Weights of which one vector is trained, always in the same order of operations."""

    def __init__(self, model: str) -> None:
        """Loads the weights of a model, or makes one vector."""
        self.weights: dict[str, NDArray[Any]] = {_TRAINED: np.zeros(64, np.float32)}
        if model:
            self.weights = load_file(Path(model) / "model.safetensors")

    @property
    def trained(self) -> NDArray[Any]:
        """The vector that is trained, float32 [D]."""
        return self.weights[_TRAINED]

    def step(self, deliveries: list[Delivery]) -> str:
        """Makes a step, and returns the digest of its inputs."""
        digest, vector = hashlib.sha256(), np.zeros(len(self.trained), np.float64)
        for delivery in deliveries:
            rewards = np.array([one.reward or 0.0 for one in delivery.sessions])
            for session, advantage in zip(delivery.sessions, rewards - rewards.mean(), strict=True):
                for one in session.trajectories:
                    for array in (one.token_ids, one.loss_mask, one.logprobs, one.policy_versions):
                        digest.update(np.ascontiguousarray(array).tobytes())
                    digest.update(np.float64(advantage).tobytes())
                    at = one.token_ids[one.loss_mask] % len(vector)
                    np.add.at(
                        vector,
                        at,
                        advantage * np.exp(one.logprobs[one.loss_mask].astype(np.float64)),
                    )
        self.weights[_TRAINED] = (self.trained + _RATE * vector).astype(self.trained.dtype)
        return digest.hexdigest()


def digest_of(session: SessionResult) -> str:
    """Returns the digest of the rows of a session."""
    digest = hashlib.sha256(repr(session.reward).encode())
    for one in session.trajectories:
        for array in (one.token_ids, one.loss_mask, one.logprobs, one.policy_versions):
            digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def checkpoints_in(folder: Path) -> list[Path]:
    """Returns the checkpoints, oldest first."""
    return sorted(folder.glob("checkpoint-*.json"))


def _save(folder: Path, step: int, policy: Policy, mesh: dict[str, Any]) -> None:
    path = folder / f"checkpoint-{step:06d}.json"
    part = path.with_suffix(".part")
    with part.open("w") as file:
        json.dump({"step": step, "vector": policy.trained.tobytes().hex(), "mesh": mesh}, file)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
    for old in checkpoints_in(folder)[:-KEPT]:
        old.unlink()


def _load(path: Path) -> dict[str, Any]:
    saved: dict[str, Any] = json.loads(path.read_text())
    return saved


async def _ask(openai: AsyncOpenAI, messages: list[Any]) -> str:
    answer = await openai.chat.completions.create(model="policy", messages=messages, max_tokens=24)
    return answer.choices[0].message.content or ""


async def agent(task: str, session: Session) -> float:
    """Takes two turns. The reward follows from the last answer."""
    async with AsyncOpenAI(
        base_url=session.base_url, api_key=session.api_key, max_retries=_TRIES, timeout=_REQUEST_S
    ) as openai:
        messages = [{"role": "user", "content": f"begin {task}"}]
        said = await _ask(openai, messages)
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "go on"}]
        said = await _ask(openai, messages)
    return zlib.crc32(said.encode()) % 5 / 4


async def main(addresses: str, where: str, seed: str, model: str, checkpoint: str) -> None:
    """Trains until it is stopped."""
    folder, policy, step = Path(where), Policy(model), 0
    log = os.open(folder / "steps.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def note(**entry: Any) -> None:
        os.write(log, f"{json.dumps(entry)}\n".encode())

    async with Client(MeshAddresses(**json.loads(addresses))) as client:
        sys.stdout.write("READY {}\n")
        sys.stdout.flush()
        if checkpoint:
            saved = _load(Path(checkpoint))
            step, vector = saved["step"], bytes.fromhex(saved["vector"])
            policy.weights[_TRAINED] = np.frombuffer(vector, policy.trained.dtype)
            run = await client.open_run(step, state=saved["mesh"])
            await client.load_state_dict(saved["mesh"])
            for later in checkpoints_in(folder):  # these states are void
                if later.name > Path(checkpoint).name:
                    later.unlink()
            await client.push_weights(policy.weights, step, allow_partial=True)
            note(restored=step, run=state_of_run(run))
        async with client.subscribe(CONSUMER, credits=GROUPS) as subscription:
            if not checkpoint:
                _save(folder, 0, policy, await client.state_dict(CONSUMER))
            stop = folder / "stop"
            while not (stop.exists() and step >= int(stop.read_text())):
                names = [f"{step}-{at}" for at in range(GROUPS)]
                async with rollout_groups(
                    client, names, runner=agent, n=SAMPLES, refill=_REFILLS, group_id=str,
                    run_id=JOB, resume=True, seed=int(seed), progress=False,
                ) as groups:  # fmt: skip
                    ended = [group async for group in groups]
                deliveries = await _take(subscription, ended)
                inputs = policy.step(deliveries)
                weights = hashlib.sha256(policy.trained.tobytes()).hexdigest()
                sessions = [one for part in deliveries for one in part.sessions]
                rows = {one.session_id: digest_of(one) for one in sessions}
                taken = [[one.run_id, one.group_id] for one in deliveries]
                note(step=step, inputs=inputs, weights=weights, rows=rows, groups=taken)
                step += 1
                await client.push_weights(policy.weights, step, allow_partial=True)
                await subscription.acknowledge(*deliveries)
                # One more than the files: the newest state may not be in a file yet.
                state = await client.state_dict(CONSUMER, keep=KEPT + 1)
                _save(folder, step, policy, state)
    note(done=step)


async def _take(groups: Subscription, ended: list[GroupOutcome]) -> list[Delivery]:
    """Returns the deliveries of these groups in order.

    Raises:
        RuntimeError: Another group came.
    """
    found = {one.delivery_id: one async for one in groups.until(ended)}
    if len(found) != len(ended):
        raise RuntimeError(f"unknown groups came: {sorted(found)}, and {len(ended)} are wanted")
    return sorted(found.values(), key=lambda one: one.group_id)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
