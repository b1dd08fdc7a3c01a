"""GRPO in plain torch through the mesh: roll out, take the groups, train, push weights, repeat.

    python -m examples.grpo_sync --steps 30

The policy is made on the fly, the engine is vLLM, and the agent is the demo's. `make demo` runs
this loop with a screen. With a checkpoint the loop survives its own death, and that of the mesh.
`examples.grpo_async` is the asynchronous version.
"""

import asyncio
import time
import uuid
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch

from examples.demo import checkpoint as checkpoints
from examples.demo.grpo import Trainer
from examples.demo.run import (
    AGENT_TIMEOUT_S,
    DELIVERY_TIMEOUT_S,
    OnStep,
    Plan,
    Run,
    Running,
    in_this_process,
    print_failures,
    rows_of,
    run_alone,
)
from rollmesh.batches import step_metrics
from rollmesh.client import (
    Client,
    Delivery,
    Group,
    MeshAddresses,
    SubscribeOptions,
    rollout_groups,
)
from rollmesh.v1 import collector_pb2

_KEPT = 3
"""Number of checkpoints that the collector keeps."""


async def train(
    addresses: MeshAddresses,
    model: Path,
    plan: Plan,
    on_step: OnStep,
    running: Running = in_this_process,
    checkpoint: Path | None = None,
) -> Run:
    """Trains only on what the newest policy sampled.

    With a checkpoint, it continues from there if the file exists, and replaces it after each step.
    """
    torch.set_num_threads(2)  # nothing else runs during a training step
    trainer, run, started = plan.trainer(model), Run(), time.monotonic()
    consumer, adapter, options = "trainer", "", SubscribeOptions()
    if plan.rank:  # other adapters of the mesh may have trainers of their own
        own = collector_pb2.DeliveryFilter(adapters=[plan.adapter])
        consumer, adapter = plan.adapter, plan.adapter
        options = SubscribeOptions(filter=own)
    job = uuid.uuid4().hex
    first_version = int(bool(plan.rank))  # an adapter has no version 0
    async with Client(addresses) as client:
        await client.check_temperature(plan.temperature)
        restored = checkpoints.load(checkpoint, trainer) if checkpoint else None
        if restored is not None:
            run, job, version = restored.run, restored.job, restored.steps + first_version
            started -= run.seconds
            await client.open_run(version, state=restored.mesh, adapter=adapter)
            await client.load_state_dict(restored.mesh)
            await _push(client, trainer, plan, version)
        elif plan.rank:  # sessions sample with an adapter from the first one on
            await _push(client, trainer, plan, first_version)
        async with (
            client.subscribe(
                consumer, unit="group", credits=plan.groups, options=options
            ) as groups,
            running(plan, run.audit) as agents,
        ):
            if checkpoint is not None and restored is None:
                state = await client.state_dict(consumer)
                checkpoints.save(checkpoint, trainer, run, job, state)
            for step in range(len(run.rewards), plan.steps):
                tasks = plan.tasks(step)
                async with rollout_groups(
                    client,
                    [Group(sample=task, group_id=f"{step}-{at}") for at, task in enumerate(tasks)],
                    runner=agents,
                    n=plan.samples,
                    concurrency=plan.concurrency,
                    timeout_s=AGENT_TIMEOUT_S,
                    adapters=[plan.adapter] if plan.rank else [],
                    sampling={"temperature": plan.temperature},
                    run_id=job,
                    resume=True,  # sessions that a killed trainer began are found again
                    progress=False,
                ) as rolling:
                    ended = [group async for group in rolling]
                print_failures(rolling.summary)
                coming = groups.until(ended, timeout_s=DELIVERY_TIMEOUT_S)
                deliveries = [delivery async for delivery in coming]
                for delivery in deliveries:
                    run.audit.received(delivery.sessions)
                run.rewards.append(_mean_reward(deliveries))
                report = await asyncio.to_thread(trainer.step, rows_of(deliveries))
                run.differences.append(report.logprob_mean_abs_diff)
                metrics = step_metrics(deliveries, policy_version=step + first_version)
                await client.report_step(consumer, step, metrics | report.metrics())
                await _push(client, trainer, plan, step + 1 + first_version)
                await groups.acknowledge(*deliveries)  # a successor need not repeat the step
                run.seconds = time.monotonic() - started
                if checkpoint is not None:
                    state = await client.state_dict(consumer, keep=_KEPT)
                    await asyncio.to_thread(checkpoints.save, checkpoint, trainer, run, job, state)
                on_step(run, report)
    return run


async def _push(client: Client, trainer: Trainer, plan: Plan, version: int) -> None:
    if trainer.is_adapter:
        weights, config = trainer.weights(), trainer.adapter_config
        await client.push_adapter(weights, plan.adapter, version, config)
    else:
        await client.push_weights(trainer.weights(), version)


def _mean_reward(deliveries: Iterable[Delivery]) -> float:
    sessions = [session for delivery in deliveries for session in delivery.sessions]
    rewards = [session.reward for session in sessions if session.reward is not None]
    return float(np.mean(rewards or [0.0]))


if __name__ == "__main__":
    run_alone(train, __doc__, "var/grpo_sync")
