"""Logs: one JSON object on each line, with the id of the request it was written for."""

import asyncio
import io
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from rollmesh.runtime.rpc import open_channel
from rollmesh.runtime.telemetry import (
    JsonFormatter,
    configure_logging,
    current_request,
    fields,
)
from tests.runtime.services import ask, started


def not_json(constant: str) -> object:
    raise AssertionError(f"{constant} is not JSON")


def parsed(line: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(line, parse_constant=not_json)
    return found


@contextmanager
def logging_to(stream: io.StringIO) -> Iterator[logging.Logger]:
    logger, handler = logging.getLogger("rollmesh.test.logs"), logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter("probe"))
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield logger
    finally:
        logger.removeHandler(handler)
        logger.propagate = True


def logged(event: str, *values: object, **extra: object) -> dict[str, Any]:
    stream = io.StringIO()
    with logging_to(stream) as logger:
        logger.warning(event, *values, extra=fields(**extra))
    (line,) = stream.getvalue().splitlines()
    return parsed(line)


def test_a_line_has_its_event_and_its_fields() -> None:
    line = logged("leased to %s", "engine-0", session="s", turn=3)
    assert line.pop("time").endswith("+00:00")
    assert line == {
        "level": "warning",
        "service": "probe",
        "logger": "rollmesh.test.logs",
        "event": "leased to engine-0",
        "session": "s",
        "turn": 3,
    }


@pytest.mark.parametrize("text", ["two\nlines", 'a "quoted" word', "長い", "\x00\x1b[31m"])
def test_whatever_is_logged_stays_on_its_line(text: str) -> None:
    assert logged("saw %s", text, value=text)["event"] == f"saw {text}"


@pytest.mark.parametrize("value", [Path("a/b"), float("nan"), float("inf"), {1, 2}, b"x", None])
def test_a_field_of_any_kind_is_json(value: object) -> None:
    assert "value" in logged("seen", value=value)


def test_an_exception_is_a_field_with_its_traceback() -> None:
    stream = io.StringIO()
    with logging_to(stream) as logger:
        try:
            int("many")
        except ValueError:
            logger.exception("failed")
    (line,) = stream.getvalue().splitlines()
    assert parsed(line)["exception"].endswith("with base 10: 'many'\n")


async def test_a_request_id_stays_within_its_task_and_the_tasks_it_starts() -> None:
    async def child() -> str:
        return current_request.get()

    async def request(name: str) -> tuple[str, dict[str, Any]]:
        current_request.set(name)
        async with asyncio.TaskGroup() as group:
            started_by_it = group.create_task(child())
        return started_by_it.result(), logged("seen")

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(request(name)) for name in ("a", "b")]
    for name, task in zip(("a", "b"), tasks, strict=True):
        seen, line = task.result()
        assert (seen, line["request_id"]) == (name, name)
    assert "request_id" not in logged("outside of any")


async def test_the_log_of_a_process_is_json_and_has_the_traceback(
    tmp_path: Path,
) -> None:
    async with started(tmp_path) as process:
        process.port = json.loads(await process.wait_line("READY"))["port"]
        async with open_channel(process.address) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await ask(channel, b"raise", metadata=(("x-request-id", "r-17"),))
        assert await process.terminate() == 0
    assert "r-17" in (caught.value.details() or "")
    lines = [parsed(line) for line in (tmp_path / "scripted.log").read_text().splitlines()]
    assert {line["service"] for line in lines} == {"scripted"}
    (line,) = [line for line in lines if line["level"] == "error"]
    assert line["request_id"] == "r-17"
    assert line["method"] == "/rollmesh.test.ScriptedService/unary_unary"
    assert "what nobody may see" in line["exception"]


@pytest.mark.parametrize(("level", "said"), [("info", True), ("error", False)])
async def test_lines_below_the_level_are_not_logged(
    tmp_path: Path,
    level: str,
    said: bool,  # a table
) -> None:
    async with started(tmp_path, f"--log-level={level}") as process:
        await process.wait_line("READY")
        await process.terminate()
    assert ("stopping" in (tmp_path / "scripted.log").read_text()) is said


def test_a_client_that_leaves_while_grpc_sends_is_not_logged_with_a_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.root, "handlers", [])
    monkeypatch.setattr(logging.root, "level", logging.INFO)
    configure_logging("probe", "info")
    grpcs = logging.getLogger("grpc._cython.cygrpc")
    grpcs.error("ExecuteBatchError raised in core by servicer method [%s]", "/a/b")
    grpcs.error("Unexpected [%s] raised", "KeyError")
    (line,) = capsys.readouterr().err.splitlines()
    assert parsed(line)["event"] == "Unexpected [KeyError] raised"
