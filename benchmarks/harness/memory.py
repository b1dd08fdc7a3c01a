"""Memory use of processes."""

import os
from pathlib import Path


def rss_bytes(pid: int) -> int:
    """Returns the resident memory of a process, bytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def peak_mb(pid: int | str) -> float:
    """Returns the peak memory of a process so far, MB. "self" is this process."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024 / 1e6
