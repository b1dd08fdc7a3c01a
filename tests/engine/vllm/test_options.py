"""What is passed through to vLLM, and what an engine says of what vLLM does not take."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from rollmesh.engine import EngineConfig, EngineService
from rollmesh.launch import plan_mesh
from rollmesh.runtime import read_mesh
from rollmesh.runtime.config import ConfigError, parse_config
from rollmesh.runtime.errors import EngineStartError
from tests.processes import run_refused

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of torch, as vLLM imports it
]


def read_options(options: dict[str, Any]) -> dict[str, Any]:
    from rollmesh.engine.vllm import read_options as read

    return read(options)


@pytest.mark.parametrize(
    ("option", "value", "read"),
    [
        ("tensor_parallel_size", 2, 2),
        ("enable_prefix_caching", False, False),
        ("enable_expert_parallel", True, True),
        ("load_format", "dummy", "dummy"),
        ("hf_overrides", {"rope_theta": 1.0}, {"rope_theta": 1.0}),
        ("limit_mm_per_prompt", {"image": 2}, {"image": 2}),
        ("max_num_batched_tokens", 4096, 4096),
        ("kv_cache_dtype", "fp8", "fp8"),
    ],
)
def test_an_option_is_what_vllm_makes_of_it(option: str, value: Any, read: Any) -> None:
    assert read_options({option: value}) == {option: read}


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("tensor_paralel_size", 2, "did you mean tensor_parallel_size"),
        ("tensor_parallel_size", "two", "invalid int value: 'two'"),
        ("block_size", 16.5, "invalid int value"),
        ("enable_prefix_caching", "yes", "unrecognized arguments: yes"),
        ("kv_cache_dtype", "fp3", "choose from 'auto', 'bfloat16'"),
        ("compilation_config", {"bogus": 1}, "Unexpected keyword argument"),
        ("model", "other", "model_path"),
        ("max_model_len", 10, "max_context_tokens"),
        ("max_num_seqs", 10, "lease_capacity"),
        ("mm_processor_cache_gb", 1, "image_cache_bytes"),
        ("logprobs_mode", "processed_logprobs", "the setting logprobs"),
        ("max_logprobs", 20, "at most 256 ids"),
        ("kv_sharing_fast_prefill", True, "scored ids wrong"),
        ("max_loras", 2, "max_adapters"),
        ("max_lora_rank", 8, "max_adapter_rank"),
    ],
)
def test_what_vllm_does_not_take_is_named(option: str, value: Any, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_options({option: value})
    assert str(caught.value).startswith(f"vllm.{option}: ")
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_options_come_by_flag_by_file_and_by_a_mesh(tmp_path: Path) -> None:
    wanted = {"tensor_parallel_size": 2, "hf_overrides": {"rope_theta": 1.0}}
    by_flag = parse_config(EngineConfig, "engine", [f"--vllm={json.dumps(wanted)}"], {})
    assert by_flag.vllm == wanted
    path = tmp_path / "mesh.toml"
    path.write_text("[engine.vllm]\ntensor_parallel_size = 2\nhf_overrides = {rope_theta = 1.0}\n")
    assert parse_config(EngineConfig, "engine", [f"--config={path}"], {}).vllm == wanted
    (flags,) = [
        spec.flags for spec in plan_mesh(read_mesh(path), lambda: 1) if "engine" in spec.name
    ]
    assert parse_config(EngineConfig, "engine", flags, {}).vllm == wanted
    with pytest.raises(ConfigError, match="vllm: is '7'; give a table"):
        parse_config(EngineConfig, "engine", ["--vllm=7"], {})


@pytest.mark.long
async def test_a_model_that_does_not_fit_ends_with_the_reason_in_one_line(
    tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A context of 131,072 tokens, whose KV cache is larger than the 1 GiB that it may take."""
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    large = {"max_position_embeddings": 2**17, "num_hidden_layers": 16, "num_key_value_heads": 4}
    options = {"hf_overrides": large, "load_format": "dummy"}
    flags = {"model_path": model_dir, "dtype": "float32", "enforce_eager": True, "router": ""}
    flags |= {"max_context_tokens": 2**17, "vllm": json.dumps(options)}
    code, errors = await run_refused("engine", **flags)
    assert code == 1
    last = errors.strip().splitlines()[-1]
    assert last.startswith("rollmesh engine: vLLM could not start: ValueError: ")
    assert "KV cache" in last
    assert "Traceback" not in last


async def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    service = EngineService(EngineConfig(model_path=tmp_path, router=""))
    with pytest.raises(EngineStartError, match=re.escape(str(tmp_path))):
        async with service.running("here"):
            pytest.fail("it started")


def test_an_unknown_option_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    options = {"tensor_paralel_size": 2}
    with pytest.raises(ConfigError, match="did you mean tensor_parallel_size"):
        EngineService(EngineConfig(model_path=tmp_path, router="", vllm=options))
