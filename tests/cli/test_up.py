"""`rollmesh up`: processes that die restart at their address, and none outlives the command."""

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from openai import AsyncOpenAI

from rollmesh.cli.certs.making import make_certificates
from rollmesh.cli.up.supervisor import free_ports
from rollmesh.client import Client, MeshAddresses
from rollmesh.runtime.access.identity import CallerConfig, Identity
from rollmesh.runtime.access.making import write_private
from rollmesh.runtime.errors import RollmeshError
from rollmesh.runtime.rpc.channels import open_channel
from rollmesh.v1 import collector_pb2, collector_pb2_grpc

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


@dataclass
class Up:
    """A running `rollmesh up`."""

    process: asyncio.subprocess.Process
    line: dict[str, Any]

    @property
    def addresses(self) -> MeshAddresses:
        return MeshAddresses.from_json(json.dumps(self.line))

    async def serving(self, address: str) -> None:
        """Waits until a service answers that it is ready."""
        identity = Identity(self.addresses)
        async with asyncio.timeout(60), open_channel(address, identity=identity) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            watching = stub.Watch(health_pb2.HealthCheckRequest(), wait_for_ready=True)
            async for seen in watching:
                if seen.status == health_pb2.HealthCheckResponse.SERVING:
                    return


@asynccontextmanager
async def up(folder: Path, config: str) -> AsyncIterator[asyncio.subprocess.Process]:
    path = folder / "mesh.toml"
    path.write_text(config)
    command = ("-m", "rollmesh.cli", "up", f"--config={path}")
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
async def running_mesh(folder: Path, config: str) -> AsyncIterator[Up]:
    async with up(folder, config) as process, asyncio.timeout(170):
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


def test_the_ports_of_a_mesh_are_its_own_also_while_nobody_listens() -> None:
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


async def test_what_is_killed_comes_back_at_its_address(mesh: Up) -> None:
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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_stops_everything(mesh: Up, number: signal.Signals) -> None:
    family = psutil.Process(mesh.process.pid).children(recursive=True)
    assert len(family) == len(mesh.line["pids"]) == 7
    mesh.process.send_signal(number)
    async with asyncio.timeout(60):
        assert await mesh.process.wait() == 0
    assert [one for one in family if one.is_running()] == []


async def test_nothing_outlives_a_supervisor_that_was_killed(mesh: Up) -> None:
    family = psutil.Process(mesh.process.pid).children(recursive=True)
    mesh.process.kill()
    alive = (await asyncio.to_thread(psutil.wait_procs, family, 60))[1]
    assert alive == []


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


async def test_a_mesh_with_certificates_says_how_a_trainer_gets_in(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    write_private(tmp_path / "certs", make_certificates([], datetime.now(UTC), 1))
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


async def test_help_says_what_there_is() -> None:
    command = [sys.executable, "-m", "rollmesh.cli", "--help"]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdout=pipe, env=dict(os.environ))
    async with asyncio.timeout(60):
        said = (await process.communicate())[0].decode()
    assert process.returncode == 0
    assert all(name in said for name in ("up", "router", "engine", "gateway", "sidecar", "scorer"))
