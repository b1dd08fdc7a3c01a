"""`rollmesh up`: processes that die restart at their address, and none outlives the command."""

import asyncio
import json
import os
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import httpx2
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from openai import AsyncOpenAI

from rollmesh.cli import Supervisor, free_ports
from rollmesh.client import Client, MeshAddresses
from rollmesh.launch import ProcessSpec
from rollmesh.runtime.access import CallerConfig, Identity
from rollmesh.runtime.errors import RollmeshError
from rollmesh.runtime.rpc import open_channel
from rollmesh.v1 import collector_pb2, collector_pb2_grpc
from tests.trial_certificates import copy_certificates
from tests.waiting import until

MESH = """
[mesh]
data_dir = "{data}"
model_path = "{model}"
engines = {engines}
routers = 2

[engine]
backend = "scripted"
vocabulary_tokens = 500
reply_tokens = 4
"""
VLLM = """
[mesh]
data_dir = "{data}"
model_path = "{model}"

[engine]
backend = "vllm"
dtype = "float32"
enforce_eager = true
max_context_tokens = 2048
"""


@dataclass
class Up:
    """A running `rollmesh up`."""

    process: asyncio.subprocess.Process
    line: dict[str, Any]

    @property
    def addresses(self) -> MeshAddresses:
        return MeshAddresses.from_json(json.dumps(self.line))

    async def serving(self, address: str, within_s: float = 60) -> None:
        """Waits until a service answers that it is ready. It may die and come back meanwhile."""
        identity = Identity(self.addresses)
        async with asyncio.timeout(within_s), open_channel(address, identity=identity) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            while True:
                watching = stub.Watch(health_pb2.HealthCheckRequest(), wait_for_ready=True)
                with suppress(grpc.aio.AioRpcError):
                    async for seen in watching:
                        if seen.status == health_pb2.HealthCheckResponse.SERVING:
                            return


def _listening(address: str, data_dir: Path | None = None) -> tuple[str, ...]:
    where = (f"--data-dir={data_dir}",) if data_dir else ()
    return f"--port={address.rpartition(':')[2]}", *where


@asynccontextmanager
async def up(folder: Path, config: str, *flags: str) -> AsyncIterator[asyncio.subprocess.Process]:
    path = folder / "mesh.toml"
    path.write_text(config)
    command = ("-m", "rollmesh.cli", "up", f"--config={path}", *flags)
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *command,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        limit=2**20,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


@asynccontextmanager
async def running_mesh(
    folder: Path, config: str, *flags: str, within_s: float = 170
) -> AsyncIterator[Up]:
    async with up(folder, config, *flags) as process, asyncio.timeout(within_s):
        assert process.stdout is not None
        async for line in process.stdout:
            if line.startswith(b"UP "):
                yield Up(process, json.loads(line.removeprefix(b"UP ")))
                return
        raise AssertionError((await process.communicate())[1].decode())


@pytest.fixture
async def mesh(tmp_path: Path, tokenizer_dir: Path) -> AsyncIterator[Up]:
    config = MESH.format(data=tmp_path / "data", model=tokenizer_dir, engines=2)
    async with running_mesh(tmp_path, config) as mesh:
        yield mesh


async def test_progress_is_shown_while_a_process_is_not_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Supervisor, "PROGRESS_S", 0.05)
    with closing(free_ports()) as ports:
        router, collector, database = (f"127.0.0.1:{next(ports)}" for _ in range(3))
        flags = f"--store=postgresql://rollmesh@{database}/rollmesh", f"--data-dir={tmp_path}"
        specs = [
            ProcessSpec("router", "router", router, flags=_listening(router, tmp_path)),
            ProcessSpec(
                "collector", "collector", collector, (*_listening(collector), *flags), grace_ms=0
            ),
        ]
        environments = {spec.name: dict(os.environ) for spec in specs}
        said = ""

        async def until_shown(pattern: str) -> None:
            def shown() -> bool:
                nonlocal said
                said += capfd.readouterr().err
                return re.search(pattern, said, re.MULTILINE) is not None

            await until(shown)

        log = tmp_path / "logs" / "collector.log"
        log.parent.mkdir()
        log.write_text("the words of an earlier run\n")
        supervisor = Supervisor(specs, environments, log.parent, 120)
        stop = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(supervisor.run(stop))
            await until_shown(r"^rollmesh up: router is ready after \d+ s$")
            await until_shown(
                r"^rollmesh up: collector is not ready after \d+ s: waiting for the database: ."
            )
            stop.set()
    assert "the words of an earlier run" not in said
    begins = json.loads(log.read_text().splitlines()[1])
    assert begins["event"] == "a run of rollmesh up begins"
    assert begins["process"] == "collector"
    assert {"time", "version"} < set(begins)


