"""Typed reasons, lineage, finish and export; numbered as in `rollmesh/v1`."""

from enum import IntEnum


class Fidelity(IntEnum):
    """Why tokens are not simply the trained output of one policy version."""

    EXACT = 1
    LENIENT_ECHO = 2
    TEMPLATE_REWRITE = 3
    TOOLS_CHANGED = 4
    LENGTH_CUT = 5
    MIGRATED = 6
    MIXED_VERSIONS = 7
    RETRY_REPLAY = 8
    MALFORMED_TOOL_CALL = 9
    MISSING_LOGPROBS = 10
    AUXILIARY = 11
    ORPHANED = 12
    SHARED_PREFIX = 13
    STOP_STRING = 14
    CONSTRAINED = 15
    SPECIAL_TEXT = 16


class Lineage(IntEnum):
    """How a branch came to be."""

    MAIN = 1
    SIBLING = 2
    BRANCH = 3
    ROOT = 4
    AUXILIARY = 5
    SUB_AGENT = 6
    COMPACTION = 7


class Finish(IntEnum):
    """Why a generation ended."""

    STOP = 1
    LENGTH = 2
    ABORT = 3


class ExportMode(IntEnum):
    """In which form a tree goes to the trainer."""

    LEAVES = 1
    TURNS = 2
    TREE = 3
