"""What a push of weights costs, whole and by difference: bytes, and the pause of an engine.

    make bench-weights

The demo's policy and a synthetic model of 1.0 B parameters run in bfloat16 on vLLM on CPU behind a
router, and a generation runs on each all the time. The policy takes a real optimizer step (AdamW
with weights in float32) before each push, at a rate of 1e-6, as reinforcement learning of large
models has, and at the demo's own. The synthetic weights change at 2 % of their elements. Whole
pushes and differences alternate. A pause is the time for which the engine says that it did not
sample.

The last line of the output is one JSON object, whose figures are medians.
"""

import asyncio
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import Qwen3ForCausalLM

from benchmarks.adapter import Load, services
from examples.demo.policy import CONTEXT_TOKENS, make_policy
from rollmesh.client import Client, WeightDeltas, file_of

_PUSHES = 3
_RATES = {"": 1e-6, "_demo": 4e-4}
"""Learning rates, by the end of the keys of their figures."""
_CHANGED = 0.02
_LARGE = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 20,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
}


class Policy:
    """The demo's policy and its optimizer."""

    def __init__(self, folder: Path, rate: float) -> None:
        """Loads the weights of a folder, in float32."""
        self._model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=rate)
        self._dice = torch.Generator().manual_seed(0)

    def __call__(self) -> dict[str, torch.Tensor]:
        """Returns the weights after one more step, in bfloat16."""
        ids = torch.randint(5, 400, (8, 64), generator=self._dice)
        self._model(ids, labels=ids).loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        named = self._model.named_parameters()
        return {name: one.detach().to(torch.bfloat16) for name, one in named}


class Synthetic:
    """A model whose weights change at some places."""

    def __init__(self, folder: Path) -> None:
        """Writes a random model."""
        make_policy(folder, seed=0, steps=1)
        file = folder / "config.json"
        config = json.loads(file.read_text()) | _LARGE | {"dtype": "bfloat16"}
        layers = config["num_hidden_layers"]
        config |= {"layer_types": ["full_attention"] * layers, "max_window_layers": layers}
        file.write_text(json.dumps(config))
        self._dice = torch.Generator().manual_seed(0)
        self.tensors = {
            name: (torch.randn(shape, generator=self._dice) * 0.02).to(torch.bfloat16)
            for name, shape in _shapes(config).items()
        }
        save_file(self.tensors, folder / "model.safetensors", metadata={"format": "pt"})

    def __call__(self) -> dict[str, torch.Tensor]:
        """Changes some elements in place. Returns the weights."""
        for one in self.tensors.values():
            flat = one.view(-1)
            count = max(int(len(flat) * _CHANGED), 1)
            places = torch.randint(len(flat), (count,), generator=self._dice)
            flat[places] *= 1.01
        return self.tensors


def _shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inner, size = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, keys = (config[f"num_{one}_heads"] * size for one in ("attention", "key_value"))
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    layer = {
        "self_attn.q_proj": (heads, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, heads),
        "self_attn.q_norm": (size,),
        "self_attn.k_norm": (size,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    for number in range(config["num_hidden_layers"]):
        for name, shape in layer.items():
            shapes[f"model.layers.{number}.{name}.weight"] = shape
    return shapes


async def compare(
    client: Client, load: Load, folder: Path, step: Callable[[], dict[str, torch.Tensor]]
) -> dict[str, float]:
    """Pushes whole weights and differences in turn, while a generation runs."""
    load.tokens = 20  # a large model samples slowly
    deltas, version = WeightDeltas(full_every=64), await client.policy_version()
    kept = folder / "router" / "weights"
    figures: dict[str, list[float]] = {}

    async def push(*, delta: bool) -> None:
        nonlocal version
        weights = await asyncio.to_thread(step)
        version += 1
        began = time.perf_counter()
        (result,) = await client.push_weights(weights, version, delta=delta and deltas)
        took = (time.perf_counter() - began) * 1000
        (file,) = kept.rglob(f"{version}-*.safetensors")
        size, _ = file_of(weights)
        kind = "delta" if delta else "full"
        found = {f"pause_ms_{kind}": result.paused_ms, f"push_ms_{kind}": took}
        if delta:
            found["bytes_ratio"] = file.stat().st_size / size
        for name, figure in found.items():
            figures.setdefault(name, []).append(figure)

    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(load.run(load.times[0]))
        await push(delta=False)
        figures.clear()
        for _ in range(_PUSHES):
            await push(delta=False)
        await push(delta=True)  # whole, because there was none before
        figures = {name: of for name, of in figures.items() if name.endswith("full")}
        for _ in range(_PUSHES):
            await push(delta=True)
        running.cancel()
    return {name: median(of) for name, of in figures.items()}


async def measured(
    folder: Path, model: Path, step: Callable[[], dict[str, torch.Tensor]]
) -> dict[str, float]:
    """Runs a router and an engine in a folder, and compares."""
    flags = ("--backend=vllm", "--dtype=bfloat16", "--enforce-eager=true")
    sizes = (f"--model-path={model}", f"--max-context-tokens={CONTEXT_TOKENS}")
    async with services(folder, *flags, *sizes) as (client, load, _):
        found = await compare(client, load, folder, step)
    found["pause_ratio"] = found["pause_ms_delta"] / max(found["pause_ms_full"], 1)
    print(folder.name, found, flush=True)
    return found


def run(folder: Path) -> dict[str, float]:
    """Measures all models. Returns the figures by key."""
    figures: dict[str, float] = {}
    make_policy(folder / "policy", seed=0)
    for name in ("policy-mesh", "policy_demo-mesh", "large-mesh"):
        (folder / name).mkdir()
    for end, rate in _RATES.items():
        step = Policy(folder / "policy", rate)
        found = asyncio.run(measured(folder / f"policy{end}-mesh", folder / "policy", step))
        figures |= {f"{name}{end}": one for name, one in found.items()}
    step_large = Synthetic(folder / "large")
    found = asyncio.run(measured(folder / "large-mesh", folder / "large", step_large))
    return figures | {f"{name}_1b": one for name, one in found.items()}


def main() -> int:
    """Runs the benchmark and prints the results."""
    folder = Path(tempfile.mkdtemp(prefix="bench-weights-"))
    try:
        figures = run(folder)
        print(json.dumps({name: round(one, 4) for name, one in figures.items()}))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
