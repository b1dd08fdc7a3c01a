"""Adapters on the real model: log-probs equal torch's with merged weights, and what is refused."""

import asyncio
import json
import warnings
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from safetensors.torch import save

from rollmesh.runtime.errors import InvalidFieldError, InvalidWeightsError
from rollmesh.v1 import sampling_pb2
from tests import models
from tests.engine.engines import Engine, Result, engine_with, revisions
from tests.processes import ServiceProcess

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.asyncio(loop_scope="session"),
]
CONFIG = {
    "peft_type": "LORA",
    "r": 3,
    "lora_alpha": 6,
    "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"],
    "bias": "none",
    "task_type": "CAUSAL_LM",
    "inference_mode": True,
}
PROMPT = np.array([5, 6, 7, 8, 9] * 60, "<u4")
"""Long enough for the prefix cache, which keeps blocks of 128 tokens on a CPU."""
SPREAD = 0.1
RUNNING = 200
"""Tokens of the answers in whose middle a revision is pushed."""
LAST = 4
"""The last version that is pushed while others sample."""
OTHER: dict[str, Any] = {}
"""The matrices of an adapter that is never loaded."""
FIRST = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
SECOND = FIRST.replace("lora_A", "lora_B")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def engine(
    tmp_path_factory: pytest.TempPathFactory, adapting: ServiceProcess
) -> AsyncIterator[Engine]:
    """With small logits, whose log-probs are exact to 1e-5 in float32."""
    model = models.make_model_dir(tmp_path_factory.mktemp("model"), spread=SPREAD)
    OTHER.update(models.make_adapter(model, 99, CONFIG))
    async with engine_with(adapting, model) as engine:
        engine.weights = model
        yield engine


def of(version: int) -> dict[str, Any]:
    """The adapter of a request. Version 0 means the base model."""
    if not version:
        return {"token_ids_u32le": PROMPT.tobytes()}
    adapter = sampling_pb2.AdapterRef(name="math", version=version)
    return {"adapter": adapter, "token_ids_u32le": PROMPT.tobytes()}


async def generate(engine: Engine, version: int, count: int = 30) -> Result:
    return await engine.generate(engine.request(count, 0, **of(version)))


def check(engine: Engine, result: Result, version: int, tensors: Mapping[str, Any] | None) -> None:
    """Checks the version and the log-prob of each token against the model's weights in torch."""
    ids = [*PROMPT, *result.ids]
    found, at = [], np.arange(len(result.ids))
    for given in (tensors or {}, OTHER):
        rows = models.merged_logprobs(engine.weights, ids, given, CONFIG)
        found.append(rows[len(PROMPT) - 1 : -1][at, result.ids])
    assert np.abs(found[0] - result.logprobs).max() < 1e-5
    assert np.abs(found[1] - result.logprobs).max() > 1e-2  # of another adapter
    name = "math" if version else ""
    spans = [(one.adapter, one.policy_version) for one in result.finish.version_spans]
    assert spans == [(name, version)] or (not version and spans == [("", spans[0][1])])


@pytest.mark.long
async def test_revisions_that_are_pushed_while_others_sample_give_the_log_probs_of_torch(
    engine: Engine,
) -> None:
    """All of them have the same prompt, whose KV cache is kept."""
    pushed = {one: models.make_adapter(engine.weights, one, CONFIG) for one in range(1, LAST + 1)}
    check(engine, await generate(engine, 0), 0, None)
    await engine.load_adapter("math", 1, save(pushed[1]), CONFIG)
    for version in range(2, LAST + 1):
        begun, is_pushed = asyncio.Event(), asyncio.Event()
        former = [sampling_pb2.AdapterRef(name="math", version=version - 2)]
        async with asyncio.timeout(200), asyncio.TaskGroup() as tasks:
            sampling = tasks.create_task(sample_until(engine, version - 1, begun, is_pushed))
            await begun.wait()
            held = await engine.load_adapter(
                "math", version, save(pushed[version]), CONFIG, replaces=former
            )
            assert held == [("math", version - 1), ("math", version)]
            asked = (version, version - 1, 0)
            both = await asyncio.gather(*(generate(engine, one) for one in asked))
            again = await generate(engine, version)
            is_pushed.set()
        check(engine, both[0], version, pushed[version])
        check(engine, both[1], version - 1, pushed[version - 1])
        check(engine, both[2], 0, None)
        check(engine, again, version, pushed[version])
        for one in sampling.result():
            check(engine, one, version - 1, pushed[version - 1])
        assert again.finish.cached_tokens >= 128  # of its own revision
        assert both[2].finish.cached_tokens >= 128


