"""`rollmesh probe` against real servers: open, locked by tokens, over TLS, starting and absent."""

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from rollmesh.collector import CollectorConfig
from rollmesh.gateway import GatewayConfig
from rollmesh.router import RouterConfig
from rollmesh.runtime import PORTS
from rollmesh.runtime.config import describe
from rollmesh.scorer import ScorerConfig
from rollmesh.sidecar import SidecarConfig
from tests.locks import Locks
from tests.processes import reserved_port
from tests.runtime.services import ScriptedService, served
from tests.sidecar.scripted_gateway import ScriptedGateway, serving, sidecar_of
from tests.trial_certificates import copy_certificates

NO_PROXY = {"http_proxy": "http://127.0.0.1:1", "grpc_proxy": "http://127.0.0.1:1"}
"""A proxy that nothing can pass: a probe must not ask it."""


async def probed(*flags: str, **variables: object) -> tuple[int, str]:
    """Runs the probe as a container does. Returns its exit code and what it wrote to stderr."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "rollmesh.runtime.probe", *flags,
        env=NO_PROXY | {name: str(value) for name, value in variables.items()},
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    async with asyncio.timeout(60):
        _, errors = await process.communicate()
    assert process.returncode is not None
    return process.returncode, errors.decode()


@pytest.fixture
def certified(tmp_path: Path) -> Any:
    """A CA, and a file with a certificate for `gateway.mesh` alone and its key."""
    pytest.importorskip("cryptography", reason="it makes the certificates")
    from tests.certificates import Authority  # needs the package

    authority = Authority(tmp_path)
    authority.server("gateway.mesh")
    file = tmp_path / "gateway.mesh.pem"
    file.chmod(0o600)
    return str(authority.certificate), str(file)


async def test_a_probe_tells_serving_from_not_serving(tmp_path: Path) -> None:
    accepted = Locks(tmp_path / "locks").folder / "accepted"
    async with served(ScriptedService(), tokens_dir=str(accepted)) as (_, bound):
        assert await probed("router", ROLLMESH_ROUTER_PORT=bound.port) == (0, "")
        assert await probed("router", f"--port={bound.port}", "--host=0.0.0.0") == (0, "")
    code, said = await probed("router", ROLLMESH_ROUTER_PORT=bound.port)
    assert (code, "no answer at 127.0.0.1" in said) == (1, True)
    service = ScriptedService(address=asyncio.get_running_loop().create_future())
    assert service.address is not None
    async with asyncio.TaskGroup() as group:
        group.create_task(_serve_late(service))
        port = (await service.address).rpartition(":")[2]
        assert await probed("router", "--port", port) == (1, "rollmesh probe: NOT_SERVING\n")
        service.may_start.set()


async def _serve_late(service: ScriptedService) -> None:
    async with served(service):
        pass


@pytest.mark.parametrize("mutual", [True, False])
async def test_over_tls_it_shows_the_certificate_of_the_service(
    certified: tuple[str, str], *, mutual: bool
) -> None:
    ca, file = certified
    files: dict[str, Any] = {"tls_certificate_file": file, "tls_key_file": file}
    if mutual:
        files["tls_ca_file"] = ca
    async with served(ScriptedService(), **files) as (_, bound):
        port: dict[str, Any] = {"ROLLMESH_GATEWAY_PORT": bound.port}
        known = {f"ROLLMESH_GATEWAY_{name.upper()}": path for name, path in files.items()}
        assert await probed("gateway", **port, **known) == (0, "")
        assert (await probed("gateway", **port))[0] == 1
        known["ROLLMESH_GATEWAY_TLS_KEY_FILE"] = "absent"
        assert await probed("gateway", **port, **known) == (
            2,
            "rollmesh probe: tls_key_file: absent: No such file or directory\n",
        )


MESH = """
[mesh]
host = "0.0.0.0"
data_dir = "{folder}"
certificates_dir = "{folder}/certs"
engines = 2
[engine]
backend = "scripted"
[engine.vllm]
tensor_parallel_size = 2
[gateway]
port = {port}
metrics_port = 9100
max_sessions = 7
[sidecar]
port = 8001
[scorer]
function = "rewards:score"
[ray]
[[model]]
name = "policy"
[[model]]
name = "judge"
[model.gateway]
port = {other}
[model.engine]
dtype = "bfloat16"
"""


async def test_it_takes_the_file_of_the_mesh_as_the_service_does(tmp_path: Path) -> None:
    certs, file = tmp_path / "certs", tmp_path / "mesh.toml"
    copy_certificates(certs)
    files = {
        "tls_certificate_file": str(certs / "gateway.crt"),
        "tls_key_file": str(certs / "gateway.key"),
        "tls_ca_file": str(certs / "ca.crt"),
    }
    with reserved_port() as nobody:
        other = nobody.getsockname()[1]
        async with served(ScriptedService(), **files) as (_, bound):
            file.write_text(MESH.format(folder=tmp_path, port=bound.port, other=other))
            assert await probed("gateway", f"--config={file}") == (0, "")
            assert await probed("gateway", f"--config={file}", "--model=policy") == (0, "")
            code, said = await probed("gateway", "--config", str(file), "--model=judge")
            assert (code, f"127.0.0.1:{other}" in said) == (1, True)
            assert (await probed("gateway", f"--config={file}", f"--port={other}"))[0] == 1
        file.write_text("[gatway]\nport = 1\n")
        code, said = await probed("gateway", f"--config={file}")
        assert (code, "did you mean [gateway]?" in said) == (2, True)


def test_without_a_port_it_asks_at_the_services_default() -> None:
    defaults = {
        service: describe(config, service)
        for service, config in (
            ("router", RouterConfig),
            ("gateway", GatewayConfig),
            ("collector", CollectorConfig),
            ("scorer", ScorerConfig),
            ("sidecar", SidecarConfig),
        )
    }
    found = {
        service: next(one.default for one in settings if one.name == "port")
        for service, settings in defaults.items()
    }
    assert found == PORTS


async def test_it_trusts_no_other_ca(certified: tuple[str, str], tmp_path: Path) -> None:
    from tests.certificates import Authority  # needs the package

    (tmp_path / "other").mkdir()
    other = Authority(tmp_path / "other").certificate
    _, file = certified
    async with served(ScriptedService(), tls_certificate_file=file, tls_key_file=file) as (_, to):
        flags = (f"--tls-certificate-file={file}", f"--tls-key-file={file}")
        code, said = await probed("router", f"--port={to.port}", f"--tls-ca-file={other}", *flags)
    assert (code, "CERTIFICATE_VERIFY_FAILED" in said) == (1, True)


async def test_a_sidecar_is_asked_by_http_and_https(certified: tuple[str, str]) -> None:
    _, file = certified
    https: dict[str, Any] = {"https_certificate_file": file, "https_key_file": file}
    async with serving(ScriptedGateway()) as gateway:
        async with sidecar_of(SidecarConfig(gateway=gateway)) as url:
            port = {"ROLLMESH_SIDECAR_PORT": url.rpartition(":")[2]}
            assert await probed("sidecar", **port) == (0, "")
        async with sidecar_of(SidecarConfig(gateway=gateway, **https)) as url:
            port = {"ROLLMESH_SIDECAR_PORT": url.rpartition(":")[2]}
            assert await probed("sidecar", f"--https-certificate-file={file}", **port) == (0, "")
            assert (await probed("sidecar", **port))[0] == 1


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ((), "rollmesh probe SERVICE"),
        (("engine",), "--port or ROLLMESH_ENGINE_PORT"),
        (("gateway", "--config=absent"), "config: absent"),
        (("router", "--port=99999"), "port: is 99999"),
        (("router", "--port=1", "--tls-certificate-file=absent"), "tls_certificate_file: absent"),
    ],
)
async def test_a_wrong_setting_is_named(flags: tuple[str, ...], says: str) -> None:
    code, said = await probed(*flags)
    assert (code, says in said) == (2, True)


async def test_a_port_that_accepts_and_says_nothing_is_no_answer() -> None:
    with reserved_port() as holder:
        holder.listen()
        code, said = await probed("router", f"--port={holder.getsockname()[1]}")
    assert (code, "no answer" in said) == (1, True)
