"""Certificates for tests of TLS, made as the documentation says."""

import shutil
import subprocess
import tempfile
from functools import cache
from ipaddress import ip_address
from pathlib import Path

import pytest

from tests.paths import ROOT

SCRIPT = ROOT / "deploy" / "certs.sh"


def make_certificates(folder: Path) -> None:
    """Writes `ca.crt`, and `ROLE.crt` and `ROLE.key` for each role, into a new folder.

    Each call has a CA of its own.
    """
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificates")
    subprocess.run([SCRIPT, folder], check=True, stdout=subprocess.DEVNULL)


@cache
def _common() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="rollmesh-certs-"))
    make_certificates(folder)
    return folder


def copy_certificates(folder: Path) -> None:
    """Writes the same certificates for all tests of a process into a new folder."""
    shutil.copytree(_common(), folder)


def names_and_uses(certificate: Path) -> tuple[set[str], set[str]]:
    """Returns the alternative names of a certificate, such as `DNS:rollmesh`, and its uses."""
    command = ["openssl", "x509", "-in", str(certificate), "-noout", "-ext"]
    said = [
        subprocess.run([*command, extension], check=True, capture_output=True, text=True).stdout
        for extension in ("subjectAltName", "extendedKeyUsage")
    ]
    names, uses = ({one.strip() for one in text.splitlines()[1].split(",")} for text in said)
    addresses = {one for one in names if one.startswith("IP Address:")}
    shown = {f"IP:{ip_address(one.removeprefix('IP Address:'))}" for one in addresses}
    return names - addresses | shown, uses
