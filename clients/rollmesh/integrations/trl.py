"""Connects TRL's GRPOTrainer to a mesh through its `rollout_func`.

    rollouts = MeshRollouts(addresses, runner)
    trainer = GRPOTrainer(..., reward_funcs=rollouts.reward, rollout_func=rollouts)
    rollouts.attach(trainer)
    trainer.train()

The trainer's prompts become groups of sessions, in which agents run. The delivered sessions are
trained. `attach` makes the trainer push its weights to the mesh before every generation and weigh
each token by its importance ratio against the sampling policy. Of a PEFT model it pushes the
adapter, by the name of the consumer, and the sessions sample with it.
"""

import asyncio
import importlib
import logging
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Literal

from rollmesh.batches import Row, StepCounts, rows_of
from rollmesh.client import (
    AgentRunner,
    Client,
    Group,
    GroupIds,
    MeshAddresses,
    Retries,
    RewardFunction,
    RolloutSettings,
    SampleOutcome,
    SessionResult,
    TimeLimits,
    WeightDeltas,
    chosen,
    rollout,
    run_of_state,
    state_of_run,
)
from rollmesh.runtime.errors import (
    CheckpointUnknownError,
    ConsumerUnknownError,
    InvalidFieldError,
    RollmeshError,
)
from rollmesh.v1 import sampling_pb2
from rollmesh.v1.sampling_pb2 import PolicyRun

_log = logging.getLogger(__name__)
_MOST_CHECKPOINTS = 64
"""Of a consumer."""
_REPORT_S = 10.0
_LOGGED = {
    "loss": "loss",
    "grad_norm": "grad_norm",
    "entropy": "entropy",
    "kl": "kl_reference",
    "clip_ratio/region_mean": "clip_ratio",
    "sampling/sampling_logp_difference/mean": "logprob_difference_mean",
    "sampling/sampling_logp_difference/max": "logprob_difference_max",
    "sampling/importance_sampling_ratio/mean": "ratio_mean",
    "sampling/importance_sampling_ratio/max": "ratio_max",
}
"""Names of a step's metrics, by the names in the trainer's log."""


