"""Five services that are started by hand find each other: by defaults, or by one mesh file."""

import socket
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from rollmesh.collector import CollectorConfig
from rollmesh.gateway import GatewayConfig
from rollmesh.router import RouterConfig
from rollmesh.runtime.access import make_tokens
from rollmesh.sidecar import SidecarConfig
from tests.paths import ROOT
from tests.trial_certificates import copy_certificates

PORTS = [one.port for one in (RouterConfig, CollectorConfig, GatewayConfig, SidecarConfig)]
# A network of its own: every port is free, and nobody else is met.
OWN_NETWORK = ("unshare", "--map-root-user", "--net")
LOOPBACK_UP = """
import fcntl, os, socket, struct, sys
with socket.socket() as any_socket:
    up_and_running = struct.pack("16sH14x", b"lo", 0x1 | 0x40)
    fcntl.ioctl(any_socket, 0x8914, up_and_running)  # SIOCSIFFLAGS
if sys.argv[1:]:
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


@cache
def own_network() -> tuple[str, ...]:
    """Returns how Python is run in a network of its own. Empty if this machine cannot."""
    command = (*OWN_NETWORK, sys.executable, "-c", LOOPBACK_UP)
    try:
        done = subprocess.run(command, capture_output=True, timeout=60, check=False)
    except FileNotFoundError:
        return ()
    return command if done.returncode == 0 else ()


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def answered(folder: Path, **environ: str) -> str:
    """Runs the services in a folder. Returns how many tokens an agent was answered."""
    command = own_network()
    if not command and (taken := [port for port in PORTS if not is_free(port)]):
        pytest.skip(f"ports {taken} are taken, and this machine gives no network of its own")
    done = subprocess.run(
        [*(command or (sys.executable,)), "-m", "tests.docs.by_hand", str(folder)],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), **environ},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture
def folder(tmp_path: Path, tokenizer_dir: Path) -> Path:
    (tmp_path / "var").mkdir()
    (tmp_path / "var" / "model").symlink_to(tokenizer_dir)
    return tmp_path


def test_by_their_defaults(folder: Path) -> None:
    assert answered(folder) == "4"


def test_by_one_file_that_locks_them_with_tokens_and_certificates(folder: Path) -> None:
    (folder / "mesh.toml").write_text('[mesh]\ncertificates_dir = "certs"\n')
    make_tokens(folder / "var/mesh/tokens")
    copy_certificates(folder / "certs")
    trainer = {
        "ROLLMESH_TOKEN_FILE": str(folder / "var/mesh/tokens/trainer.token"),
        "ROLLMESH_TLS_CA_FILE": str(folder / "certs/ca.crt"),
        "ROLLMESH_TLS_CERTIFICATE_FILE": str(folder / "certs/trainer.crt"),
        "ROLLMESH_TLS_KEY_FILE": str(folder / "certs/trainer.key"),
    }
    assert answered(folder, **trainer) == "4"
