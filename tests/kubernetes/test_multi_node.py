"""The pods of an engine of several nodes: the workers are told what the leader is told."""

import json
from typing import Any

import pytest

from rollmesh.engine import EngineConfig
from tests.kubernetes.rendering import overlay, templates

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of torch, as vLLM imports it
]


def words_of(pod: str, part: str, variables: dict[str, str]) -> list[str]:
    """Command or arguments of a pod, with what its variables stand for."""
    (container,) = templates(overlay("gpu-multi-node"))[pod]["spec"]["containers"]
    words: list[str] = container[part]
    for name, value in variables.items():
        words = [word.replace(f"$({name})", value) for word in words]
    assert not any("$(" in word for word in words)
    return words


def test_workers_load_the_model_as_the_leader_does() -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from rollmesh.engine.vllm import engine_arguments, read_options

    variables = {"LWS_LEADER_ADDRESS": "10.0.0.1", "LWS_WORKER_INDEX": "1"}
    (given,) = [
        word.removeprefix("--vllm=")
        for word in words_of("rollmesh-engine-group leader", "args", variables)
        if word.startswith("--vllm=")
    ]
    options = read_options(json.loads(given))
    config = EngineConfig()
    leader: dict[str, Any] = engine_arguments(config, options, takes_constraints=False) | {
        "model": "/model"
    }
    program, serve, model, headless, *flags = words_of(
        "rollmesh-engine-group worker", "command", variables
    )
    assert (program, serve, headless) == ("vllm", "serve", "--headless")
    worker = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(flags)
    assert (leader["node_rank"], worker.node_rank) == (0, 1)
    own = {"node_rank", "disable_log_stats", "structured_outputs_config", "mm_processor_cache_gb"}
    for name, value in (leader | {"model": model}).items():
        if name not in own | {"model"}:
            assert getattr(worker, name) == value, name
    assert model == "/model"
