import signal
from collections.abc import AsyncIterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from hypothesis import HealthCheck, Phase, settings

from rollmesh.chat import Tokenizer
from rollmesh.chat.templates import Continuation, load_template
from tests.engine.engines import engine_with
from tests.meshes import Mesh, scripted_mesh
from tests.models import make_model_dir, make_tokenizer_dir, make_vision_dir

# A change is judged by the same examples wherever it is tested. Others are looked for by hand:
# `pytest --hypothesis-profile=search`, as often as one likes.
_ANY_MACHINE = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("search", _ANY_MACHINE, max_examples=600, derandomize=False)
settings.register_profile("default", _ANY_MACHINE, max_examples=60, derandomize=True)
# `make mutation` runs the tests hundreds of times and needs only to know that one fails.
_UNSHRUNK = (Phase.explicit, Phase.generate)
settings.register_profile(
    "mutation", settings.get_profile("default"), phases=_UNSHRUNK, max_examples=20
)
settings.load_profile("default")
# A shell's `&` has Ctrl-C ignored, by children too. Tests send it to theirs.
signal.signal(signal.SIGINT, signal.default_int_handler)

# What needs torch or Ray, which the environment of `make test-fast` has not.
_WITH_TORCH = (
    "agents",
    "batches/test_image_layouts.py",
    "batches/test_images.py",
    "batches/test_tensors.py",
    "engine/requests/test_constraint.py",
    "engine/conformance",
    "engine/vllm",
    "examples",
    "gpu",
    "ray",
    "trainers",
    "vision",
)
collect_ignore = [] if find_spec("torch") else list(_WITH_TORCH)
pytest_plugins = ["tests.garbage", "tests.progress", "tests.schedule"]


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's files without weights."""
    return make_tokenizer_dir(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def vision_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a model that takes images, without weights."""
    return make_vision_dir(tmp_path_factory.mktemp("vision"))


@pytest.fixture(scope="session")
def tokenizer(tokenizer_dir: Path) -> Tokenizer:
    return Tokenizer(tokenizer_dir)


@pytest.fixture(scope="session")
def continuation(tokenizer_dir: Path, tokenizer: Tokenizer) -> Continuation:
    return Continuation(load_template(tokenizer_dir, tokenizer), tokenizer)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole random model that vLLM can load."""
    return make_model_dir(tmp_path_factory.mktemp("model"), seed=0)


@pytest.fixture(scope="session")
def other_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same architecture with other weights."""
    return make_model_dir(tmp_path_factory.mktemp("other"), seed=1)


@pytest.fixture
async def mesh(
    request: pytest.FixtureRequest, tmp_path: Path, tokenizer_dir: Path
) -> AsyncIterator[Mesh]:
    """Router, scripted engine, collector, gateway and sidecar, each a real process.

    The module's MESH, if it has one, holds further arguments of `scripted_mesh`.
    """
    settings = getattr(request.module, "MESH", {})
    async with scripted_mesh(tmp_path, tokenizer_dir, **settings) as running:
        yield running


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def vllm_home(
    tmp_path_factory: pytest.TempPathFactory, model_dir: Path
) -> AsyncIterator[Mesh]:
    """The one mesh around vLLM, and the one engine, of all tests that leave it whole."""
    engine: dict[str, Any] = {"backend": "vllm", "dtype": "float32", "enforce_eager": True}
    engine |= {"max_context_tokens": 2048, "model_path": model_dir}
    async with scripted_mesh(tmp_path_factory.mktemp("vllm-mesh"), model_dir, **engine) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def vllm_mesh(vllm_home: Mesh, model_dir: Path) -> AsyncIterator[Mesh]:
    """A mesh around vLLM with the weights of `model_dir`, for tests with sessions of their own."""
    async with engine_with(vllm_home.processes["engine"], model_dir):
        yield vllm_home
