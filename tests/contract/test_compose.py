"""docker-compose.yml: no service that others reach is open, and none may do more than it needs."""

from typing import Any

import pytest

from tests.paths import ROOT

yaml = pytest.importorskip("yaml", reason="reads the file")
SERVICES = {
    "router-1": "router", "router-2": "router", "collector": "collector", "gateway": "gateway",
    "engine": "engine", "engine-gpu": "engine", "sidecar": "sidecar", "sidecar-host": "sidecar",
    "scorer": "scorer",
}  # fmt: skip

TOOLS = ("prometheus", "grafana")
OBSERVABILITY = "docker/observability"
NO_MORE = "no-new-privileges:true"


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
    assert service["environment"][f"{prefix}METRICS_TOKEN_FILE"] == "/locks/scrapers"
    assert "${LOCKS:-locks}:/locks:ro" in service["volumes"]
    assert not any("INSECURE" in variable for variable in service["environment"])


def test_they_are_all(services: dict[str, Any]) -> None:
    others = {"tokens", "policy", "postgres", *TOOLS}
    assert set(services) == {*SERVICES, *others}


def test_services_are_hardened_and_few_have_a_port_of_the_host(services: dict[str, Any]) -> None:
    for name in (*SERVICES, *TOOLS, "tokens", "policy"):
        service = services[name]
        assert service["read_only"], name
        assert (service["cap_drop"], service["security_opt"]) == (["ALL"], [NO_MORE]), name
        assert service["init"], f"{name}: a first process that passes signals on and reaps orphans"
    ports = [port for service in services.values() for port in service.get("ports", ())]
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_under_tls_every_service_shows_its_certificate_and_asks_for_one() -> None:
    over = yaml.safe_load((ROOT / "docker" / "tls.yml").read_text())["services"]
    assert set(over) == {*SERVICES, "tokens", "prometheus"}
    for name, kind in SERVICES.items():
        found, prefix = over[name]["environment"], f"ROLLMESH_{kind.upper()}_"
        assert found[f"{prefix}TLS_CERTIFICATE_FILE"] == f"/locks/{kind}.crt"
        assert found[f"{prefix}TLS_KEY_FILE"] == f"/locks/{kind}.key"
        assert found[f"{prefix}TLS_CA_FILE"] == "/locks/ca.crt"


@pytest.mark.parametrize(
    ("file", "secure"),
    [
        ("prometheus.yml", {}),
        (
            "prometheus-tls.yml",
            {
                "scheme": "https",
                "tls_config": {"ca_file": "/locks/ca.crt", "server_name": "rollmesh"},
            },
        ),
    ],
)
def test_prometheus_shows_its_token_and_knows_who_answers(
    services: dict[str, Any], file: str, secure: dict[str, Any]
) -> None:
    (job,) = yaml.safe_load((ROOT / OBSERVABILITY / file).read_text())["scrape_configs"]
    shown = {"authorization": {"credentials_file": "/locks/scraper.token"}, **secure}
    asked = {"job_name", "dns_sd_configs", "relabel_configs"}
    assert {name: value for name, value in job.items() if name not in asked} == shown
    (found,) = job["dns_sd_configs"]
    assert set(found["names"]) == set(SERVICES)
    over = yaml.safe_load((ROOT / "docker" / "tls.yml").read_text())["services"]
    mounts = (over if secure else services)["prometheus"]["volumes"]
    assert f"./{OBSERVABILITY}/{file}:/etc/prometheus/prometheus.yml:ro" in mounts
    assert "${LOCKS:-locks}:/locks:ro" in services["prometheus"]["volumes"]