async def sample_until(
    engine: Engine, version: int, begun: asyncio.Event, end: asyncio.Event
) -> list[Result]:
    """Samples one answer after another, so that whatever happens is in the middle of one."""
    answers = list[Result]()
    while not end.is_set():
        answers.append(Result())
        request = engine.request(RUNNING, 4, **of(version))
        async with aclosing(engine.stream(request)) as messages:
            async for one in messages:
                answers[-1].take(one)
                begun.set()
    return answers


async def test_a_version_that_is_loaded_again_with_other_bytes_has_no_cache_of_the_former(
    engine: Engine,
) -> None:
    await engine.unload_adapter("math")
    for seed in (11, 12):
        tensors = models.make_adapter(engine.weights, seed, CONFIG)
        await engine.load_adapter("math", 9, save(tensors), CONFIG, push_id=str(seed))
        first, second = [await generate(engine, 9) for _ in range(2)]
        assert (first.finish.cached_tokens, second.finish.cached_tokens >= 128) == (0, True)
        for one in (first, second):
            check(engine, one, 9, tensors)
        await engine.unload_adapter("math", 9)


MISFITS: list[tuple[str, Any, str]] = [
    (FIRST, None, r"q_proj.lora_A.weight: is missing"),
    (FIRST, torch.zeros(3, 63), r"has shape \[3, 63\], the model needs \[3, 64\]"),
    (FIRST, torch.zeros(2, 64), r"has shape \[2, 64\], the model needs \[3, 64\]"),
    (SECOND, torch.zeros(64, 3), r"the model needs \[128, 3\]"),
    (FIRST, torch.zeros(3, 64).long(), "has dtype torch.int64"),
    (FIRST, torch.full((3, 64), torch.nan), "has a NaN or an infinite value"),
    (FIRST, torch.full((3, 64), torch.inf), "has a NaN or an infinite value"),
    ("base_model.model.model.norm.lora_A.weight", torch.zeros(3, 64), "is no matrix A or B"),
    ("model.layers.0.self_attn.q_proj.lora_A.weight", torch.zeros(3, 64), "is no matrix"),
    (FIRST.replace("layers.0", "layers.7"), torch.zeros(3, 64), "is no matrix A or B"),
    (FIRST.replace("self_attn.q_proj", "mlp.gate_proj"), torch.zeros(3, 64), "in target_modules"),
    (f"{FIRST}.more", torch.zeros(1), "is no matrix A or B"),
    ("base_model.model.lm_head.lora_A.weight", torch.zeros(3, 64), "is no matrix A or B"),
]
KINDS: list[tuple[dict[str, Any], str]] = [
    ({"r": 5}, "max_adapter_rank"),
    ({"target_modules": ["q_proj", "c_attn"]}, "no module 'c_attn'"),
    ({"target_modules": ["embed_tokens"]}, "no module 'embed_tokens'"),
    ({"init_lora_weights": "pissa"}, "init_lora_weights"),
    ({"peft_type": "LOHA"}, "peft_type"),
]


async def test_an_adapter_that_does_not_fit_is_refused_by_its_part_and_nothing_changes(
    engine: Engine,
) -> None:
    kept = models.make_adapter(engine.weights, 3, CONFIG)
    await engine.load_adapter("math", 3, save(kept), CONFIG)
    before = revisions((await engine.info()).adapters)
    whole = models.make_adapter(engine.weights, 1, CONFIG)
    for name, tensor, said in MISFITS:
        tensors = {**whole, name: tensor}
        given = save({one: value for one, value in tensors.items() if value is not None})
        with pytest.raises(InvalidWeightsError, match=said):
            await engine.load_adapter("math", 20, given, CONFIG)
    data = save(whole)
    for change, said in KINDS:
        with pytest.raises(InvalidFieldError, match=said) as caught:
            await engine.load_adapter("math", 20, data, {**CONFIG, **change})
        assert caught.value.field == "header.config_json"
    for damaged in (data[:-1], b"x" * 100):
        with pytest.raises(InvalidWeightsError, match="cannot be read"):
            await engine.load_adapter("math", 20, damaged, CONFIG)
    assert revisions((await engine.info()).adapters) == before
    check(engine, await generate(engine, 0), 0, None)
    check(engine, await generate(engine, 3), 3, kept)


