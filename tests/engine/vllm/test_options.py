"""What is passed through to vLLM, and what an engine says of what vLLM does not take."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rollmesh.cli.up.plan import plan_mesh, read_mesh
from rollmesh.engine.config import EngineConfig
from rollmesh.engine.vllm.options import read_options
from rollmesh.runtime.config import ConfigError, parse_config

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of torch, as vLLM imports it
]


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
        ("logprobs_mode", "processed_logprobs", "before temperature"),
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
    table = "{}tensor_parallel_size = 2\nhf_overrides = {{rope_theta = 1.0}}\n"
    path = tmp_path / "engine.toml"
    path.write_text(table.format("[vllm]\n"))
    assert parse_config(EngineConfig, "engine", [f"--config={path}"], {}).vllm == wanted
    path.write_text(table.format("[engine.vllm]\n"))
    (flags,) = [
        spec.flags for spec in plan_mesh(read_mesh(path), lambda: 1) if "engine" in spec.name
    ]
    assert parse_config(EngineConfig, "engine", flags, {}).vllm == wanted
    with pytest.raises(ConfigError, match="vllm: is '7'; give a table"):
        parse_config(EngineConfig, "engine", ["--vllm=7"], {})


def start(model: Path, **flags: object) -> subprocess.CompletedProcess[str]:
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]
    return subprocess.run(
        [sys.executable, "-m", "rollmesh.engine", f"--model-path={model}", "--router=", *arguments],
        capture_output=True, text=True, timeout=400, check=False,
        env={**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1"},
    )  # fmt: skip


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    return done.stderr.strip().splitlines()[-1]


def test_a_model_that_does_not_fit_ends_with_the_reason_in_one_line(model_dir: Path) -> None:
    """A context of 4 M tokens, whose KV cache does not fit 1 GiB."""
    options = json.dumps({"hf_overrides": {"max_position_embeddings": 2**22}})
    done = start(
        model_dir, dtype="float32", enforce_eager=True, max_context_tokens=2**22, vllm=options
    )
    assert done.returncode == 1
    assert last_line(done).startswith("rollmesh engine: vLLM could not start: ValueError: ")
    assert "KV cache" in last_line(done)
    assert "Traceback" not in last_line(done)


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    done = start(tmp_path)
    assert done.returncode == 1
    assert str(tmp_path) in last_line(done)


def test_an_unknown_option_ends_the_engine_before_it_loads_anything(tmp_path: Path) -> None:
    done = start(tmp_path, vllm='{"tensor_paralel_size": 2}')
    assert (done.returncode, done.stdout) == (2, "")
    assert "did you mean tensor_parallel_size" in last_line(done)
