"""Runs checks one after another, each within a time."""

import asyncio
import time
from collections.abc import Collection, Iterable, Iterator

import httpx2

from rollmesh.conformance.checks import Check, NotSeenError, Result, Verdict
from rollmesh.conformance.server import FailedError, Server

PATHS = {"chat": "chat/completions", "responses": "responses", "messages": "messages"}
"""Path of each protocol below the base URL."""
_TRAINING = "training"
"""The checks of sessions' records. They need a capture."""
_NOT_SERVED = {404, 405, 501}


async def run_checks(
    server: Server, checks: Iterable[Check], required: Collection[str], limit_s: float
) -> list[Result]:
    """Returns how each check ended.

    Args:
        server: The server under test.
        checks: The checks, in their order.
        required: Protocols that fail where the server does not serve them. Others are one skipped
            row each.
        limit_s: Time for each check, seconds.
    """
    results: list[Result] = []
    served: dict[str, bool] = {}
    for check in checks:
        protocol = check.protocol
        if protocol == _TRAINING and not server.capture_url:
            if protocol not in served:
                results.append(Result(_RECORDED, Verdict.SKIPPED, "no capture URL is given"))
            served[protocol] = False
        if protocol in PATHS and protocol not in served:
            served[protocol] = await _serves(server, protocol, limit_s)
            if not served[protocol]:
                results.append(_absent(protocol, fails=protocol in required))
        if served.get(protocol, True):
            results.append(await _run(server, check, limit_s))
    return results


async def _serves(server: Server, protocol: str, limit_s: float) -> bool:
    try:
        async with asyncio.timeout(limit_s):
            answer = await server.post(PATHS[protocol], {})
    except (TimeoutError, httpx2.HTTPError):
        return True  # each of its checks says what is wrong
    return answer.status not in _NOT_SERVED


def _absent(protocol: str, *, fails: bool) -> Result:
    check = Check(
        f"{protocol}.served",
        "The server serves the protocol.",
        f"Agents that speak {protocol} cannot use the server.",
        _nothing,
    )
    verdict = Verdict.FAILED if fails else Verdict.SKIPPED
    return Result(check, verdict, f"POST {PATHS[protocol]} is not served")


async def _nothing(_server: Server) -> None:
    """The row of a protocol that is not served stands for its checks."""


_RECORDED = Check(
    f"{_TRAINING}.served",
    "The record of a session can be read.",
    "Trainers: nobody sees what their samples lack.",
    _nothing,
)


async def _run(server: Server, check: Check, limit_s: float) -> Result:
    started = time.monotonic()
    verdict, detail = Verdict.PASSED, ""
    try:
        async with asyncio.timeout(limit_s):
            await check.run(server)
    except Exception as error:  # a server may send anything
        verdict, detail = _judged(error, limit_s)
    return Result(check, verdict, detail, time.monotonic() - started)


def _judged(error: Exception, limit_s: float) -> tuple[Verdict, str]:
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    match error:
        case NotSeenError():
            return Verdict.NOT_SEEN, str(error)
        case FailedError():
            return Verdict.FAILED, str(error)
        case TimeoutError() | httpx2.TimeoutException():
            return Verdict.FAILED, f"not done within {limit_s:g} s"
        case _:
            return Verdict.FAILED, f"unexpected form of an answer: {type(error).__name__}: {error}"


def failed(results: Iterable[Result]) -> Iterator[Result]:
    """Yields what failed."""
    return (one for one in results if one.verdict == Verdict.FAILED)
