"""Starts vLLM with the arguments of rollmesh and those that the user passes through."""

import os
from collections.abc import Mapping
from typing import Any

from vllm.config import WeightTransferConfig
from vllm.config.logging import LoggingConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.metrics.loggers import PrometheusStatLogger

from rollmesh.engine.config import EngineConfig
from rollmesh.engine.vllm.failure import failure_log
from rollmesh.engine.vllm.images import takes_images
from rollmesh.runtime.errors import EngineStartError


def start_llm(
    config: EngineConfig, options: Mapping[str, Any], *, takes_constraints: bool
) -> AsyncLLM:
    """Returns vLLM with the model loaded by all of its workers.

    Args:
        config: The settings.
        options: Further arguments of `AsyncEngineArgs`, as `read_options` returned them.
        takes_constraints: Whether the model has the tokenizer that constraints need.

    Raises:
        EngineStartError: vLLM could not start; the message gives the reason in one line.
    """
    with failure_log() as failures:
        settings = {"logging_config": LoggingConfig(pylogging_config_file=failures.config_file)}
        try:
            return AsyncLLM.from_engine_args(
                AsyncEngineArgs(**(settings | _arguments(config, options, takes_constraints))),
                stat_loggers=[PrometheusStatLogger] if config.metrics_port >= 0 else None,
            )
        except Exception as error:
            reason = failures.first() or f"{type(error).__name__}: {error}"
            raise EngineStartError(f"vLLM could not start: {' '.join(reason.split())}") from error


def _arguments(
    config: EngineConfig,
    options: Mapping[str, Any],
    takes_constraints: bool,  # noqa: FBT001
) -> dict[str, Any]:
    own: dict[str, Any] = {
        "model": str(config.model_path),
        # The gateway handles text; only constraints need the tokenizer.
        "skip_tokenizer_init": not takes_constraints,
        "structured_outputs_config": {"backend": "xgrammar"},
        "max_model_len": config.max_context_tokens or None,
        "dtype": config.dtype,
        "enforce_eager": config.enforce_eager,
        "max_num_seqs": config.lease_capacity,
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "disable_log_stats": True,  # vLLM logs no statistics; its metrics go to Prometheus
        "worker_extension_cls": "rollmesh.engine.vllm.worker_extension.WeightReceiver",
        "weight_transfer_config": (
            WeightTransferConfig(config.weight_transfer) if config.weight_transfer else None
        ),
    }
    # Each request carries what the processor made of its images: see `images`.
    images = {"mm_processor_cache_gb": 0} if takes_images(config.model_path) else {}
    return {**_cpu_arguments(options), **own, **images, **options}


def _cpu_arguments(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments for a CPU: one worker, in the scheduler's process.

    vLLM's default on CPUs is a separate worker process, and the scheduler busy-waits for its
    answers. With few cores this takes a core from the model and starves the threads that move
    requests and tokens into and out of the scheduler: streams stalled for seconds, and aborts and
    pauses took effect only after the request had ended. vLLM would bind the model's threads to
    cores in the worker; here the environment sets them instead.
    """
    if not current_platform.is_cpu():
        return {}
    environ = os.environ  # noqa: TID251 - the only way to set the threads of vLLM's process
    environ.setdefault("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) - 1, 1)))
    environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    workers = options.get("tensor_parallel_size", 1) * options.get("pipeline_parallel_size", 1)
    if workers == 1:
        return {"distributed_executor_backend": UniProcExecutor}
    # vLLM would bind each worker to a NUMA node and refuses to start if there are too few nodes.
    environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    return {}
