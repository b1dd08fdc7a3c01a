"""Adapter revisions of an engine, without a model: checked, loaded, used and unloaded."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from rollmesh.engine import Adapter, Adapters, Control, EngineConfig, ScriptedBackend, read_config
from rollmesh.runtime.errors import (
    AdapterUnknownError,
    EngineAsleepError,
    InvalidFieldError,
    InvalidWeightsError,
    OverloadedError,
    RollmeshError,
    StaleVersionError,
)
from rollmesh.runtime.rpc import open_channel, typed_errors
from rollmesh.v1 import engine_pb2, engine_pb2_grpc, sampling_pb2
from tests.controls import WAKE_UP, sleep
from tests.engine.engines import CONFIG, Engine, Result, revisions
from tests.processes import running
from tests.waiting import until

DATA = save({"w": np.zeros(4, np.float32)})
REPLY = 200
slowly = pytest.mark.parametrize("engine", [25], indirect=True)
"""With an engine of so few tokens per second that what follows is in the middle of an answer."""
HEADER = engine_pb2.AdapterHeader(
    adapter=sampling_pb2.AdapterRef(name="math", version=1),
    config_json=json.dumps(CONFIG),
    safetensors_bytes=len(DATA),
)
SCRIPTED = EngineConfig(backend="scripted", max_adapters=2)


@pytest.fixture
async def engine(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Engine]:
    """A scripted engine with room for two revisions."""
    rate = getattr(request, "param", 500)
    (tmp_path / "scratch").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "scratch"))
    flags = {"max_adapters": 2, "reply_tokens": REPLY, "tokens_per_second": rate}
    async with (
        running("engine", tmp_path, backend="scripted", **flags) as process,
        open_channel(process.address) as channel,
    ):
        yield Engine(process, engine_pb2_grpc.EngineServiceStub(channel), tmp_path)


class SlowlyLoading(ScriptedBackend):
    """Loads an adapter when the test says so."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.loads, self.may_load = asyncio.Event(), asyncio.Event()
        self.unloaded: list[Adapter] = []

    async def load_adapter(self, adapter: Adapter) -> None:
        self.loads.set()
        await self.may_load.wait()
        await super().load_adapter(adapter)

    async def unload_adapter(self, adapter: Adapter) -> None:
        await super().unload_adapter(adapter)
        self.unloaded.append(adapter)


def of(name: str, version: int) -> dict[str, Any]:
    """The adapter of a request."""
    return {"adapter": sampling_pb2.AdapterRef(name=name, version=version)}


async def generate(engine: Engine, count: int, **fields: Any) -> Result:
    return await engine.generate(engine.request(count, 0, **fields))


async def test_every_token_tells_the_name_and_version_of_its_adapter(engine: Engine) -> None:
    assert await engine.load_adapter("math", 1, DATA) == [("math", 1)]
    assert await engine.load_adapter("math", 2, DATA) == [("math", 1), ("math", 2)]
    base, first, second = [
        await generate(engine, 20, **given) for given in ({}, of("math", 1), of("math", 2))
    ]
    assert len({tuple(one.ids) for one in (base, first, second)}) == 3
    assert [(s.adapter, s.policy_version) for s in base.finish.version_spans] == [("", 0)]
    assert [(s.adapter, s.policy_version) for s in second.finish.version_spans] == [("math", 2)]
    async with aclosing(engine.stream(engine.request(20, 4, **of("math", 1)))) as chunks:
        told = [(one.adapter, one.policy_version) async for one in chunks if one.token_ids_u32le]
    assert set(told) == {("math", 1)}
    assert len(told) > 1


async def test_an_adapter_that_is_not_loaded_is_a_refusal_with_its_reason(engine: Engine) -> None:
    await engine.load_adapter("math", 2, DATA)
    for name, version in (("math", 1), ("code", 2)):
        with pytest.raises(AdapterUnknownError, match="is not loaded"):
            await generate(engine, 5, **of(name, version))
    for wrong in (of("", 1), of("a" * 65, 1), of("a\n", 1), of("math", 0)):
        with pytest.raises(InvalidFieldError, match=r"adapter\.(name|version)"):
            await generate(engine, 5, **wrong)


