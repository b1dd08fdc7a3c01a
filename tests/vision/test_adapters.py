"""Adapters of a model with images, whose checkpoint names modules otherwise than PEFT's model."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollmesh.runtime.errors import InvalidWeightsError
from rollmesh.runtime.rpc import open_channel
from rollmesh.v1 import engine_pb2_grpc, sampling_pb2
from tests.engine.engines import PROMPT, Engine
from tests.processes import running
from tests.vision.environment import torchvision
from tests.vision.models import KINDS, make_vision_model

pytestmark = [pytest.mark.long, pytest.mark.vllm]
BOTH, LANGUAGE = ["q_proj", "down_proj"], r".*language_model.*(q_proj|down_proj)"


def saved(model: Path, folder: Path, targets: Any) -> Any:
    """Writes an adapter with random matrices. Returns PEFT's model."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForImageTextToText

    torch.manual_seed(5)
    base = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32)
    config = LoraConfig("CAUSAL_LM", r=3, lora_alpha=6, target_modules=targets)
    network = get_peft_model(base, config)
    for one in network.parameters():
        if one.requires_grad:
            one.data = torch.randn(one.shape) * 0.2
    network.save_pretrained(folder)
    return network


async def load(engine: Engine, version: int, folder: Path) -> None:
    config = json.loads((folder / "adapter_config.json").read_text())
    data = (folder / "adapter_model.safetensors").read_bytes()
    await engine.load_adapter("math", version, data, config)


@pytest.mark.parametrize("kind", KINDS)
async def test_an_adapter_of_the_language_model_samples_as_pefts_own_and_of_the_tower_is_refused(
    tmp_path: Path, kind: str
) -> None:
    model = make_vision_model(kind, tmp_path / "model")
    flags: dict[str, Any] = {"model_path": model, "dtype": "float32", "enforce_eager": True}
    flags |= {"max_context_tokens": 512, "max_adapters": 1, "max_adapter_rank": 4}
    (tmp_path / "engine").mkdir()
    with torchvision():
        async with (
            running("engine", tmp_path / "engine", backend="vllm", **flags) as process,
            open_channel(process.address) as channel,
        ):
            engine = Engine(process, engine_pb2_grpc.EngineServiceStub(channel), model)
            saved(model, tmp_path / "both", BOTH)
            with pytest.raises(InvalidWeightsError, match=r"vis.*is no matrix"):
                await load(engine, 1, tmp_path / "both")
            network = saved(model, tmp_path / "language", LANGUAGE)
            await load(engine, 2, tmp_path / "language")
            adapter = sampling_pb2.AdapterRef(name="math", version=2)
            result = await engine.generate(engine.request(20, 0, adapter=adapter))
    with torch.no_grad():
        ids = torch.tensor([[*PROMPT.tolist(), *result.ids]])
        logits = network.double()(input_ids=ids).logits[0, len(PROMPT) - 1 : -1]
    found = torch.log_softmax(logits, -1)[torch.arange(len(result.ids)), result.ids].numpy()
    assert np.abs(found - result.logprobs).max() < 1e-4