class MeshRollouts:
    """A `rollout_func` and its reward function."""

    def __init__(  # noqa: PLR0913 - keywords, each with a default
        self,
        addresses: MeshAddresses,
        runner: AgentRunner,
        *,
        consumer: str = "trl",
        model: str = RolloutSettings.model,
        concurrency: int = RolloutSettings.concurrency,
        timeout_s: float = RolloutSettings.timeout_s,
        limits: TimeLimits | None = None,
        retries: Retries | None = None,
        refill: int = RolloutSettings.refill,
        reward: RewardFunction | None = None,
        sampling_policy: Literal["enforce", "refuse"] = "enforce",
    ) -> None:
        """Takes the mesh and the agent.

        Args:
            addresses: Of the mesh.
            runner: Runs the agent. Receives an entry of the data set's `prompt` column.
            consumer: Consumer name at the collector. One per trainer.
            model: Name of the model that is trained. May be empty if the mesh has only one.
            concurrency: Maximum number of concurrent sessions. This and the following are settings
                of `rollmesh.client.rollout`.
            timeout_s: Time limit of one agent, seconds.
            limits: Other time limits.
            retries: Which failed attempts are retried.
            refill: How many further sessions a sample gets after failures of the infrastructure.
            reward: Scores a finished agent. None: the runner returns the rewards.
            sampling_policy: The treatment of an agent's own temperature, top_p and the like, which
                the trainer would not know of: they are ignored, or a 400.

        Raises:
            InvalidFieldError: A setting is invalid.
        """
        self._mesh = _Mesh(addresses, model)
        self._consumer = consumer
        self._settings: dict[str, Any] = {
            "runner": runner,
            "model": model,
            "concurrency": concurrency,
            "timeout_s": timeout_s,
            "limits": limits or TimeLimits(),
            "retries": retries or Retries(),
            "refill": refill,
            "reward": reward,
            "sampling_policy": sampling_policy,
        }
        chosen("sampling_policy", sampling_policy, dict.fromkeys(("enforce", "refuse")))
        RolloutSettings(**self._settings)
        self.counts: Counter[str] = Counter()
        """Samples so far: "trained". "failed" (in the batch without trained tokens or reward).
        "retried" (attempts after the first); "left_out" (further trajectories of a session: TRL
        takes one per prompt)."""
        self._ids = GroupIds()
        self.rows: list[Row | None] = []
        """The rows of the last call, one per prompt. None if the sample failed."""

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, Any]:
        """Runs one agent per prompt. Called by TRL.

        Returns:
            `prompt_ids`, `completion_ids` (lists of ids), `logprobs` (of the sampling policy; 0.0
            for tokens that were not sampled), `env_mask` (1 for trained tokens), `mesh_reward`.

        Raises:
            InvalidFieldError: The trainer's sampling parameters are refused (`sampling_of`), or
                the engines return other log-probabilities than it computes (`check_temperature`).
            RollmeshError: The collector refuses the subscription.
        """
        training = trainer.model.training
        size = trainer.num_generations if training else trainer.num_generations_eval
        sampling = sampling_of(trainer.args)
        process = int(trainer.accelerator.process_index)
        place = "train" if training else "eval", int(trainer.state.global_step), process
        groups = list(self._groups(prompts, size, sampling, place))
        self.rows = asyncio.run(self._run(groups, _of_process(self._consumer, process)))
        if training:
            for row in (one for one in self.rows if one is not None):
                self._mesh.counts.add(row.session)
        filler = int(trainer.eos_token_ids[0])
        found = [_columns(row, filler) for row in self.rows]
        return {name: [columns[name] for columns in found] for name in found[0]}

    def reward(
        self,
        *,
        completions: Sequence[Any],
        mesh_reward: Sequence[float | None],
        log_metric: Callable[[str, float], None] | None = None,
        **_: Any,
    ) -> list[float | None]:
        """Returns the rewards of the sessions, None for failed ones. TRL's reward function.

        TRL prints the number of failed sessions with its metrics, as `failed_sessions`.

        Raises:
            InvalidFieldError: The completions are not those of the last rollout.
        """
        if len(completions) != len(mesh_reward):
            raise InvalidFieldError(
                "completions", "are not those of the last rollout; pass them on unchanged"
            )
        if log_metric is not None:
            log_metric("failed_sessions", float(list(mesh_reward).count(None)))
        return list(mesh_reward)

    def attach(self, trainer: Any, *, delta: bool = False) -> None:
        """Makes a trainer push its weights to the mesh and use our log-probabilities.

        The trainer behaves as with `use_vllm`, with the mesh instead of its own vLLM: it pushes the
        weights before the first generation after each step, and by default
        (`vllm_importance_sampling_correction`) it weighs every token by exp(trainer's
        log-probability - ours).

        Each training is a run of the policy. The trainer's checkpoints have the states of the
        consumers, so a training that resumes from one goes back in a new run, with its weights and
        its place in the deliveries.

        Args:
            trainer: The trainer.
            delta: Whether to push weights as differences, see `Client.push_weights`.

        Raises:
            InvalidFieldError: The trainer's sampling parameters are refused (`sampling_of`).
        """
        sampling_of(trainer.args)
        model = trainer.accelerator.unwrap_model(trainer.model)
        # The base model of an adapter keeps its weights.
        adapter = self._consumer if hasattr(model, "peft_config") else ""
        self._settings["adapters"] = [adapter] if adapter else []
        self._mesh.adapter = adapter
        deltas = WeightDeltas() if delta else None
        trainer.vllm_generation = _Attached(self._mesh, trainer, self._consumer, deltas)
        trainer.add_callback(_callback(trainer.vllm_generation))
        trainer.use_vllm = True
        trainer._last_loaded_step = -1  # noqa: SLF001 - set as for its own vLLM

    def _groups(
        self,
        prompts: Sequence[Any],
        size: int,
        sampling: Mapping[str, Any],
        place: tuple[str, int, int],
    ) -> Iterator[Group]:
        """Yields a group per run of at most `size` equal prompts, because TRL repeats prompts.

        Groups have the ids that they had before a restart, by which the rollout finds them.
        """
        for prompt, run in groupby(prompts):
            count = sum(1 for _ in run)
            for begin in range(0, count, size):
                n = min(size, count - begin)
                group_id = self._ids.id(*place, sample=prompt)
                yield Group(sample=prompt, group_id=group_id, n=n, sampling=sampling)

    async def _run(self, groups: Sequence[Group], consumer: str) -> list[Row | None]:
        """Returns the row of each session, in the order of the groups."""
        rows: dict[tuple[str, int], Row] = {}

        async def keep(outcome: SampleOutcome, session: SessionResult) -> None:
            rows[outcome.group_id, outcome.sample_index] = self._main(session)

        async with self._mesh.client() as client:
            for sampling in (group.sampling or {} for group in groups[:1]):
                await client.check_temperature(sampling["temperature"], self._mesh.model)
            summary = await rollout(
                client,
                groups,
                **self._settings,
                run_id=self._mesh.job,
                resume=True,
                on_session=keep,
                consumer=consumer,
                progress=False,
            )
        found = [
            rows.get((group.group_id, index)) for group in groups for index in range(group.n or 0)
        ]
        self.counts["trained"] += len(rows)
        self.counts["failed"] += found.count(None)
        self.counts["retried"] += summary.retries
        return found

    def _main(self, result: SessionResult) -> Row:
        """Returns the row of the main trajectory. Counts the others."""
        rows = sorted(
            rows_of([result]), key=lambda row: (row.trajectory.lineage != "MAIN", -row.index)
        )
        if not rows:
            raise InvalidFieldError("session", f"{result.session_id} has no trainable trajectory")
        self.counts["left_out"] += len(rows) - 1
        if rows[0].trajectory.images:
            raise InvalidFieldError(
                "images", "a rollout function cannot give TRL images; train on text, or with verl"
            )
        return rows[0]


