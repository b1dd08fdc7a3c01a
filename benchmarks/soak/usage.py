"""Resource use of processes over time: resident memory and file descriptors."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

import psutil

_MB = 1024 * 1024


@dataclass(slots=True)
class Usage:
    """Samples of one process since the start of the measurement."""

    rss_mb: list[float] = field(default_factory=list)
    fds: list[int] = field(default_factory=list)

    def add(self, pid: int) -> None:
        """Adds a sample, unless the process has just died."""
        try:
            process = psutil.Process(pid)
            self.rss_mb.append(process.memory_info().rss / _MB)
            self.fds.append(process.num_fds())
        except psutil.Error:
            return

    @property
    def rss_growth_mb(self) -> float:
        """Median of the last tenth of the samples minus that of the first tenth, megabytes."""
        part = max(len(self.rss_mb) // 10, 1)
        return median(self.rss_mb[-part:]) - median(self.rss_mb[:part]) if self.rss_mb else 0.0


def worst_growth_mb(usage: Mapping[str, Usage]) -> tuple[str, float]:
    """Returns the process whose memory grew most, and its growth in megabytes. "" for none."""
    if not usage:
        return "", 0.0
    name = max(usage, key=lambda one: usage[one].rss_growth_mb)
    return name, usage[name].rss_growth_mb
