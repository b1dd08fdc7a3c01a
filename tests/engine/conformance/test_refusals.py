"""What all backends refuse, by which name, and that they go on afterwards."""

import asyncio
import json
from typing import Any

import numpy as np
import pytest

from rollmesh.runtime.errors import (
    InvalidConstraintError,
    InvalidFieldError,
    ModelMismatchError,
    RequestIdInUseError,
)
from rollmesh.runtime.rpc import typed_errors
from rollmesh.v1 import engine_pb2, sampling_pb2
from tests.controls import Control, abort, sleep
from tests.engine.engines import ATTACHED, Engine, in_mid_answer

# The first vLLM test waits for the model to start.
pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.mark.parametrize(
    ("fields", "reason", "name"),
    [
        ({"token_ids_u32le": b""}, "PROMPT_EMPTY", "token_ids_u32le"),
        ({"token_ids_u32le": b"\1\2\3"}, "INVALID_FIELD", "token_ids_u32le"),
        (
            {"token_ids_u32le": np.full(2048, 5, "<u4").tobytes()},
            "PROMPT_TOO_LONG",
            "token_ids_u32le",
        ),
        (
            {"token_ids_u32le": np.array([9999], "<u4").tobytes()},
            "TOKEN_OUT_OF_VOCABULARY",
            "token_ids_u32le",
        ),
        ({"request_id": ""}, "INVALID_FIELD", "request_id"),
        ({"model": "another"}, "MODEL_MISMATCH", "model"),
        ({"sampling": {"temperature": -1.0}}, "INVALID_SAMPLING", "sampling.temperature"),
        ({"sampling": {"top_p": float("nan")}}, "INVALID_SAMPLING", "sampling.top_p"),
        ({"sampling": {"stop_token_ids": [9999]}}, "INVALID_SAMPLING", "sampling.stop_token_ids"),
        ({"top_logprobs": 21}, "INVALID_FIELD", "top_logprobs"),
        ({"sampling": {"logit_bias": {9999: 1.0}}}, "INVALID_SAMPLING", "sampling.logit_bias"),
        ({"sampling": {"logit_bias": {5: 101.0}}}, "INVALID_SAMPLING", "sampling.logit_bias"),
        (
            {"sampling": {"logit_bias": {5: float("nan")}}},
            "INVALID_SAMPLING",
            "sampling.logit_bias",
        ),
        (
            {"sampling": {"allowed_token_ids": [9999]}},
            "INVALID_SAMPLING",
            "sampling.allowed_token_ids",
        ),
        (
            {"sampling": {"allowed_token_ids": [5], "stop_token_ids": [5], "min_tokens": 1}},
            "INVALID_SAMPLING",
            "sampling.allowed_token_ids",
        ),
        ({"banned_token_ids": [9999]}, "INVALID_FIELD", "banned_token_ids"),
        ({"banned_token_ids": [5] * 65}, "INVALID_FIELD", "banned_token_ids"),
        (
            {"sampling": {"bad_sequences": [sampling_pb2.TokenSequence()]}},
            "INVALID_SAMPLING",
            "sampling.bad_sequences",
        ),
        (
            {"sampling": {"bad_sequences": [sampling_pb2.TokenSequence(token_ids=[9999])]}},
            "INVALID_SAMPLING",
            "sampling.bad_sequences",
        ),
        (
            {
                "sampling": {
                    "allowed_token_ids": [5],
                    "bad_sequences": [sampling_pb2.TokenSequence(token_ids=[7, 5])],
                }
            },
            "INVALID_SAMPLING",
            "sampling.bad_sequences",
        ),
    ],
)
async def test_a_bad_request_names_its_field_and_the_engine_stays_up(
    engine: Engine, fields: dict[str, Any], reason: str, name: str
) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        await engine.generate(engine.request(5, 0, **fields))
    assert (caught.value.reason, caught.value.field) == (reason, name)
    assert len((await engine.generate(engine.request(2, 0))).ids) == 2


