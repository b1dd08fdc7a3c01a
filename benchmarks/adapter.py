"""How long a revision of an adapter takes to the engines, and whether sampling pauses for it.

    make bench-adapter

A policy of 0.9 M parameters runs on vLLM on CPU behind a router, and four generations run on it all
the time. The complete weights are pushed, then an adapter of rank 16. Each push is timed from the
call to the first token of the new revision. A pause is by how much the longest time between two
messages of a generation exceeds that of the same time without a push. Then an adapter of rank 16
for a model of 8 B parameters is pushed to a scripted engine.

The last line of the output is one JSON object, whose figures are medians.
"""

import asyncio
import json
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from transformers import Qwen3ForCausalLM

from benchmarks.harness.systems import read_line, run_process
from examples.demo.policy import CONTEXT_TOKENS, make_policy
from rollmesh.client import Client, MeshAddresses
from rollmesh.mesh import EngineClients, LeaseClient
from rollmesh.v1 import engine_pb2, sampling_pb2

_PUSHES, _GENERATIONS, _RANK = 5, 4, 16
_QUIET_S, _START_S, _TIMEOUT_MS = 2.0, 600.0, 120_000
_MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
_LARGE_PARAMETERS = 8_030_261_248
_LARGE_LAYERS, _LARGE_HIDDEN, _LARGE_KEYS, _LARGE_INNER = 32, 4096, 1024, 14_336
_Push: TypeAlias = Callable[[int], Coroutine[Any, Any, Any]]


class Load:
    """Generations on the base model, and the times at which their messages came."""

    def __init__(self, leases: LeaseClient, engines: EngineClients) -> None:
        """Takes the router's leases, and the engines."""
        self._leases = leases
        self._engines = engines
        self._next = 0
        self.tokens = 300
        """Length of a generation."""
        self.times: list[list[float]] = [[] for _ in range(_GENERATIONS)]
        """Of each of the generations that run at once, in seconds of the performance counter."""

    async def run(self, times: list[float]) -> None:
        """Samples one generation after the other."""
        while True:
            async for _ in self.messages(self.tokens, None):
                times += [time.perf_counter()]

    async def messages(
        self, tokens: int, adapter: sampling_pb2.AdapterRef | None
    ) -> AsyncIterator[engine_pb2.TokenChunk]:
        """Yields the messages of a generation, each with a token."""
        self._next += 1
        number = self._next
        async with self._leases.lease(
            session_id=f"s{number}",
            adapter=adapter,
            deadline_ms=_TIMEOUT_MS,
            suspended_ms=_TIMEOUT_MS,
        ) as grant:
            generate = engine_pb2.GenerateRequest(
                request_id=f"r{number}",
                token_ids_u32le=bytes([number % 200, 1, 0, 0]) * 8,
                sampling=sampling_pb2.SamplingParams(max_tokens=tokens, ignore_eos=True),
            )
            if grant.HasField("adapter"):
                generate.adapter.CopyFrom(grant.adapter)
            request = engine_pb2.StreamedGenerate(generate=generate, max_chunk_tokens=1)
            engine = self._engines.of(grant.address)
            with engine.begin(request, _TIMEOUT_MS, {}) as answer:
                while True:
                    message = await answer.next()
                    yield message
                    if message.HasField("finish"):
                        return

    async def until_sampled(self, adapter: sampling_pb2.AdapterRef | None, version: int) -> None:
        """Samples single tokens until one is of a version."""
        while True:
            async for message in self.messages(1, adapter):
                if version in {span.policy_version for span in message.finish.version_spans}:
                    return

    def longest_ms(self, since: float, until: float) -> float:
        """Returns the longest time without a message of a generation, milliseconds."""
        longest = 0.0
        for times in self.times:
            inside = [since, *(one for one in times if since < one < until), until]
            longest = max([longest, *(after - before for before, after in pairwise(inside))])
        return longest * 1000


async def pushed(
    load: Load, push: _Push, adapter: sampling_pb2.AdapterRef | None, version: int
) -> tuple[float, float]:
    """Pushes one revision.

    Returns:
        Time from the call to its first token, and the longest pause less the longest before, both
        in milliseconds.
    """
    quiet = time.perf_counter()
    await asyncio.sleep(_QUIET_S)
    began = time.perf_counter()
    await push(version)
    await load.until_sampled(adapter, version)
    ended = time.perf_counter()
    await asyncio.sleep(_QUIET_S)
    most = load.longest_ms(began, time.perf_counter()) - load.longest_ms(quiet, began)
    return (ended - began) * 1000, max(most, 0.0)


