"""Settings of the engine."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from rollmesh.runtime.config import Bounds, OneOf
from rollmesh.runtime.rpc.listening import ServerConfig


@dataclass(frozen=True, kw_only=True)
class EngineConfig(ServerConfig):
    """Settings of an engine."""

    router: str = "127.0.0.1:7100"
    """host:port of the router to register with; empty serves alone."""
    engine_id: str = "engine-0"
    """Id of this engine, unique in the mesh."""
    model: str = "policy"
    """Name of the model, as agents give it."""
    backend: Annotated[str, OneOf(("vllm", "scripted"))] = "vllm"
    """What generates tokens."""
    model_path: Path = Path("var/model")
    """Folder of the model (vllm)."""
    max_context_tokens: Annotated[int, Bounds(0)] = 0
    """Most ids of a prompt and its answer; 0 takes the model's own limit."""
    lease_capacity: Annotated[int, Bounds(1)] = 256
    """Most leases at a time, and most requests sampled at a time."""
    dtype: str = "auto"
    """Number type of the weights (vllm): auto, float32, bfloat16."""
    enforce_eager: bool = False
    """Whether to do without compiled graphs (vllm)."""
    gpu_memory_utilization: Annotated[float, Bounds(0)] = 0.9
    """Part of the accelerator's memory to use (vllm)."""
    vllm: dict[str, Any] = field(default_factory=dict)
    """Any other argument of the installed vLLM's AsyncEngineArgs, by its name: a table in a file, a
    JSON object elsewhere, such as {"tensor_parallel_size": 2} (vllm)."""
    weight_transfer: str = ""
    """Weight transfer backend, such as nccl or ipc (vllm); empty takes weights by calls alone."""
    weight_transfer_timeout_ms: Annotated[int, Bounds(1)] = 300_000
    """Longest wait for the trainer in a transfer, milliseconds; then the engine restarts (vllm)."""
    script: str = ""
    """JSON file with fixed replies (scripted)."""
    tokens_per_second: Annotated[float, Bounds(0)] = 0.0
    """Steps of the token clock per second, 0 as fast as possible (scripted)."""
    reply_tokens: Annotated[int, Bounds(1)] = 32
    """Length of replies that no script fixes (scripted)."""
    vocabulary_tokens: Annotated[int, Bounds(3)] = 1000
    """Number of ids (scripted)."""
    eos_id: Annotated[int, Bounds(0)] = 1
    """Id that ends a reply (scripted)."""
