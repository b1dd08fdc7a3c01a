"""Checkpoints of a consumer, which a trainer saves in its own, stored sessions, and steps."""

import logging
import uuid
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from rollmesh.client.arguments import filled
from rollmesh.client.runs import RunCalls, run_of_state, state_of_run
from rollmesh.client.sessions import Delivery
from rollmesh.runtime import version_of
from rollmesh.runtime.errors import ConsumerUnknownError, InvalidFieldError, SessionUnknownError
from rollmesh.runtime.telemetry import fields
from rollmesh.v1 import collector_pb2
from rollmesh.v1.sampling_pb2 import PolicyRun

_log = logging.getLogger(__name__)
_STATE_FORMAT = 1


class StateCalls(RunCalls):
    """Saves, restores and releases states of consumers, reads sessions, and reports steps."""

    async def state_dict(
        self,
        consumer: str,
        *,
        untrained: Iterable[Delivery] = (),
        keep: int | None = None,
        run: PolicyRun | None = None,
    ) -> dict[str, Any]:
        """Makes a checkpoint of a consumer, and returns the state that restores it.

        Acknowledge the trained deliveries, then call this, then save the state with the weights.
        The collector keeps later acknowledged units until the checkpoint is released.

        Args:
            consumer: Its name. The call waits a while until it is created.
            untrained: Deliveries that were acknowledged and are not trained yet.
            keep: Number of the consumer's newest checkpoints to keep, 1 to 64. Older ones are
                released. None keeps all, at most 64.
            run: The trainer's run. None: the only run that this client has opened, or the first.

        Returns:
            A dictionary for JSON or `torch.save`. Its `policy_version` is the one that the consumer
            had reported, or None, and its `policy_run` the run.

        Raises:
            ConsumerUnknownError: No consumer has this name.
            TooManyCheckpointsError: There are 64 already.
            RunAbandonedError: The consumer is of a later run.
            InvalidFieldError: `keep` is invalid.
        """
        run = self._only_run(run)
        request = filled(
            collector_pb2.CreateCheckpointRequest,
            consumer=consumer,
            checkpoint_id=uuid.uuid4().hex,
            untrained_delivery_ids=[delivery.delivery_id for delivery in untrained],
            keep=keep,
            run=run.number,
        )
        response = await self._at_collector(
            lambda stub: stub.CreateCheckpoint, request, ConsumerUnknownError
        )
        made = response.checkpoint
        version = version_of(made.policy_version) if made.HasField("policy_version") else None
        return {
            "format": _STATE_FORMAT,
            "consumer": consumer,
            "checkpoint_id": made.checkpoint_id,
            "policy_version": version,
            "policy_run": state_of_run(run),
        }

    async def load_state_dict(
        self, state: Mapping[str, Any], *, run: PolicyRun | None = None
    ) -> int:
        """Moves a consumer back to the checkpoint of a state. Call it before you subscribe.

        Units acknowledged or filtered since then are delivered again, and none from before. Later
        checkpoints are released. After `open_run`, the consumer belongs to the new run, and
        subscriptions of the trainer before fail with `RunAbandonedError`.

        Args:
            state: As returned by `state_dict`.
            run: The trainer's run. None: the only run that this client has opened, or the first.

        Returns:
            The number of units that are delivered again.

        Raises:
            ConsumerUnknownError: The consumer was deleted.
            CheckpointUnknownError: The checkpoint was released.
            RunAbandonedError: The consumer is of a later run.
            InvalidFieldError: It is not such a state.
        """
        consumer, checkpoint_id = _read_state(state)
        request = collector_pb2.RestoreCheckpointRequest(
            consumer=consumer,
            checkpoint_id=checkpoint_id,
            request_id=uuid.uuid4().hex,
            policy_run=self._only_run(run),
        )
        response = await self._at_collector(lambda stub: stub.RestoreCheckpoint, request)
        return response.again

    async def release_state(self, state: Mapping[str, Any]) -> None:
        """Releases the checkpoint of a state, which can no longer be loaded. A repeat is no error.

        Raises:
            ConsumerUnknownError: The consumer was deleted.
            InvalidFieldError: It is not such a state.
        """
        consumer, checkpoint_id = _read_state(state)
        request = collector_pb2.ReleaseCheckpointRequest(
            consumer=consumer, checkpoint_id=checkpoint_id
        )
        await self._at_collector(lambda stub: stub.ReleaseCheckpoint, request)

    async def report_step(
        self,
        consumer: str,
        step: int,
        metrics: Mapping[str, Any],
        *,
        run: PolicyRun | None = None,
    ) -> list[collector_pb2.Alarm]:
        """Stores the trainer's numbers of a step, for `rollmesh status` and viewers.

        The collector keeps the last 1,000 steps. A report deletes earlier reports of this step and
        of later ones. Each alarm is also logged as a warning.

        Args:
            consumer: Name of the trainer's consumer.
            step: Number of the step.
            metrics: Numbers by name, at most 64. An array or a tensor on the CPU, such as the ratio
                of each token, becomes NAME_mean, NAME_min and NAME_max. Alarms look at
                `step_metrics` and `logprob_metrics` of `rollmesh.batches`.
            run: The trainer's run. None: the only run that this client has opened, or the first.

        Returns:
            The alarms that the last steps raise, with their remedies.

        Raises:
            ConsumerUnknownError: No consumer has this name.
            RunAbandonedError: The consumer is of a later run.
            InvalidFieldError: A name or a value is invalid.
        """
        numbers: dict[str, float] = {}
        for name, value in metrics.items():
            numbers |= _numbers(name, value)
        report = filled(collector_pb2.TrainingStep, step=step, metrics=numbers)
        number = self._only_run(run).number
        request = collector_pb2.ReportStepRequest(consumer=consumer, step=report, run=number)
        response = await self._at_collector(lambda stub: stub.ReportStep, request)
        for alarm in response.alarms:
            _log.warning(alarm.message, extra=fields(alarm=alarm.name, consumer=consumer))
        return list(response.alarms)

    async def annotate(
        self, session_id: str, name: str, values: ArrayLike, *, trajectory_id: str = ""
    ) -> None:
        """Writes the trainer's own numbers for the tokens of a stored session back, for viewers.

        They are deleted with the session. The viewer colours tokens by them, and compares
        `logprobs` with the sampled ones.

        Args:
            session_id: The session.
            name: Name of the numbers, such as `logprobs` or `advantages`. Numbers of the same name
                are replaced. A trajectory has at most 16 names.
            values: float [N]: one for each token of the trajectory or the tree, as in its
                `token_ids`. NaN is no number.
            trajectory_id: The trajectory. Empty: the tree of a session that was recorded as one.

        Raises:
            InvalidFieldError: `values` does not fit the tokens, or a name is invalid.
            RollmeshError: The session stays unknown, or the collector's store is nearly full.
        """
        try:
            data = np.asarray(values, "<f4")
        except (TypeError, ValueError) as error:
            raise InvalidFieldError("values", f"{error}; give one number for each token") from error
        if data.ndim != 1:
            raise InvalidFieldError("values", f"has shape {data.shape}; give one dimension")
        annotation = filled(
            collector_pb2.Annotation,
            name=name,
            trajectory_id=trajectory_id,
            values_f32le=data.tobytes(),
        )
        request = collector_pb2.AnnotateRequest(session_id=session_id, annotations=[annotation])
        await self._at_collector(lambda stub: stub.Annotate, request, SessionUnknownError)

    async def steps(self, consumer: str, last: int = 100) -> list[collector_pb2.TrainingStep]:
        """Returns the last steps that were reported, oldest first.

        Args:
            consumer: Name of the trainer's consumer.
            last: Maximum number of steps, 1 to 1,000.

        Raises:
            ConsumerUnknownError: No consumer has this name.
            InvalidFieldError: `last` is invalid.
        """
        request = filled(collector_pb2.ListStepsRequest, consumer=consumer, page_size=last)
        response = await self._at_collector(lambda stub: stub.ListSteps, request)
        return list(response.steps)


def _numbers(name: str, value: Any) -> dict[str, float]:
    """Returns a number, or the mean, minimum and maximum of an array."""
    try:
        found = np.asarray(value, np.float64)
    except (TypeError, ValueError) as error:
        raise InvalidFieldError(f"metrics.{name}", f"is no number or array: {error}") from error
    if not found.ndim:
        return {name: float(found)}
    if not found.size:
        return {}
    parts = {"mean": found.mean(), "min": found.min(), "max": found.max()}
    return {f"{name}_{part}": float(number) for part, number in parts.items()}


def _read_state(state: Mapping[str, Any]) -> tuple[str, str]:
    """Returns the consumer and the checkpoint of a state."""
    if state.get("format") != _STATE_FORMAT:
        raise InvalidFieldError(
            "state.format",
            f"is {state.get('format')!r}; give what `state_dict` of this release returned",
        )
    for name in ("consumer", "checkpoint_id"):
        if not isinstance(state.get(name), str):
            raise InvalidFieldError(f"state.{name}", "is not a string; give what was saved")
    run_of_state(state)
    return state["consumer"], state["checkpoint_id"]
