"""Checks rollmesh and other servers: `make conformance-peers`.

    python -m benchmarks.peers [NAME ...]

Writes a file for each server into docs/conformance: version, settings, date, and the end of each
check. The checks of training records run in front of a scripted engine, the others in front of a
mesh. A server that is not installed keeps its file. `scripts.pages.peers` makes the page.
"""

import argparse
import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx2

from benchmarks.peers.door import door
from benchmarks.peers.engine import Engine, make_model, serving
from benchmarks.peers.systems import ROOT, SYSTEMS, System
from benchmarks.peers.theirs import Answers, Theirs
from rollmesh.conformance import CHECKS, RECORDS, Result, Server, run_checks, table
from tests.conformance.test_against_rollmesh import CONTEXT, RULES
from tests.meshes import scripted_mesh
from tests.models import make_vision_dir

RESULTS = ROOT / "docs" / "conformance"
_CHECK_S = 120.0
_LONGEST = 120
_ENGINES = {"rollmesh", "vllm"}
"""They have an engine of their own."""
_NO_PROTOCOLS = {"vllm", "areal"}
"""docs/conformance-vllm.json has those of the one. The other asks for completions of ids."""
_PAIR = re.compile(r'\[\n +(".*"),\n +(".*")\n +\]')


async def records(name: str, stack: AsyncExitStack, folder: Path) -> list[Result]:
    """Checks the training records of a server."""
    engine, upstream = None, ""
    if name not in _ENGINES:
        engine = Engine(make_model(folder / "model"))
        upstream = await stack.enter_async_context(serving(engine))
    recorder = await stack.enter_async_context(SYSTEMS[name].run(folder, upstream))
    if isinstance(recorder, Theirs):
        recorder.engine = engine
    capture = await stack.enter_async_context(door(recorder))
    client = await stack.enter_async_context(httpx2.AsyncClient(timeout=_CHECK_S, trust_env=False))
    server = Server(client, "policy", capture_url=capture)
    return await run_checks(server, RECORDS.checks, (), _CHECK_S)


async def protocols(name: str, stack: AsyncExitStack, folder: Path) -> list[Result]:
    """Checks what agents see of a server in front of a mesh, or of the mesh."""
    model = make_vision_dir(folder / "vision")
    mesh = await stack.enter_async_context(
        scripted_mesh(folder / "mesh", model, RULES, max_context_tokens=CONTEXT)
    )
    session = await stack.enter_async_context(
        (await stack.enter_async_context(mesh.client())).session()
    )
    url, key = session.keyless_url, session.api_key
    if name not in _ENGINES:
        upstream = session.base_url.removesuffix("/v1")
        recorder = await stack.enter_async_context(SYSTEMS[name].run(folder, upstream))
        opened = await recorder.open({})
        url, key = opened["base_url"], opened["key"]
        if isinstance(recorder, Answers):
            url = f"{recorder.url}/v1"
    client = await stack.enter_async_context(
        httpx2.AsyncClient(
            base_url=url,
            headers={"authorization": f"Bearer {key}"},
            timeout=_CHECK_S,
            limits=httpx2.Limits(max_keepalive_connections=0),  # some close after a 500, unsaid
            trust_env=False,
        )
    )
    checks = [one for one in CHECKS if one.protocol != "training"]
    return await run_checks(Server(client, "policy", CONTEXT, key), checks, (), _CHECK_S)


async def check(name: str, system: System, version: str) -> dict[str, Any]:
    """Runs the checks at a server. Returns its record."""
    found = {}
    for part in (records, protocols) if name not in _NO_PROTOCOLS else (records,):
        async with AsyncExitStack() as stack:
            folder = Path(stack.enter_context(TemporaryDirectory(prefix="rollmesh-peers-")))
            results = await part(name, stack, folder)
        print(f"{system.title}\n{table(results)}\n", flush=True)
        found[part.__name__] = _ends(results)
    return {
        "title": system.title,
        "package": system.package,
        "version": version,
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "settings": system.settings,
        "record": system.record,
        **found,
    }


def _ends(results: Sequence[Result]) -> dict[str, list[str]]:
    return {one.check.name: [one.verdict.lower(), one.detail[:_LONGEST]] for one in results}


def _version(system: System) -> str:
    """Returns the version of a package in an environment. Empty if it is not installed."""
    if system.environment == ROOT / ".venv":
        return metadata.version(system.package)
    python = system.environment / "bin" / "python"
    if not python.exists():
        return ""
    code = f"from importlib import metadata; print(metadata.version({system.package!r}))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def main() -> int:
    """Returns the exit code: 1 if a check failed at rollmesh."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*SYSTEMS, []], metavar="NAME")
    names = parser.parse_args().names or list(SYSTEMS)
    RESULTS.mkdir(exist_ok=True)
    bad = False
    for name in names:
        system = SYSTEMS[name]
        version = _version(system)
        if not version:
            print(f"conformance-peers: {name}: {system.package} is not installed")
            continue
        found = asyncio.run(check(name, system, version))
        written = _PAIR.sub(r"[\1, \2]", json.dumps(found, indent=1))
        (RESULTS / f"{name}.json").write_text(f"{written}\n")
        ends = [
            kind for part in ("records", "protocols") for kind, _ in found.get(part, {}).values()
        ]
        bad |= name == "rollmesh" and "failed" in ends
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