def test_the_ports_of_a_mesh_stay_reserved_while_its_processes_restart() -> None:
    with closing(free_ports()) as ports:
        address = "127.0.0.1", next(ports)
        for _ in range(2):  # a service that is started again
            with socket.create_server(address):
                pass
            with socket.socket() as other, pytest.raises(OSError, match="in use"):
                other.bind(address)


async def test_an_agent_is_answered_at_the_addresses_that_are_printed(mesh: Up) -> None:
    async with Client(mesh.addresses) as client, client.session() as session:
        async with AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as agent:
            answer = await agent.chat.completions.create(
                model="policy", messages=[{"role": "user", "content": "hello"}], timeout=30
            )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 4
    assert set(mesh.line["engines"]) == {"engine-0", "engine-1"}
    await stranger_is_refused(mesh)


async def stranger_is_refused(mesh: Up) -> None:
    token_file = Path(mesh.line["token_file"])
    assert token_file.stat().st_mode & 0o777 == 0o600
    stranger = MeshAddresses(router=mesh.line["router"], collector=mesh.line["collector"])
    async with Client(stranger) as client:
        for call in (client.stats, client.replicas):
            with pytest.raises(RollmeshError) as refused:
                await call()
            assert refused.value.reason == "CALLER_UNKNOWN"
    identity = Identity(CallerConfig(token_file=str(token_file.with_name("operator.token"))))
    async with open_channel(mesh.line["collector"], identity=identity) as channel:
        stub: Any = collector_pb2_grpc.CollectorServiceStub(channel)
        await stub.GetStats(collector_pb2.GetStatsRequest(), timeout=30)


async def test_the_viewer_of_a_locked_mesh_shows_it_and_comes_back_after_a_kill(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    config = MESH.format(data=tmp_path / "data", model=tokenizer_dir, engines=1)
    async with (
        running_mesh(tmp_path, config, "--view=0") as mesh,
        Client(mesh.addresses) as client,
        httpx2.AsyncClient(base_url=f"http://{mesh.line['view']}", timeout=30) as http,
    ):
        async with client.session() as session:
            rows = (await http.get("/api/open")).json()["rows"]
            assert [one["session_id"] for one in rows] == [session.session_id]
        os.kill(mesh.line["pids"]["view"], signal.SIGKILL)

        async def found() -> bool:
            with suppress(httpx2.TransportError):
                return bool((await http.get("/api/sessions")).json()["total"])
            return False

        await until(found)


async def test_a_killed_process_restarts_at_its_address(mesh: Up) -> None:
    named = dict(zip(("router", "router-1"), mesh.line["router"].split(","), strict=True))
    named |= {"gateway-0": mesh.line["gateway"]}
    named |= {"collector": mesh.line["collector"], **mesh.line["engines"]}
    killed = [psutil.Process(mesh.line["pids"][name]) for name in named]
    for process in killed:
        process.kill()
    await asyncio.to_thread(psutil.wait_procs, killed, 30)
    for address in named.values():
        await mesh.serving(address)
    async with Client(mesh.addresses) as client, client.session() as session:
        assert session.session_id


@pytest.mark.long
async def test_gateways_that_serve_agents_answer_them_again_after_a_kill(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    config = MESH.format(data=tmp_path / "data", model=tokenizer_dir, engines=1)
    config = config.replace("routers = 2", "gateways = 2\nsidecars = 0").replace("500", "300")
    async with running_mesh(tmp_path, config) as mesh, Client(mesh.addresses) as client:
        assert set(mesh.line["sidecars"]) == {"gateway-0", "gateway-1"}
        assert "sidecar" not in mesh.line["pids"]
        sessions = [await client.open_session(client.session_request()) for _ in range(4)]
        served = {one.base_url.split("/")[2] for one in sessions}
        assert served <= set(mesh.line["sidecars"].values())
        for killed in ("gateway-0", "gateway-1"):
            process = psutil.Process(mesh.line["pids"][killed])
            process.kill()
            await asyncio.to_thread(psutil.wait_procs, [process], 30)
            for session in sessions:
                async with AsyncOpenAI(
                    base_url=session.base_url, api_key=session.api_key, max_retries=60
                ) as agent:
                    answer = await agent.chat.completions.create(
                        model="policy", messages=[{"role": "user", "content": killed}], timeout=30
                    )
                assert answer.usage is not None
                assert answer.usage.completion_tokens == 4


@pytest.mark.long
@pytest.mark.vllm
async def test_an_engine_of_vllm_that_is_killed_takes_its_model_along_and_comes_back(
    tmp_path: Path, model_dir: Path
) -> None:
    config = VLLM.format(data=tmp_path / "data", model=model_dir)
    async with running_mesh(tmp_path, config, within_s=570) as mesh:
        engine = psutil.Process(mesh.line["pids"]["engine-0"])
        models = engine.children(recursive=True)
        assert models
        engine.kill()
        alive = (await asyncio.to_thread(psutil.wait_procs, models, 60))[1]
        assert [one for one in alive if one.status() != psutil.STATUS_ZOMBIE] == []

        async def is_back() -> bool:
            try:
                await mesh.serving(mesh.line["engines"]["engine-0"], within_s=300)
            except grpc.aio.AioRpcError:  # an engine that loads its model may end a watch
                return False
            return True

        await until(is_back, 300)


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGINT, marks=pytest.mark.long), signal.SIGTERM]
)
async def test_a_signal_stops_everything(mesh: Up, number: signal.Signals) -> None:
    family = psutil.Process(mesh.process.pid).children(recursive=True)
    assert len(family) == len(mesh.line["pids"]) == 7
    mesh.process.send_signal(number)
    async with asyncio.timeout(60):
        said = (await mesh.process.communicate())[1].decode().splitlines()
    assert mesh.process.returncode == 0
    assert [one for one in family if one.is_running()] == []
    ready = [line.split()[2] for line in said if line.startswith("rollmesh up: ")]
    assert set(ready) == set(mesh.line["pids"])
    assert [line for line in said if "asyncio" in line] == []


