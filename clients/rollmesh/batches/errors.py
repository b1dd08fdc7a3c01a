"""Why a trajectory cannot be a row of a batch."""

from rollmesh.runtime.errors import RollmeshError


class TrajectoryTooLongError(RollmeshError):
    """A trajectory has more tokens than a row may hold; nothing is cut.

    Use longer rows, or leave it out (`too_long="leave_out"`).
    """

    code = "OUT_OF_RANGE"
    reason = "TRAJECTORY_TOO_LONG"

    def __init__(self, trajectory_id: str, part: str, tokens: int, most: int) -> None:
        """Names the trajectory, the part that is too long, and the limit."""
        super().__init__(
            f"trajectory {trajectory_id}: its {part} has {tokens} tokens and {most} fit; "
            'give more room, or too_long="leave_out" to go on without it',
            trajectory_id=trajectory_id,
            tokens=tokens,
            most=most,
        )


class MissingRewardError(RollmeshError):
    """A trajectory has no reward: none of its session, none of its own, none of a turn.

    Set a reward before the session closes, use `set_rewards`, or pass
    `missing_reward="leave_out"`.
    """

    code = "FAILED_PRECONDITION"
    reason = "MISSING_REWARD"

    def __init__(self, trajectory_id: str, session_id: str, *, kind: str = "trajectory") -> None:
        """Names the trajectory, or what else `kind` says, and its session."""
        super().__init__(
            f"{kind} {trajectory_id}: session {session_id} was closed without a reward; "
            'set one before the close, or missing_reward="leave_out" to go on without it',
            trajectory_id=trajectory_id,
            session_id=session_id,
        )


class PackageMissingError(RollmeshError):
    """What was asked for needs a package that is not installed.

    Install the package that the message names.
    """

    code = "FAILED_PRECONDITION"
    reason = "PACKAGE_MISSING"

    def __init__(self, package: str, wanted: str) -> None:
        """Names the package and what needs it."""
        super().__init__(f"{wanted} needs the package {package}; install it", package=package)