@pytest.mark.parametrize(
    ("tag", "says"),
    [
        pytest.param("{", "not JSON", id="no JSON"),
        pytest.param('{"type": "structural_tag"}', "no format", id="no format"),
        pytest.param('{"format": ' * 80 + "{}" + "}" * 80, "nested deeper", id="deep"),
        pytest.param('{"format": {"a": "' + "x" * 131_072 + '"}}', "more than", id="large"),
    ],
)
async def test_a_constraint_that_is_none_is_refused(engine: Engine, tag: str, says: str) -> None:
    request = engine.request(4, 0, constraint=engine_pb2.Constraint(structural_tag_json=tag))
    with pytest.raises(InvalidConstraintError, match=says) as caught:
        await engine.generate(request)
    assert caught.value.field == "constraint.structural_tag_json"


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [
        ("temperature", 0.0, 2.0),
        ("top_p", 1e-6, 1.0),
        ("min_p", 0.0, 1.0),
        ("presence_penalty", -2.0, 2.0),
        ("frequency_penalty", -2.0, 2.0),
        ("repetition_penalty", 1e-6, 100.0),
    ],
)
async def test_both_bounds_of_a_sampling_parameter_are_allowed(
    engine: Engine, name: str, least: float, most: float
) -> None:
    if (await engine.info()).backend == "sglang" and name.endswith("_penalty"):
        with pytest.raises(InvalidFieldError, match=rf"sampling\.{name}: (changes|is at most 2)"):
            await engine.generate(engine.request(2, 0, sampling={name: most}))
        return
    for value in (least, most):
        assert len((await engine.generate(engine.request(2, 0, sampling={name: value}))).ids) == 2
    for value in (least - 1e-6, most + 1e-5):
        with pytest.raises(InvalidFieldError, match=f"give {least:.6g} to {most:.6g}"):
            await engine.generate(engine.request(2, 0, sampling={name: value}))


def alternatives(levels: int) -> str:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        schema = {"anyOf": [schema]}
    form = {"type": "json_schema", "json_schema": schema}
    return json.dumps({"type": "structural_tag", "format": form})


async def test_nested_alternatives_cost_the_engine_nothing(engine: Engine) -> None:
    constraint = engine_pb2.Constraint(structural_tag_json=alternatives(28))
    await takes(engine, constraint)


async def takes(engine: Engine, constraint: engine_pb2.Constraint) -> None:
    """An engine samples under a constraint, or refuses all of them by name."""
    request = engine.request(4, 0, constraint=constraint)
    request.generate.sampling.ignore_eos = False
    if (await engine.info()).backend in ATTACHED:
        with pytest.raises(InvalidConstraintError, match="is not sent to an attached server"):
            await engine.generate(request)
        return
    assert (await engine.generate(request)).ids


async def test_a_schema_with_too_many_parts_is_refused(engine: Engine) -> None:
    form = {"type": "json_schema", "json_schema": {"anyOf": [{}] * 16_400}}
    tag = json.dumps({"type": "structural_tag", "format": form})
    request = engine.request(4, 0, constraint=engine_pb2.Constraint(structural_tag_json=tag))
    with pytest.raises(InvalidConstraintError, match="too complex: has more than 16384") as caught:
        await engine.generate(request)
    assert caught.value.field == "constraint.structural_tag_json"


async def test_a_running_id_is_refused(engine: Engine) -> None:
    refused = asyncio.Event()

    async def act(request: engine_pb2.GenerateRequest) -> None:
        try:
            await engine.generate(engine_pb2.StreamedGenerate(generate=request))
        except RequestIdInUseError:
            refused.set()

    await in_mid_answer(engine, act, lambda _: refused.is_set())
    assert len((await engine.generate(engine.request(3, 0))).ids) == 3


async def test_a_control_call_that_means_another_model_is_refused(engine: Engine) -> None:
    with pytest.raises(ModelMismatchError), typed_errors():
        await engine.stub.ControlEngines(sleep(model="another"))


async def test_a_control_call_without_an_action_is_refused(engine: Engine) -> None:
    with pytest.raises(InvalidFieldError, match="action: is not set"), typed_errors():
        await engine.stub.ControlEngines(Control())
    with pytest.raises(InvalidFieldError, match=r"abort\.request_ids: is empty"), typed_errors():
        await engine.stub.ControlEngines(abort())
