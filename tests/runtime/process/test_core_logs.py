"""What gRPC's core, which knows no `logging`, may write into the log of a service."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import ServiceProcess
from tests.trial_certificates import copy_certificates

SERVICES = ("router", "engine", "gateway", "collector", "scorer", "sidecar")
LOOK = """
import importlib.abc, os, sys
class Look(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "grpc":
            print(os.environ.get("GRPC_VERBOSITY"))
sys.meta_path.insert(0, Look())
import rollmesh.SERVICE.__main__
"""


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_quiets_it_before_it_is_imported(
    service: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GRPC_VERBOSITY", raising=False)
    command = [sys.executable, "-c", LOOK.replace("SERVICE", service)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout == "ERROR\n"


async def test_failed_handshakes_leave_no_line_in_a_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GRPC_VERBOSITY", raising=False)
    certs = tmp_path / "certs"
    copy_certificates(certs)
    flags = [
        f"--data-dir={tmp_path / 'router'}",
        "--port=0",
        f"--tls-certificate-file={certs / 'router.crt'}",
        f"--tls-key-file={certs / 'router.key'}",
        f"--tls-ca-file={certs / 'ca.crt'}",
    ]
    log = tmp_path / "router.log"
    with log.open("ab") as stderr:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "rollmesh.router", *flags),
            stdout=asyncio.subprocess.PIPE,
            stderr=stderr,
            start_new_session=True,
        )
    router = ServiceProcess(process, log)
    try:
        await router.wait_ready()
        before = log.stat().st_size
        for _ in range(20):
            reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
            writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" * 10)
            async with asyncio.timeout(60):
                await reader.read()
            writer.close()
        assert log.stat().st_size == before
    finally:
        await router.kill()
