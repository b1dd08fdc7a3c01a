"""What it costs to take tokens as they are sampled, so that a lost engine's can be continued.

    make bench-streaming

256 generations of 256 tokens each run on vLLM on CPU at the same time, with a small random model:
once by `Generate`, which returns each at its end, and once over one stream, `Generations`, as the
gateway asks for when no client reads token by token. There are three interleaved rounds.

`tokens_per_second_*` are medians, `ratio` is that of the streamed to the whole ones, and
`client_cpu_ratio` is the CPU time of the caller. The last line of the output is one JSON object.
"""

import asyncio
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.harness.systems import read_line, run_process
from rollmesh.mesh import COLLECT_MS, MOST_COLLECTED_TOKENS, EngineClient, EngineClients
from rollmesh.runtime.codec import pack_ids
from rollmesh.runtime.rpc import open_channel
from rollmesh.v1 import engine_pb2, engine_pb2_grpc, sampling_pb2
from tests.models import make_model_dir

_GENERATIONS, _TOKENS, _ROUNDS = 256, 256, 3
_START_S = 600.0
_TIMEOUT_S = 300.0


class Generations:
    """Requests that are equal but for their ids and prompts."""

    def __init__(
        self, stub: "engine_pb2_grpc.EngineServiceAsyncStub", engine: EngineClient
    ) -> None:
        """Takes the engine, by its calls and by one stream."""
        self._stub = stub
        self._engine = engine
        self._next = 0

    def _request(self) -> engine_pb2.GenerateRequest:
        self._next += 1
        prompt = np.arange(self._next, self._next + 32, dtype=np.uint32) % 300
        return engine_pb2.GenerateRequest(
            request_id=f"r{self._next}",
            token_ids_u32le=pack_ids(prompt.astype(np.uint32)),
            sampling=sampling_pb2.SamplingParams(max_tokens=_TOKENS, ignore_eos=True),
        )

    async def whole(self) -> int:
        """Returns the number of tokens of one generation."""
        response = await self._stub.Generate(self._request(), timeout=_TIMEOUT_S)
        return len(response.token_ids_u32le) // 4

    async def streamed(self) -> int:
        """Returns the number of tokens of one generation, taken as they come."""
        request = engine_pb2.StreamedGenerate(
            generate=self._request(), max_chunk_tokens=MOST_COLLECTED_TOKENS, collect_ms=COLLECT_MS
        )
        tokens = 0
        with self._engine.begin(request, int(_TIMEOUT_S * 1000), {}) as answer:
            while tokens < _TOKENS:
                tokens += len((await answer.next()).token_ids_u32le) // 4
        return tokens


async def at_once(generate: Callable[[], Awaitable[int]]) -> tuple[float, float]:
    """Runs all generations at the same time.

    Returns:
        Tokens per second, and the caller's CPU time in milliseconds.
    """
    started, cpu = time.perf_counter(), time.process_time()
    tokens = await asyncio.gather(*(generate() for _ in range(_GENERATIONS)))
    seconds = time.perf_counter() - started
    if tokens != [_TOKENS] * _GENERATIONS:
        raise RuntimeError(f"a generation had {min(tokens)} tokens, not {_TOKENS}")
    return sum(tokens) / seconds, (time.process_time() - cpu) * 1000


@asynccontextmanager
async def engine(folder: Path) -> AsyncIterator[Generations]:
    """Runs an engine with a small random model."""
    model = make_model_dir(folder / "model")
    flags = ("--port=0", "--router=", "--backend=vllm", "--dtype=float32", "--enforce-eager=true")
    sizes = (
        f"--model-path={model}",
        "--max-context-tokens=512",
        f"--lease-capacity={_GENERATIONS}",
    )
    command = (sys.executable, "-m", "rollmesh.engine", *flags, *sizes)
    async with run_process(folder / "engine.log", *command) as process:
        ready = json.loads(await read_line(process, "READY", folder, _START_S))
        address, engines = f"127.0.0.1:{ready['port']}", EngineClients(int(_TIMEOUT_S * 1000))
        async with open_channel(address) as channel:
            yield Generations(engine_pb2_grpc.EngineServiceStub(channel), engines.of(address))
            await engines.close()


async def measure(folder: Path) -> dict[str, float]:
    """Runs the benchmark."""
    whole: list[tuple[float, float]] = []
    streamed: list[tuple[float, float]] = []
    async with engine(folder) as generations:
        await at_once(generations.whole)  # warms vLLM up
        for at in range(_ROUNDS):
            whole.append(await at_once(generations.whole))
            streamed.append(await at_once(generations.streamed))
            print(f"round {at}: whole {whole[-1]}, streamed {streamed[-1]}", flush=True)
    speeds = [median(speed for speed, _ in found) for found in (whole, streamed)]
    cpus = [median(cpu for _, cpu in found) for found in (whole, streamed)]
    return {
        "tokens_per_second_whole": round(speeds[0], 1),
        "tokens_per_second_streamed": round(speeds[1], 1),
        "ratio": round(speeds[1] / speeds[0], 3),
        "client_cpu_ratio": round(cpus[1] / cpus[0], 2),
    }


def main() -> int:
    """Runs the benchmark and prints the results."""
    with tempfile.TemporaryDirectory(prefix="bench-streaming-") as name:
        print(json.dumps(asyncio.run(measure(Path(name)))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
