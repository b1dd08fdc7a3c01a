"""Ray where other tests use the machine's cores too."""

from collections.abc import Callable
from typing import Any

_STARTS = 3

# A raylet starts two Python processes before it registers. Ray waits 30 s for any of them.
PATIENT = {
    "RAY_gcs_server_port_wait_time_s": "90",
    "RAY_raylet_start_wait_time_s": "300",
    "RAY_agent_register_timeout_ms": "300000",
    "RAY_worker_register_timeout_seconds": "300",
}


def started(start: Callable[..., Any], **settings: Any) -> Any:
    """Calls what starts Ray, again if Ray's processes were not up in its time."""
    for left in reversed(range(_STARTS)):
        try:
            return start(**settings)
        except Exception as error:
            if not left or "imed out" not in str(error):
                raise
            print(f"Ray is started again: {error}")  # noqa: T201 - shown if the test fails
    raise AssertionError
