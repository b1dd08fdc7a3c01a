"""Settings of the engine."""

from dataclasses import dataclass
from pathlib import Path

from rollmesh.runtime.serving import ServerConfig


@dataclass(frozen=True, kw_only=True)
class EngineConfig(ServerConfig):
    """Settings of an engine."""

    router: str = ""
    """host:port of the router to register with; empty serves alone."""
    engine_id: str = "engine-0"
    """Id of this engine, unique in the mesh."""
    model: str = "policy"
    """Name of the model, as agents give it."""
    backend: str = "vllm"
    """What generates: vllm or scripted."""
    model_path: Path = Path("var/model")
    """Folder of the model (vllm)."""
    max_context_tokens: int = 0
    """Most ids of a prompt and its answer; 0 takes the model's own limit."""
    lease_capacity: int = 256
    """Most leases at a time, and most requests sampled at a time."""
    dtype: str = "auto"
    """Number type of the weights (vllm): auto, float32, bfloat16."""
    enforce_eager: bool = False
    """Whether to do without compiled graphs (vllm)."""
    gpu_memory_utilization: float = 0.9
    """Part of the accelerator's memory to use (vllm)."""
    weight_transfer: str = ""
    """Weight transfer backend, such as nccl or ipc (vllm); empty takes weights by calls alone."""
    weight_transfer_timeout_ms: int = 300_000
    """Longest wait for the trainer in a transfer, milliseconds; then the engine restarts (vllm)."""
    script: str = ""
    """JSON file with fixed replies (scripted)."""
    tokens_per_second: float = 0.0
    """Steps of the token clock per second, 0 as fast as possible (scripted)."""
    reply_tokens: int = 32
    """Length of replies that no script fixes (scripted)."""
    vocabulary_tokens: int = 1000
    """Number of ids (scripted)."""
    eos_id: int = 1
    """Id that ends a reply (scripted)."""
