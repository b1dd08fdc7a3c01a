"""What both backends refuse, by which name, and that they go on afterwards."""

from contextlib import aclosing
from typing import Any

import numpy as np
import pytest

from rollmesh.runtime.errors import (
    InvalidConstraintError,
    InvalidFieldError,
    ModelMismatchError,
    RequestIdInUseError,
)
from rollmesh.runtime.rpc.channels import typed_errors
from rollmesh.v1 import engine_pb2, sampling_pb2
from tests.engine.engines import LONG, Engine

# The first vLLM test waits for the model to start.
pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]


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


async def test_a_running_id_is_refused(engine: Engine) -> None:
    request = engine.request(LONG, 1)
    async with aclosing(engine.stream(request)) as responses:
        await anext(responses)
        with pytest.raises(RequestIdInUseError):
            await engine.generate(request)
    await engine.until(lambda info: info.running == 0)
    assert len((await engine.generate(engine.request(3, 0))).ids) == 3


@pytest.mark.parametrize(
    "method", ["Abort", "Pause", "Resume", "Sleep", "WakeUp", "ResetPrefixCache"]
)
async def test_a_call_that_means_another_model_is_refused(engine: Engine, method: str) -> None:
    request = getattr(engine_pb2, f"{method}Request")(model="another")
    with pytest.raises(ModelMismatchError), typed_errors():
        await getattr(engine.stub, method)(request)
