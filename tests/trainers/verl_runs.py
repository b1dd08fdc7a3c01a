"""Whole runs of verl's own trainer, `python -m verl.trainer.main_ppo`, on a CPU."""

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import parquet

from tests.meshes import Mesh
from tests.processes import run_to_its_code
from tests.ray_on_busy_machines import PATIENT
from tests.trainers.processes import ENVIRONMENT, SOURCES
from tests.trainers.verl_pages import command

PROMPTS, SAMPLES = 8, 4
_LIMIT_S = 1500.0
_HELPERS = "tests.trainers.verl_cpu"


@dataclass(frozen=True)
class Run:
    """A run that has ended."""

    code: int
    output: str
    """Standard output and standard error of the driver, which has those of Ray's workers."""
    steps: Mapping[int, Mapping[str, float]]
    """What verl's file logger wrote, by step."""

    def metric(self, name: str) -> list[float]:
        return [metrics[name] for _, metrics in sorted(self.steps.items()) if name in metrics]


def write_data(folder: Path) -> Path:
    """Writes a data set as verl reads them."""
    rows = [
        {
            "prompt": [{"role": "user", "content": f"What is {at} plus 12?"}],
            "data_source": "letters",
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": at},
        }
        for at in range(64)
    ]
    path = folder / "data.parquet"
    parquet.write_table(pa.Table.from_pylist(rows), path)
    return path


async def train(mesh: Mesh, folder: Path, steps: int, *overrides: str) -> Run:
    """Runs the command of docs/verl.md on a mesh until it has done its steps."""
    log = folder / "metrics.jsonl"
    log.unlink(missing_ok=True)
    # The paths of Ray's sockets may have 107 characters.
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp", ignore_cleanup_errors=True) as short:
        code, output, errors = await run_to_its_code(
            ENVIRONMENT / "bin" / "python",
            "-m",
            "verl.trainer.main_ppo",
            *_of_the_page(mesh, write_data(folder)),
            *(f"{name}={value}" for name, value in _ON_A_CPU.items()),
            f"+rollmesh.collector={mesh.address('collector')}",
            f"+rollmesh.sidecar={mesh.address('sidecar')}",
            f"+ray_kwargs.ray_init._temp_dir={short}",
            f"trainer.default_local_dir={folder / 'checkpoints'}",
            f"trainer.total_training_steps={steps}",
            *overrides,
            cwd=folder,
            env=_environment(mesh, folder, log),
            limit_s=_LIMIT_S,
        )
    return Run(code, output + errors, _steps(log))


def _of_the_page(mesh: Mesh, data: Path) -> list[str]:
    """The page's command with the values of a test in the places of the reader's."""
    values = {
        "DATA.parquet": str(data),
        "HOST:PORT": mesh.address("router"),
        "my_package.my_module:run": f"{_HELPERS}.agent:run",
    }
    words = [f"{word} " for word in command()]
    for shown, value in {**values, "=MODEL ": f"={mesh.model} "}.items():
        words = [word.replace(shown, value) for word in words]
    return [word.strip() for word in words]


_ON_A_CPU: Mapping[str, object] = {
    "actor_rollout_ref.actor.fsdp_config.model_dtype": "fp32",
    "+actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype": "fp32",
    "actor_rollout_ref.actor.optim.lr": 0.02,
    "actor_rollout_ref.actor.ppo_mini_batch_size": PROMPTS // 2,
    "actor_rollout_ref.actor.strategy": "fsdp2",
    "actor_rollout_ref.actor.use_torch_compile": False,
    "+actor_rollout_ref.model.override_config.attn_implementation": "sdpa",
    "actor_rollout_ref.model.use_remove_padding": False,
    "actor_rollout_ref.rollout.n": SAMPLES,
    "algorithm.rollout_correction.rollout_is": "token",
    "data.dataloader_num_workers": 0,
    "data.max_prompt_length": 256,
    "data.max_response_length": 128,
    "data.train_batch_size": PROMPTS,
    "+ray_kwargs.ray_init.address": "local",
    "+ray_kwargs.ray_init.include_dashboard": False,
    "ray_kwargs.ray_init.num_cpus": 16,
    "+ray_kwargs.ray_init.num_gpus": 1,
    "+ray_kwargs.ray_init.object_store_memory": 200_000_000,
    "reward.num_workers": 1,
    "trainer.device": "cpu",
    "trainer.logger": "[console,file]",
    "trainer.n_gpus_per_node": 1,
    "trainer.nnodes": 1,
    "trainer.val_before_train": False,
    "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
}


def _environment(mesh: Mesh, folder: Path, log: Path) -> dict[str, str]:
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        "PYTHONPATH": SOURCES,
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **PATIENT,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_DEDUP_LOGS": "0",
        "ROLLMESH_TOKEN_FILE": mesh.addresses.token_file,
        "VERL_ENGINE_DEVICE": "cuda",
        "VERL_FILE_LOGGER_PATH": str(log),
        "VERL_PLATFORM": "cpu",
        "VERL_USE_EXTERNAL_MODULES": f"{_HELPERS}.cpu_platform,rollmesh.integrations.verl.weights",
    }


def _steps(log: Path) -> dict[int, Any]:
    if not log.exists():
        return {}
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    return {line["step"]: line["data"] for line in lines}
