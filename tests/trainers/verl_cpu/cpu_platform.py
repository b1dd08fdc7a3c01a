"""A CPU as an accelerator of verl, which verl loads by `VERL_USE_EXTERNAL_MODULES`.

verl's engines are registered for its accelerators alone, so its processes also need
`VERL_ENGINE_DEVICE=cuda`. Imported by verl's processes only.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import distributed
from verl.plugin.platform import PlatformBase, PlatformRegistry

_GIB = 1 << 30


class _Device(ModuleType):
    """`torch.cpu` with what verl asks of `torch.cuda`."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def device_count(self) -> int:
        return 1

    def get_device_name(self) -> str:
        return "CPU"

    def mem_get_info(self) -> tuple[int, int]:
        return 4 * _GIB, 8 * _GIB

    def empty_cache(self) -> None: ...

    def set_device(self, device: Any) -> None: ...

    def reset_peak_memory_stats(self) -> None: ...

    def memory_allocated(self, *_: Any) -> int:
        return 0

    memory_reserved = max_memory_allocated = max_memory_reserved = memory_allocated

    def get_rng_state(self, *_: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, *_: Any) -> None:
        torch.set_rng_state(state)

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed


_DEVICE = _Device("cpu_device")


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):  # type: ignore[misc]  # verl has no types
    """One slot, which Ray counts as a GPU."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _DEVICE

    def is_available(self) -> bool:
        return True

    def current_device(self) -> str:
        return "cpu"  # where verl moves a model to

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None: ...

    def synchronize(self, device_index: int | None = None) -> None: ...

    def manual_seed(self, seed: int) -> None:
        random.seed(seed)
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def set_allocator_settings(self, settings: str) -> None: ...

    def empty_cache(self) -> None: ...

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None: ...

    def profiler_stop(self) -> None: ...

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None: ...


_init_process_group = distributed.init_process_group


def _init(backend: str | None = None, **settings: Any) -> None:
    """verl names one backend twice, for the CPU and for the accelerator. torch refuses that."""
    _init_process_group("gloo" if backend == "cpu:gloo,cpu:gloo" else backend, **settings)


distributed.init_process_group = _init
