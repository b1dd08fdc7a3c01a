"""The systems under test: the mesh with a scripted engine, and peers with a fake engine."""

import asyncio
import itertools
import json
import os
import random
import sys
import threading
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, closing, contextmanager
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Protocol

from benchmarks.harness.locks import lock
from benchmarks.harness.workload import reply_text, tool_list, user_text, vocabulary
from examples.demo.chatml import END, make_tokenizer
from rollmesh.cli import free_ports
from rollmesh.client import Client, MeshAddresses, Session
from rollmesh.launch import plan_mesh
from rollmesh.runtime import read_mesh
from rollmesh.v1 import gateway_pb2

_PEERS = Path(__file__).resolve().parents[2] / ".venv-peer" / "bin"
PEER, LITELLM = _PEERS / "rllm-model-gateway", _PEERS / "litellm"
_CONTEXT = 131_072
_START_TIMEOUT_S = 60
_STOP_TIMEOUT_S = 30
_LINE_BYTES = 2**24
_TOOLS, _MOST_TOOLS = 17_000, 200
_TOKENS_PER_SECOND = 200
SCRIPTED_MESH = """\
[mesh]
data_dir = "{folder}/mesh"
model_path = "{folder}/model"

[engine]
backend = "scripted"
script = "{folder}/script.json"
max_context_tokens = {context}
vocabulary_tokens = {vocabulary}
eos_id = {eos}

[gateway]
max_context_tokens = {context}
"""
"""Settings of a mesh with a scripted engine."""


class System(Protocol):
    """A system that serves turns."""

    port: int
    more_ports: tuple[int, ...]
    """Ports of further sidecars."""
    pids: dict[str, int]
    """Process ids, by the names under which CPU time is reported."""

    async def open(self, count: int) -> list[tuple[str, str]]:
        """Opens sessions. Returns the path of each up to `/v1`, and its key."""
        ...

    async def close(self) -> None:
        """Closes the open sessions."""
        ...


@dataclass
class Mesh:
    """`rollmesh up`."""

    client: Client
    port: int
    pids: dict[str, int]
    sessions: list[Session] = field(default_factory=list)
    more_ports: tuple[int, ...] = ()

    async def open(self, count: int) -> list[tuple[str, str]]:
        """Opens sessions through the gateway."""
        for _ in range(count):
            request = gateway_pb2.CreateSessionRequest()
            self.sessions.append(await self.client.open_session(request))
        return [(f"/sessions/{one.session_id}/v1", one.api_key) for one in self.sessions]

    async def close(self) -> None:
        """Closes the sessions, which hands them to the collector."""
        while self.sessions:
            await self.client.close_session(self.sessions.pop())


@dataclass
class Peer:
    """`rllm-model-gateway`, which opens a session on its first turn."""

    port: int
    pids: dict[str, int]
    opened: int = 0
    more_ports: tuple[int, ...] = ()

    async def open(self, count: int) -> list[tuple[str, str]]:
        """Makes up names for new sessions."""
        self.opened += count
        names = range(self.opened - count, self.opened)
        return [(f"/sessions/bench-{at}/v1", "none") for at in names]

    async def close(self) -> None:
        """Does nothing: the peer's sessions have no end."""


@dataclass
class Litellm:
    """`litellm --config`, which forwards chat requests and keeps no sessions."""

    port: int
    pids: dict[str, int]
    more_ports: tuple[int, ...] = ()

    async def open(self, count: int) -> list[tuple[str, str]]:
        """Returns the same path for all sessions."""
        return [("/v1", "none")] * count

    async def close(self) -> None:
        """Does nothing."""


@dataclass(frozen=True, slots=True)
class Model:
    """The model that both engines simulate."""

    reply: str
    reply_tokens: int
    bytes_per_token: float
    """Bytes of user text per token. Determines the number of ids from the fake engine."""
    tools_17k: int
    """Number of tools whose definitions take 17,000 tokens."""


