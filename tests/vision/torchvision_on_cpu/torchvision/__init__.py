"""Loads a torchvision that was built for GPUs beside a torch that was built for CPUs.

The processors of vision models need its transforms, which are Python. Its import fails only because
it registers gradients of two operators whose library needs CUDA. They are declared here first. The
package itself is further down the path.
"""

import sys
from importlib.machinery import PathFinder
from pathlib import Path

import torch

for _name in ("nms", "qnms"):
    torch.library.define(
        f"torchvision::{_name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
    )

_own = Path(__file__).parent.parent
_spec = PathFinder.find_spec(
    "torchvision", [path for path in sys.path if Path(path).resolve() != _own.resolve()]
)
assert _spec is not None
assert _spec.origin is not None
__path__ = list(_spec.submodule_search_locations or ())
__file__ = _spec.origin
exec(compile(Path(_spec.origin).read_bytes(), _spec.origin, "exec"))  # noqa: S102
