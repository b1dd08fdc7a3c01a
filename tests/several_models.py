"""A mesh of two models with different tokenizers and templates, behind one sidecar."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from openai import AsyncOpenAI
from tokenizers import Tokenizer as RustTokenizer

from rollmesh.chat import Tokenizer
from rollmesh.client import Client, MeshAddresses, Session
from tests.chat import families
from tests.meshes import CHATML, write_script
from tests.models import CONTEXT_TOKENS, make_tokenizer_dir
from tests.processes import ServiceProcess, running

POLICY, JUDGE = "policy", "org/judge"
QUESTION = "What is 12 plus 30?"
ANSWERS = {POLICY: "The answer is 42.", JUDGE: "I am not sure."}
_LLAMA = "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n", "<|eot_id|>"
_TURNS = {POLICY: CHATML, JUDGE: _LLAMA}


@dataclass
class Fleet:
    """The processes, by name: `router`, `collector`, `sidecar`, and an engine and a gateway of each
    model, such as `engine policy`."""

    folder: Path
    stack: AsyncExitStack
    processes: dict[str, ServiceProcess]
    tokenizers: dict[str, Tokenizer]

    @property
    def addresses(self) -> MeshAddresses:
        names = ("router", "collector", "sidecar")
        return MeshAddresses(**{name: self.processes[name].address for name in names})

    def client(self) -> Client:
        return Client(self.addresses)

    def sampled_ids(self, model: str) -> list[int]:
        """What a model samples when it is asked `QUESTION`."""
        reply = f"{ANSWERS[model]}{_TURNS[model][1]}"
        ids: list[int] = self.tokenizers[model].encode(reply).tolist()
        return ids

    def openai(self, session: Session) -> AsyncOpenAI:
        """The published client. Closed with the mesh."""
        agent = AsyncOpenAI(base_url=session.base_url, api_key="none", max_retries=0)
        self.stack.push_async_callback(agent.close)
        return agent

    async def start(self, name: str, **flags: object) -> ServiceProcess:
        """Starts a process, or its successor on the same port and data."""
        service, _, model = name.partition(" ")
        folder = self.folder / name.replace("/", "_")
        if former := self.processes.get(name):
            await former.kill()
            flags["port"] = former.port
        if service not in {"router", "collector"}:
            flags["router"] = self.processes["router"].address
        if service in ("router", "collector", "gateway"):
            flags["data_dir"] = folder / "data"
        if service in ("engine", "gateway"):
            flags |= {"model": model, f"{service}_id": name.replace("/", "-")}
        if service == "engine":
            path = _model_path(self.folder, model)
            config = json.loads((path / "config.json").read_text())
            flags |= {"backend": "scripted", "vocabulary_tokens": config["vocab_size"]}
            flags |= {"eos_id": self.tokenizers[model].special_id(_TURNS[model][1])}
            flags |= {"reply_tokens": 8, "script": path / "script.json"}
        if service == "gateway":
            flags |= {"collector": self.processes["collector"].address}
            flags |= {"model_path": _model_path(self.folder, model)}
        process = await self.stack.enter_async_context(running(service, folder, **flags))
        self.processes[name] = process
        return process


@asynccontextmanager
async def two_models(folder: Path, **engine: object) -> AsyncIterator[Fleet]:
    """Runs a mesh with a scripted engine and a gateway for each of two models."""
    async with AsyncExitStack() as stack:
        fleet = Fleet(folder, stack, {}, {})
        for model in (POLICY, JUDGE):
            path = _write_model(folder, model)
            tokenizer = fleet.tokenizers[model] = Tokenizer(path)
            rules = [(QUESTION, ANSWERS[model])]
            write_script(path / "script.json", tokenizer, rules, _TURNS[model])
        for together in (("router", "collector"), ("engine", "gateway"), ("sidecar",)):
            async with asyncio.TaskGroup() as tasks:
                for service in together:
                    of_model = service in ("engine", "gateway")
                    flags = engine if service == "engine" else {}
                    for model in (POLICY, JUDGE) if of_model else ("",):
                        tasks.create_task(fleet.start(f"{service} {model}".strip(), **flags))
        yield fleet


def _model_path(folder: Path, model: str) -> Path:
    return folder / f"model-{model.replace('/', '_')}"


def _write_model(folder: Path, model: str) -> Path:
    """Writes the files of a model that a gateway needs."""
    path = _model_path(folder, model)
    if model == POLICY:
        return make_tokenizer_dir(path)
    path.mkdir(parents=True)
    families.write("llama3_1", path)
    size = RustTokenizer.from_file(str(path / "tokenizer.json")).get_vocab_size()
    config = {"vocab_size": size, "max_position_embeddings": CONTEXT_TOKENS}
    (path / "config.json").write_text(json.dumps(config))
    return path