@slowly
async def test_a_revision_that_is_unloaded_serves_its_generations_to_their_end(
    engine: Engine,
) -> None:
    await engine.load_adapter("math", 1, DATA)
    await engine.load_adapter("math", 2, DATA)
    result = Result()
    async with aclosing(engine.stream(engine.request(REPLY, 1, **of("math", 1)))) as chunks:
        async for one in chunks:
            result.take(one)
            if result.messages == 3:
                former = [sampling_pb2.AdapterRef(name="math", version=1)]
                with pytest.raises(OverloadedError, match="3 are needed"):  # its room is in use
                    await engine.load_adapter("math", 3, DATA, replaces=former)
                assert await engine.unload_adapter("math", 1) == [("math", 2)]
                with pytest.raises(AdapterUnknownError):
                    await generate(engine, 5, **of("math", 1))
                with pytest.raises(OverloadedError, match="3 are needed"):
                    await engine.load_adapter("math", 3, DATA)
    assert len(result.ids) == REPLY
    assert await engine.load_adapter("math", 3, DATA) == [("math", 2), ("math", 3)]
    assert await engine.unload_adapter("math") == []
    assert await engine.unload_adapter("math") == []


@slowly
async def test_a_revision_that_is_loaded_again_before_its_last_generation_ends_is_used_again(
    engine: Engine,
) -> None:
    await engine.load_adapter("math", 1, DATA, push_id="a")
    result = Result()
    async with aclosing(engine.stream(engine.request(REPLY, 1, **of("math", 1)))) as chunks:
        result.take(await anext(chunks))
        assert await engine.unload_adapter("math", 1) == []
        assert await engine.load_adapter("math", 1, DATA, push_id="a") == [("math", 1)]
        assert len((await generate(engine, 5, **of("math", 1))).ids) == 5
        async for one in chunks:
            result.take(one)
    assert len(result.ids) == REPLY
    assert await engine.load_adapter("math", 2, DATA) == [("math", 1), ("math", 2)]


async def test_too_many_revisions_are_refused_with_the_number_needed(engine: Engine) -> None:
    await engine.load_adapter("math", 1, DATA)
    await engine.load_adapter("code", 1, DATA)
    with pytest.raises(InvalidFieldError, match="3 revisions are needed") as caught:
        await engine.load_adapter("math", 2, DATA)
    assert caught.value.metadata["needed"] == "3"
    former = [sampling_pb2.AdapterRef(name="math", version=1)]
    with pytest.raises(InvalidWeightsError):
        await engine.load_adapter("math", 2, b"x", replaces=former)
    assert revisions((await engine.info()).adapters) == [("code", 1), ("math", 1)]
    held = await engine.load_adapter("math", 2, DATA, replaces=former)
    assert held == [("code", 1), ("math", 2)]


async def test_a_push_is_loaded_once_and_another_of_its_version_is_refused(engine: Engine) -> None:
    for _ in range(2):
        assert await engine.load_adapter("math", 1, DATA, push_id="a") == [("math", 1)]
    with pytest.raises(StaleVersionError, match="another push"):
        await engine.load_adapter("math", 1, DATA, push_id="b")
    assert [one.push_id for one in (await engine.info()).adapters] == ["a"]


async def test_adapters_belong_to_the_weights_in_use(engine: Engine) -> None:
    await engine.update(1, DATA)
    await engine.load_adapter("math", 1, DATA)
    with pytest.raises(InvalidFieldError, match="unload them first"):
        await engine.update(2, DATA)
    with pytest.raises(RollmeshError, match="unload them first"), typed_errors():
        await engine.stub.ControlEngines(sleep(2))
    with typed_errors():
        await engine.stub.ControlEngines(sleep(1))
    with pytest.raises(EngineAsleepError):
        await engine.load_adapter("math", 2, DATA)
    assert await engine.unload_adapter("math") == []
    with typed_errors():
        await engine.stub.ControlEngines(WAKE_UP)
    await engine.update(2, DATA)


