"""The address under which a service that listens on all addresses registers."""

import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rollmesh.mesh import reachable
from rollmesh.runtime.errors import RemoteError
from rollmesh.runtime.rpc import open_channel
from rollmesh.v1 import router_pb2, router_pb2_grpc
from tests.processes import running
from tests.waiting import until

ROUTER = "127.0.0.1:7100"


@pytest.mark.parametrize(
    ("address", "router", "expected"),
    [
        pytest.param("10.1.2.3:7200", ROUTER, "10.1.2.3:7200", id="one-address"),
        pytest.param("gateway:7200", ROUTER, "gateway:7200", id="a-name"),
        pytest.param("0.0.0.0:7200", ROUTER, "127.0.0.1:7200", id="all-of-ipv4"),
        pytest.param("0.0.0.0:7200", "localhost:7100", "127.0.0.1:7200", id="router-by-name"),
        pytest.param(":::7200", ROUTER, "127.0.0.1:7200", id="all-of-both"),
        pytest.param("[::]:7200", ROUTER, "127.0.0.1:7200", id="in-brackets"),
    ],
)
async def test_an_address_of_no_host_becomes_the_one_that_leads_to_the_router(
    address: str, router: str, expected: str
) -> None:
    assert await reachable(address, router) == expected


async def test_an_ipv6_address_stands_in_brackets() -> None:
    with socket.socket(socket.AF_INET6) as probe:
        try:
            probe.bind(("::1", 0))
        except OSError:
            pytest.skip("this machine has no IPv6")
    assert await reachable(":::7200", "[::1]:7100") == "[::1]:7200"


async def test_a_router_whose_name_is_unknown_is_away() -> None:
    with pytest.raises(RemoteError, match=r"no-such-host\.invalid:7100") as failed:
        await reachable("0.0.0.0:7200", "no-such-host.invalid:7100")
    assert failed.value.code == "UNAVAILABLE"


@pytest.mark.parametrize("service", ["engine", "gateway", "collector", "sidecar"])
async def test_a_service_on_all_addresses_without_an_id_can_be_found(
    service: str, tmp_path: Path, tokenizer_dir: Path
) -> None:
    flags_of: dict[str, dict[str, Any]] = {
        "engine": {"backend": "scripted", "engine_id": ""},
        "gateway": {"model_path": tokenizer_dir, "data_dir": tmp_path / "g", "gateway_id": ""},
        "collector": {"data_dir": tmp_path / "c"},
        "sidecar": {},
    }
    flags = {"host": "0.0.0.0", "insecure_bind": True, **flags_of[service]}  # noqa: S104
    async with (
        running("router", tmp_path, data_dir=tmp_path / "router") as router,
        running(service, tmp_path, router=router.address, **flags) as process,
        open_channel(router.address) as channel,
    ):
        stub: Any = router_pb2_grpc.RouterServiceStub(channel)

        async def replicas() -> Sequence[router_pb2.Replica]:
            request = router_pb2.ListReplicasRequest()
            response = await stub.ListReplicas(request, timeout=60)
            return list(response.replicas)

        (one,) = await until(replicas)
    hello = one.hello
    assert hello.address == f"127.0.0.1:{process.port}"
    if service in {"engine", "gateway"}:
        assert hello.replica_id == f"{service}-{socket.gethostname()}"
