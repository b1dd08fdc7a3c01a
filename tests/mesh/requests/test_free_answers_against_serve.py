"""Reasoning and calls that the model writes of its own accord: a mesh, and vLLM's own endpoints."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.mesh.requests.free_requests import LESSONS, TAUGHT_MESSAGES, TAUGHT_RESPONSES
from tests.mesh.requests.protocol_answers import ask_messages, ask_responses, check
from tests.mesh.requests.serve import Servers, both, vllm_serve
from tests.mesh.requests.taught import make_taught_dir
from tests.meshes import scripted_mesh
from tests.models import CONTEXT_TOKENS

pytestmark = [pytest.mark.long, pytest.mark.vllm, pytest.mark.timeout(2400)]


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_taught_dir(tmp_path_factory.mktemp("taught"), LESSONS)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def taught_servers(
    tmp_path_factory: pytest.TempPathFactory, taught: Path
) -> AsyncIterator[Servers]:
    """A mesh and `vllm serve` with the model that has learnt its answers."""
    folder = tmp_path_factory.mktemp("mesh")
    async with vllm_serve(taught, folder / "log", "--reasoning-parser", "qwen3") as url:
        async with scripted_mesh(
            folder,
            taught,
            backend="vllm",
            dtype="float32",
            enforce_eager=True,
            max_context_tokens=CONTEXT_TOKENS,
            model_path=taught,
        ) as mesh:
            async with both(mesh, url) as found:
                yield found


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("name", TAUGHT_MESSAGES)
async def test_messages_say_what_vllm_says_or_the_difference_has_a_name(
    taught_servers: Servers, name: str, *, stream: bool
) -> None:
    case, more = TAUGHT_MESSAGES[name], {"stream": True} if stream else {}
    ours = await ask_messages(taught_servers.mesh, {**case.fields, **more})
    theirs = await ask_messages(taught_servers.vllm, {**case.fields, **more})
    check(case, ours, theirs, stream=stream)


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("name", TAUGHT_RESPONSES)
async def test_responses_say_what_vllm_says_or_the_difference_has_a_name(
    taught_servers: Servers, name: str, *, stream: bool
) -> None:
    case, more = TAUGHT_RESPONSES[name], {"stream": True} if stream else {}
    ours = await ask_responses(taught_servers.mesh, {**case.fields, **more})
    theirs = await ask_responses(taught_servers.vllm, {**case.fields, **more})
    check(case, ours, theirs, stream=stream)