@asynccontextmanager
async def services(folder: Path, *engine: str) -> AsyncIterator[tuple[Client, Load, str]]:
    """Runs a router and an engine. Yields a client, the load, and the router's address."""
    async with AsyncExitStack() as stack:
        router = ("rollmesh.router", "--port=0", f"--data-dir={folder / 'router'}")
        addresses: list[str] = []
        for name, *flags in (router, ("rollmesh.engine", "--port=0", *engine)):
            known = [f"--router={addresses[0]}"] if addresses else []
            command = (sys.executable, "-m", name, *flags, *known)
            log = folder / f"{name}.log"
            process = await stack.enter_async_context(run_process(log, *command))
            ready = json.loads(await read_line(process, "READY", folder, _START_S))
            addresses.append(f"127.0.0.1:{ready['port']}")
        mesh = MeshAddresses(router=addresses[0], gateway="", collector="", sidecar="")
        client = await stack.enter_async_context(Client(mesh))
        leases = await stack.enter_async_context(LeaseClient(addresses[0], "bench"))
        engines = EngineClients(_TIMEOUT_MS)
        stack.push_async_callback(engines.close)
        yield client, Load(leases, engines), addresses[0]


async def small(folder: Path) -> dict[str, float]:
    """Pushes to a policy of 0.9 M parameters on vLLM, while it samples."""
    make_policy(folder / "policy", seed=0, steps=1)
    model = Qwen3ForCausalLM.from_pretrained(folder / "policy", dtype=torch.float32)
    full = {name: one.detach().clone() for name, one in model.named_parameters()}
    config = LoraConfig(r=_RANK, target_modules=_MODULES)
    matrices = get_peft_model_state_dict(get_peft_model(model, config))
    flags = ("--backend=vllm", "--dtype=float32", "--enforce-eager=true", "--max-adapters=7")
    sizes = (f"--model-path={folder / 'policy'}", f"--max-context-tokens={CONTEXT_TOKENS}")
    async with services(folder / "small", *flags, *sizes) as (client, load, _):
        newest = sampling_pb2.AdapterRef(name="bench")

        async def push_adapter(version: int) -> None:
            await client.push_adapter(matrices, "bench", version, config.to_dict())

        async def push_full(version: int) -> None:
            await client.push_weights(full, version)

        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(load.run(times)) for times in load.times]
            await push_full(1)  # the first one warms the path
            found = [await pushed(load, push_full, None, at + 2) for at in range(_PUSHES)]
            await push_adapter(1)
            own = [await pushed(load, push_adapter, newest, at + 2) for at in range(_PUSHES)]
            for task in running:
                task.cancel()
    return {
        "push_ms_adapter": round(median(ms for ms, _ in own), 1),
        "push_ms_full": round(median(ms for ms, _ in found), 1),
        "pause_ms_adapter": round(median(ms for _, ms in own), 1),
        "pause_ms_full": round(median(ms for _, ms in found), 1),
        "bytes_ratio": round(_bytes(matrices) / _bytes(full), 4),
    }


async def large(folder: Path) -> dict[str, float]:
    """Pushes an adapter of a model with 8 B parameters to a scripted engine."""
    sizes = {
        "self_attn.q_proj": (_LARGE_HIDDEN, _LARGE_HIDDEN),
        "self_attn.k_proj": (_LARGE_KEYS, _LARGE_HIDDEN),
        "self_attn.v_proj": (_LARGE_KEYS, _LARGE_HIDDEN),
        "self_attn.o_proj": (_LARGE_HIDDEN, _LARGE_HIDDEN),
        "mlp.gate_proj": (_LARGE_INNER, _LARGE_HIDDEN),
        "mlp.up_proj": (_LARGE_INNER, _LARGE_HIDDEN),
        "mlp.down_proj": (_LARGE_HIDDEN, _LARGE_INNER),
    }
    matrices: dict[str, torch.Tensor] = {}
    for layer in range(_LARGE_LAYERS):
        for module, (rows, columns) in sizes.items():
            name = f"base_model.model.model.layers.{layer}.{module}"
            matrices[f"{name}.lora_A.weight"] = torch.zeros(_RANK, columns, dtype=torch.bfloat16)
            matrices[f"{name}.lora_B.weight"] = torch.zeros(rows, _RANK, dtype=torch.bfloat16)
    config = LoraConfig(r=_RANK, target_modules=_MODULES).to_dict()
    times: list[float] = []
    flags = ("--backend=scripted", "--max-adapters=7")
    async with services(folder / "large", *flags) as (client, load, _):
        for version in range(1, _PUSHES + 1):
            began = time.perf_counter()
            await client.push_adapter(matrices, "bench", version, config)
            await load.until_sampled(sampling_pb2.AdapterRef(name="bench"), version)
            times.append((time.perf_counter() - began) * 1000)
    return {
        "push_ms_adapter_8b": round(median(times), 1),
        "megabytes_adapter_8b": round(_bytes(matrices) / 1e6, 1),
        "bytes_ratio_8b": round(_bytes(matrices) / (2 * _LARGE_PARAMETERS), 4),
    }


def _bytes(tensors: dict[str, torch.Tensor]) -> int:
    return sum(one.numel() * one.element_size() for one in tensors.values())


def main() -> int:
    """Runs the benchmark and prints the results."""
    folder = Path(tempfile.mkdtemp(prefix="bench-adapter-"))
    try:
        for name in ("small", "large"):
            (folder / name).mkdir()
        found = asyncio.run(small(folder))
        print(found, flush=True)
        print(json.dumps(found | asyncio.run(large(folder))))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
