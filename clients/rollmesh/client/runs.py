"""The runs of a trainer's policies. A trainer that goes back to a checkpoint opens a new one."""

import uuid
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollmesh.client.arguments import filled
from rollmesh.client.connections import CALL_S, Connections
from rollmesh.mesh import retried
from rollmesh.runtime import is_stale, number_of
from rollmesh.runtime.errors import InvalidFieldError, SupersededError
from rollmesh.v1 import router_pb2, router_pb2_grpc, trajectory_pb2
from rollmesh.v1.sampling_pb2 import PolicyRun, VersionSpan


class RunCalls(Connections):
    """Opens runs, and remembers them for the calls of this client."""

    @cached_property
    def _runs(self) -> dict[tuple[str, str], PolicyRun]:
        """The runs of this client, by model and adapter."""
        return {}

    async def open_run(
        self,
        version: int,
        *,
        state: Mapping[str, Any] | None = None,
        model: str = "",
        adapter: str = "",
        request_id: str = "",
    ) -> PolicyRun:
        """Opens a new run of a policy, so that its versions may go back. Call it after a restart.

        Weights that trainers of earlier runs push are refused from then on, and subscriptions of
        this client end their subscriptions. Later calls take and return versions within the run.
        Engines sample with the weights that they hold until the next push.

        Args:
            version: The version of the restored weights. 0 starts anew.
            state: As returned by `state_dict`, from the same checkpoint. It names the run in which
                the checkpoint was made. None: the run that is current now.
            model: Name of the model. May be empty if the mesh has only one.
            adapter: Name of the adapter that is trained. Empty: the weights of the model.
            request_id: The same in all processes of a trainer gives them the same run.

        Returns:
            The run. `follow_run` gives it to other clients of the trainer.

        Raises:
            InvalidFieldError: The version or the state is invalid, or the mesh lacks the model.
        """
        request = filled(
            router_pb2.OpenRunRequest,
            model=model,
            adapter=adapter,
            version=version,
            parent=None if state is None else run_of_state(state),
            request_id=request_id or uuid.uuid4().hex,
        )

        async def open_at(router: "router_pb2_grpc.RouterServiceAsyncStub") -> PolicyRun:
            return (await router.OpenRun(request, timeout=CALL_S)).run

        # Superseded: another router opened a run at the same time.
        run = await retried(lambda _: self._routers.repeat(open_at), CALL_S, SupersededError)
        self.follow_run(run)
        return run

    def follow_run(self, run: PolicyRun) -> None:
        """Makes a run, which another client of the same trainer opened, the run of this client."""
        self._runs[run.model, run.adapter] = run

    def is_abandoned(self, spans: Iterable[VersionSpan], model: str = "") -> bool:
        """Returns whether a run from which this client's run does not descend sampled a span.

        Without a run nothing is abandoned.
        """
        runs = [run for run in self._runs.values() if model in {"", run.model}]
        return any(is_stale(run, span) for span in spans for run in runs)

    def _number(self, version: Any, model: str, adapter: str = "") -> Any:
        """Returns the policy version of a version within this client's run."""
        runs = [
            one
            for one in self._runs.values()
            if one.adapter == adapter and model in {"", one.model}
        ]
        return numbered(runs[0] if len(runs) == 1 else PolicyRun(), version)

    def _only_run(self, run: PolicyRun | None) -> PolicyRun:
        """Returns a run that was given, or else the only one of this client.

        Raises:
            InvalidFieldError: The client has several.
        """
        if run is None and len(self._runs) > 1:
            raise InvalidFieldError("run", "is None, and this client has several; give one")
        return run or next(iter(self._runs.values()), PolicyRun())


def numbered(run: PolicyRun, version: Any) -> Any:
    """Returns the policy version of a version within a run.

    A value of another type stays as it is, and is refused by the field of its request.
    """
    return number_of(run.number, version) if isinstance(version, int) else version


def state_of_run(run: PolicyRun) -> dict[str, Any]:
    """Returns a run as JSON values."""
    ancestors = list(run.ancestors)
    values = {"number": run.number, "model": run.model, "adapter": run.adapter}
    return {**values, "ancestors": ancestors}


def run_of_state(state: Mapping[str, Any]) -> PolicyRun:
    """Returns the run of a state. States of releases without runs are of run 0.

    Raises:
        InvalidFieldError: It is no run.
    """
    try:
        return PolicyRun(**state.get("policy_run", {}))
    except (TypeError, ValueError) as error:
        raise InvalidFieldError("state.policy_run", f"{error}; give what was saved") from error


def of_spans(
    proto: trajectory_pb2.Trajectory | trajectory_pb2.TrajectoryTree,
    count: int,
    part: Callable[[int], int],
) -> NDArray[np.int64]:
    """Returns a part of each token's policy version. -1 for tokens that were not sampled."""
    values = np.full(count, -1, np.int64)
    for span in proto.version_spans:
        values[span.start : span.end] = part(span.policy_version)
    return values
