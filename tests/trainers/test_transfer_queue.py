"""The writer against TransferQueue 0.1.11 and the replay buffer of verl 0.9.1, as published."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.docs.pages import blocks
from tests.trainers.processes import run_script

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(1800)]
SNIPPET = "docs/verl.md python 2"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ran(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Any]:
    (shown,) = (block for block in blocks("python") if block.name == SNIPPET)
    yield await run_script("queue_run", tmp_path_factory.mktemp("queue"), snippet=shown.text)


async def test_the_main_conversation_is_the_last_of_its_session(ran: Any) -> None:
    keys, extras = ran["groups"]["keys"], ran["groups"]["extra_fields"]
    ids = {key: extra["trajectory_id"] for key, extra in zip(keys, extras, strict=True)}
    assert ids["branched_0_0"] == "sub0"
    assert ids["branched_0_1"] == "main0"
    assert ids["branched_1_1"] == "main1"
    assert len([key for key in keys if key.startswith("branched")]) == 4  # no auxiliary call


async def test_rows_of_different_lengths_come_back_as_they_went_in(ran: Any) -> None:
    lengths = dict(zip(ran["groups"]["keys"], map(len, ran["groups"]["responses"]), strict=True))
    assert (lengths["branched_0_0"], lengths["branched_0_1"]) == (2, 7)


async def test_versions_are_of_each_trajectory_alone(ran: Any) -> None:
    versions = {
        extra["trajectory_id"]: (extra["min_global_steps"], extra["max_global_steps"])
        for extra in ran["groups"]["extra_fields"]
    }
    assert (versions["main0"], versions["sub0"]) == ((4, 4), (6, 6))


async def test_routed_experts_are_laid_out_as_verls_agent_loop_does(ran: Any) -> None:
    assert ran["experts"] == {"same": True, "shape": [5, 3, 2], "last": 0}
    assert ran["refusals"]["mixed"].startswith("columns: only some rows have ['routed_experts']")


async def test_verls_filter_finds_the_group_whose_scores_are_all_equal(ran: Any) -> None:
    assert ran["groups"]["evicted"] == 1
    assert ran["groups"]["refilled"][0] >= 1
    assert {key.split("_")[0] for key in ran["groups"]["keys"]} == {"branched", "late"}


async def test_a_prompt_fails_by_the_policy_that_was_asked_for(ran: Any) -> None:
    assert ran["statuses"] == {
        "any-failed-0": "finished",
        "any-failed-1": "failure",
        "any-failed-2": "failure",
        "all-failed-0": "finished",
        "all-failed-1": "finished",
        "all-failed-2": "failure",
    }


async def test_a_uid_that_keys_would_be_cut_at_is_refused(ran: Any) -> None:
    said = "uid: 'a_b' contains \"_\", which separates the parts of a key; leave it out"
    assert ran["refusals"]["uid"] == said


async def test_a_column_that_would_be_overwritten_is_refused(ran: Any) -> None:
    assert ran["refusals"]["column"] == "prompt: has the columns ['rm_scores']; rename them"


async def test_a_configuration_that_cannot_work_is_refused_by_name(ran: Any) -> None:
    refusals = ran["refusals"]
    assert refusals["settings"] == "rollmesh: 'runners'; see docs/verl.md"
    assert "'speed'" in refusals["unknown"]
    assert refusals["sampling_policy"] == (
        "sampling_policy: 'agent' is invalid; give one of enforce, refuse"
    )
    assert refusals["status"] == (
        "status: 'some_failed' is invalid; give one of any_failed, all_failed"
    )
    assert refusals["writer"] == refusals["status"]
    assert refusals["concurrency"] == "concurrency: is 0; give at least 1"
    assert refusals["retries"] == "retries.tries: is 0; give at least 1"
    assert refusals["runner"].startswith("rollmesh.runners.mine: 'no.such.module:run' is no")


async def test_extra_fields_are_columns_too_where_that_is_asked_for(ran: Any) -> None:
    assert ran["flat"] == [["SUB_AGENT", "MAIN"], [6, 4]]


async def test_the_pages_snippet_writes_a_prompt_and_its_row(ran: Any) -> None:
    prompt, row = ran["snippet"]
    assert prompt == "u"
    assert row.startswith("u_")


async def test_scores_of_a_teacher_are_columns_as_verls_own_teachers_make_them(ran: Any) -> None:
    """A row is about the next token. The last one is empty, as those before the first answer."""
    found = ran["taught"]
    dtype, ids, logprobs = found["wide"]
    assert (dtype, ids) == ("torch.int32", [[0, 0], [4, 5], [6, 7], [8, 9], [0, 0]])
    assert logprobs[1] == pytest.approx([-0.4, -0.5])
    assert (logprobs[0], logprobs[4]) == ([0, 0], [0, 0])
    _, ids, logprobs = found["narrow"]
    assert ids == [[0], *([one] for one in found["token_ids"][2:]), [0]]
    assert logprobs == [[0], [-1], [-2], [-3], [0]]