def make_model(folder: Path) -> Model:
    """Writes the tokenizer, the engine's script and the mesh file."""
    words, rng = vocabulary(), random.Random(3)
    corpus = [user_text(rng, words) for _ in range(200)]
    tokenizer = make_tokenizer(corpus, 4096, folder / "model", _CONTEXT)
    reply = reply_text(words)
    ids = tokenizer.encode(f"{reply}{END}").ids
    (folder / "script.json").write_text(json.dumps([{"after": [], "reply": ids}]))
    (folder / "mesh.toml").write_text(
        SCRIPTED_MESH.format(
            folder=folder,
            context=_CONTEXT,
            vocabulary=tokenizer.get_vocab_size(),
            eos=tokenizer.token_to_id(END),
        )
    )
    sample = user_text(rng, words)
    tool_tokens = [
        len(tokenizer.encode(json.dumps(tool)).ids) + 1 for tool in tool_list(words, _MOST_TOOLS)
    ]
    tools = 1 + next(at for at, n in enumerate(itertools.accumulate(tool_tokens)) if n >= _TOOLS)
    return Model(reply, len(ids), len(sample) / len(tokenizer.encode(sample).ids), tools)


@asynccontextmanager
async def running_mesh(
    folder: Path,
    gateways: int = 1,
    *,
    locked: bool = False,
    traces: str = "",
    inside: bool = False,
) -> AsyncIterator[Mesh]:
    """Runs router, engine, collector, and as many gateways and sidecars.

    Args:
        folder: From `make_model`.
        gateways: Number of gateways, and of sidecars.
        locked: Whether the services talk over mutual TLS and show tokens too.
        traces: Where 1 % of the traces are sent to. Empty: none are.
        inside: Whether the gateways serve agents themselves, without sidecars.
    """
    tables = read_mesh(folder / "mesh.toml")
    kind = "-locked" if locked else "-traced" if traces else "-inside" if inside else ""
    data_dir = folder / f"mesh-{gateways}{kind}"
    shown = lock(tables, data_dir)[1] if locked else {}
    counts = {"gateways": gateways, "sidecars": 0 if inside else gateways}
    tables["mesh"] |= {**counts, "tokens": locked, "data_dir": str(data_dir)}
    if traces:
        tables["traces"] = {"endpoint": traces, "ratio": 0.01}
    config = folder / f"{data_dir.name}.toml"
    config.write_text(_toml(tables))
    command = ("-m", "rollmesh.cli", "up", f"--config={config}")
    log = folder / f"up-{data_dir.name}.log"
    async with run_process(log, sys.executable, *command) as process:
        text = await read_line(process, "UP ", folder)
        said = json.loads(text)
        addresses = replace(MeshAddresses.from_json(text), **shown)
        pids = {name.removesuffix("-0"): pid for name, pid in said["pids"].items()}
        first, *more = (int(at.rpartition(":")[2]) for at in said["sidecars"].values())
        async with Client(addresses) as client:
            yield Mesh(client, first, pids, more_ports=tuple(more))


