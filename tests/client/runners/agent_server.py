"""The agent server of docs/runners.md, small: `python agent_server.py PORT FOLDER [--remember]`.

Its agents do what their sample says. Each line of FOLDER/log is one thing that happened. With
`--remember` ended runs are kept on disk, as a server does that survives a restart.
"""

import argparse
import asyncio
import json
import logging
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

MAX_RUNS = 4


@dataclass
class Run:
    """One agent."""

    said: dict[str, Any] = field(default_factory=lambda: {"status": "running"})
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None


class AgentServer:
    def __init__(self, folder: Path, *, remember: bool) -> None:
        self._folder = folder
        self._remember = remember
        self._runs: dict[str, Run] = {}
        self._tasks: asyncio.TaskGroup

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/runs/{id}", self.submit, methods=["PUT"]),
                Route("/runs/{id}", self.poll, methods=["GET"]),
                Route("/runs/{id}", self.forget, methods=["DELETE"]),
            ],
            lifespan=self._lifespan,
        )

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as self._tasks:
            yield
            for run in self._runs.values():
                if run.task is not None:
                    run.task.cancel()

    async def submit(self, request: Request) -> Response:
        session_id, body = request.path_params["id"], await request.json()
        if request.headers.get("authorization") != "Bearer open":
            return JSONResponse({"error": "no token"}, 401)
        run = self._find(session_id)
        if run is None:
            if sum(not run.ended.is_set() for run in self._runs.values()) >= MAX_RUNS:
                return JSONResponse({"error": "busy"}, 503, {"retry-after": "0.05"})
            run = self._runs[session_id] = Run()
            run.task = self._tasks.create_task(self._work(session_id, run, body))
        if body["sample"].get("cut"):  # the reply is lost on its way
            self._log("cut", session_id)
            os._exit(9)
        return JSONResponse(run.said, 201)

    async def poll(self, request: Request) -> Response:
        run = self._find(request.path_params["id"])
        if run is None:
            return JSONResponse({"error": "unknown run"}, 404)
        with suppress(TimeoutError):
            async with asyncio.timeout(float(request.query_params["wait_s"])):
                await run.ended.wait()
        return JSONResponse(run.said)

    async def forget(self, request: Request) -> Response:
        session_id = request.path_params["id"]
        run = self._runs.pop(session_id, None)
        if run is not None and run.task is not None:
            run.task.cancel()
        (self._folder / session_id).unlink(missing_ok=True)
        self._log("forgot", session_id)
        return Response(status_code=204)

    def _find(self, session_id: str) -> Run | None:
        kept = self._folder / session_id
        if session_id not in self._runs and kept.exists():
            run = self._runs[session_id] = Run(json.loads(kept.read_text()))
            run.ended.set()
        return self._runs.get(session_id)

    async def _work(self, session_id: str, run: Run, body: dict[str, Any]) -> None:
        self._log("began", session_id)
        try:
            run.said = {"status": "completed", "result": await act(body)}
        except asyncio.CancelledError:
            self._log("cancelled", session_id)
            raise
        except Exception as error:  # noqa: BLE001 - the agent's failure is the run's end
            run.said = {"status": "failed", "error": str(error)}
        if self._remember:
            (self._folder / session_id).write_text(json.dumps(run.said))
        run.ended.set()
        self._log(str(run.said["status"]), session_id)

    def _log(self, what: str, session_id: str) -> None:
        with (self._folder / "log").open("a") as file:
            file.write(f"{what} {session_id}\n")


async def act(body: dict[str, Any]) -> Any:
    """Does what the sample says: waits, fails, asks the model, answers."""
    sample = body["sample"]
    if path := sample.get("wait_for"):
        while not Path(path).exists():  # noqa: ASYNC110 - a file
            await asyncio.sleep(0.01)
    if sample.get("fail"):
        raise ValueError(sample["fail"])
    if sample.get("ask"):
        return await ask(body)
    return sample.get("result")


async def ask(body: dict[str, Any]) -> Any:
    """Asks the model once; returns a reward for the turn and one for the session."""
    async with httpx2.AsyncClient(trust_env=False, timeout=60) as http:
        reply = await http.post(
            f"{body['base_url']}/chat/completions",
            headers={"authorization": f"Bearer {body['api_key']}"},
            json={
                "model": body["model"],
                "messages": [{"role": "user", "content": body["sample"]["ask"]}],
            },
        )
    answer = reply.raise_for_status().json()
    return {"reward": 1.0, "turn_rewards": {answer["id"]: 0.5}}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--remember", action="store_true")
    options = parser.parse_args()
    logging.disable()
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", options.port))
        listener.listen()
        print(f"READY {listener.getsockname()[1]}", flush=True)  # noqa: T201 - for who started it
        app = AgentServer(options.folder, remember=options.remember).app()
        uvicorn.Server(uvicorn.Config(app, log_config=None)).run([listener])


if __name__ == "__main__":
    main()
