import asyncio
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from rollmesh.client import Client, Rewards, Session
from rollmesh.client.rollouts.rollout import rollout
from rollmesh.client.runners.ray_tasks import RayRunner
from rollmesh.runtime.errors import InvalidFieldError
from tests.client.runners.test_commands import appears
from tests.sidecar.scripted_gateway import ScriptedGateway
from tests.waiting import until

SESSION = Session("5e55", "rmk-5e55-secret", "http://127.0.0.1:1/sessions/rmk-5e55-secret/v1")
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::FutureWarning")


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """A real Ray on this machine, with two places for tasks."""
    ray.init(
        address="local",  # not one that runs on this machine already
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        configure_logging=False,
    )
    yield
    ray.shutdown()


def runner(agent: Any, **settings: Any) -> RayRunner:
    return RayRunner(agent=agent, options={"num_cpus": 1}, **settings)


async def test_without_a_connection_to_ray_nothing_is_started() -> None:
    assert not ray.is_initialized()
    with pytest.raises(InvalidFieldError, match=r"ray\.init"):
        await runner(len)("sample", SESSION)


@pytest.mark.usefixtures("cluster")
async def test_a_task_finds_url_key_and_model_and_leaves_none_of_it_behind() -> None:
    def agent(sample: Any) -> Any:
        names = ("OPENAI_BASE_URL", "OPENAI_API_KEY", "OPENAI_MODEL", "ROLLMESH_SESSION_ID")
        return [sample, *(os.environ.get(name) for name in names)]

    async def asynchronous(sample: Any) -> Any:
        return agent(sample)

    expected = ["q", SESSION.base_url, SESSION.api_key, "m", "5e55"]
    assert await runner(agent, model="m")("q", SESSION) == expected
    assert await runner(asynchronous, model="m")("q", SESSION) == expected
    bare = ray.remote(lambda: os.environ.get("OPENAI_API_KEY"))
    assert await asyncio.gather(*(bare.remote() for _ in range(4))) == [None] * 4


@pytest.mark.usefixtures("cluster")
async def test_a_task_that_fails_and_one_whose_worker_is_killed_leave_the_others_alone(
    gateway: ScriptedGateway, client: Client, tmp_path: Path
) -> None:
    begun = tmp_path / "begun"

    def agent(sample: str) -> Any:
        if sample == "fails":
            raise ValueError("confused")
        if sample == "killed":
            with begun.open("a") as file:
                file.write("begun\n")
            os.kill(os.getpid(), 9)
        return Rewards(session=1.0, turns={"3": 0.5})

    samples = ["fails", "killed", "works"]
    async with asyncio.timeout(100):
        summary = await rollout(client, samples, runner=runner(agent), n=1)
    assert summary.counts == {"FAILED": 2, "COMPLETED": 1}
    assert set(summary.errors) == {"RayTaskError(ValueError)", "WorkerCrashedError"}
    assert begun.read_text() == "begun\n"  # Ray would begin it again, in the same session
    rewards = [closed.rewards for closed in gateway.closed if closed.rewards.HasField("reward")]
    assert [(reward.reward, dict(reward.turn_rewards)) for reward in rewards] == [(1.0, {3: 0.5})]


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize(
    "deaf",
    [
        pytest.param(False, id="an agent that ends"),
        pytest.param(True, id="one that goes on"),
    ],
)
async def test_a_task_that_is_to_end_is_interrupted_and_its_worker_killed_where_it_goes_on(
    tmp_path: Path,
    deaf: bool,  # noqa: FBT001 - a parameter of the table
) -> None:
    begun, interrupted = tmp_path / "begun", tmp_path / "interrupted"

    def agent(sample: Any) -> None:
        while True:
            try:
                if not begun.exists():  # in here: it is interrupted as soon as it says so
                    begun.write_text(f"{os.getpid()}\n")
                time.sleep(0.01)  # Ray interrupts between two system calls
            except KeyboardInterrupt:
                interrupted.write_text("interrupted\n")
                if not deaf:
                    raise

    async with asyncio.timeout(100):
        running = asyncio.ensure_future(runner(agent, grace_s=600)(None, SESSION))
        pid = int(await appears(begun))
        running.cancel()
        await appears(interrupted)
        if deaf:
            assert not running.done()
            running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        if deaf:
            await until(lambda: not psutil.pid_exists(pid))
    assert psutil.pid_exists(pid) != deaf
