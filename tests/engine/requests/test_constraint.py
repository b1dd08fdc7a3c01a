"""Constraints on the real model: what is sampled under them, and that none of them can do harm."""

import asyncio
import json
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollmesh.chat import Tokenizer
from rollmesh.runtime.errors import InvalidConstraintError, InvalidSamplingError
from rollmesh.v1 import engine_pb2, sampling_pb2
from tests.controls import abort
from tests.engine.engines import PROMPT, Engine, Result
from tests.models import torch_logprobs

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.asyncio(loop_scope="session"),
]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["small", "large"]},
    },
    "required": ["name", "count", "kind"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def engine(vllm_engine: Engine) -> Engine:
    return vllm_engine


def tag(schema: object, **fields: Any) -> str:
    form = {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": 1, **fields}
    return json.dumps({"type": "structural_tag", "format": form})


def request(
    engine: Engine, text: str, count: int = 400, chunk: int = 0, **sampling: Any
) -> engine_pb2.StreamedGenerate:
    strict = sampling.pop("strict", False)
    made = engine.request(
        count, chunk, constraint=engine_pb2.Constraint(structural_tag_json=text, strict=strict)
    )
    made.generate.sampling.CopyFrom(sampling_pb2.SamplingParams(max_tokens=count, **sampling))
    return made


async def test_every_sample_is_a_value_of_the_schema(engine: Engine, model_dir: Path) -> None:
    tokenizer = Tokenizer(model_dir)
    results = await asyncio.gather(
        *(engine.generate(request(engine, tag(SCHEMA), seed=seed)) for seed in range(20))
    )
    values = []
    for result in results:
        assert result.finish.reason == sampling_pb2.FINISH_REASON_STOP
        assert result.finish.stop_token_id == result.ids[-1]
        value = json.loads(tokenizer.rust.decode(result.ids))
        assert set(value) == {"name", "count", "kind"}
        assert 0 <= value["count"] <= 99
        assert value["kind"] in {"small", "large"}
        values.append(json.dumps(value))
    assert len(set(values)) > 10  # sampled, not one value


async def test_log_probs_are_those_of_the_allowed_tokens(engine: Engine, model_dir: Path) -> None:
    """What the reason CONSTRAINED says. Checked against torch."""
    tokenizer = Tokenizer(model_dir)
    forced = json.dumps(
        {"type": "structural_tag", "format": {"type": "const_string", "value": "The answer"}}
    )
    result = await engine.generate(request(engine, forced, seed=1))
    assert tokenizer.rust.decode(result.ids) == "The answer"
    rows = torch_logprobs(model_dir, [*PROMPT, *result.ids])[len(PROMPT) - 1 : -1]
    free = rows[np.arange(len(result.ids)), result.ids]
    assert result.logprobs[-1] == 0.0  # only the end was left
    assert (np.array(result.logprobs) >= free - 1e-4).all()
    # The first token begins the string: the model's own chances of those that do, renormalised.
    texts = [tokenizer.rust.decode([id_]) for id_ in range(rows.shape[1])]
    allowed = [id_ for id_, text in enumerate(texts) if text and "The answer".startswith(text)]
    left = rows[0] - np.logaddexp.reduce(rows[0][allowed])
    assert result.logprobs[0] == pytest.approx(float(left[result.ids[0]]), abs=1e-3)


async def test_the_limit_cuts_a_constrained_answer_too(engine: Engine) -> None:
    result = await engine.generate(request(engine, tag(SCHEMA), count=3))
    assert (len(result.ids), result.finish.reason) == (3, sampling_pb2.FINISH_REASON_LENGTH)


BOUND = {"type": "string", "minLength": 2, "maxLength": 5}
LONG = {"type": "array", "items": {"type": "integer"}, "minItems": 900}


async def test_an_update_and_an_abort_take_effect_in_the_middle(engine: Engine) -> None:
    before = (await engine.info()).policy_version
    result = Result()
    while result.finish.reason != sampling_pb2.FINISH_REASON_ABORT:  # it may end before
        made, result = request(engine, tag(LONG), count=1900, chunk=1), Result()
        async with asyncio.timeout(120), aclosing(engine.stream(made)) as responses:
            async for response in responses:
                result.take(response)
                if result.messages == 3:
                    await engine.update(before + 1, engine.weights)
                    await engine.stub.ControlEngines(abort(made.generate.request_id))
        before += 1
    assert result.spans[0][0] == before - 1
    assert len(result.ids) == len(result.logprobs) == result.spans[-1][2]


def deep(levels: int) -> object:
    schema: object = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


@pytest.mark.parametrize(
    ("text", "says"),
    [
        pytest.param("{", "not JSON", id="no JSON"),
        pytest.param("[]", "no format", id="no object"),
        pytest.param('{"format": {"type": "made_up"}}', "cannot be compiled", id="no such format"),
        pytest.param(tag({"type": "strin"}), "Unsupported type", id="no such type"),
        pytest.param(tag({"$ref": "#/$defs/gone"}), "cannot be compiled", id="no such reference"),
        pytest.param(tag({"type": "string", "pattern": "((("}), "Regex", id="no regex"),
        pytest.param(tag({"minimum": 5, "maximum": 3, "type": "integer"}), "range", id="empty"),
        pytest.param(tag(schema=False), "cannot", id="nothing allowed"),
        pytest.param(tag({"enum": ["\ud800"]}), "lone surrogate", id="half a character"),
        pytest.param(
            tag({"type": "string", "pattern": "[a-z]{20000}"}), "to parse", id="long to parse"
        ),
        pytest.param(tag(deep(200)), "nested deeper", id="deep"),
        pytest.param(
            tag({"type": "string", "pattern": "(" * 31_000 + "a" + ")" * 31_000}),
            "crashes the grammar compiler",
            id="a deep pattern",
        ),
        pytest.param("[" * 100_000, "not JSON|nested", id="deeper than the parser"),
        pytest.param(tag({"enum": ["x" * 200_000]}), "more than", id="large"),
        pytest.param(
            tag({"properties": {f"p{at}": {"type": "string"} for at in range(300)}}),
            "300 optional properties",
            id="wide",
        ),
    ],
)
async def test_rubbish_is_refused_with_its_field_and_harms_nobody(
    engine: Engine, text: str, says: str
) -> None:
    with pytest.raises(InvalidConstraintError, match=says) as caught:
        await engine.generate(request(engine, text))
    assert caught.value.field == "constraint.structural_tag_json"
    assert (await engine.generate(engine.request(4, 0))).ids


@pytest.mark.parametrize(
    "schema",
    [
        pytest.param({"$ref": "#"}, id="itself"),
        pytest.param({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, id="a loop"),
        pytest.param(
            {"type": "object", "properties": {"next": {"$ref": "#"}}}, id="recursive object"
        ),
        pytest.param(
            {
                "properties": {f"p{at}": {"type": "string"} for at in range(1000)},
                "required": [f"p{at}" for at in range(750)],
            },
            id="wide",
        ),
        pytest.param({"type": "string", "minLength": 100_000}, id="longer than the context"),
    ],
)
async def test_odd_schemas_end_in_an_answer_or_an_error_and_harm_nobody(
    engine: Engine, schema: object
) -> None:
    try:
        result = await engine.generate(request(engine, tag(schema), count=40))
        assert result.finish.reason in {
            sampling_pb2.FINISH_REASON_STOP,
            sampling_pb2.FINISH_REASON_LENGTH,
        }
    except InvalidConstraintError as refused:
        assert "constraint.structural_tag_json" in str(refused)  # noqa: PT017 - either is right
    assert (await engine.generate(engine.request(4, 0))).ids


async def test_a_strict_schema_is_refused_where_a_part_of_it_would_not_hold(engine: Engine) -> None:
    loose = {"type": "integer", "multipleOf": 7, "maximum": 99, "minimum": 0}
    assert (await engine.generate(request(engine, tag(loose)))).ids
    with pytest.raises(InvalidConstraintError, match="multipleOf"):
        await engine.generate(request(engine, tag(loose), strict=True))
    tags = tag({"type": "object", "properties": {"a": BOUND}}, style="qwen_xml")
    with pytest.raises(InvalidConstraintError, match="lengths of strings"):
        await engine.generate(request(engine, tags, strict=True))
    assert (await engine.generate(request(engine, tag(BOUND), strict=True))).ids


@pytest.mark.parametrize(
    "sampling", [pytest.param({"ignore_eos": True}, id="eos"), pytest.param({"min_tokens": 3})]
)
async def test_what_contradicts_a_constraint_is_refused(engine: Engine, sampling: Any) -> None:
    with pytest.raises(InvalidSamplingError, match=f"sampling.{next(iter(sampling))}"):
        await engine.generate(request(engine, tag(SCHEMA), **sampling))
