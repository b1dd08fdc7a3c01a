"""Weights of several families of models, pushed in each way, sample as torch says."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollmesh.client import file_of
from rollmesh.runtime.errors import EngineDeadError, InvalidWeightsError
from rollmesh.runtime.rpc import open_channel
from rollmesh.v1 import engine_pb2_grpc
from tests import models
from tests.engine.engines import PROMPT, Engine, engine_with
from tests.processes import running

pytestmark = [pytest.mark.long, pytest.mark.vllm]
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "dtype": "float32",
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen2": {"tie_word_embeddings": False},  # it has biases
    "Gemma2": {"query_pre_attn_scalar": 32},  # it has no output layer of its own
    # vLLM pads experts of 48 rows on a CPU.
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Phi3": {},  # its checkpoints have fused layers
    "Glm4": {},
    "GptOss": {"num_local_experts": 4, "num_experts_per_tok": 2},
}
FUSED = {"Qwen3Moe", "Mixtral"}
"""transformers 5 fuses their experts, and its `save_pretrained` does not."""


def make(family: str, folder: Path, seed: int) -> Any:
    """Writes a model. Returns it."""
    import torch
    import transformers

    models.make_tokenizer_dir(folder, 512)
    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")(
        vocab_size=400, **SIZES, **FAMILIES[family], eos_token_id=1, pad_token_id=0, bos_token_id=0
    )
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for name, one in model.named_parameters():
            if "norm" in name or "bias" in name:  # these begin as the same constants in each
                one.add_(torch.randn_like(one) * 0.1)
    model.save_pretrained(folder)
    return model


def file(tensors: Any) -> bytes:
    return b"".join(file_of(tensors)[1])


async def check(engine: Engine, model: Any) -> None:
    """Samples with the most likely ids and compares with torch."""
    import torch

    result = await engine.generate(engine.request(12, 0, sampling={"temperature": 0}))
    with torch.no_grad():
        ids = torch.tensor([[*PROMPT.tolist(), *result.ids]])
        rows = torch.log_softmax(model(ids).logits[0].float(), -1)[len(PROMPT) - 1 : -1]
    assert rows.argmax(-1).tolist() == result.ids
    own = rows[torch.arange(12), torch.tensor(result.ids)].numpy()
    assert np.abs(own - result.logprobs).max() < 1e-3  # other weights differ by more than 1


@pytest.mark.parametrize("family", [one for one in FAMILIES if one != "GptOss"])
async def test_a_push_samples_as_torch_does(family: str, tmp_path: Path) -> None:
    from transformers.core_model_loading import revert_weight_conversion

    made = [make(family, tmp_path / str(seed), seed) for seed in range(3)]
    flags = {"backend": "vllm", "dtype": "float32", "enforce_eager": True}
    flags |= {"model_path": tmp_path / "0", "max_context_tokens": 512}
    async with running("engine", tmp_path / "engine", **flags) as process:
        async with engine_with(process, tmp_path / "0") as engine:
            await check(engine, made[0])
            version = (await engine.info()).policy_version
            for number, kept in ((1, False), (2, True), (0, True), (1, False)):
                version += 1
                data = (tmp_path / str(number) / "model.safetensors").read_bytes()
                await engine.update(version, data, keep_file=kept, push_id=f"push-{version}")
                await check(engine, made[number])
            if family in FUSED:
                with pytest.raises(InvalidWeightsError, match=r"push revert_weight_conversion\("):
                    await engine.update(version + 1, file(made[2].state_dict()))
                await check(engine, made[1])
            saved = revert_weight_conversion(made[2], made[2].state_dict())
            await engine.update(version + 1, file(saved), keep_file=True, push_id="saved")
            await check(engine, made[2])


async def test_weights_that_vllm_does_not_reload_end_the_engine(tmp_path: Path) -> None:
    """They would be sampled with under the new version otherwise."""
    made = [make("GptOss", tmp_path / str(seed), seed) for seed in range(2)]
    flags = {"backend": "vllm", "dtype": "float32", "enforce_eager": True}
    flags |= {"model_path": tmp_path / "0", "max_context_tokens": 512}
    async with (
        running("engine", tmp_path / "engine", **flags) as process,
        open_channel(process.address) as channel,
    ):
        engine = Engine(process, engine_pb2_grpc.EngineServiceStub(channel), Path())
        await check(engine, made[0])
        with pytest.raises(EngineDeadError, match="loaded in part"):
            await engine.update(1, tmp_path / "1")
        assert await process.exit_code() != 0
    assert "keeps its former weights" in (tmp_path / "engine" / "engine.log").read_text()
