"""Files that only their owner may read: journals, stores, weights and logs hold conversations."""

import itertools
import os
from pathlib import Path

UMASK = 0o077
"""Umask of every service: files get mode 0600 and folders 0700, whatever the shell has."""


def make_folder(path: Path) -> None:
    """Creates a folder and those above it that are missing, for the owner alone.

    A folder that exists keeps its mode: it may be shared on purpose, or a volume's.

    Raises:
        OSError: It cannot be created.
    """
    missing = list(itertools.takewhile(lambda one: not one.exists(), (path, *path.parents)))
    for folder in reversed(missing):
        folder.mkdir(mode=0o700, exist_ok=True)


def make_file(path: Path) -> None:
    """Creates an empty file for the owner alone, or takes others' rights from an existing file.

    Raises:
        OSError: It cannot be created, or belongs to another user and others have rights.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        if os.fstat(descriptor).st_mode & UMASK:
            os.fchmod(descriptor, 0o600)
    finally:
        os.close(descriptor)
