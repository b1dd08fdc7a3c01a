"""GRPO in plain torch through the mesh: roll out, take the groups, train, push weights, repeat.

    python -m examples.grpo_sync --steps 30

The policy is made on the fly, the engine is vLLM, and the agent is the demo's. `make demo` runs
this loop with a screen. `examples.grpo_async` is the asynchronous version.
"""

import asyncio
import time
from pathlib import Path

import torch

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
from rollmesh.client import Client, Delivery, MeshAddresses, SubscribeOptions, Subscription
from rollmesh.client.rollouts import rollout
from rollmesh.v1 import collector_pb2


async def train(
    addresses: MeshAddresses,
    model: Path,
    plan: Plan,
    on_step: OnStep,
    running: Running = in_this_process,
) -> Run:
    """Trains only on what the newest policy sampled."""
    torch.set_num_threads(2)  # nothing else runs during a training step
    trainer = plan.trainer(model)
    consumer, options = "trainer", SubscribeOptions()
    if plan.rank:  # other adapters of the mesh may have trainers of their own
        own = collector_pb2.DeliveryFilter(adapters=[plan.adapter])
        consumer, options = plan.adapter, SubscribeOptions(filter=own)
    run, started = Run(), time.monotonic()
    async with (
        Client(addresses) as client,
        client.subscribe(consumer, unit="group", credits=plan.groups, options=options) as groups,
        running(plan, run.audit) as agents,
    ):
        await client.check_temperature(plan.temperature)
        if plan.rank:  # sessions sample with an adapter from the first one on
            await _push(client, trainer, plan, 1)
        for step in range(plan.steps):
            summary = await rollout(
                client,
                plan.tasks(step),
                runner=agents,
                n=plan.samples,
                concurrency=plan.concurrency,
                timeout_s=AGENT_TIMEOUT_S,
                adapters=[plan.adapter] if plan.rank else [],
                sampling={"temperature": plan.temperature},
                progress=False,
            )
            print_failures(summary)
            deliveries = await _take(groups, plan.groups)
            for delivery in deliveries:
                run.audit.received(delivery.sessions)
            run.rewards.append(summary.mean_reward or 0.0)
            report = await asyncio.to_thread(trainer.step, rows_of(deliveries))
            run.differences.append(report.logprob_mean_abs_diff)
            metrics = step_metrics(deliveries, policy_version=step + bool(plan.rank))
            await client.report_step(consumer, step, metrics | report.metrics())
            await _push(client, trainer, plan, step + 1 + bool(plan.rank))
            await groups.acknowledge(*deliveries)  # a successor need not repeat the step
            run.seconds = time.monotonic() - started
            on_step(run, report)
    return run


async def _push(client: Client, trainer: Trainer, plan: Plan, version: int) -> None:
    if trainer.is_adapter:
        weights, config = trainer.weights(), trainer.adapter_config
        await client.push_adapter(weights, plan.adapter, version, config)
    else:
        await client.push_weights(trainer.weights(), version)


async def _take(groups: Subscription, count: int) -> list[Delivery]:
    """Returns the next complete groups.

    Raises:
        RuntimeError: Some groups were never completed.
    """
    taken: list[Delivery] = []
    try:
        async with asyncio.timeout(DELIVERY_TIMEOUT_S):
            while len(taken) < count:
                taken.append(await anext(groups))
    except TimeoutError:
        raise RuntimeError(
            f"{len(taken)} of {count} groups came within {DELIVERY_TIMEOUT_S:.0f} s: "
            "sessions are missing; see the failures above and the mesh's logs"
        ) from None
    return taken


if __name__ == "__main__":
    run_alone(train, __doc__, "var/grpo_sync")
