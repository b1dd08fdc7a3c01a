"""verl 0.9.1 and TransferQueue 0.1.11 as published, on CPU, against a mesh."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from rollmesh.client import SessionResult, Trajectory
from rollmesh.v1 import collector_pb2
from tests.meshes import scripted_mesh
from tests.trainers.processes import run_script

_SAMPLES = 3
_SUPERSEDED = _SAMPLES + 1  # of the broken agent, which is tried again, and of the flaky one
_HOPELESS = 2  # the attempts of the step that ends verl
_SESSIONS = 4 * _SAMPLES + _SUPERSEDED + 1 + _HOPELESS  # of four prompts and a validation set
_AFTER = 2 * _SAMPLES  # of the job after its checkpoint, and of the one that resumed from that
_TRAINED = 3 * _SAMPLES  # of four prompts. One is broken
pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(1800)]


@dataclass(frozen=True)
class Ran:
    """What verl read from its queue, and what the collector delivers to anybody else."""

    read: dict[str, Any]
    sessions: dict[tuple[str, int], SessionResult]
    superseded: list[SessionResult]
    step: dict[str, float]
    """The numbers that the trainer reported."""

    def column(self, name: str) -> list[Any]:
        values: list[Any] = self.read["columns"][name]["values"]
        return values

    def trajectories(self) -> list[Trajectory]:
        """In the order of the rows that verl read."""
        found: list[Trajectory] = []
        for key in self.read["keys"]:
            uid, sample, index = key.split("_")
            session = self.sessions[uid, int(sample)]
            assert index == "0"
            found += session.trajectories
        return found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ran(tmp_path_factory: pytest.TempPathFactory, tokenizer_dir: Path) -> AsyncIterator[Ran]:
    folder = tmp_path_factory.mktemp("verl")
    async with scripted_mesh(folder, tokenizer_dir) as mesh, mesh.client() as client:
        read = await run_script(
            "verl_run",
            folder,
            addresses=asdict(mesh.addresses),
            samples=_SAMPLES,
            model=str(tokenizer_dir),
        )
        sessions: dict[tuple[str, int], SessionResult] = {}
        superseded: list[SessionResult] = []
        async with client.subscribe("audit", unit="session") as deliveries:
            async with asyncio.timeout(600):
                while len(sessions) + len(superseded) < _SESSIONS + _AFTER:
                    (session,) = (await anext(deliveries)).sessions
                    if session.superseded:
                        superseded.append(session)
                    else:
                        sessions[session.metadata["uid"], session.sample_index] = session
        stats = await client.stats()
        (verl,) = [one for one in stats.consumers if one.name == "verl"]
        counts, ends = (
            (verl.acknowledged, verl.leased, verl.ready),
            [one.metadata for one in superseded],
        )
        assert counts == (_SESSIONS + _AFTER, 0, 0), ends
        (step,) = await client.steps("verl")
        yield Ran(read, sessions, superseded, dict(step.metrics))


async def test_the_replay_buffer_takes_every_session_of_every_prompt_that_ended(ran: Ran) -> None:
    expected = {f"{uid}_{at}_0" for uid in ("first", "second", "flaky") for at in range(_SAMPLES)}
    assert set(ran.read["keys"]) == expected


async def test_the_tokens_verl_reads_are_the_ones_the_engine_sampled(ran: Ran) -> None:
    for at, trajectory in enumerate(ran.trajectories()):
        ids, prompt = trajectory.token_ids.tolist(), trajectory.prompt_tokens
        assert trajectory.turns == 2
        assert ran.column("input_ids")[at] == ids
        assert ran.column("prompts")[at] == ids[:prompt]
        assert ran.column("responses")[at] == ids[prompt:]
        mask = trajectory.loss_mask[prompt:].astype(int).tolist()
        assert ran.column("response_mask")[at] == ran.column("loss_mask")[at] == mask
        assert 0 < sum(mask) < len(mask)
        assert ran.column("position_ids")[at] == list(range(len(ids)))
        assert ran.column("attention_mask")[at] == [1] * len(ids)
        logprobs = trajectory.logprobs[prompt:].tolist()
        assert ran.column("rollout_log_probs")[at] == logprobs


async def test_agents_sample_with_verls_parameters_whatever_they_send(ran: Ran) -> None:
    for (uid, _), session in ran.sessions.items():
        for trajectory in session.trajectories:
            assert "SAMPLING_CHANGED" not in trajectory.reasons
            for sampling in (one.sampling for one in trajectory.segments if one.sampled):
                expected = (0.0, 1.0) if uid == "checked" else (1.0, 0.875)
                assert (sampling.temperature, sampling.top_p) == expected
                assert (sampling.top_k, sampling.HasField("seed")) == (0, False)


async def test_the_score_is_at_the_last_position_and_nowhere_else(ran: Ran) -> None:
    for key, scores in zip(ran.read["keys"], ran.column("rm_scores"), strict=True):
        uid, sample, _ = key.split("_")
        assert scores[-1] == ran.sessions[uid, int(sample)].reward
        assert uid == "flaky" or not any(scores[:-1])


async def test_the_reward_of_a_turn_is_at_the_last_token_of_that_turn(ran: Ran) -> None:
    of_group = [at for at, key in enumerate(ran.read["keys"]) if key.startswith("flaky")]
    for at in of_group:
        mask, scores = ran.column("response_mask")[at], ran.column("rm_scores")[at]
        end_of_turn = mask.index(0) - 1
        assert {place: score for place, score in enumerate(scores) if score} == {
            end_of_turn: 0.5,
            len(scores) - 1: 2.0,
        }


async def test_a_failed_attempt_is_superseded_by_one_that_verl_trains(ran: Ran) -> None:
    (failed,) = [session for session in ran.superseded if session.metadata["uid"] == "flaky"]
    successor = ran.sessions["flaky", failed.sample_index]
    assert (failed.outcome, failed.reward) == ("LOST", None)
    assert successor.metadata == {"uid": "flaky", "agent_name": "solver", "attempt": "2"}
    assert (successor.outcome, successor.reward) == ("COMPLETED", 2.0)
    trained = {extra["trajectory_id"] for extra in ran.column("extra_fields")}
    assert {one.trajectory_id for one in successor.trajectories} <= trained
    assert not {one.trajectory_id for one in failed.trajectories} & trained


async def test_columns_have_the_dtypes_that_verl_writes_itself(ran: Ran) -> None:
    dtypes = {name: column.get("dtype") for name, column in ran.read["columns"].items()}
    integers = (
        "prompts responses response_mask loss_mask input_ids attention_mask position_ids num_turns"
    )
    assert {name: dtypes[name] for name in integers.split()} == dict.fromkeys(
        integers.split(), "torch.int64"
    )
    assert dtypes["rollout_log_probs"] == dtypes["rm_scores"] == "torch.float32"


async def test_columns_of_the_data_set_are_carried_along(ran: Ran) -> None:
    uids = [key.split("_")[0] for key in ran.read["keys"]]
    assert ran.column("uid") == uids
    assert ran.column("session_id") == [int(key.split("_")[1]) for key in ran.read["keys"]]
    assert set(ran.column("data_source")) == {"sums"}
    assert set(ran.column("agent_name")) == {"solver"}
    assert ran.column("reward_model")[0] == {"style": "rule", "ground_truth": "7"}
    assert ran.column("raw_prompt")[0][0]["role"] == "user"
    assert ran.column("multi_modal_inputs") == [{}] * _TRAINED
    assert ran.column("global_steps") == [1] * _TRAINED


async def test_turns_count_as_verl_counts_them(ran: Ran) -> None:
    assert ran.column("num_turns") == [4] * _TRAINED  # two of the user, two of the model


async def test_extra_fields_have_the_scorers_info_and_the_weights_versions(ran: Ran) -> None:
    rows = zip(ran.read["keys"], ran.column("extra_fields"), ran.trajectories(), strict=True)
    for key, extra, trajectory in rows:
        said = {} if key.startswith("flaky") else {"accuracy": 0.5}
        assert extra["reward_extra_info"] == said
        assert (extra["min_global_steps"], extra["max_global_steps"]) == (0, 0)
        assert extra["trajectory_id"] == trajectory.trajectory_id
        assert extra["reasons"] == list(trajectory.reasons)


async def test_tags_have_the_names_that_the_replay_buffer_and_the_metrics_read(ran: Ran) -> None:
    for tag, trajectory in zip(ran.read["tags"], ran.trajectories(), strict=True):
        prompt, tokens = trajectory.prompt_tokens, len(trajectory.token_ids)
        assert tag == {
            "status": "success",
            "prompt_len": prompt,
            "response_len": tokens - prompt,
            "seq_len": tokens,
            "global_steps": 1,
            "min_global_steps": 0,
            "max_global_steps": 0,
        }


async def test_verls_grpo_makes_advantages_of_the_rewards(ran: Ran) -> None:
    for uid in ("first", "second"):
        of_group = [at for at, key in enumerate(ran.read["keys"]) if key.startswith(uid)]
        rewards = np.array([sum(ran.column("rm_scores")[at]) for at in of_group])
        assert len(set(rewards)) > 1, "the runner's rewards must differ within a group"
        expected = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
        for at, advantage in zip(of_group, expected, strict=True):
            mask = np.array(ran.column("response_mask")[at])
            assert np.allclose(ran.read["advantages"][at], advantage * mask, atol=1e-5)


async def test_sessions_of_the_broken_agent_are_closed_as_failed(ran: Ran) -> None:
    outcomes = {place: session.outcome for place, session in ran.sessions.items()}
    assert {outcomes["third", at] for at in range(_SAMPLES)} == {"FAILED"}
    assert {outcomes["first", at] for at in range(_SAMPLES)} == {"COMPLETED"}


async def test_the_record_of_a_failed_session_has_the_agents_error(ran: Ran) -> None:
    errors = {place: one.metadata.get("error") for place, one in ran.sessions.items()}
    assert errors["third", 0] == "RuntimeError: this agent is broken"
    assert errors["first", 0] is None


async def test_verl_prints_the_failed_sessions_of_a_step_with_its_metrics(ran: Ran) -> None:
    assert ran.read["metrics"]["training/rollout_failure/failed_sessions"] == _SAMPLES


async def test_the_error_that_ends_verl_has_the_agents_error(ran: Ran) -> None:
    assert "no materializable trajectories" in ran.read["ended"]
    assert f"{_SAMPLES + 1} failed: RuntimeError: this agent is broken" in ran.read["ended"]


async def test_verls_own_reward_manager_scores_sessions_without_a_reward(ran: Ran) -> None:
    found, session = ran.read["validated"], ran.sessions["checked", 0]
    assert found["keys"] == ["checked_0_0"]
    assert session.reward is None
    (trajectory,) = session.trajectories
    assert found["responses"] == trajectory.token_ids[trajectory.prompt_tokens :].tolist()
    said = found["extra_fields"]["reward_extra_info"]
    assert (said["truth"], said["accuracy"]) == ("sums 7", 0.25)
    assert found["rm_scores"][-1] == said["score"] > 0
    assert not any(found["rm_scores"][:-1])


async def test_a_resumed_job_samples_with_the_weights_of_its_checkpoint_in_a_new_run(
    ran: Ran,
) -> None:
    resumed = ran.read["resumed"]
    assert resumed["pushed"] == [1, 2]  # the mesh had version 2 of the job before
    assert "run 1 is abandoned, because run 2 was opened at version 1" in resumed["refused"]
    assert {one["min_global_steps"] for one in resumed["abandoned"] + resumed["tags"]} == {2}
    runs = {
        uid: {
            int(run)
            for place, session in ran.sessions.items()
            for one in session.trajectories
            for run in one.policy_runs[one.loss_mask]
            if place[0] == uid
        }
        for uid in ("first", "abandoned", "resumed")
    }
    assert runs == {"first": {1}, "abandoned": {1}, "resumed": {2}}


async def test_a_resumed_job_gets_the_sessions_of_its_checkpoints_weights_without_sampling_again(
    ran: Ran,
) -> None:
    found = ran.read["resumed"]["found"]
    assert [one["min_global_steps"] for one in found] == [0] * _SAMPLES
    assert "found" not in {uid for uid, _ in ran.sessions}


async def test_a_resumed_job_gets_nothing_that_the_abandoned_run_sampled(ran: Ran) -> None:
    abandoned = {one.session_id for place, one in ran.sessions.items() if place[0] == "abandoned"}
    stale = collector_pb2.FILTER_REASON_STALE_RUN
    assert {tuple(one) for one in ran.read["resumed"]["filtered"]} == {
        (session_id, stale) for session_id in abandoned
    }


async def test_a_step_is_reported_with_verls_numbers_and_counts_of_its_sessions(ran: Ran) -> None:
    step = {name: value for name, value in ran.step.items() if name != "grad_norm"}
    assert np.isnan(ran.step["grad_norm"])
    assert (step["sessions"], step["compared_groups"], step["flat_groups"]) == (_TRAINED, 3, 1)
    assert step["trained_tokens"] == sum(int(one.loss_mask.sum()) for one in ran.trajectories())
    assert (step["masked_sessions"], step["rewarded_untrained_sessions"]) == (0, 0)
    assert (step["lag_mean"], step["lag_max"], step["entropy"]) == (0, 0, 0.5)
    assert step["logprob_difference_mean"] == pytest.approx(0.01, rel=1e-3)
    assert step["ratio_max"] == pytest.approx(np.exp(0.01), rel=1e-3)
    alarms = [one for one in ran.read["said"] if "values that are not finite: grad_norm" in one]
    assert len(alarms) == 1
