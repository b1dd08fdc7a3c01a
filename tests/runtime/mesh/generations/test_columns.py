"""Columns of answers: checked, and continued by another engine."""

import zlib
from typing import Any

import numpy as np
import pytest

from rollmesh.mesh import Generation
from rollmesh.runtime.codec import (
    EXPERTS,
    SUPPORT,
    experts_column,
    experts_of,
    joined,
    rows_between,
    support_column,
    support_of,
)
from rollmesh.runtime.errors import EngineFaultError
from rollmesh.v1 import engine_pb2, sampling_pb2
from tests.runtime.mesh.generations.answers import PROMPT, message

BOTH = [EXPERTS, SUPPORT]


def experts(start: int, end: int, engine: int = 1) -> sampling_pb2.TokenColumn:
    rows = np.arange(start, end)[:, None, None] + np.full((1, 2, 1), 100 * engine)
    return experts_column(start, rows.astype(np.uint16))


def support(start: int, end: int) -> sampling_pb2.TokenColumn:
    return support_column(start, [np.arange(at, dtype=np.uint32) for at in range(start, end)])


def begun(kinds: list[Any], **fields: Any) -> Generation:
    sampling = sampling_pb2.SamplingParams(max_tokens=6)
    asked = engine_pb2.GenerateRequest(
        token_ids_u32le=PROMPT, columns=kinds, sampling=sampling, **fields
    )
    generation = Generation(asked, vocabulary_tokens=100)
    generation.begin("engine-1", "r1")
    return generation


def part(*columns: sampling_pb2.TokenColumn, **of: Any) -> engine_pb2.TokenChunk:
    made = message(**{"spans": None, **of})
    made.columns.extend(columns)
    return made


LAST: dict[str, Any] = {"spans": ((0, 0, 2),)}
WRONG = sampling_pb2.TokenColumn(kind=SUPPORT, start=3, rows=1, value_bytes=4, data=b"\1\0\0\0")


@pytest.mark.parametrize(
    ("kinds", "columns", "of", "said"),
    [
        pytest.param([], [support(3, 5)], {}, "not what comes next", id="not asked for"),
        pytest.param(BOTH, [experts(1, 4), support(3, 5)], {}, "comes next", id="a gap"),
        pytest.param(BOTH, [support(3, 5), support(4, 6)], {}, "comes next", id="twice"),
        pytest.param([SUPPORT], [support(3, 4)], {}, "other tokens", id="support is late"),
        pytest.param([SUPPORT], [support(3, 6)], LAST, "other tokens", id="support of none"),
        pytest.param([EXPERTS], [experts(0, 3)], LAST, "other tokens", id="experts are missing"),
        pytest.param([EXPERTS], [experts(0, 5)], LAST, "other tokens", id="of the last token"),
        pytest.param([EXPERTS], [experts(0, 10)], {}, "other tokens", id="beyond the answer"),
        pytest.param([SUPPORT], [WRONG], {}, r"columns\[0\]\.data", id="half a row"),
        pytest.param(
            [SUPPORT],
            [support_column(3, [np.array([100], np.uint32)] * 2)],
            {},
            "id 100",
            id="outside the vocabulary",
        ),
    ],
)
def test_columns_that_cannot_be_right_are_refused(
    kinds: list[Any], columns: list[Any], of: dict[str, Any], said: str
) -> None:
    generation = begun(kinds)
    with pytest.raises(EngineFaultError, match=said):
        generation.take(part(*columns, **of))
    assert (generation.taken, generation.columns) == (0, [])


def test_another_engine_gives_the_rows_that_did_not_arrive() -> None:
    generation = begun(BOTH, routed_experts_start=1)
    generation.take(part(experts(1, 4), support(3, 5)))
    # Rows that arrive before their tokens are lost with them.
    generation.take(part(experts(4, 6), support(5, 8), ids=()))
    assert generation.taken == 2
    rest = generation.begin("engine-2", "r2")
    assert (rest.routed_experts_start, list(rest.columns)) == (4, BOTH)
    end = {"spans": ((0, 0, 2),), "prompt_crc32": zlib.crc32(rest.token_ids_u32le)}
    last = part(experts(4, 6, engine=2), support(5, 7), ids=(7, 8), **end)
    generation.take(last)
    found = [(one.kind, one.start, one.rows, one.engine_id) for one in joined(generation.columns)]
    assert found == [
        (SUPPORT, 3, 2, "engine-1"),
        (SUPPORT, 5, 2, "engine-2"),
        (EXPERTS, 1, 3, "engine-1"),
        (EXPERTS, 4, 2, "engine-2"),
    ]
    rows = experts_of(generation.columns, 7)
    assert rows is not None
    assert rows.rows[:, 0, 0].tolist() == [0, 101, 102, 103, 204, 205, 0]
    assert rows.has_row.tolist() == [False, True, True, True, True, True, False]


@pytest.mark.parametrize("aborted", [True, False])
def test_rows_that_never_came_are_missed_unless_their_tokens_were_cut_off(*, aborted: bool) -> None:
    generation = begun(BOTH)
    assert not generation.has_all_rows(0)
    generation.take(part(support(3, 5)))
    assert not generation.has_all_rows(1)
    if aborted:
        last = {"spans": ((0, 0, 2),), "reason": sampling_pb2.FINISH_REASON_ABORT}
        generation.take(part(experts(0, 3), ids=(), **last))
    else:  # the engine was lost
        generation.take(part(experts(0, 3), ids=()))
        generation.finish = engine_pb2.GenerateFinish(reason=sampling_pb2.FINISH_REASON_STOP)
    assert generation.has_all_rows(1)
    assert not generation.has_all_rows(2)
    assert begun([]).has_all_rows(6)


def test_rows_are_cut_and_joined_without_loss() -> None:
    whole = [experts(0, 9), support(2, 9)]
    cut = [row for at in range(9) for row in rows_between(whole, at, at + 1)]
    assert len(cut) == 16
    assert joined(reversed(cut)) == joined(whole)
    ragged = support_of(cut, 10)
    assert ragged is not None
    assert np.diff(ragged.offsets).tolist() == [0, 0, 2, 3, 4, 5, 6, 7, 8, 0]
    assert ragged.values[ragged.offsets[5] : ragged.offsets[6]].tolist() == [0, 1, 2, 3, 4]
    assert (experts_of([], 3), support_of([], 3)) == (None, None)