@dataclass(slots=True)
class _Mesh:
    """The mesh, and the trainer's run of its policy."""

    addresses: MeshAddresses
    model: str
    adapter: str = ""
    run: PolicyRun = field(default_factory=PolicyRun)
    """Run 0 until it is opened."""
    job: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Run id of the sessions. It stays the same after a resume."""
    counts: StepCounts = field(default_factory=StepCounts)
    """Of the sessions since the last report of a step."""

    @asynccontextmanager
    async def client(self) -> AsyncIterator[Client]:
        """A client in the run. Each call of the trainer has an event loop of its own."""
        async with Client(self.addresses) as client:
            client.follow_run(self.run)
            yield client


class _Attached:
    """Replaces a trainer's own vLLM: `sync_weights` pushes to the mesh. Opens and saves its run."""

    def __init__(
        self, mesh: _Mesh, trainer: Any, consumer: str, deltas: WeightDeltas | None
    ) -> None:
        self._mesh = mesh
        self._trainer = trainer
        self._consumer = consumer
        self._delta = deltas or False
        self._trains = False
        self._version = 0
        """The last version that was pushed."""

    def sync_weights(self) -> None:
        """Pushes the model's parameters, tied ones once, or its adapter, under the next version."""
        accelerator = self._trainer.accelerator
        if not self._mesh.run.number:  # an evaluation without training
            self._open(0, {}, self._mesh.job)
        if accelerator.is_main_process:
            asyncio.run(self._push(accelerator.unwrap_model(self._trainer.model)))
        accelerator.wait_for_everyone()

    def begin(self, step: int, saved: Mapping[str, Any]) -> None:
        """Opens a run for the training that begins, or goes on after a checkpoint.

        Without a checkpoint the step is 0. `saved` is empty if the checkpoint has nothing of the
        mesh.
        """
        version = saved["version"] + 1 if saved else step + bool(step)
        self._open(version, saved.get("consumers", {}), saved.get("job") or uuid.uuid4().hex)
        self._trains = True

    def saved(self) -> dict[str, Any]:
        """Makes checkpoints of the consumers of all processes, and returns them with the version.

        Empty if the trainer does not train.
        """
        return asyncio.run(self._save()) if self._trains else {}

    def report(self, step: int, logs: Mapping[str, Any]) -> None:
        """Reports a step with the trainer's numbers. An error is logged: the training goes on."""
        counts, self._mesh.counts = self._mesh.counts, StepCounts()
        numbers = {ours: logs[name] for name, ours in _LOGGED.items() if name in logs}
        try:
            asyncio.run(self._report(step, counts.metrics(self._version) | numbers))
        except (RollmeshError, TimeoutError) as error:
            _log.warning("report of step %d failed: %s", step, error or "the collector is away")

    def end(self) -> None:
        """Ends the training. The run stays, for evaluations."""
        self._trains = False

    def _open(self, version: int, states: Mapping[str, Any], job: str) -> None:
        """Opens a run in the first process, for all of them."""
        found: list[Any] = [None, job]
        if self._trainer.accelerator.is_main_process:
            found[0] = state_of_run(asyncio.run(self._restore(version, states)))
        importlib.import_module("accelerate.utils").broadcast_object_list(found)
        self._mesh.run = run_of_state({"policy_run": found[0]})
        self._mesh.job = found[1]
        self._version = max(version - 1, 0)

    async def _restore(self, version: int, states: Mapping[str, Any]) -> PolicyRun:
        mesh, state = self._mesh, next(iter(states.values()), None)
        async with Client(mesh.addresses) as client:
            run = await client.open_run(
                version, state=state, model=mesh.model, adapter=mesh.adapter
            )
            for consumer, of_consumer in states.items():
                try:
                    again = await client.load_state_dict(of_consumer)
                except (ConsumerUnknownError, CheckpointUnknownError) as error:
                    _log.warning("the mesh does not know the checkpoint of %s: %s", consumer, error)
                else:
                    _log.info("resumed: %d sessions were trained after the checkpoint", again)
        return run

    async def _report(self, step: int, metrics: Mapping[str, Any]) -> None:
        consumer = _of_process(self._consumer, int(self._trainer.accelerator.process_index))
        async with asyncio.timeout(_REPORT_S), self._mesh.client() as client:
            await client.report_step(consumer, step, metrics)

    async def _save(self) -> dict[str, Any]:
        keep = min(self._trainer.args.save_total_limit or _MOST_CHECKPOINTS, _MOST_CHECKPOINTS)
        count = self._trainer.accelerator.num_processes
        async with self._mesh.client() as client:
            consumers = [_of_process(self._consumer, process) for process in range(count)]
            states = {one: await client.state_dict(one, keep=keep) for one in consumers}
        return {"version": self._version, "job": self._mesh.job, "consumers": states}

    async def _push(self, model: Any) -> None:
        mesh = self._mesh
        async with mesh.client() as client:
            version = await client.policy_version(mesh.model, mesh.adapter) + 1
            if not mesh.adapter:
                named = {name: tensor.detach() for name, tensor in model.named_parameters()}
                # By the names of the model's checkpoints. Its own fuse experts.
                loading: Any = importlib.import_module("transformers.core_model_loading")
                tensors = loading.revert_weight_conversion(model, named)
                await client.push_weights(tensors, version, model=mesh.model, delta=self._delta)
            else:
                peft: Any = importlib.import_module("peft")  # it is there if the model is one
                matrices = peft.get_peft_model_state_dict(model)
                config = model.peft_config[model.active_adapter].to_dict()
                await client.push_adapter(matrices, mesh.adapter, version, config, model=mesh.model)
        self._version = version


