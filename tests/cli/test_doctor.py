"""What goes wrong in a mesh of real processes is named, and a mesh that is well raises nothing."""

import asyncio
import json
import re
import signal
import sqlite3
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, closing
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest

from benchmarks.chaos.disks import mounted
from rollmesh.client import Client, MeshAddresses, Observer, Session, Subscription
from rollmesh.runtime import ALARM_RULES, STEP_RULES, Alarm, AlarmLimits, raised
from rollmesh.runtime.access import Role
from rollmesh.v1 import engine_pb2
from tests.ahead import AHEAD_S
from tests.faults.test_lying_engines import answer
from tests.locks import Locks
from tests.meshes import Mesh, scripted_mesh
from tests.models import make_thinking_dir
from tests.processes import running
from tests.receivers import hanging_receiver
from tests.router.engines import Answers, noting_engine
from tests.view.test_viewer import viewer
from tests.waiting import until

QUICK = AlarmLimits(patience_s=0.5, session_s=60)
Act = Callable[[], Awaitable[object]]


@asynccontextmanager
async def observed(mesh: Mesh, limits: AlarmLimits) -> AsyncIterator[Observer]:
    addresses = MeshAddresses(
        router=mesh.address("router"),
        collector=mesh.address("collector"),
        token_file=mesh.addresses.token_file,
    )
    async with Observer(addresses, limits, 240) as observer:
        yield observer


async def named(
    mesh: Mesh, name: str, act: Act | None = None, limits: AlarmLimits = QUICK
) -> Alarm:
    """Looks until an alarm is raised, and does something before each look."""
    async with observed(mesh, limits) as observer:

        async def look() -> Alarm | None:
            found = await observer.watch()
            if act is not None:
                await act()
            return next((one for one in found if one.name == name), None)

        alarm = await until(look)
        assert alarm is not None
        return alarm


async def say(mesh: Mesh, session: Session, *said: str, **given: Any) -> str:
    """Asks for an answer to messages that alternate between user and assistant."""
    roles = ("user", "assistant") * len(said)
    chat: list[Any] = [
        {"role": role, "content": text} for role, text in zip(roles, said, strict=False)
    ]
    create = mesh.openai(session).chat.completions.create
    found = await create(model="policy", messages=chat, **given)
    return found.choices[0].message.content or ""


async def turns(
    mesh: Mesh, client: Client, count: int, purpose: Any = "train", **given: Any
) -> None:
    """Sessions of one turn, all at once."""

    async def one(at: int) -> None:
        async with client.session(purpose=purpose) as session:
            await say(mesh, session, f"Question {at}", **given)

    async with asyncio.TaskGroup() as tasks:
        for at in range(count):
            tasks.create_task(one(at))


# Each is made to go wrong.


