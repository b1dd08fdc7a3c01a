"""TRL's GRPOTrainer over a mesh, through its `rollout_func`.

    rollouts = MeshRollouts(addresses, runner)
    trainer = GRPOTrainer(..., reward_funcs=rollouts.reward, rollout_func=rollouts)
    rollouts.attach(trainer)
    trainer.train()

The trainer's prompts become groups of sessions; agents run in them; what the collector delivers is
trained. `attach` pushes the weights to the mesh before every generation and makes the trainer weigh
each token by what it was worth when it was sampled.
"""

import asyncio
import logging
import uuid
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rollmesh.batches import Row, rows_of
from rollmesh.client import AgentRunner, Client, MeshAddresses, Session, SessionResult
from rollmesh.integrations.arrivals import Arrivals
from rollmesh.integrations.sessions import Limits, Sample, SessionRuns
from rollmesh.runtime.errors import InvalidFieldError
from rollmesh.runtime.telemetry.logs import fields

_log = logging.getLogger(__name__)


class MeshRollouts:
    """A `rollout_func`, and the reward that goes with it."""

    def __init__(
        self,
        addresses: MeshAddresses,
        runner: AgentRunner,
        *,
        consumer: str = "trl",
        limits: Limits | None = None,
    ) -> None:
        """Takes the mesh and the agent.

        Args:
            addresses: Of the mesh.
            runner: Gets an entry of the data set's `prompt` column; returns the reward.
            consumer: Name at the collector; one for each trainer.
            limits: How much at once, and how long.
        """
        self._addresses = addresses
        self._runner = runner
        self._consumer = consumer
        self._limits = limits or Limits()
        self.counts: Counter[str] = Counter()
        """Samples so far: "trained"; "failed" (in the batch with nothing trained and no reward);
        "left_out" (further trajectories of a session: TRL takes one for each prompt)."""
        self.rows: list[Row | None] = []
        """What the last call returned, one per prompt; None where the sample failed."""

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, Any]:
        """Runs one agent for each prompt, as TRL calls it.

        Returns:
            `prompt_ids`, `completion_ids` (lists of ids), `logprobs` (of the policy that sampled;
            0.0 where nothing was), `env_mask` (1 where the token is trained), `mesh_reward`.

        Raises:
            InvalidFieldError: The trainer's temperature is not 1.
            RollmeshError: The collector refuses the subscription.
        """
        if trainer.args.temperature != 1.0:
            raise InvalidFieldError(
                "temperature",
                f"is {trainer.args.temperature}, and the trainer would compare log-probabilities "
                "at that temperature with ours, which are at 1.0; leave it at 1.0",
            )
        training = trainer.model.training
        size = trainer.num_generations if training else trainer.num_generations_eval
        sampling = {
            "temperature": 1.0,
            "max_tokens": int(trainer.args.max_completion_length),
        }
        groups = [uuid.uuid4().hex for _ in range(-(-len(prompts) // size))]
        samples = [
            Sample(prompt, groups[at // size], at % size, size, sampling)
            for at, prompt in enumerate(prompts)
        ]
        process = int(trainer.accelerator.process_index)
        consumer = f"{self._consumer}-{process}" if process else self._consumer
        self.rows = asyncio.run(self._run(samples, consumer))
        filler = int(trainer.eos_token_ids[0])
        found = [_columns(row, filler) for row in self.rows]
        return {name: [columns[name] for columns in found] for name in found[0]}

    def reward(
        self, *, completions: Sequence[Any], mesh_reward: Sequence[float | None], **_: Any
    ) -> list[float | None]:
        """Returns what the sessions earned, as TRL calls a reward function; None where one failed.

        Raises:
            InvalidFieldError: The completions are not those of the last rollout.
        """
        if len(completions) != len(mesh_reward):
            raise InvalidFieldError("completions", "are not those of the last rollout")
        return list(mesh_reward)

    def attach(self, trainer: Any) -> None:
        """Makes a trainer push its weights to the mesh and correct by our log-probabilities.

        It then behaves as with `use_vllm`, with the mesh in the place of its own vLLM: the weights
        go out before the first generation after each step, and with
        `vllm_importance_sampling_correction` (its default) every token is weighed by
        exp(trainer's log-probability - ours).
        """
        trainer.vllm_generation = _Weights(self._addresses, trainer)
        trainer.use_vllm = True
        trainer._last_loaded_step = -1  # noqa: SLF001 - what its own set-up of vLLM sets

    async def _run(self, samples: Sequence[Sample], consumer: str) -> list[Row | None]:
        limits = self._limits
        async with (
            Client(self._addresses) as client,
            client.subscribe(consumer, unit="session", credits=limits.concurrency) as sessions,
            asyncio.TaskGroup() as group,
        ):
            arrivals = Arrivals(sessions)
            reading = group.create_task(arrivals.serve())
            places = asyncio.Semaphore(limits.concurrency)
            runs = SessionRuns(client, arrivals, limits, places)
            async with asyncio.TaskGroup() as running:
                tasks = [running.create_task(self._sample(runs, sample)) for sample in samples]
            reading.cancel()
        return [task.result() for task in tasks]

    async def _sample(self, runs: SessionRuns, sample: Sample) -> Row | None:
        kept: list[SessionResult] = []

        async def keep(result: SessionResult) -> None:
            kept.append(result)

        try:
            await runs.run(sample, self._runner, _take_reward, keep)
            row = self._main(kept[0])
        except Exception:  # noqa: BLE001 - the edge to the user's code: siblings go on
            _log.exception("sample failed", extra=fields(group=sample.group_id))
            self.counts["failed"] += 1
            return None
        self.counts["trained"] += 1
        return row

    def _main(self, result: SessionResult) -> Row:
        """Returns the main trajectory, and counts the others."""
        rows = sorted(
            rows_of([result]), key=lambda row: (row.trajectory.lineage != "MAIN", -row.index)
        )
        if not rows:
            raise InvalidFieldError("session", f"{result.session_id} has nothing to train on")
        self.counts["left_out"] += len(rows) - 1
        return rows[0]


class _Weights:
    """Stands where a trainer has its own vLLM: `sync_weights` pushes to the mesh."""

    def __init__(self, addresses: MeshAddresses, trainer: Any) -> None:
        self._addresses = addresses
        self._trainer = trainer

    def sync_weights(self) -> None:
        """Pushes the model's parameters, tied ones once, under the next version."""
        accelerator = self._trainer.accelerator
        if accelerator.is_main_process:
            model = accelerator.unwrap_model(self._trainer.model)
            named = {name: tensor.detach() for name, tensor in model.named_parameters()}
            asyncio.run(self._push(named))
        accelerator.wait_for_everyone()

    async def _push(self, parameters: dict[str, Any]) -> None:
        async with Client(self._addresses) as client:
            await client.push_weights(parameters, await client.policy_version() + 1)


def _take_reward(session: Session, given: Any) -> None:
    if given is None or isinstance(given, bool):
        raise InvalidFieldError("reward", f"{given!r} is no number; the runner must return one")
    session.reward = float(given)


def _columns(row: Row | None, filler: int) -> dict[str, Any]:
    if row is None:
        nothing = {"prompt_ids": [filler], "completion_ids": [filler], "logprobs": [0.0]}
        return {**nothing, "env_mask": [0], "mesh_reward": None}
    trajectory, prompt = row.trajectory, row.trajectory.prompt_tokens
    return {
        "prompt_ids": trajectory.token_ids[:prompt].tolist(),
        "completion_ids": trajectory.token_ids[prompt:].tolist(),
        "logprobs": trajectory.logprobs[prompt:].tolist(),
        "env_mask": trajectory.loss_mask[prompt:].astype(int).tolist(),
        "mesh_reward": row.reward,
    }
