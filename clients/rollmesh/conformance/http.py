"""Checks that all protocols share: paths, models, and answers under load."""

from typing import Any

from rollmesh.conformance.checks import Family, NotSeenError
from rollmesh.conformance.server import Server, need

HTTP = Family("http.server")
OBSERVED = Family("http.observed")
_LONGEST_DELAY_S = 120


@HTTP.check(
    "GET models lists what is served.",
    "Clients that look for the model before they begin: the SDK's models.list raises.",
)
async def _models(server: Server) -> None:
    body = (await server.send("GET", "models")).body()
    data: Any = body.get("data")
    need(body.get("object") == "list" and isinstance(data, list), f"the list is {body!r:.200}")
    need(data, "the list is empty")
    for entry in data:
        need(isinstance(entry.get("id"), str), f"an entry has no id: {entry!r:.200}")
        need(entry.get("object") == "model", f"object of an entry is {entry.get('object')!r}")


@HTTP.check(
    "A path that is not served is a 404 with a JSON body.",
    "Whoever sets a wrong base URL: the SDKs show no message.",
)
async def _unknown_path(server: Server) -> None:
    answer = await server.post("no/such/path", {})
    need(answer.status == 404, f"status {answer.status}: {answer}")
    answer.value()


@OBSERVED.check(
    "Whenever the server was busy (429, 503), it said retry-after, of at most 120 s.",
    "The SDKs: they give up after 1.4 s without it, and do not wait for more than 120 s.",
)
async def _retry_after(server: Server) -> None:
    busy = [headers.get("retry-after") for status, headers in server.seen if status in {429, 503}]
    if not busy:
        raise NotSeenError("the server was never busy")
    wrong = [one for one in busy if one is None or not _is_short(one)]
    need(not wrong, f"{len(wrong)} of {len(busy)} answers had another retry-after: {wrong!r:.100}")


@OBSERVED.check(
    "No request of this run was answered with a 500.",
    "Clients that retry, and whoever looks for the reason: a 500 names nothing.",
)
async def _no_failure(server: Server) -> None:
    found = sum(status == 500 for status, _ in server.seen)
    need(not found, f"{found} of {len(server.seen)} answers were a 500")


def _is_short(delay: str) -> bool:
    return delay.isdecimal() and 1 <= int(delay) <= _LONGEST_DELAY_S
