"""Steps that a trainer reports, and the alarms that they raise."""

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollmesh.batches import step_metrics
from rollmesh.client import Client, MeshAddresses, PolicyRun
from rollmesh.client.sync import Client as SyncClient
from rollmesh.runtime.errors import ConsumerUnknownError, InvalidFieldError, RunAbandonedError
from rollmesh.v1 import collector_pb2 as pb
from tests.batches.records import session, trajectory
from tests.collector.collectors import TIMEOUT_S, collector_at
from tests.collector.postgres_server import postgres_database
from tests.processes import running

HEALTHY = {"sessions": 8.0, "sampled_tokens": 80.0, "trained_tokens": 60.0, "flat_groups": 1.0}
HEALTHY |= {"compared_groups": 2.0, "lag_mean": 0.5, "logprob_difference_mean": 1e-6}


def client_at(collector: str) -> Client:
    return Client(MeshAddresses(router="", collector=collector))


async def report(client: Client, steps: Iterable[dict[str, Any]], consumer: str = "c") -> list[str]:
    """Reports healthy steps with these values. Returns the names of the last one's alarms."""
    alarms: list[pb.Alarm] = []
    for at, metrics in enumerate(steps):
        alarms = await client.report_step(consumer, at, HEALTHY | metrics)
    return [one.name for one in alarms]


@pytest.mark.parametrize(
    ("steps", "alarm"),
    [
        pytest.param([{}] * 20, [], id="healthy"),
        pytest.param([{"loss": float("nan")}], ["not_finite"], id="NaN"),
        pytest.param([{"loss": float("nan")}, {"loss": 1.0}], [], id="NaN, and then none"),
        pytest.param(
            [{"rewarded_untrained_sessions": 2}], ["rewarded_without_tokens"], id="reward alone"
        ),
        pytest.param([{"trained_tokens": 0}], ["everything_masked"], id="all masked"),
        pytest.param([{"trained_tokens": 0, "sampled_tokens": 0}], [], id="nothing sampled"),
        pytest.param([{"flat_groups": 2}] * 3, ["no_variance"], id="three steps without variance"),
        pytest.param([{"flat_groups": 2}] * 2, [], id="two steps without variance"),
        pytest.param([{"flat_groups": 0, "compared_groups": 0}] * 3, [], id="no groups"),
        pytest.param(
            [{"lag_mean": lag} for lag in (1, 1, 1, 2, 3, 4)], ["lag_grows"], id="growing lag"
        ),
        pytest.param([{"lag_mean": 5}] * 6, [], id="a lag that stays"),
        pytest.param([{"lag_mean": lag} for lag in (1, 9)], [], id="two steps show no growth"),
        pytest.param(
            [{"logprob_difference_mean": 0.001 * 3**at} for at in range(8)],
            ["logprob_difference_grows"],
            id="growing difference",
        ),
    ],
)
async def test_steps_that_go_wrong_silently_raise_an_alarm(
    steps: list[dict[str, Any]], alarm: list[str], client: Client
) -> None:
    assert await report(client, steps) == alarm
    (standing,) = (await client.stats()).consumers
    assert ([one.name for one in standing.alarms], standing.step) == (alarm, len(steps) - 1)


@pytest.fixture
async def client(tmp_path: Path) -> Any:
    async with asyncio.timeout(TIMEOUT_S), collector_at(tmp_path) as address:
        async with client_at(address) as client, client.subscribe("c"):
            await client.state_dict("c")  # waits for the consumer
            yield client


async def test_a_trainer_that_went_back_replaces_the_steps_of_the_abandoned_one(
    client: Client,
) -> None:
    await report(client, [{"at": at} for at in range(6)])
    for step in (3, 3, 4):
        await client.report_step("c", step, {"at": -step})
    found = [(one.step, one.metrics["at"]) for one in await client.steps("c")]
    assert found == [(0, 0), (1, 1), (2, 2), (3, -3), (4, -4)]
    assert [one.step for one in await client.steps("c", last=2)] == [3, 4]


async def test_a_step_with_a_single_number_raises_its_alarm_and_leaves_the_counts_readable(
    client: Client,
) -> None:
    for name in ("rewarded_untrained_sessions", "sampled_tokens", "flat_groups", "lag_mean"):
        for value in (2.0, float("nan"), float("inf")):
            await client.report_step("c", 0, {name: value})
            (standing,) = (await client.stats()).consumers
            assert standing.step == 0
    alarms = await client.report_step("c", 0, {"rewarded_untrained_sessions": 2})
    assert [one.name for one in alarms] == ["rewarded_without_tokens"]