async def test_an_upload_that_breaks_off_or_is_too_large_changes_nothing(
    engine: Engine, tmp_path: Path
) -> None:
    with pytest.raises(InvalidWeightsError, match="were announced"):
        await engine.load_adapter("math", 1, DATA, safetensors_bytes=len(DATA) + 1)
    with pytest.raises(InvalidFieldError, match=r"at most \d+ at max_adapter_rank=16"):
        await engine.load_adapter("math", 1, DATA, safetensors_bytes=2**40)
    with pytest.raises(InvalidFieldError, match="safetensors_bytes"):
        await engine.load_adapter("math", 1, b"")
    with pytest.raises(InvalidFieldError, match="config_json"):
        await engine.load_adapter("math", 1, DATA, config_json="")
    with pytest.raises(InvalidFieldError, match="model"):
        await engine.load_adapter("math", 1, DATA, model="other")
    assert revisions((await engine.info()).adapters) == []
    assert not list((tmp_path / "scratch").rglob("adapter_*"))


async def test_an_engine_without_room_takes_no_adapters(tmp_path: Path) -> None:
    async with (
        running("engine", tmp_path, backend="scripted") as process,
        open_channel(process.address) as channel,
    ):
        engine = Engine(process, engine_pb2_grpc.EngineServiceStub(channel), tmp_path)
        with pytest.raises(InvalidFieldError, match="max_adapters=1"):
            await engine.load_adapter("math", 1, DATA)
        assert (await engine.info()).max_adapters == 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"peft_type": "IA3"}, "peft_type"),
        ({"r": 17}, "r: is 17; give 1 to 16, or start the engine with max_adapter_rank=17"),
        ({"r": 0}, "r: is 0; give 1 to 16$"),
        ({"r": True}, "r:"),
        ({"lora_alpha": "8"}, "lora_alpha"),
        ({"lora_alpha": float("nan")}, "lora_alpha"),
        ({"bias": "all"}, "bias"),
        ({"target_modules": []}, "target_modules"),
        ({"target_modules": [1]}, "target_modules"),
        ({"use_dora": True}, "use_dora"),
        (
            {"rank_pattern": {"q_proj": 17}},
            r"rank_pattern\['q_proj'\]: is 17; .*max_adapter_rank=17",
        ),
        ({"rank_pattern": {"q_proj": "2"}}, "rank_pattern"),
        ({"rank_pattern": [2]}, "rank_pattern: is no object"),
        ({"alpha_pattern": {"q_proj": float("inf")}}, r"alpha_pattern\['q_proj'\]: is inf"),
        ({"alpha_pattern": {"q_proj(": 1}}, r"alpha_pattern\['q_proj\('\]: is not taken"),
        ({"rank_pattern": {str(one): 1 for one in range(481)}}, "have 481 names with 0 choices"),
        ({"rank_pattern": {f"{one}.*": 1 for one in range(65)}}, "65 names with 65 choices"),
        ({"lora_alpha": 10**400}, "lora_alpha"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    ],
)
def test_a_config_of_another_adapter_is_refused_by_its_field(
    change: dict[str, Any], said: str
) -> None:
    assert read_config(json.dumps(CONFIG), 16)["r"] == 4
    with pytest.raises(InvalidFieldError, match=said) as caught:
        read_config(json.dumps({**CONFIG, **change}), 16)
    assert caught.value.field == "header.config_json"