@pytest.mark.long
@pytest.mark.parametrize("count", [1, 4])
async def test_a_signal_while_processes_start_stops_everything(
    tmp_path: Path, tokenizer_dir: Path, count: int
) -> None:
    config = MESH.format(data=tmp_path / "data", model=tokenizer_dir, engines=2)
    async with asyncio.timeout(170), up(tmp_path, config) as process:
        seen = psutil.Process(process.pid)
        await until(lambda: len(seen.children()) >= count)
        children = seen.children(recursive=True)
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGINT)
        said, errors = await process.communicate()
        assert process.returncode == 0, errors.decode()
    assert psutil.wait_procs(children, 30)[1] == []
    assert not [line for line in said.splitlines() if line.startswith(b"UP ")]
    assert b"Traceback" not in errors


async def test_nothing_outlives_a_supervisor_that_was_killed(mesh: Up) -> None:
    family = psutil.Process(mesh.process.pid).children(recursive=True)
    mesh.process.kill()
    alive = (await asyncio.to_thread(psutil.wait_procs, family, 60))[1]
    assert alive == []


@pytest.mark.long
@pytest.mark.vllm
async def test_nothing_outlives_a_supervisor_that_was_killed_while_vllm_loads(
    tmp_path: Path, model_dir: Path
) -> None:
    config = VLLM.format(data=tmp_path / "data", model=model_dir)
    async with asyncio.timeout(570), up(tmp_path, config) as process:
        supervisor = psutil.Process(process.pid)

        def loading() -> list[psutil.Process]:
            """Returns vLLM's processes, which have no READY line yet."""
            return [
                child
                for service in supervisor.children()
                if "rollmesh.engine" in service.cmdline()
                for child in service.children(recursive=True)
            ]

        await until(loading, 300)
        family = supervisor.children(recursive=True)
        supervisor.kill()
        alive = (await asyncio.to_thread(psutil.wait_procs, family, 60))[1]
        assert [one for one in alive if one.status() != psutil.STATUS_ZOMBIE] == []


