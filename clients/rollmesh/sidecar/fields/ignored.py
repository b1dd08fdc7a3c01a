"""Counts the parameters that change nothing here."""

from collections.abc import Collection, Mapping
from typing import Any

from prometheus_client import Counter

IGNORED = Counter(
    "rollmesh_sidecar_ignored_parameters_total", "Parameters that change nothing here.", ["name"]
)


def count_ignored(given: Mapping[str, Any], known: Collection[str], named: Collection[str]) -> None:
    """Counts the parameters of an object that change nothing.

    Args:
        given: The object.
        known: Names of its parameters that are read.
        named: Names that are counted as such. All others share the label `other`, which bounds the
            labels.
    """
    for name in given:
        if name not in known and given[name] is not None:
            IGNORED.labels(name if name in named else "other").inc()
