"""Runs of a trainer: their policy versions, and the samples that belong to them.

A trainer that goes back to a checkpoint opens a new run of its policy. A policy version is one
number, which orders all versions of all runs: `STRIDE` times the number of the run, plus the
version within the run.
"""

from rollmesh.runtime.errors import InvalidFieldError, RunAbandonedError
from rollmesh.v1 import sampling_pb2

STRIDE = 10**12
"""Number of versions of a run."""
MOST_ANCESTORS = 1000
"""Number of earlier runs that a run descends from, as far as it is known."""


def number_of(run: int, version: int) -> int:
    """Returns the policy version of a version within a run. A policy version stays as it is."""
    return version if version >= STRIDE else run * STRIDE + version


def run_of(policy_version: int) -> int:
    """Returns the number of the run of a policy version."""
    return policy_version // STRIDE


def version_of(policy_version: int) -> int:
    """Returns the version within its run of a policy version."""
    return policy_version % STRIDE


def told(policy_version: int) -> str:
    """Returns a policy version for people: "version 5", or "version 5 of run 1"."""
    run = run_of(policy_version)
    return f"version {version_of(policy_version)}" + (f" of run {run}" if run else "")


def start_of(run: sampling_pb2.PolicyRun) -> int:
    """Returns the policy version with which a run begins: the checkpoint's version."""
    return number_of(run.number, version_of(run.ancestors[-1]) if run.ancestors else 0)


def opened(parent: sampling_pb2.PolicyRun, version: int, taken: int) -> sampling_pb2.PolicyRun:
    """Returns a new run of a policy.

    Args:
        parent: The run in which the checkpoint was made.
        version: The version within it at which the trainer continues. Later versions of the
            parent's own ancestors do not belong to the new run either.
        taken: The highest number of a run that may be in use.
    """
    # Of each run, up to the version: the trainer has trained nothing that came after it.
    ends = [*parent.ancestors, number_of(parent.number, version)]
    ancestors = [number_of(run_of(end), min(version_of(end), version)) for end in ends]
    return sampling_pb2.PolicyRun(
        number=max(taken, parent.number) + 1,
        model=parent.model,
        adapter=parent.adapter,
        ancestors=ancestors[-MOST_ANCESTORS:],
    )


def belongs(run: sampling_pb2.PolicyRun, policy_version: int) -> bool:
    """Returns whether a run, or a run that it descends from, sampled with a policy version.

    An earlier run's versions belong to the run up to the one at which it was left. Its later
    versions, and all versions of other runs, are abandoned.
    """
    number = run_of(policy_version)
    return number == run.number or any(
        run_of(end) == number and policy_version <= end for end in run.ancestors
    )


def is_stale(run: sampling_pb2.PolicyRun | None, span: sampling_pb2.VersionSpan) -> bool:
    """Returns whether an abandoned run of a run's policy sampled the tokens of a span.

    Without a run nothing is abandoned.
    """
    if run is None or span.adapter != run.adapter:
        return False
    return not belongs(run, span.policy_version)


def check_current(field: str, run: int, current: sampling_pb2.PolicyRun) -> None:
    """Checks that a trainer is not of an earlier run than the current one.

    Raises:
        RunAbandonedError: A later run was opened.
    """
    if run < current.number:
        raise RunAbandonedError(
            f"{field}: run {run} is abandoned, because run {current.number} was opened at "
            f"{told(start_of(current))}; stop this trainer if another was restored in its place, "
            "else call open_run",
            policy_version=start_of(current),
        )


def check_run(field: str, run: sampling_pb2.PolicyRun) -> None:
    """Checks the fields of a run.

    Raises:
        InvalidFieldError: Its ancestors are too many, or are no earlier runs in ascending order.
    """
    if len(run.ancestors) > MOST_ANCESTORS:
        problem = f"are {len(run.ancestors)}; give at most {MOST_ANCESTORS}"
        raise InvalidFieldError(f"{field}.ancestors", problem)
    numbers = [run_of(one) for one in run.ancestors]
    if any(one < 0 for one in run.ancestors) or numbers != sorted(
        {one for one in numbers if one < run.number}
    ):
        raise InvalidFieldError(
            f"{field}.ancestors", "are no earlier runs in their order; give what OpenRun returned"
        )