async def test_a_killed_collector_and_a_frozen_gateway_are_silent_and_hold_up_nothing(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollmesh.client.observer._LOOK_S", 0.5)
    await mesh.processes["collector"].kill()
    assert (await named(mesh, "server_silent")).where == mesh.address("collector")
    await mesh.start("collector")
    mesh.processes["gateway"].freeze()
    try:
        alarm = await named(mesh, "server_silent")
    finally:
        mesh.processes["gateway"].thaw()
    assert "gives no answer" in alarm.message


async def test_an_engine_that_lies_is_left_out(mesh: Mesh) -> None:
    async def certain(request: engine_pb2.GenerateRequest) -> Answers:
        yield answer(request, 0.5)

    async with mesh.client() as client, client.session() as held, client.session() as session:
        await say(mesh, held, "I take the other engine.")
        async with noting_engine(mesh.addresses.router, "liar") as engine:
            engine.answers = certain
            await say(mesh, session, "And I this one.")
            alarm = await named(mesh, "engine_left_out")
    assert (alarm.where, "above 0" in alarm.message) == ("liar", True)


async def test_an_engine_that_refuses_the_weights_is_behind(mesh: Mesh) -> None:
    async with mesh.client() as client, noting_engine(mesh.addresses.router, "late") as engine:
        engine.refuses = True
        with pytest.raises(Exception, match="late"):
            await client.push_weights({"w": np.zeros(1, np.float32)}, 1)
        assert (await named(mesh, "engine_behind")).where == "late"


@pytest.mark.long
async def test_an_engine_slower_than_its_peer_by_half_is_named(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    async with scripted_mesh(tmp_path, tokenizer_dir, tokens_per_second=400) as mesh:
        slow = mesh.flags("engine") | {"port": 0, "tokens_per_second": 20, "engine_id": "slow"}
        await mesh.run("engine", "slow", **slow)
        async with mesh.client() as client:
            alarm = await named(mesh, "engine_slow", lambda: turns(mesh, client, 12))
    assert alarm.where == "slow"


@pytest.mark.long
async def test_log_probs_that_are_no_numbers_and_a_cache_that_collapses_are_named(
    mesh: Mesh,
) -> None:
    hits = 0

    async def broken(request: engine_pb2.GenerateRequest) -> Answers:
        response = answer(request, float("nan"))
        response.finish.cached_tokens = hits
        yield response

    async with mesh.client() as client, noting_engine(mesh.addresses.router, "broken") as engine:
        engine.answers = broken
        await mesh.processes["engine"].kill()
        text, hits = "many words " * 150, 1000

        async def ask() -> None:
            async with client.session() as session:
                await say(mesh, session, text)

        for _ in range(4):
            await ask()
        assert (await named(mesh, "logprobs_not_finite")).where == "broken"
        hits = 0
        alarm = await named(mesh, "cache_collapses", ask)
    assert "0% of prompt tokens" in alarm.message


@pytest.mark.long
async def test_a_queue_and_an_outbox_that_only_grow_are_named(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    async with scripted_mesh(tmp_path, tokenizer_dir, lease_capacity=1) as mesh:
        async with mesh.client() as client, AsyncExitStack() as stack:
            await client.pause_engines()
            tasks: list[asyncio.Task[str]] = []
            group = await stack.enter_async_context(asyncio.TaskGroup())

            async def ask() -> None:
                session = await stack.enter_async_context(client.session())
                tasks.append(group.create_task(say(mesh, session, "Is it my turn?")))
                await asyncio.sleep(0)

            alarm = await named(mesh, "queue_grows", ask)
            assert alarm.where == mesh.address("router")
            await client.resume_engines()
            await asyncio.wait(tasks)
        async with mesh.client() as client:
            await mesh.processes["collector"].kill()

            async def close() -> None:
                async with client.session():
                    pass

            alarm = await named(mesh, "outbox_grows", close)
    assert "closed sessions wait for the collector" in alarm.message


async def test_a_session_that_is_set_aside_is_named(mesh: Mesh) -> None:
    async with mesh.client() as client:
        session = await client.open_session(client.session_request())
        await say(mesh, session, "Hello.")
        await mesh.processes["gateway"].kill()
        with closing(sqlite3.connect(mesh.folder / "gateway" / "journal.sqlite")) as db, db:
            db.execute("UPDATE sessions SET spec = 'x'")
        await mesh.start("gateway")
        alarm = await named(mesh, "dead_letters")
    assert alarm.message.startswith("1 sessions are set aside")


async def test_a_disk_that_is_full_is_named(tmp_path: Path, tokenizer_dir: Path) -> None:
    with mounted(tmp_path / "small", 32) as disk:
        if disk is None:
            pytest.skip("a file system cannot be mounted here")
        first = {"collector": {"data_dir": tmp_path / "small" / "collector"}}
        async with scripted_mesh(tmp_path, tokenizer_dir, first=first) as mesh:
            disk.fill()
            alarm = await named(mesh, "disk_low")
    assert alarm.where == mesh.address("collector")
    assert "has 0 MiB free" in alarm.message


@pytest.mark.long
async def test_a_clock_that_is_ahead_is_named(mesh: Mesh) -> None:
    flags = {**mesh.flags("gateway"), "port": 0, "gateway_id": "ahead"}
    flags["data_dir"] = mesh.folder / "ahead"
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.ahead", "rollmesh.gateway", *arguments),
        stdout=PIPE, stderr=PIPE,
    )  # fmt: skip
    try:
        alarm = await named(mesh, "clocks_apart")
    finally:
        process.kill()
        await process.communicate()
    assert alarm.where == "ahead"
    # The clock is read while the mesh is busy: what a look took is in the figure.
    told = re.match(r"its clock is (\d+\.\d) s ahead of the others\.", alarm.message)
    assert told is not None, alarm.message
    assert float(told[1]) == pytest.approx(AHEAD_S, rel=0.5)


@pytest.mark.long
async def test_a_session_without_progress_and_a_consumer_that_nobody_reads_are_named(
    mesh: Mesh,
) -> None:
    async with mesh.client() as client:
        async with client.subscribe("gone", unit="session"):
            await client.state_dict("gone")  # waits for the consumer
        async with client.session() as session:
            await say(mesh, session, "Hello.")
            alarm = await named(mesh, "session_stalls", limits=AlarmLimits(session_s=0.05))
            assert alarm.where == session.session_id
        assert (await named(mesh, "consumer_unread")).where == "gone"


@pytest.mark.long
async def test_answers_that_always_end_by_length_and_echoes_that_differ_are_named(
    mesh: Mesh,
) -> None:
    async with mesh.client() as client:
        await turns(mesh, client, 20, max_tokens=2)
        assert "20 of 20" in (await named(mesh, "always_by_length")).message

        async def echo() -> None:
            async with client.session() as session:
                answered = await say(mesh, session, "Hello.")
                await say(mesh, session, "Hello.", f"{answered}\n", "And then?")

        alarm = await named(mesh, "echo_drifts", echo)
    assert "LENIENT_ECHO" in alarm.message


@pytest.mark.long
async def test_a_template_that_rewrites_earlier_turns_is_named(tmp_path: Path) -> None:
    rules = [
        ("Think.", "<think>\nHard.\n</think>\n\nDone."),
        ("More.", "<think>\nSo.\n</think>\n\nYes."),
    ]
    model = make_thinking_dir(tmp_path / "model")
    async with scripted_mesh(tmp_path, model, rules) as mesh, mesh.client() as client:

        async def think() -> None:
            async with client.session() as session:
                said = ["Think.", await say(mesh, session, "Think.")]
                await say(mesh, session, *said, "More.")

        alarm = await named(mesh, "history_rewritten", think)
    assert "TEMPLATE_REWRITE" in alarm.message


STEPS: dict[str, list[dict[str, float]]] = {
    "not_finite": [{"loss": float("nan")}],
    "rewarded_without_tokens": [{"rewarded_untrained_sessions": 2}],
    "everything_masked": [{"sampled_tokens": 9, "trained_tokens": 0}],
    "no_variance": [{"compared_groups": 2, "flat_groups": 2}] * 3,
    "version_stands": [{"policy_version": 7}] * 20,
    "lag_grows": [{"lag_mean": lag} for lag in (1, 1, 1, 2, 3, 4)],
    "logprob_difference_grows": [{"logprob_difference_mean": 3.0**at} for at in range(8)],
}
"""What trainers report, by the alarm that it raises."""


@pytest.mark.long
async def test_every_alarm_of_a_trainer_is_named_by_the_doctor_the_metrics_and_the_viewer(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    first = {"collector": {"metrics_port": 0}}
    async with scripted_mesh(tmp_path, tokenizer_dir, first=first) as mesh:
        async with mesh.client() as client, AsyncExitStack() as stack:
            for name, steps in STEPS.items():
                await stack.enter_async_context(client.subscribe(name, unit="session"))
                await client.state_dict(name)  # waits for the consumer
                for at, metrics in enumerate(steps):
                    await client.report_step(name, at, metrics)
            async with observed(mesh, QUICK) as observer:
                found = await observer.watch()
            assert {one.name: one.where for one in found} == {name: name for name in STEPS}
            exported = await mesh.processes["collector"].samples("rollmesh_alarm{")
            labels = {f'rollmesh_alarm{{name="{name}",where="{name}"}}' for name in STEPS}
            assert exported.keys() == labels
            async with viewer(mesh) as http:

                async def shown() -> bool:
                    seen = (await http.get("/api/alarms")).json()["alarms"]
                    return {one["name"]: one["message"] for one in seen} == {
                        one.name: one.message for one in found
                    }

                await until(shown)


def test_every_alarm_is_injected_into_a_mesh() -> None:
    text = Path(__file__).read_text()
    assert [rule.name for rule in ALARM_RULES if f'"{rule.name}"' not in text] == []
    assert STEPS.keys() == {rule.name for rule in STEP_RULES}


# The command.


async def doctor(*flags: str, code: int = 0) -> str:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "rollmesh.cli.doctor", *flags, stdout=PIPE, stderr=PIPE
    )
    async with asyncio.timeout(90):
        output, errors = await process.communicate()
    assert process.returncode == code, errors
    return output.decode() if code != 2 else errors.decode()


async def test_the_command_names_alarms_and_ends_with_1(mesh: Mesh) -> None:
    where = ("--router", mesh.address("router"), "--collector", mesh.address("collector"))
    quick = ("--for=1s", "--every=0.2")
    assert "nothing is wrong: 4 servers" in await doctor(*where, *quick)
    async with mesh.client() as client, client.subscribe("trainer"):
        await client.state_dict("trainer")
        await client.report_step("trainer", 1, {"loss": float("nan")})
        said = await doctor(*where, *quick, code=1)
        assert said.splitlines()[0] == "not_finite  trainer"
        assert "Restore the last checkpoint" in said.splitlines()[1]
        (line,) = (await doctor(*where, *quick, "--json", code=1)).splitlines()
        assert json.loads(line)["name"] == "not_finite"
    assert "--for" in await doctor("--for=soon", code=2)
    assert "at least 3.6" in await doctor("--patience=30m", "--every=1s", code=2)


async def test_a_mesh_that_does_not_answer_is_a_finding() -> None:
    said = await doctor("--router=127.0.0.1:9", "--for=0.2", "--every=0.1", code=1)
    assert said.startswith("server_silent  127.0.0.1:9\n")


async def test_it_ends_and_names_servers_that_accept_and_never_answer() -> None:
    async with hanging_receiver() as router, hanging_receiver() as collector:
        addresses = [one.removeprefix("http://") for one in (router, collector)]
        where = ("--router", addresses[0], "--collector", addresses[1])
        said = await doctor(*where, "--for=1", "--every=1", code=1)
    for one in addresses:
        assert f"server_silent  {one}\n" in said


async def test_it_watches_until_it_is_stopped_and_serves_the_gauge_of_alarms(mesh: Mesh) -> None:
    where = ("--router", mesh.address("router"), "--collector", mesh.address("collector"))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "rollmesh.cli.doctor", *where),
        *("--watch", "--every=0.2", "--metrics-port=0"),
        stdout=PIPE, stderr=PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stderr is not None
    gauge = f'rollmesh_alarm{{name="server_silent",where="{mesh.address("collector")}"}} 1.0'
    try:
        async with asyncio.timeout(90), httpx2.AsyncClient() as http:
            url = (await process.stderr.readline()).decode().split()[-1]
            await mesh.processes["collector"].kill()
            assert b"server_silent" in await process.stdout.readline()
            await process.stdout.readline()

            async def exposed() -> bool:
                return gauge in (await http.get(url)).text

            await until(exposed)
            await mesh.start("collector")
            assert b"cleared  server_silent" in await process.stdout.readline()
            process.send_signal(signal.SIGINT)
            assert await process.wait() == 1
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def test_operators_and_trainers_see_alarms_and_agents_none(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    locks = Locks(tmp_path / "locks")
    async with scripted_mesh(tmp_path, tokenizer_dir, locks=locks) as mesh:
        seen = {}
        for role in (Role.OPERATOR, Role.TRAINER, Role.AGENT):
            addresses = MeshAddresses(
                router=mesh.address("router"),
                collector=mesh.address("collector"),
                token_file=str(locks.token_file(role)),
            )
            async with Observer(addresses) as observer:
                seen[role] = await observer.look()
    operator, trainer, agent = (seen[one] for one in (Role.OPERATOR, Role.TRAINER, Role.AGENT))
    assert all(one.samples for one in (*operator.servers, *trainer.servers))
    assert (operator.sessions, trainer.sessions) == ([], None)
    assert not any(one.samples or one.silent for one in agent.servers)
    assert not raised([agent, agent])


async def test_a_caller_to_whom_no_server_shows_anything_is_told(tmp_path: Path) -> None:
    said = "router: no server shows its state; give --router, and an operator's --token-file"
    assert said in await doctor("--router=", code=2)
    locks = Locks(tmp_path / "locks")
    lock = locks.flags(Role.ROUTER)
    async with running("router", tmp_path / "router", data_dir=tmp_path / "data", **lock) as router:
        for words in ((), ("--watch",), (f"--token-file={locks.token_file(Role.AGENT)}",)):
            assert said in await doctor(f"--router={router.address}", *words, code=2)


# A mesh that is well.


async def test_a_mesh_that_is_well_raises_nothing(tmp_path: Path, tokenizer_dir: Path) -> None:
    found: set[Alarm] = set()
    looks = 0

    async def watch(observer: Observer) -> None:
        nonlocal looks
        while True:
            found.update(await observer.watch())
            looks += 1

    async def read(deliveries: Subscription, count: int) -> None:
        for _ in range(count):
            await deliveries.acknowledge(await anext(deliveries))

    async with AsyncExitStack() as stack:
        mesh = Mesh(tmp_path, tokenizer_dir, stack)
        await mesh.start("router")
        await mesh.start("collector")
        observer = await stack.enter_async_context(observed(mesh, AlarmLimits(patience_s=10)))
        client = await stack.enter_async_context(mesh.client())
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(watch(observer))
            for service in ("gateway", "engine", "sidecar"):  # while it starts
                await mesh.start(
                    service, **({"tokens_per_second": 400} if service == "engine" else {})
                )
            await until(lambda: looks > 8)  # and does nothing
            async with client.subscribe("trainer", unit="session") as deliveries:
                for version in (1, 2, 3):  # training, and pushes in the middle
                    async with asyncio.TaskGroup() as step:
                        step.create_task(turns(mesh, client, 24))
                        weights = {"w": np.zeros(1 << 20, np.float32)}
                        step.create_task(client.push_weights(weights, version))
                    await read(deliveries, 24)
                    await client.report_step("trainer", version, {"loss": 1.0})
                await turns(mesh, client, 48, purpose="eval")
                seen = looks
                await until(lambda: looks > seen + 8)
            watching.cancel()
    assert found == set()