async def test_a_trainer_whose_run_was_abandoned_reports_nothing(client: Client) -> None:
    """As after `open_run` and `load_state_dict` of the trainer that was restored in its place."""
    run = PolicyRun(number=1, model="policy", ancestors=[4])
    state = await client.state_dict("c")
    async with client_at(client.addresses.collector) as restored:
        restored.follow_run(run)
        await restored.load_state_dict(state)
        await restored.report_step("c", 5, {"at": 1})
        with pytest.raises(RunAbandonedError, match=r"^run: run 0 is abandoned"):
            await client.report_step("c", 4, {"at": 0})
        (step,) = await restored.steps("c")
    assert (step.step, step.metrics["at"]) == (5, 1)


async def test_two_trainers_that_report_one_step_leave_one_of_their_reports(
    client: Client,
) -> None:
    values = range(8)
    await asyncio.gather(*(client.report_step("c", 5, {"a": v, "b": v}) for v in values))
    (step,) = await client.steps("c")
    assert step.metrics["a"] == step.metrics["b"]


async def test_an_array_becomes_its_mean_minimum_and_maximum(client: Client) -> None:
    import torch

    given = {"ratio": np.array([[0.5, 1.5], [1.0, 1.0]]), "kl": torch.tensor([1.0, 2.0])}
    await client.report_step("c", 0, {**given, "empty": [], "loss": torch.tensor(3.0)})
    (step,) = await client.steps("c")
    assert dict(step.metrics) == {
        "ratio_mean": 1.0, "ratio_min": 0.5, "ratio_max": 1.5,
        "kl_mean": 1.5, "kl_min": 1.0, "kl_max": 2.0, "loss": 3.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("step", "metrics", "said"),
    [
        pytest.param(0, {"": 1.0}, "1 to 64 letters", id="no name"),
        pytest.param(0, {"a b": 1.0}, "'a b' is not", id="a blank"),
        pytest.param(0, {"é": 1.0}, "is not 1 to 64", id="a letter outside ASCII"),
        pytest.param(0, {"x": "much"}, r"metrics\.x: is no number", id="a text"),
        pytest.param(0, {f"m{at}": 1.0 for at in range(65)}, "has 65 names", id="65 names"),
        pytest.param(2**63, {}, r"step\.step: is", id="a step that no store holds"),
        pytest.param(-1, {}, "step", id="a step below 0"),
    ],
)
async def test_a_report_that_cannot_be_stored_is_refused_by_field(
    step: int, metrics: dict[str, Any], said: str, client: Client
) -> None:
    with pytest.raises(InvalidFieldError, match=said):
        await client.report_step("c", step, metrics)
    assert not await client.steps("c")


async def test_steps_of_a_deleted_consumer_are_gone(client: Client) -> None:
    await client.report_step("c", 7, {})
    with pytest.raises(ConsumerUnknownError):
        await client.report_step("unknown", 0, {})
    await client.delete_consumer("c")
    async with client.subscribe("c"):
        await client.state_dict("c")
        assert not await client.steps("c")


@pytest.mark.long
@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
async def test_the_last_thousand_steps_survive_the_death_of_a_collector(
    kind: str, tmp_path: Path
) -> None:
    def report_all(address: str) -> None:
        with SyncClient(MeshAddresses(router="", collector=address)) as client:
            for step in range(1005):
                client.report_step("c", step, {"reward_mean": step})

    async with asyncio.timeout(TIMEOUT_S), postgres_database() as database:
        flags: dict[str, Any] = {"data_dir": tmp_path / "data", "port": 0}
        flags["store"] = database.url if kind == "postgres" else "sqlite"
        async with running("collector", tmp_path, **flags) as process:
            async with client_at(process.address) as client, client.subscribe("c"):
                await client.state_dict("c")
                await asyncio.to_thread(report_all, process.address)
            await process.kill()
        async with running("collector", tmp_path, **flags) as process:
            async with client_at(process.address) as client:
                steps = await client.steps("c", last=1000)
    assert [one.step for one in steps] == list(range(5, 1005))
    assert steps[-1].metrics["reward_mean"] == 1004


async def test_metrics_of_delivered_sessions_raise_their_alarm(client: Client) -> None:
    masked = session("s", [trajectory("t", [(2, False, False), (3, True, False)])])
    alarms: list[pb.Alarm] = []
    for step in range(3):
        alarms = await client.report_step("c", step, step_metrics([masked]))
    assert {one.name for one in alarms} == {"rewarded_without_tokens", "everything_masked"}


async def test_alarms_are_exported_while_they_last(tmp_path: Path) -> None:
    gauge = 'rollmesh_alarm{name="not_finite",where="c"}'
    async with running("collector", tmp_path, data_dir=tmp_path, metrics_port=0) as process:
        async with client_at(process.address) as client, asyncio.timeout(TIMEOUT_S):
            async with client.subscribe("c"):
                await client.state_dict("c")
                for values, exported in (
                    (float("nan"), {gauge: 1.0}),
                    (1.0, {}),
                    (float("nan"), {gauge: 1.0}),
                ):
                    await report(client, [{"loss": values}])
                    assert await process.samples("rollmesh_alarm{") == exported
            await client.delete_consumer("c")
            assert await process.samples("rollmesh_alarm{") == {}
