"""`deploy/certs.sh`: a certificate for each role, kept while it is valid."""

import os
import subprocess
from pathlib import Path

import pytest

from rollmesh.runtime.access import Role
from tests.trial_certificates import SCRIPT, copy_certificates, make_certificates, names_and_uses

SERVES_NOTHING = {Role.OPERATOR, Role.TRAINER, Role.AGENT}


def contents(folder: Path) -> dict[str, bytes]:
    return {one.name: one.read_bytes() for one in folder.iterdir()}


def test_each_role_has_a_certificate_that_shows_it_and_a_private_key(tmp_path: Path) -> None:
    copy_certificates(tmp_path / "certs")
    names = {*Role, "scorer"}
    files = {path.name: path for path in (tmp_path / "certs").iterdir()}
    assert files.keys() == {"ca.crt", *(f"{one}.{end}" for one in names for end in ("crt", "key"))}
    assert {path.stat().st_mode & 0o077 for path in files.values()} == {0}
    services = {"DNS:rollmesh", "DNS:localhost", "IP:127.0.0.1", "IP:::1"}
    for role in Role:
        found, uses = names_and_uses(files[f"{role}.crt"])
        serves = set() if role in SERVES_NOTHING else services
        assert found == {f"URI:rollmesh://role/{role}", *serves}
        assert ("TLS Web Server Authentication" in uses) == bool(serves)
    assert names_and_uses(files["scorer.crt"])[0] == services


def test_certificates_are_replaced_in_their_last_week(tmp_path: Path) -> None:
    make_certificates(tmp_path / "certs")
    made = contents(tmp_path / "certs")
    make_certificates(tmp_path / "certs")
    assert contents(tmp_path / "certs") == made
    command = [str(SCRIPT), str(tmp_path / "short"), "node-1.cluster", "10.0.0.7"]
    subprocess.run(command, check=True, env=os.environ | {"DAYS": "6"})
    found, _ = names_and_uses(tmp_path / "short" / "router.crt")
    assert {"DNS:node-1.cluster", "IP:10.0.0.7"} <= found
    short = contents(tmp_path / "short")
    make_certificates(tmp_path / "short")
    assert not {*short.values()} & {*contents(tmp_path / "short").values()}


@pytest.mark.parametrize("host", ["node-1.cluster", "10.0.0.7", "fd00::7"])
def test_a_further_host_has_all_made_again(tmp_path: Path, host: str) -> None:
    copy_certificates(tmp_path / "certs")
    before = contents(tmp_path / "certs")
    command = [str(SCRIPT), str(tmp_path / "certs"), "localhost", host]
    subprocess.run(command, check=True)
    made = contents(tmp_path / "certs")
    assert not {*before.values()} & {*made.values()}
    subprocess.run(command, check=True)
    make_certificates(tmp_path / "certs")
    assert contents(tmp_path / "certs") == made


@pytest.mark.parametrize("lost", ["ca.crt", "engine.crt"])
def test_a_missing_certificate_has_all_made_again(tmp_path: Path, lost: str) -> None:
    copy_certificates(tmp_path / "certs")
    before = contents(tmp_path / "certs")
    (tmp_path / "certs" / lost).unlink()
    make_certificates(tmp_path / "certs")
    assert contents(tmp_path / "certs")["router.key"] != before["router.key"]