@contextmanager
def trace_receiver() -> Iterator[str]:
    """Yields the URL of a receiver of traces in this process. It reads nothing of them."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base's name
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def _toml(tables: Mapping[str, Mapping[str, object]]) -> str:
    """Returns a mesh file. JSON writes numbers and text as TOML does."""
    return "\n".join(
        f"[{name}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in table.items())
        for name, table in tables.items()
    )


@asynccontextmanager
async def running_timed_mesh(folder: Path) -> AsyncIterator[tuple[Mesh, Process]]:
    """Runs a mesh whose engine streams at a fixed rate and reports the time of each first token.

    Yields:
        The mesh and its engine. See `timed_engine` for the engine's output.
    """
    tables = read_mesh(folder / "mesh.toml")
    tables["mesh"]["data_dir"] = f"{folder}/timed"
    tables["engine"]["tokens_per_second"] = float(_TOKENS_PER_SECOND)
    processes: dict[str, Process] = {}
    with closing(free_ports()) as ports:
        specs = plan_mesh(tables, lambda: next(ports))
    async with AsyncExitStack() as stack:
        for spec in specs:
            module = "benchmarks.harness.timed_engine" if spec.service == "engine" else None
            command = ("-m", module or f"rollmesh.{spec.service}", *spec.flags)
            process = await stack.enter_async_context(
                run_process(folder / f"timed-{spec.name}.log", sys.executable, *command)
            )
            await read_line(process, "READY", folder)
            processes[spec.service] = process
        at = {spec.service: spec.address for spec in specs}
        addresses = MeshAddresses.from_json(json.dumps(at))
        async with Client(addresses) as client:
            port = int(at["sidecar"].rpartition(":")[2])
            pids = {name: process.pid for name, process in processes.items()}
            yield Mesh(client, port, pids), processes["engine"]


@asynccontextmanager
async def running_peer(folder: Path, model: Model) -> AsyncIterator[Peer]:
    """Runs the peer in front of a fake engine."""
    async with running_fake_engine(folder, model) as (engine, worker):
        with closing(free_ports()) as ports:
            port = next(ports)
        async with run_process(
            folder / "peer.log",
            str(PEER),
            "--host=127.0.0.1",
            f"--port={port}",
            f"--db-path={folder / 'peer.db'}",
            f"--worker=http://127.0.0.1:{worker}/v1",
            "--log-level=warning",
        ) as gateway:
            await until_listening(port, gateway, folder)
            yield Peer(port, {"peer_gateway": gateway.pid, "peer_engine": engine.pid})


@asynccontextmanager
async def running_litellm(folder: Path, model: Model) -> AsyncIterator[Litellm]:
    """Runs LiteLLM's proxy in front of a fake engine."""
    async with running_fake_engine(folder, model) as (engine, worker):
        config = folder / "litellm.json"  # JSON is YAML
        parameters = {
            "model": "openai/policy",
            "api_base": f"http://127.0.0.1:{worker}/v1",
            "api_key": "none",
        }
        entry = {"model_name": "policy", "litellm_params": parameters}
        config.write_text(json.dumps({"model_list": [entry]}))
        with closing(free_ports()) as ports:
            port = next(ports)
        flags = (f"--config={config}", "--host=127.0.0.1", f"--port={port}")
        settings = {
            "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",
            "LITELLM_LOCAL_MODEL_COST_MAP": "true",  # otherwise it downloads prices
            "LITELLM_LOG": "ERROR",
        }
        log = folder / "litellm.log"
        async with run_process(log, str(LITELLM), *flags, environ=settings) as proxy:
            await until_listening(port, proxy, folder)
            yield Litellm(port, {"litellm_proxy": proxy.pid, "litellm_engine": engine.pid})


@asynccontextmanager
async def running_fake_engine(folder: Path, model: Model) -> AsyncIterator[tuple[Process, int]]:
    """Runs a fake engine. Yields its process and port."""
    log = folder / "engine.log"
    async with run_process(log, sys.executable, "-m", "benchmarks.harness.fake_engine") as engine:
        assert engine.stdin is not None
        settings = {
            "reply": model.reply,
            "reply_tokens": model.reply_tokens,
            "bytes_per_token": model.bytes_per_token,
        }
        engine.stdin.write(json.dumps(settings).encode())
        engine.stdin.close()
        yield engine, json.loads(await read_line(engine, "READY", folder))["port"]


@asynccontextmanager
async def run_process(
    log: Path, *command: str, environ: Mapping[str, str] | None = None
) -> AsyncIterator[Process]:
    """Runs a program until the block ends."""
    with log.open("ab") as stderr:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=PIPE,
            stdout=PIPE,
            stderr=stderr,
            limit=_LINE_BYTES,
            env={**os.environ, "NO_PROXY": "127.0.0.1", **(environ or {})},
        )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
        try:
            async with asyncio.timeout(_STOP_TIMEOUT_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


async def read_line(
    process: Process, prefix: str, folder: Path, timeout_s: float = _START_TIMEOUT_S
) -> str:
    """Returns the rest of the first line that starts with `prefix`."""
    assert process.stdout is not None
    async with asyncio.timeout(timeout_s):
        async for line in process.stdout:
            text = line.decode().strip()
            if text.startswith(prefix):
                return text.removeprefix(prefix).strip()
    raise RuntimeError(f"a process ended before it was ready:\n{logs(folder)}")


async def until_listening(
    port: int, process: Process, folder: Path, timeout_s: float = _START_TIMEOUT_S
) -> None:
    """Waits until the peer accepts connections, because it prints nothing when it does."""
    async with asyncio.timeout(timeout_s):
        while process.returncode is None:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                await asyncio.sleep(0.05)
            else:
                writer.close()
                return
    raise RuntimeError(f"the peer ended before it was ready:\n{logs(folder)}")


def logs(folder: Path) -> str:
    """Returns the end of each log, for error messages."""
    return "\n".join(f"{log.name}: {log.read_text()[-1000:]}" for log in folder.rglob("*.log"))
