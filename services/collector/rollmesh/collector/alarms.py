"""Signs in the last steps of a trainer that its run goes wrong without an error. Pure decisions."""

import math
from collections.abc import Callable, Iterator, Sequence
from statistics import median

from rollmesh.v1 import collector_pb2 as pb

WINDOW = 20
"""Number of last steps that the rules look at."""
_REPEATS = 3
_GROWTH = 2.0


def alarms_of(steps: Sequence[pb.TrainingStep]) -> list[pb.Alarm]:
    """Returns the alarms that the last steps raise.

    Args:
        steps: The last steps of a consumer's trainer, oldest first, at most `WINDOW`. A rule is
            silent if they lack its metrics. `rollmesh.batches.step_metrics` has the names.
    """
    if not steps:
        return []
    return [
        pb.Alarm(name=rule.__name__.removeprefix("_"), message=message)
        for rule in _RULES
        for message in rule(steps)
    ]


_Rule = Callable[[Sequence[pb.TrainingStep]], Iterator[str]]


def _not_finite(steps: Sequence[pb.TrainingStep]) -> Iterator[str]:
    last = steps[-1]
    if names := sorted(name for name, value in last.metrics.items() if not math.isfinite(value)):
        yield (
            f"step {last.step} has values that are not finite: {', '.join(names)}. Restore the "
            "last checkpoint, and look at the learning rate and the log-probabilities"
        )


def _rewarded_without_tokens(steps: Sequence[pb.TrainingStep]) -> Iterator[str]:
    count = steps[-1].metrics.get("rewarded_untrained_sessions")
    if count:
        yield (
            f"{count:.0f} sessions of step {steps[-1].step} have a reward and no trained token. "
            "See whether their agents call the mesh's model, and why their tokens are masked"
        )


def _everything_masked(steps: Sequence[pb.TrainingStep]) -> Iterator[str]:
    sampled = steps[-1].metrics.get("sampled_tokens")
    if sampled and steps[-1].metrics.get("trained_tokens") == 0:
        yield (
            f"none of the {sampled:.0f} tokens that were sampled for step {steps[-1].step} is "
            "trained. See the trajectories' reasons, and the settings that mask turns"
        )


def _no_variance(steps: Sequence[pb.TrainingStep]) -> Iterator[str]:
    last = steps[-_REPEATS:]
    compared = [step.metrics.get("compared_groups", 0) for step in last]
    flat = [step.metrics.get("flat_groups") for step in last]
    if len(last) == _REPEATS and all(compared) and compared == flat:
        yield (
            f"in each group of the last {_REPEATS} steps all sessions have the same reward, so "
            "their advantages are 0. Choose tasks that are neither always nor never solved, and "
            "see whether the reward function reads the answers"
        )


def _lag_grows(steps: Sequence[pb.TrainingStep]) -> Iterator[str]:
    for before, now in _growths(steps, "lag_mean", least=1.0):
        yield (
            f"trained tokens are {now:.1f} versions old, and were {before:.1f} before. The trainer "
            "is faster than the mesh, or pushes too often: add engines, or set max_policy_lag"
        )


def _logprob_difference_grows(steps: Sequence[pb.TrainingStep]) -> Iterator[str]:
    for before, now in _growths(steps, "logprob_difference_mean", least=0.01):
        yield (
            "the trainer's log-probabilities differ from the sampled ones by "
            f"{now:.4f} on average, and did by {before:.4f} before. See whether the engines have "
            "the trainer's weights, data type, temperature and templates"
        )


_RULES: tuple[_Rule, ...] = (
    _not_finite,
    _rewarded_without_tokens,
    _everything_masked,
    _no_variance,
    _lag_grows,
    _logprob_difference_grows,
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