def _callback(attached: _Attached) -> Any:
    """Returns the trainer's callback. Its state is in the trainer's checkpoints."""
    callbacks: Any = importlib.import_module("transformers.trainer_callback")

    class MeshRun(callbacks.TrainerCallback, callbacks.ExportableState):  # type: ignore[misc]
        """Has no state of its own: the trainer may make another one."""

        def state(self) -> dict[str, Any]:
            return {"args": {}, "attributes": {"saved": attached.saved()}}

        def on_train_begin(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
            found = state.stateful_callbacks.setdefault(MeshRun.__name__, self.state())
            attached.begin(state.global_step, found["attributes"]["saved"])

        def on_log(self, _args: Any, state: Any, _control: Any, **given: Any) -> None:
            if "loss" in given["logs"]:  # neither an evaluation nor the end
                attached.report(state.global_step, given["logs"])

        def on_train_end(self, _args: Any, _state: Any, _control: Any, **_: Any) -> None:
            attached.end()

    return MeshRun()


def _of_process(consumer: str, process: int) -> str:
    """Returns the name of a process's consumer."""
    return f"{consumer}-{process}" if process else consumer


_ACCEPTED = {*sampling_pb2.SamplingParams.DESCRIPTOR.fields_by_name} - {"bad_sequences", "seed"}


def sampling_of(args: Any) -> dict[str, Any]:
    """Returns the sampling parameters of a session, from the trainer's arguments.

    Its `generation_kwargs` win, as in TRL's own generation.

    Raises:
        InvalidFieldError: A session cannot have an argument.
    """
    given: dict[str, Any] = {**(args.generation_kwargs or {})}
    if args.vllm_structured_outputs_regex:
        given["vllm_structured_outputs_regex"] = args.vllm_structured_outputs_regex
    for name in given.keys() - _ACCEPTED:
        known = ", ".join(sorted(_ACCEPTED))
        raise InvalidFieldError(name, f"is no parameter of a session; leave it out, or use {known}")
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    sampling = {name: getattr(args, name) for name in names}
    sampling |= {"max_tokens": args.max_completion_length, **given}
    sampling["top_k"] = max(sampling["top_k"] or 0, 0)  # off: 0, in other releases None or -1
    try:
        sampling_pb2.SamplingParams(**sampling)
    except (TypeError, ValueError) as error:
        raise InvalidFieldError("generation_kwargs", f"{sampling}: {error}") from error
    return {name: value for name, value in sampling.items() if value is not None}


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
