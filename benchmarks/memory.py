"""How much memory processes hold."""

import os
from pathlib import Path


def rss_bytes(pid: int) -> int:
    """Returns the memory that a process holds."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def peak_mb(pid: int | str) -> float:
    """Returns the most memory that a process held so far, MB; "self" is this one."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024 / 1e6