@pytest.mark.long
async def test_a_full_disk_under_the_logs_is_said_once_and_ends_nothing(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    logs = tmp_path / "data" / "logs"
    logs.mkdir(parents=True)
    names = ("router", "router-1", "engine-0", "collector", "gateway-0", "sidecar")
    for name in names:
        (logs / f"{name}.log").symlink_to("/dev/full")
    config = MESH.format(data=tmp_path / "data", model=tokenizer_dir, engines=1)
    async with running_mesh(tmp_path, config) as mesh:
        assert set(mesh.line["pids"]) == set(names)
        for _ in range(2):
            killed = psutil.Process(mesh.line["pids"]["engine-0"])
            killed.kill()
            await asyncio.to_thread(psutil.wait_procs, [killed], 30)
            await mesh.serving(mesh.line["engines"]["engine-0"])
            (mesh.line["pids"]["engine-0"],) = (
                one.pid
                for one in psutil.Process(mesh.process.pid).children()
                if "rollmesh.engine" in one.cmdline()
            )
        mesh.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(60):
            said = (await mesh.process.communicate())[1].decode().splitlines()
    assert mesh.process.returncode == 0
    lost = [line for line in said if "No space left on device" in line]
    assert len(lost) == 1, said
    assert str(logs) in lost[0]


async def test_a_scorer_of_the_file_rewards_sessions_that_have_no_reward(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    config = MESH.format(data=tmp_path / "data", model=tokenizer_dir, engines=1)
    config += '[scorer]\nfunction = "tests.scorer.functions:behaves"\n'
    async with running_mesh(tmp_path, config) as mesh, Client(mesh.addresses) as client:
        async with client.session() as session:
            async with AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as agent:
                await agent.chat.completions.create(
                    model="policy", messages=[{"role": "user", "content": "hello"}], timeout=30
                )
        async with client.subscribe("trainer", unit="session") as sessions:
            (scored,) = (await anext(sessions)).sessions
    assert scored.reward == len(scored.trajectories[0].token_ids)


async def test_the_up_line_of_a_mesh_with_certificates_names_the_trainers_files(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    copy_certificates(tmp_path / "certs")
    config = MESH.format(data=tmp_path / "data", model=tokenizer_dir, engines=1)
    config = config.replace("[mesh]", f'[mesh]\ncertificates_dir = "{tmp_path / "certs"}"')
    async with running_mesh(tmp_path, config) as mesh:
        async with Client(mesh.addresses) as client, client.session() as session:
            assert session.session_id
        plain = replace(mesh.addresses, tls_ca_file="")
        async with Client(plain) as client:
            with pytest.raises(RollmeshError):
                await client.replicas()


async def test_a_service_that_cannot_start_ends_the_mesh_with_its_reason(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    config = MESH.format(data=tmp_path / "data", model=tokenizer_dir, engines=1)
    config += 'token_file = "/no/such/file"\n'
    async with up(tmp_path, config) as process, asyncio.timeout(120):
        said = (await process.communicate())[1].decode()
    assert process.returncode == 1
    line = said.strip().splitlines()[-1]
    assert "engine-0 ended with code 2 before it was ready: rollmesh engine: " in line
    assert "token_file: /no/such/file: " in line
    assert str(tmp_path / "data" / "logs" / "engine-0.log") in line


@pytest.mark.parametrize(
    ("config", "names"),
    [
        ("[mesh]\nengines = 0", "mesh.engines"),
        ("[mesh]\nfoo = 1", "mesh.foo"),
        ("[foo]\na = 1", "foo"),
        ("[engine]\nunknown = 1\n[sidecar]\nport = 'x'", "engine.unknown"),
        ("[engine]\nunknown = 1\n[sidecar]\nport = 'x'", "sidecar.port"),
        ("[[model]]\nname = 'a'\n[model.gateway]\nmax_sessions = 0", "model.gateway.max_sessions"),
        ("[mesh", "mesh.toml"),
    ],
)
async def test_a_bad_file_is_named(tmp_path: Path, config: str, names: str) -> None:
    async with up(tmp_path, config) as process, asyncio.timeout(60):
        said = (await process.communicate())[1].decode()
    assert process.returncode == 2
    assert names in said


async def test_help_lists_the_commands() -> None:
    command = [sys.executable, "-m", "rollmesh.cli", "--help"]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdout=pipe, env=dict(os.environ))
    async with asyncio.timeout(60):
        said = (await process.communicate())[0].decode()
    assert process.returncode == 0
    assert all(name in said for name in ("up", "router", "engine", "gateway", "sidecar", "scorer"))
