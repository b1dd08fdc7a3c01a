"""`rollmesh conformance --base-url URL`: checks a server as agents would use it.

The key is the first line of `--key-file`, or else the variable ROLLMESH_CONFORMANCE_KEY. It is no
flag, because `ps` shows flags to everybody.
"""

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import httpx2

from rollmesh.conformance.catalog import CHECKS
from rollmesh.conformance.report import junit, table
from rollmesh.conformance.runner import PATHS, failed, run_checks
from rollmesh.conformance.server import Server

_LEAST_TIMEOUT_S = 1.0


def main() -> int:
    """Returns the exit code: 0 if no check failed, 1 if one failed, 2 if it could not begin."""
    parser = _parser()
    given = parser.parse_args()
    named = [one for one in given.protocols.split(",") if one]
    if unknown := set(named) - PATHS.keys():
        parser.error(f"--protocols: {', '.join(sorted(unknown))}: give some of {', '.join(PATHS)}")
    if not given.base_url.startswith(("http://", "https://")):
        parser.error(f"--base-url: {given.base_url!r} is no URL; give one as http://HOST/v1")
    if not given.timeout_s >= _LEAST_TIMEOUT_S:
        parser.error(f"--timeout-s: is {given.timeout_s}; give at least {_LEAST_TIMEOUT_S:g}")
    try:
        key = _key(given.key_file, os.environ)
    except (OSError, ValueError) as error:
        parser.error(f"--key-file: {error}")
    return asyncio.run(_check(given, named, key))


def _key(file: Path | None, environ: Mapping[str, str]) -> str:
    """Returns the key that is sent. Empty for none.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is no text, or its first line is empty.
    """
    if file is None:
        return environ.get("ROLLMESH_CONFORMANCE_KEY", "")
    key = file.read_text("utf-8").partition("\n")[0].strip()
    if not key:
        raise ValueError(f"{file} has no key in its first line")
    return key


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="rollmesh conformance", description=__doc__)
    add = parser.add_argument
    add("--base-url", required=True, help="as OpenAI's clients take it: http://HOST/v1")
    add("--key-file", type=Path, help="file with the key, sent as bearer token, by Messages also "
        "as x-api-key; without it, ROLLMESH_CONFORMANCE_KEY has the key")  # fmt: skip
    add("--model", default="", help="the first that the server lists, where it is not given")
    add("--protocols", default="", help="some of chat,responses,messages, which must be served; "
        "without it, those that are served are checked")  # fmt: skip
    add("--context-tokens", type=int, help="context length of the model; without it, the checks "
        "that exceed it are not seen, unless the server's models say it (vLLM)")  # fmt: skip
    add("--capture-url", default="", help="opens sessions and shows their records, for the checks "
        "of training; without it, they are not run")  # fmt: skip
    add("--timeout-s", type=float, default=120.0, help="seconds for each check; default 120")
    add("--junit", type=Path, help="file for the results as JUnit XML")
    return parser


async def _check(given: argparse.Namespace, named: list[str], key: str) -> int:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    base_url = given.base_url.rstrip("/")
    fresh = httpx2.Limits(max_keepalive_connections=0)  # some servers close one without saying so
    async with httpx2.AsyncClient(
        base_url=base_url, headers=headers, timeout=given.timeout_s, limits=fresh
    ) as client:
        server = Server(
            client,
            given.model or "policy",
            given.context_tokens,
            key,
            given.capture_url.rstrip("/"),
        )
        try:
            await _learn(server, given.model)
        except httpx2.HTTPError as error:
            print(f"rollmesh conformance: {base_url}: {error or type(error)}", file=sys.stderr)
            return 2
        also = {"http", "training"} if given.capture_url else {"http"}
        checks = [one for one in CHECKS if not named or one.protocol in {*named, *also}]
        results = await run_checks(server, checks, named, given.timeout_s)
    print(table(results))
    if given.junit is not None:
        given.junit.write_bytes(junit(results))
    return int(any(failed(results)))


async def _learn(server: Server, model: str) -> None:
    """Takes the model and its context length from the server's list, where they are not given."""
    answer = await server.send("GET", "models")
    with suppress(ValueError, KeyError, IndexError, TypeError):
        listed = json.loads(answer.text)["data"]
        entry = next((one for one in listed if one["id"] == model), listed[0])
        server.model = model or str(entry["id"])
        if server.context_tokens is None and isinstance(entry.get("max_model_len"), int):
            server.context_tokens = entry["max_model_len"]


if __name__ == "__main__":
    sys.exit(main())
