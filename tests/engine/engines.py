"""A stub of an engine in a process of its own, and what a generation gives."""

import asyncio
import json
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Mapping,
)
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rollmesh.runtime.rpc import from_status, open_channel, read_stream, typed_errors
from rollmesh.v1 import engine_pb2, engine_pb2_grpc, sampling_pb2
from rollmesh.v1.sampling_pb2 import TokenColumn
from tests import models
from tests.controls import unload_adapter
from tests.processes import ServiceProcess
from tests.waiting import until

PROMPT = np.array([5, 6, 7, 8] * 4, "<u4")
KEEP = engine_pb2.PAUSE_MODE_KEEP
CONFIG = {
    "peft_type": "LORA",
    "r": 4,
    "lora_alpha": 8,
    "target_modules": ["q_proj", "v_proj"],
    "bias": "none",
    "task_type": "CAUSAL_LM",
}
"""The config of an adapter, as PEFT writes it."""
ATTACHED = {"vllm-http", "sglang"}
"""Backends that adapt a server."""
LONG = 1900
"""So many tokens that what happens meanwhile happens in the middle, on most machines."""
_MIDDLE_S = 240.0


@dataclass
class Result:
    """One whole generation."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_ids: list[list[int]] = field(default_factory=list)
    top_logprobs: list[list[float]] = field(default_factory=list)
    columns: list[TokenColumn] = field(default_factory=list)
    messages: int = 0
    finish: engine_pb2.GenerateFinish = field(default_factory=engine_pb2.GenerateFinish)

    @property
    def spans(self) -> list[tuple[int, int, int]]:
        return [(s.policy_version, s.start, s.end) for s in self.finish.version_spans]

    def take(self, response: engine_pb2.GenerateResponse | engine_pb2.TokenChunk) -> None:
        self.messages += 1
        ids = np.frombuffer(response.token_ids_u32le, "<u4").tolist()
        if response.top_ids_u32le:
            tops = np.frombuffer(response.top_ids_u32le, "<u4").reshape(len(ids), -1)
            self.top_ids += tops.tolist()
            values = np.frombuffer(response.top_logprobs_f32le, "<f4").reshape(tops.shape)
            self.top_logprobs += values.tolist()
        self.columns += response.columns
        self.ids += ids
        self.logprobs += np.frombuffer(response.logprobs_f32le, "<f4").tolist()
        if response.HasField("finish"):
            self.finish = response.finish


@dataclass
class Scored:
    """The scores of one sequence."""

    logprobs: np.ndarray
    """[M]."""
    top_ids: np.ndarray
    """[M, K]."""
    top_logprobs: np.ndarray
    """[M, K]."""
    version: int
    sizes: list[int]
    """Of the messages, bytes."""


async def streamed(
    stub: Any, request: engine_pb2.StreamedGenerate
) -> AsyncGenerator[engine_pb2.TokenChunk, None]:
    """The messages of one generation, on a stream of its own. Closing it ends the generation."""
    begin = engine_pb2.BeginGeneration(number=1, request=request)

    async def requests() -> AsyncIterator[engine_pb2.GenerationsRequest]:
        yield engine_pb2.GenerationsRequest(begin=[begin])

    async with aclosing(read_stream(stub.Generations(requests()))) as messages:
        async for message in messages:
            for frame in message.frames:
                if frame.HasField("error"):
                    raise from_status(frame.error)
                if frame.HasField("answer"):
                    yield frame.answer


class Engine:
    """A running engine and a stub for it."""

    def __init__(self, process: ServiceProcess, stub: Any, weights: Path) -> None:
        self.process = process
        self.stub: Any = stub
        self.weights = weights
        self._next = 0

    def request(self, count: int, chunk: int, **fields: Any) -> engine_pb2.StreamedGenerate:
        """Requests a number of tokens, in messages of at most `chunk`. 0 requests one answer."""
        self._next += 1
        sampling = fields.pop("sampling", {})
        given: dict[str, Any] = {
            "request_id": f"r{self._next}",
            "token_ids_u32le": PROMPT.tobytes(),
            **fields,
        }
        limits = sampling_pb2.SamplingParams(max_tokens=count, ignore_eos=True, **sampling)
        return engine_pb2.StreamedGenerate(
            generate=engine_pb2.GenerateRequest(**given, sampling=limits), max_chunk_tokens=chunk
        )

    async def generate(self, request: engine_pb2.StreamedGenerate) -> Result:
        result = Result()
        if not request.max_chunk_tokens:
            with typed_errors():
                result.take(await self.stub.Generate(request.generate, timeout=120))
            return result
        async with asyncio.timeout(120), aclosing(self.stream(request)) as responses:
            async for response in responses:
                result.take(response)
        return result

    def stream(
        self, request: engine_pb2.StreamedGenerate
    ) -> AsyncGenerator[engine_pb2.TokenChunk, None]:
        return streamed(self.stub, request)

    async def score(self, ids: Any, **fields: Any) -> Scored:
        """Has a sequence scored. `ids_u32le` may be an array."""
        self._next += 1
        given: dict[str, Any] = {"request_id": f"s{self._next}", **fields}
        given["token_ids_u32le"] = np.asarray(ids, "<u4").tobytes()
        if "ids_u32le" in given:
            given["ids_u32le"] = np.asarray(given["ids_u32le"]).astype("<u4").tobytes()
        request = engine_pb2.ScoreTokensRequest(**given)
        call = self.stub.ScoreTokens(request, timeout=120)
        async with aclosing(read_stream(call)) as responses:
            parts = [part async for part in responses]
        logprobs = np.concatenate([np.frombuffer(one.logprobs_f32le, "<f4") for one in parts])
        rows = [np.frombuffer(one.top_ids_u32le, "<u4") for one in parts]
        values = [np.frombuffer(one.top_logprobs_f32le, "<f4") for one in parts]
        (version,) = {one.policy_version for one in parts}
        return Scored(
            logprobs,
            _table(np.concatenate(rows), len(logprobs)),
            _table(np.concatenate(values), len(logprobs)),
            version,
            [one.ByteSize() for one in parts],
        )

    async def info(self) -> engine_pb2.GetInfoResponse:
        info: engine_pb2.GetInfoResponse = await self.stub.GetInfo(engine_pb2.GetInfoRequest())
        return info

    async def until(self, holds: Callable[[engine_pb2.GetInfoResponse], bool]) -> None:
        async def look() -> bool:
            return holds(await self.info())

        await until(look)

    async def update(
        self, version: int, source: Path | bytes, mode: Any = KEEP, **header_fields: Any
    ) -> Any:
        header = engine_pb2.UpdateWeightsHeader(
            policy_version=version, pause_mode=mode, **header_fields
        )
        if isinstance(source, Path):
            header.checkpoint_dir = str(source)
        else:
            header.safetensors_bytes = len(source)

        async def parts() -> AsyncIterator[engine_pb2.UpdateWeightsRequest]:
            yield engine_pb2.UpdateWeightsRequest(header=header)
            if isinstance(source, bytes):
                for at in range(0, len(source), 65_536):
                    chunk = source[at : at + 65_536]
                    yield engine_pb2.UpdateWeightsRequest(safetensors_chunk=chunk)

        with typed_errors():
            return await self.stub.UpdateWeights(parts(), timeout=120)

    async def load_adapter(
        self,
        name: str,
        version: int,
        data: bytes,
        config: Mapping[str, Any] = CONFIG,
        **header: Any,
    ) -> list[tuple[str, int]]:
        """Loads an adapter revision. Returns the revisions that the engine holds then."""
        given: dict[str, Any] = {
            "adapter": sampling_pb2.AdapterRef(name=name, version=version),
            "config_json": json.dumps(config),
            "safetensors_bytes": len(data),
            **header,
        }

        async def parts() -> AsyncIterator[engine_pb2.LoadAdapterRequest]:
            yield engine_pb2.LoadAdapterRequest(header=engine_pb2.AdapterHeader(**given))
            for at in range(0, len(data), 65_536):
                yield engine_pb2.LoadAdapterRequest(safetensors_chunk=data[at : at + 65_536])

        with typed_errors():
            response = await self.stub.LoadAdapter(parts(), timeout=120)
        return revisions(response.adapters)

    async def unload_adapter(self, name: str, version: int = 0) -> list[tuple[str, int]]:
        """Unloads an adapter revision, or all of a name. Returns the revisions that are left."""
        with typed_errors():
            await self.stub.ControlEngines(unload_adapter(name, version))
        return revisions((await self.info()).adapters)


async def in_mid_answer(
    engine: Engine,
    act: Callable[[engine_pb2.GenerateRequest], Awaitable[object]],
    was: Callable[[Result], bool],
) -> Result:
    """Acts after the third message of a long answer. Returns the answer.

    Does it again until `was` says of an answer that this was its middle. A process that stands
    still for seconds acts after the end of an answer.
    """
    async with asyncio.timeout(_MIDDLE_S):
        while True:
            request, result = engine.request(LONG, 1), Result()
            async with aclosing(engine.stream(request)) as responses:
                async for response in responses:
                    result.take(response)
                    if result.messages == 3:
                        await act(request.generate)
            if was(result):
                return result


def revisions(loaded: Iterable[engine_pb2.LoadedAdapter]) -> list[tuple[str, int]]:
    """Names and versions of loaded adapters."""
    return [(one.adapter.name, one.adapter.version) for one in loaded]


def _table(values: np.ndarray, rows: int) -> np.ndarray:
    return values.reshape(rows, len(values) // rows)


@asynccontextmanager
async def engine_with(
    process: ServiceProcess, model: Path, other: Path = Path()
) -> AsyncIterator[Engine]:
    """An engine with the weights of `model` and no adapter, whatever was pushed to it before.

    `other` has the weights that its tests push.
    """
    async with open_channel(process.address) as channel:
        engine = Engine(process, engine_pb2_grpc.EngineServiceStub(channel), other)
        before = await engine.info()
        for name in {one.adapter.name for one in before.adapters}:
            await engine.unload_adapter(name)
        await engine.update(before.policy_version + 1, model)
        yield engine


def torch_logprobs(model: Path, ids: list[int]) -> np.ndarray:
    """What torch gives for each of `ids` after the prompt."""
    rows = models.torch_logprobs(model, [*PROMPT, *ids])[len(PROMPT) - 1 : -1]
    return rows[np.arange(len(ids)), ids]
