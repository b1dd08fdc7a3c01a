"""A second engine of real vLLM, for tests of adapters and of the sampled distribution."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.processes import ServiceProcess, running


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def adapting(
    tmp_path_factory: pytest.TempPathFactory, model_dir: Path
) -> AsyncIterator[ServiceProcess]:
    """An engine that takes adapters, and gives the log-probs of the sampled distribution."""
    flags: dict[str, object] = {"model_path": model_dir, "dtype": "float32", "enforce_eager": True}
    flags |= {"max_context_tokens": 2048, "logprobs": "sampled"}
    flags |= {"max_adapters": 3, "max_adapter_rank": 4}
    async with running(
        "engine", tmp_path_factory.mktemp("adapting"), backend="vllm", **flags
    ) as process:
        yield process
