"""Finds out why vLLM could not start: the first exception that any of its processes logs.

vLLM's scheduler and workers run in separate processes. Their exceptions go to the log; the caller
only gets "see root cause above". This module adds a handler to vLLM's logging configuration, which
vLLM passes on to all of its processes.
"""

import json
import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

_NAME = "rollmesh-failure"


class FailureHandler(logging.Handler):
    """Writes the first logged exception to a file that all processes share."""

    def __init__(self, path: str) -> None:
        """Takes the path of the file; the process that creates it has failed first."""
        super().__init__(logging.ERROR)
        self._path = Path(path)

    def emit(self, record: logging.LogRecord) -> None:
        """Writes the record's exception unless another process was first."""
        error = record.exc_info[1] if record.exc_info else None
        if error is None:
            return
        with suppress(OSError), self._path.open("x") as file:
            file.write(f"{type(error).__name__}: {error}")


@dataclass(frozen=True, slots=True)
class FailureLog:
    """The folder where failures are written while vLLM starts."""

    folder: Path

    @property
    def config_file(self) -> str:
        """Path of a logging configuration for vLLM: its own, plus the handler."""
        return str(self.folder / "logging.json")

    def first(self) -> str:
        """Returns the first logged exception; empty if there was none."""
        path = self.folder / "failure"
        return path.read_text() if path.exists() else ""


@contextmanager
def failure_log() -> Iterator[FailureLog]:
    """Collects failures while vLLM starts; later failures appear only in vLLM's log."""
    # pyright mistakes this package for vLLM; workers import this module.
    from vllm import envs  # noqa: PLC0415 # pyright: ignore[reportAttributeAccessIssue]
    from vllm.logger import DEFAULT_LOGGING_CONFIG  # noqa: PLC0415

    with tempfile.TemporaryDirectory(prefix="rollmesh-vllm-") as folder:
        log = FailureLog(Path(folder))
        own = envs.VLLM_LOGGING_CONFIG_PATH
        config = json.loads(Path(own).read_text()) if own else deepcopy(DEFAULT_LOGGING_CONFIG)
        handler = {"()": f"{__name__}.FailureHandler", "path": str(log.folder / "failure")}
        config.setdefault("handlers", {})[_NAME] = handler
        logger = config.setdefault("loggers", {}).setdefault("vllm", {})
        logger["handlers"] = [*logger.get("handlers", ()), _NAME]
        Path(log.config_file).write_text(json.dumps(config))
        yield log
