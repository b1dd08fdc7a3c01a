"""docker-compose.yml: no service that others reach is open."""

from typing import Any

import pytest

from tests.paths import ROOT

yaml = pytest.importorskip("yaml", reason="reads the file")
SERVICES = {
    "router-1": "router", "router-2": "router", "collector": "collector", "gateway": "gateway",
    "engine": "engine", "engine-gpu": "engine", "sidecar": "sidecar", "sidecar-host": "sidecar",
    "scorer": "scorer",
}  # fmt: skip


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    return found


@pytest.mark.parametrize("name", SERVICES)
def test_every_service_is_locked(services: dict[str, Any], name: str) -> None:
    service, kind = services[name], SERVICES[name]
    prefix = f"ROLLMESH_{kind.upper()}_"
    if kind != "sidecar":
        assert service["environment"][f"{prefix}TOKENS_DIR"] == "/locks/accepted"
    if kind != "scorer":
        assert service["environment"][f"{prefix}TOKEN_FILE"] == f"/locks/{kind}.token"
    assert "${LOCKS:-locks}:/locks:ro" in service["volumes"]
    assert not any("INSECURE" in variable for variable in service["environment"])


def test_they_are_all(services: dict[str, Any]) -> None:
    assert set(services) == {*SERVICES, "tokens", "policy", "postgres"}
