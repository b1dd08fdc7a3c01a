"""The process's limit of open files, of which each connection is one."""

import resource


def raise_descriptor_limit() -> int:
    """Raises the limit of open files as far as the process may; returns it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard
