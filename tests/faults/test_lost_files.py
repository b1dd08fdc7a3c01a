"""A store whose files are removed under it: its process ends, and says of which in a sentence."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from rollmesh.runtime.rpc import open_channel
from rollmesh.v1 import collector_pb2, collector_pb2_grpc
from tests.collector.postgres_server import postgres_database
from tests.collector.records import record
from tests.processes import running


@pytest.mark.parametrize(
    ("service", "file"),
    [
        pytest.param("gateway", "journal.sqlite", id="gateway"),
        pytest.param("collector", "collector.sqlite", id="collector"),
    ],
)
async def test_a_service_whose_folder_is_removed_exits_with_one_sentence(
    tmp_path: Path, tokenizer_dir: Path, service: str, file: str
) -> None:
    data = tmp_path / "data"
    async with running("router", tmp_path, data_dir=tmp_path / "router") as router:
        gateway = {"router": router.address, "model_path": tokenizer_dir}
        flags = gateway if service == "gateway" else {}
        async with running(service, tmp_path, data_dir=data, **flags) as process:
            shutil.rmtree(data)
            code = await process.exit_code()
    written = (tmp_path / f"{service}.log").read_text().splitlines()
    said = [line for line in written if line.startswith(f"rollmesh {service}: ")]
    assert code == 1
    assert len(said) == 1
    assert said[0].startswith(f"rollmesh {service}: {data / file}: was removed or replaced")
    assert not [line for line in written if "Traceback" in line]


async def test_a_collector_over_postgresql_keeps_nothing_in_its_folder(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    async with (
        postgres_database() as database,
        running("collector", tmp_path, data_dir=data, store=database.url) as process,
        open_channel(process.address) as channel,
    ):
        data.rmdir()  # it is empty
        stub: Any = collector_pb2_grpc.CollectorServiceStub(channel)
        request = collector_pb2.IngestRequest(sessions=[record("a")])
        await stub.Ingest(request, timeout=60)
        assert await process.terminate() == 0