def saved(folder: Path, model: Path, seed: int, dtype: Any, **config: Any) -> Any:
    """Writes an adapter with PEFT. Returns PEFT's model, whose matrices are random."""
    from peft import LoraConfig, get_peft_model

    given = {"r": 3, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj", "down_proj"], **config}
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of PEFT, on layers that are tied or have no bias
        network = get_peft_model(models.load_network(model), LoraConfig("CAUSAL_LM", **given))
        for one in network.parameters():
            if one.requires_grad:
                one.data = (torch.randn(one.shape) * 0.2).to(dtype)
        network.save_pretrained(folder)
    return network


async def load_saved(engine: Engine, version: int, folder: Path) -> None:
    config = json.loads((folder / "adapter_config.json").read_text())
    data = (folder / "adapter_model.safetensors").read_bytes()
    await engine.load_adapter("math", version, data, config)


@pytest.mark.parametrize(
    ("dtype", "config"),
    [
        ("bfloat16", {}),
        ("float16", {"use_rslora": True, "target_modules": "all-linear"}),
        ("float32", {"target_modules": r".*\.1\..*(k|up)_proj", "init_lora_weights": "gaussian"}),
        (
            "float32",
            {
                "rank_pattern": {"q_proj": 1, "layers.1.mlp.down_proj": 4},
                "alpha_pattern": {"v_proj": 9, r"layers\.0\.mlp\..*": 1.5},
            },
        ),
        (
            "float32",
            {"use_rslora": True, "rank_pattern": {"v_proj": 4}, "layers_to_transform": [1]},
        ),
    ],
    ids=["bfloat16", "rsLoRA of all linear layers", "expression", "patterns", "one layer"],
)
async def test_an_adapter_that_peft_saved_samples_as_pefts_own_model(
    engine: Engine, tmp_path: Path, dtype: str, config: dict[str, Any]
) -> None:
    await engine.unload_adapter("math")
    network = saved(tmp_path, engine.weights, 5, getattr(torch, dtype), **config)
    await load_saved(engine, 1, tmp_path)
    result = await generate(engine, 1)
    with torch.no_grad():
        ids = torch.tensor([[*PROMPT.tolist(), *result.ids]])
        rows = torch.log_softmax(network.double()(ids).logits[0], -1)[len(PROMPT) - 1 : -1]
    found = rows[torch.arange(len(result.ids)), result.ids].numpy()
    assert np.abs(found - result.logprobs).max() < 1e-5


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias"),
        ({"lora_bias": True}, "lora_bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"trainable_token_indices": [1, 2]}, "trainable_token_indices"),
        ({"target_modules": ["embed_tokens", "q_proj"]}, "no module 'embed_tokens'"),
        ({"target_modules": r".*(embed_tokens|q_proj)"}, "embed_tokens.*is no matrix"),
        ({"target_modules": ["lm_head"]}, "no module 'lm_head'"),
        ({"alora_invocation_tokens": [1, 2]}, "aLoRA"),
    ],
    ids=str,
)
async def test_an_adapter_that_peft_saved_with_more_than_matrices_of_linear_layers_is_refused(
    engine: Engine, tmp_path: Path, config: dict[str, Any], said: str
) -> None:
    saved(tmp_path, engine.weights, 5, torch.float32, **config)
    with pytest.raises((InvalidFieldError, InvalidWeightsError), match=said):
        await load_saved(engine, 50, tmp_path)


async def test_weights_are_replaced_while_no_adapter_is_loaded(
    engine: Engine, tmp_path: Path
) -> None:
    other = models.make_model_dir(tmp_path, seed=1, spread=SPREAD)
    tensors = models.make_adapter(other, 2, CONFIG)
    await engine.load_adapter("math", 30, save(tensors), CONFIG)
    version = (await engine.info()).policy_version + 1
    with pytest.raises(InvalidFieldError, match="unload them first"):
        await engine.update(version, other)
    await engine.unload_adapter("math")
    await engine.update(version, other)
    await engine.load_adapter("math", 31, save(tensors), CONFIG)
    engine.weights = other
    for version, given in ((31, tensors), (0, None)):
        check(engine, await generate(engine, version), version, given)