NAMES = (
    "q_proj",
    "model.layers.11.self_attn.q_proj",
    "^model.decoder.layers.0.encoder_attn.k_proj$",
    r"model\.layers\.0\.mlp\..*",
    r"layers\.\d+\.(q|k|v)_proj",
    r"layers\.[0-9]\.(?:mlp|self\-attn).+",
    r"layers\.[01]\.up_proj",
    r"model\.layers\.(?:[0-9]|1[0-5])\.mlp\.[a-z_]+",
    r".*\.[^.]+_proj",
    "a" * 128,
)
"""Of modules, as users of PEFT write them."""
LONG = (
    "(a*)*b",
    "((a|a)|(a|a))b",
    "(a|a)(a|a)(a|a)b",
    ".*.*.*b",
    "(.*)b",
    "(a+)+b",
    "a{1,1000}b",
    "(a?){30}",
    r"(a)\1",
    "(?=a)b",
    "(?P<x>a)",
    "a**",
    "(" * 100,
    "a|b",
    "[3-0]",
    "[^]",
    "",
    "\n",
    "é",
    "a" * 129,
)
"""Expressions whose match may take long, or that have more than names need."""


def test_names_in_patterns_are_taken_if_their_match_is_bounded() -> None:
    ranks = dict.fromkeys(NAMES, 2)
    config = {**CONFIG, "rank_pattern": ranks, "alpha_pattern": {**ranks, "up_proj": 0.5}}
    assert read_config(json.dumps(config), 16) == config
    assert all(re.compile(rf"(.*\.)?({one})$") for one in NAMES)
    for name in LONG:
        for field in ("rank_pattern", "alpha_pattern"):
            with pytest.raises(InvalidFieldError, match=rf"{field}\[.*\]: is not taken; give"):
                read_config(json.dumps({**CONFIG, field: {name: 2}}), 16)


@pytest.mark.parametrize("text", ["", "[", "[]", "1", "[" * 100_000])
def test_a_config_that_is_no_object_is_refused(text: str) -> None:
    with pytest.raises(InvalidFieldError, match="config_json"):
        read_config(text, 16)


@pytest.mark.parametrize("level", [1, 2])
async def test_an_engine_that_falls_asleep_in_an_upload_loads_no_adapter(level: int) -> None:
    backend = ScriptedBackend(SCRIPTED)
    control = Control(backend)
    adapters = Adapters(backend, control, SCRIPTED, asyncio.Event())

    async def bytes_after(call: Callable[[], Awaitable[None]]) -> AsyncIterator[bytes]:
        await call()
        yield DATA

    with pytest.raises(EngineAsleepError):
        await adapters.load(HEADER, bytes_after(lambda: control.sleep(level)))
    assert adapters.loaded() == []
    await control.wake_up()
    await adapters.load(HEADER, bytes_after(control.wake_up))
    assert [one.adapter for one in adapters.loaded()] == [HEADER.adapter]
    await adapters.close()


async def test_weights_are_not_dropped_under_an_adapter_that_is_being_loaded() -> None:
    backend = SlowlyLoading(SCRIPTED)
    control = Control(backend)
    adapters = Adapters(backend, control, SCRIPTED, asyncio.Event())

    async def sent() -> AsyncIterator[bytes]:
        yield DATA

    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        loading = tasks.create_task(adapters.load(HEADER, sent()))
        await backend.loads.wait()
        with pytest.raises(InvalidFieldError, match="unload them first"):
            await control.sleep(2)
        backend.may_load.set()
        await loading
    assert (control.state.has_weights, control.state.asleep) == (True, False)
    await adapters.close()


async def test_a_revision_is_unloaded_whose_caller_leaves_while_the_model_is_busy() -> None:
    backend = SlowlyLoading(SCRIPTED)
    control = Control(backend)
    adapters = Adapters(backend, control, SCRIPTED, asyncio.Event())
    backend.may_load.set()

    async def sent() -> AsyncIterator[bytes]:
        yield DATA

    await adapters.load(HEADER, sent())
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        is_busy, may_end = asyncio.Event(), asyncio.Event()

        async def work() -> None:
            is_busy.set()
            await may_end.wait()

        tasks.create_task(control.alone(work))
        await is_busy.wait()
        unloading = tasks.create_task(adapters.unload(HEADER.adapter))
        await until(lambda: not adapters.loaded())
        unloading.cancel()
        await asyncio.sleep(0)
        may_end.set()
    assert [one.ref for one in backend.unloaded] == [HEADER.adapter]
    assert not backend.unloaded[0].folder.exists()
    assert control.state.adapters == 0
    await adapters.close()
