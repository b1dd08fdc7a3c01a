"""Gates in vLLM's worker, at which weights wait that are prepared, exchanged or loaded.

A step waits as long as the folder GATES has a file of its name. Then it has written `NAME.waits`.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rollmesh.engine.vllm import PreparedWeights, WeightReceiver

PREPARE, EXCHANGE, LOAD = "prepare", "exchange", "load"
_PREPARE = "_prepare"


def register() -> None:
    """Called by vLLM in each of its processes, as an entry point of `vllm.general_plugins`."""
    worker: Any = PreparedWeights
    if "GATES" in os.environ and not hasattr(worker, "gated"):
        worker.gated = True
        setattr(worker, _PREPARE, _after(PREPARE, getattr(worker, _PREPARE)))
        worker.exchange = _after(EXCHANGE, worker.exchange)
        receiver: Any = WeightReceiver
        receiver.load_checked_weights = _after(LOAD, receiver.load_checked_weights)


def _after(name: str, step: Callable[..., Any]) -> Callable[..., Any]:
    gate = Path(os.environ["GATES"], name)

    def waits(*args: Any) -> Any:
        while gate.exists():
            gate.with_suffix(".waits").touch()
            time.sleep(0.01)
        return step(*args)

    return waits
