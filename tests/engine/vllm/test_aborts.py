"""An abort that comes while vLLM takes a request, which it does in a thread."""

from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rollmesh.engine import EngineConfig, GenerateInput, ModelLimits, make_backend, read_generate
from rollmesh.v1 import engine_pb2, sampling_pb2

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of torch, as vLLM imports it
]


class TakingLlm:
    """VLLM while it takes a request: it knows of none, and samples when it has taken it."""

    def __init__(self) -> None:
        self.backend: Any = None
        self.output_processor = SimpleNamespace(external_req_ids={}, request_states={})
        self.has_left = False

    async def abort(self, request_ids: list[str]) -> None:
        assert request_ids == ["r"]

    async def generate(self, *_: object, **__: object) -> AsyncIterator[Any]:
        await self.backend.abort(["r"])
        try:
            yield SimpleNamespace(outputs=[None], finished=False)
        finally:
            self.has_left = True


async def test_an_abort_before_vllm_knows_of_a_request_ends_it_at_its_first_token(
    tmp_path: Path,
) -> None:
    llm, backend = TakingLlm(), cast("Any", make_backend(EngineConfig(model_path=tmp_path)))
    llm.backend = backend
    backend._llm, backend._images = llm, SimpleNamespace(prompt=_prompt)  # noqa: SLF001
    asked = engine_pb2.GenerateRequest(request_id="r", token_ids_u32le=bytes(4))
    asked.sampling.max_tokens = 100
    streamed = engine_pb2.StreamedGenerate(generate=asked, max_chunk_tokens=1)
    async with aclosing(backend.generate(read_generate(streamed, ModelLimits(10, 200)))) as chunks:
        finishes = [one.finish.reason async for one in chunks]
    assert finishes == [sampling_pb2.FINISH_REASON_ABORT]
    assert llm.has_left


async def _prompt(request: GenerateInput) -> dict[str, object]:
    return {"prompt_token_ids": request.token_ids.tolist()}
