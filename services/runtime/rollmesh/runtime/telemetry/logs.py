"""Structured logs: one JSON object per line, without prompts and keys."""

import contextvars
import json
import logging
import re
import sys
import traceback
from datetime import UTC, datetime

LEVELS = ("debug", "info", "warning", "error")
_KEY = re.compile(r"\brmk-([0-9a-zA-Z]+)-[0-9a-zA-Z_-]+")
_GRPC, _CLIENT_LEFT = "grpc._cython.cygrpc", "ExecuteBatchError raised in core"
current_request: contextvars.ContextVar[str] = contextvars.ContextVar("request_id", default="")
"""Id of the current request. Empty outside of requests."""


def without_keys(text: str) -> str:
    """Returns a text with session keys cut to their ids. Errors of HTTP clients contain URLs."""
    return _KEY.sub(r"rmk-\1-...", text)


class JsonFormatter(logging.Formatter):
    """Writes a record as one JSON object: time, level, logger, event, request id, fields.

    Session keys do not come through, whoever logs them.
    """

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        """Returns the line."""
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "service": self._service,
            "logger": record.name,
            "event": record.getMessage(),
        }
        if request_id := current_request.get():
            line["request_id"] = request_id
        line |= getattr(record, "fields", {})
        if record.exc_info and record.exc_info[0]:
            line["exception"] = "".join(traceback.format_exception(*record.exc_info))
        try:
            return without_keys(json.dumps(line, default=str, allow_nan=False))
        except ValueError:  # NaN and infinity are not JSON
            simple = {key: v if isinstance(v, int) else str(v) for key, v in line.items()}
            return without_keys(json.dumps(simple))


def fields(**values: object) -> dict[str, dict[str, object]]:
    """Returns the `extra` argument of a log call: `log.info("leased", extra=fields(engine=e))`."""
    return {"fields": values}


def configure_logging(service: str, level: str) -> None:
    """Sends all logs of this process to standard error as JSON lines."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(service))
    handler.addFilter(  # grpcio logs each client that leaves too soon
        lambda record: record.name != _GRPC or not record.getMessage().startswith(_CLIENT_LEFT)
    )
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
