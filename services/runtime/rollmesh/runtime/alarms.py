"""Alarms of a trainer: signs in its last steps that a run goes wrong. Pure decisions.

The collector applies these rules to the steps that trainers report. Data that is missing raises
nothing. `mesh_alarms` has the rules of a mesh, and the table of all.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, TypeVar

from rollmesh.v1 import collector_pb2 as pb

WINDOW = 20
"""Number of last steps that the rules look at."""
_REPEATS = 3
_GROWTH = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One alarm: its condition and its remedy."""

    name: str
    when: str
    """When it is raised, for the page."""
    remedy: str
    """The sentence for people, without its full stop."""
    look: Callable[..., Iterator[Any]]
    """Yields observations."""
    prometheus: str = ""
    """The condition in Prometheus' language. Empty: the gauge `rollmesh_alarm`."""


_Look = TypeVar("_Look", bound=Callable[..., Iterator[Any]])
STEP_RULES: list[Rule] = []
"""The alarms of a trainer. They look at its last steps, oldest first. A name stays, because boards
and rules of others have it."""


def rule(
    rules: list[Rule], *, when: str, remedy: str, prometheus: str = ""
) -> Callable[[_Look], _Look]:
    """Returns a decorator that adds a function to a table, under the function's name."""

    def add(look: _Look) -> _Look:
        name = look.__name__.removeprefix("_")
        rules.append(Rule(name=name, when=when, remedy=remedy, look=look, prometheus=prometheus))
        return look

    return add


@rule(
    STEP_RULES,
    when="a number of the last step is NaN or infinite",
    remedy="Restore the last checkpoint, and look at the learning rate and the log-probabilities",
)
def _not_finite(steps: Sequence[pb.TrainingStep]) -> Iterator[str]:
    last = steps[-1]
    if names := sorted(name for name, value in last.metrics.items() if not math.isfinite(value)):
        yield f"step {last.step} has values that are not finite: {', '.join(names)}"


@rule(
    STEP_RULES,
    when="sessions of the last step have a reward and no trained token",
    remedy="See whether their agents call the mesh's model, and why their tokens are masked",
)
def _rewarded_without_tokens(steps: Sequence[pb.TrainingStep]) -> Iterator[str]:
    count = steps[-1].metrics.get("rewarded_untrained_sessions")
    if count:
        number = steps[-1].step
        yield f"{count:.0f} sessions of step {number} have a reward and no trained token"


@rule(
    STEP_RULES,
    when="tokens were sampled for the last step, and none is trained",
    remedy="See the trajectories' reasons, and the settings that mask turns",
)
def _everything_masked(steps: Sequence[pb.TrainingStep]) -> Iterator[str]:
    sampled = steps[-1].metrics.get("sampled_tokens")
    if sampled and steps[-1].metrics.get("trained_tokens") == 0:
        number = steps[-1].step
        yield f"none of the {sampled:.0f} tokens that were sampled for step {number} is trained"


@rule(
    STEP_RULES,
    when="in three steps in a row, all sessions of each group have the same reward",
    remedy="Choose tasks that are neither always nor never solved, and see whether the reward "
    "function reads the answers",
)
def _no_variance(steps: Sequence[pb.TrainingStep]) -> Iterator[str]:
    last = steps[-_REPEATS:]
    compared = [step.metrics.get("compared_groups", 0) for step in last]
    flat = [step.metrics.get("flat_groups") for step in last]
    if len(last) == _REPEATS and all(compared) and compared == flat:
        yield (
            f"in each group of the last {_REPEATS} steps all sessions have the same reward, so "
            "their advantages are 0"
        )


@rule(
    STEP_RULES,
    when=f"the last {WINDOW} steps have the same `policy_version`",
    remedy="See whether the trainer pushes its weights, and its log about the pushes",
)
def _version_stands(steps: Sequence[pb.TrainingStep]) -> Iterator[str]:
    versions = {step.metrics.get("policy_version") for step in steps}
    if len(steps) == WINDOW and len(versions) == 1 and (version := versions.pop()) is not None:
        yield f"the last {WINDOW} steps all start from policy version {version:.0f}"


@rule(
    STEP_RULES,
    when="the median of `lag_mean` is at least 1, and twice that of the older half of the steps",
    remedy="The trainer is faster than the mesh, or pushes too often: add engines, or set "
    "max_policy_lag",
)
def _lag_grows(steps: Sequence[pb.TrainingStep]) -> Iterator[str]:
    for before, now in _growths(steps, "lag_mean", least=1.0):
        yield f"trained tokens are {now:.1f} versions old, and were {before:.1f} before"


@rule(
    STEP_RULES,
    when="the median of `logprob_difference_mean` is at least 0.01, and twice that of the "
    "older half",
    remedy="See whether the engines have the trainer's weights, data type, temperature and "
    "templates",
)
def _logprob_difference_grows(steps: Sequence[pb.TrainingStep]) -> Iterator[str]:
    for before, now in _growths(steps, "logprob_difference_mean", least=0.01):
        yield (
            "the trainer's log-probabilities differ from the sampled ones by "
            f"{now:.4f} on average, and did by {before:.4f} before"
        )


def _growths(
    steps: Sequence[pb.TrainingStep], name: str, least: float
) -> Iterator[tuple[float, float]]:
    """Yields the medians of the older and the newer half of a metric, if it grew in between."""
    values = [step.metrics[name] for step in steps if name in step.metrics]
    values = [value for value in values if math.isfinite(value)]
    middle = len(values) // 2
    if middle >= _REPEATS:
        before, now = median(values[:middle]), median(values[middle:])
        if now >= least and now >= _GROWTH * before:
            yield before, now


def alarms_of(steps: Sequence[pb.TrainingStep]) -> list[pb.Alarm]:
    """Returns the alarms that the last steps of a trainer raise.

    Args:
        steps: The last steps of a consumer's trainer, oldest first, at most `WINDOW`. A rule is
            silent if they lack its metrics. `rollmesh.batches.step_metrics` has the names.
    """
    return [
        pb.Alarm(name=one.name, message=f"{seen}. {one.remedy}")
        for one in STEP_RULES
        if steps
        for seen in one.look(steps)
    ]
