"""Every overlay renders, fits Kubernetes' schemas, and gives no pod more than it needs."""

import importlib.util
import re
import tomllib
from ipaddress import ip_address
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from rollmesh.cli import installed
from rollmesh.runtime.access import TABLE, Role
from rollmesh.runtime.config import parse_config
from rollmesh.runtime.rpc import ListeningConfig
from tests.kubernetes.images import image
from tests.kubernetes.policies import Peer, allowed, matches
from tests.kubernetes.rendering import (
    MANIFESTS,
    VARIANTS,
    Manifest,
    containers,
    of_kind,
    overlay,
    parsed,
    templates,
    tool,
)
from tests.served import SERVED
from tests.trial_certificates import copy_certificates, names_and_uses

CERTIFIED = {*Role, "scorer"} - {Role.AGENT}
"""Who has a certificate in a cluster."""
PORTS = {"router": 7100, "engine": 7400, "gateway": 7200, "collector": 7300}
SERVICE = "app.kubernetes.io/component"
SHORT = {"cpu-small+scorer+postgres+cert-manager", "gpu-multi-node+postgres"}
"""Variants that have every object between them. Each takes seconds to validate."""
each_overlay = pytest.mark.parametrize("name", VARIANTS)


def mesh_file(objects: list[Manifest]) -> str:
    (config,) = (
        one for one in of_kind(objects, "ConfigMap").values() if "mesh.toml" in one["data"]
    )
    return str(config["data"]["mesh.toml"])


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(one, marks=[] if one in SHORT else [pytest.mark.long])
        for one in (*VARIANTS, "gpu-multi-node+postgres")
    ],
)
def test_it_fits_the_schemas_of_kubernetes(name: str, tmp_path: Path) -> None:
    objects = overlay(name)
    yaml = pytest.importorskip("yaml")
    file = tmp_path / "rendered.yaml"
    file.write_text(yaml.safe_dump_all(objects))
    tool("kubernetes-validate", "--strict", file)
    assert {one["metadata"].get("namespace") for one in objects} == {"rollmesh"}


def test_a_wrong_field_is_found(tmp_path: Path) -> None:
    file = tmp_path / "wrong.yaml"
    text = (MANIFESTS / "base" / "router.yaml").read_text().replace("podManagement", "podMangement")
    file.write_text(text)
    with pytest.raises(AssertionError, match="podMangementPolicy"):
        tool("kubernetes-validate", "--strict", file)


@each_overlay
def test_no_pod_has_rights(name: str) -> None:
    for maker, template in templates(overlay(name)).items():
        pod = template["spec"]
        assert pod["automountServiceAccountToken"] is False, maker
        assert pod["enableServiceLinks"] is False, maker
        assert not {"hostNetwork", "hostPID", "hostIPC", "serviceAccountName"} & pod.keys()
        of_pod = pod["securityContext"]
        assert of_pod["runAsNonRoot"] is True
        assert of_pod["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in containers(template):
            assert of_pod["runAsUser"] == image(container["image"]).uid, maker
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }, maker
            assert "memory" in container["resources"]["limits"], maker
            assert {"cpu", "memory"} <= container["resources"]["requests"].keys(), maker
            assert not any("hostPort" in port for port in container.get("ports", []))
        for volume in pod["volumes"]:
            assert "hostPath" not in volume


@each_overlay
def test_a_pod_has_the_secret_of_its_own_role_alone(name: str) -> None:
    for maker, template in templates(overlay(name)).items():
        role = template["metadata"]["labels"].get("rollmesh-role")
        if role is None or maker.endswith(" worker"):  # the worker of a group calls no service
            assert not any("projected" in one for one in template["spec"]["volumes"]), maker
            continue
        (locks,) = [one for one in template["spec"]["volumes"] if one["name"] == "locks"]
        assert locks["projected"]["defaultMode"] == 0o400
        *own, accepted = sorted(
            (one["secret"] for one in locks["projected"]["sources"]),
            key=lambda one: one["name"] == "rollmesh-accepted",
        )
        if "cert-manager" in name:
            certificates = own.pop()
            assert certificates["name"] == f"rollmesh-{role}-tls"
            files = {one["key"]: one["path"] for one in certificates["items"]}
            assert files == {"tls.crt": f"{role}.crt", "tls.key": f"{role}.key", "ca.crt": "ca.crt"}
            token = {"key": f"{role}.token", "path": f"{role}.token"}
            expected = [{"name": f"rollmesh-{role}", "items": [token]}]
            assert own == ([] if role == "scorer" else expected)
        else:
            assert own == [{"name": f"rollmesh-{role}"}], maker
        assert accepted["name"] == "rollmesh-accepted"
        paths = {one["key"]: one["path"] for one in accepted["items"]}
        assert paths.pop("scrapers") == "scrapers"
        assert paths == {one: f"accepted/{one}" for one in Role}


def test_the_secrets_have_the_form_that_the_tools_make(tmp_path: Path) -> None:
    (secrets,) = parsed((MANIFESTS / "locks" / "kustomization.yaml").read_text())
    made = {one["name"]: one["files"] for one in secrets["secretGenerator"]}
    accepted = [f"tokens/accepted/{one}" for one in sorted(Role)]
    assert made.pop("rollmesh-accepted") == [*accepted, "tokens/scrapers"]
    assert made.pop("rollmesh-scraper") == ["tokens/scraper.token", "certificates/ca.crt"]
    assert made.keys() == {f"rollmesh-{role}" for role in CERTIFIED}
    for name, files in made.items():
        role = name.removeprefix("rollmesh-")
        own = [f"certificates/{role}.crt", f"certificates/{role}.key", "certificates/ca.crt"]
        assert files == [*([] if role == "scorer" else [f"tokens/{role}.token"]), *own]


def test_the_tokens_alone_are_those_of_the_locks() -> None:
    (alone,) = parsed((MANIFESTS / "tokens" / "kustomization.yaml").read_text())
    (both,) = parsed((MANIFESTS / "locks" / "kustomization.yaml").read_text())
    tokens = {
        one["name"]: [file for file in one["files"] if file.startswith("tokens/")]
        for one in both["secretGenerator"]
    }
    del tokens["rollmesh-scorer"]
    assert {one["name"]: one["files"] for one in alone["secretGenerator"]} == tokens
    assert alone["generatorOptions"] == both["generatorOptions"]
    for folder in ("tokens", "locks"):
        (made,) = parsed((MANIFESTS / folder / "namespace.yaml").read_text())
        assert made["metadata"]["labels"] == {"pod-security.kubernetes.io/enforce": "restricted"}


def test_cert_manager_is_asked_for_the_certificates_of_a_trial(tmp_path: Path) -> None:
    objects = overlay("cpu-small+cert-manager")
    asked = of_kind(objects, "Certificate")
    issuers = of_kind(objects, "Issuer")
    assert issuers["rollmesh"]["spec"]["ca"]["secretName"] == "rollmesh-ca"
    assert asked.pop("rollmesh-ca")["spec"]["isCA"] is True
    copy_certificates(tmp_path / "certs")
    assert asked.keys() == {f"rollmesh-{role}" for role in CERTIFIED}
    for name, one in asked.items():
        role, spec = name.removeprefix("rollmesh-"), one["spec"]
        names, uses = names_and_uses(tmp_path / "certs" / f"{role}.crt")
        assert spec["secretName"] == f"{name}-tls"
        assert spec["issuerRef"]["name"] == "rollmesh"
        wanted = {f"DNS:{one}" for one in spec.get("dnsNames", [])}
        wanted |= {f"URI:{one}" for one in spec.get("uris", [])}
        wanted |= {f"IP:{ip_address(one)}" for one in spec.get("ipAddresses", [])}
        assert names == wanted
        assert ("server auth" in spec["usages"]) == ("TLS Web Server Authentication" in uses)
        assert {"client auth", "digital signature"} <= set(spec["usages"])


def test_the_scorer_is_called_by_collectors_alone() -> None:
    objects = overlay("cpu-small+scorer+cert-manager")
    policies = list(of_kind(objects, "NetworkPolicy").values())
    labels = {"app.kubernetes.io/name": "rollmesh"}
    scorer = Peer({**labels, "rollmesh-role": "scorer", SERVICE: "scorer"})
    for role in Role:
        caller = Peer({**labels, "rollmesh-role": role, SERVICE: role})
        assert allowed(policies, caller, scorer, 7500) == (role == Role.COLLECTOR), role
        assert not allowed(policies, scorer, caller, PORTS.get(role, 8000))
    (collector,) = containers(templates(objects)["rollmesh-collector"])
    assert {"name": "ROLLMESH_COLLECTOR_SCORER", "value": "rollmesh-scorer:7500"} in collector[
        "env"
    ]


@each_overlay
def test_every_service_takes_the_mesh_file(name: str, tmp_path: Path) -> None:
    objects = overlay(name)
    file = tmp_path / "mesh.toml"
    file.write_text(mesh_file(objects))
    for maker, template in templates(objects).items():
        (container,) = template["spec"]["containers"]
        service = container["name"]
        if maker.endswith(" worker") or service not in installed():
            continue
        assert container["args"][0] == "--config=/etc/rollmesh/mesh.toml"
        arguments = [f"--config={file}", *container["args"][1:]]
        environ = image(container["image"]).environment | {
            one["name"]: one["value"] for one in container.get("env", []) if "value" in one
        }
        config: Any = parse_config(installed()[service], service, arguments, environ)
        ports = {one["name"]: one["containerPort"] for one in container["ports"]}
        assert config.host == "0.0.0.0"  # noqa: S104 - is not bound
        assert config.port == ports["http" if service == "sidecar" else "grpc"], maker
        assert config.metrics_port == ports["metrics"], maker
        assert config.tls_key_file == f"/locks/{service}.key"
        if service != "scorer":
            assert config.token_file == f"/locks/{service}.token"
        assert Path(config.metrics_token_file) == Path("/locks/scrapers")
        mounts = {one["mountPath"] for one in container["volumeMounts"]}
        if hasattr(config, "data_dir"):
            assert str(config.data_dir) in mounts, maker
        if hasattr(config, "model_path"):
            assert str(config.model_path) in mounts, maker
        check_stop(template["spec"], config)


def check_stop(pod: Manifest, config: ListeningConfig) -> None:
    """Drains and finishes in grace_ms together, and has time to close its store."""
    (container,) = pod["containers"]
    stop = container.get("lifecycle", {}).get("preStop", {}).get("exec", {"command": ["", "0"]})
    waits_s = float(stop["command"][-1])
    needed_s = waits_s + config.grace_ms / 1000 + 5
    assert pod["terminationGracePeriodSeconds"] >= needed_s, container["name"]


@each_overlay
def test_probes_tell_loading_from_broken(name: str) -> None:
    for maker, template in templates(overlay(name)).items():
        (container,) = template["spec"]["containers"]
        if "startupProbe" not in container:
            assert "rollmesh-role" not in template["metadata"]["labels"] or "worker" in maker, maker
            continue
        start, ready, live = (
            container[f"{one}Probe"] for one in ("startup", "readiness", "liveness")
        )
        assert start["exec"] == ready["exec"] == live["exec"]
        python, minus_m, module, service, *_ = start["exec"]["command"]
        assert (python, minus_m, service) == ("python3", "-m", container["name"])
        assert importlib.util.find_spec(module) is not None
        assert start["periodSeconds"] * start["failureThreshold"] >= 300
        assert live["periodSeconds"] * live["failureThreshold"] >= 60, (
            "a busy service is not broken"
        )


@each_overlay
def test_every_service_may_be_disrupted_one_pod_at_a_time(name: str) -> None:
    objects = overlay(name)
    budgets = of_kind(objects, "PodDisruptionBudget").values()
    assert all(one["spec"]["maxUnavailable"] == 1 for one in budgets)
    for maker, template in templates(objects).items():
        labels = template["metadata"]["labels"]
        found = [one for one in budgets if matches(one["spec"]["selector"], labels)]
        assert len(found) == ("rollmesh-role" in labels), maker


@each_overlay
def test_the_network_allows_the_calls_of_the_table_of_roles(name: str) -> None:
    policies = list(of_kind(overlay(name), "NetworkPolicy").values())
    labels = {"app.kubernetes.io/name": "rollmesh"}
    peers = {
        str(role): Peer({"rollmesh-role": role, SERVICE: role, **labels})
        if role in {*PORTS, "sidecar"}
        else Peer({"rollmesh-role": role})
        for role in Role
    } | {"a stranger": Peer({}), "prometheus": Peer({}, namespace="monitoring")}
    for caller, (server, port) in product(peers, {**PORTS, "sidecar": 8000}.items()):
        if server == "sidecar":
            may = caller in {"agent", "trainer"}
        else:
            own = SERVED[server]
            calls = {f"/{one.full_name}/{call.name}" for one in own for call in one.methods}
            may = any(caller in TABLE[call] for call in calls)
        found = allowed(policies, peers[caller], peers[server], port)
        transfers = "transfer" in " ".join(of_kind(overlay(name), "NetworkPolicy"))
        if transfers and server == "engine" and caller in {"engine", "trainer"}:
            may = True
        assert found == may, f"{caller} to {server}"
    elsewhere = Peer({"rollmesh-role": "agent"}, namespace="agents")
    assert allowed(policies, elsewhere, peers["sidecar"], 8000)
    assert not allowed(policies, elsewhere, peers["gateway"], 7200)
    assert not allowed(policies, peers["a stranger"], peers["router"], 9100)


@each_overlay
def test_prometheus_finds_the_metrics(name: str) -> None:
    objects = overlay(name)
    if not (monitors := of_kind(objects, "ServiceMonitor")):
        assert name.startswith("cpu-small")
        return
    (monitor,) = monitors.values()
    assert set(monitor["spec"]) == {"selector", "endpoints", "podTargetLabels"}
    services = of_kind(objects, "Service")
    assert len(services) == 5
    for service in services.values():
        selector = monitor["spec"]["selector"]["matchLabels"]
        assert selector.items() <= service["metadata"]["labels"].items()
        (endpoint,) = monitor["spec"]["endpoints"]
        scraper = "rollmesh-scraper"
        authority = "rollmesh-ca" if "cert-manager" in name else scraper
        assert endpoint["scheme"] == "https"
        assert endpoint["tlsConfig"] == {
            "ca": {"secret": {"name": authority, "key": "ca.crt"}},
            "serverName": "rollmesh",
        }
        assert endpoint["authorization"] == {
            "credentials": {"name": scraper, "key": "scraper.token"}
        }
        assert endpoint["port"] in {one["name"] for one in service["spec"]["ports"]}
    policies = list(of_kind(objects, "NetworkPolicy").values())
    mesh = Peer({"app.kubernetes.io/name": "rollmesh", SERVICE: "router"})
    assert allowed(policies, Peer({}, namespace="monitoring"), mesh, 9100)


def test_the_routers_of_the_file_are_the_pods() -> None:
    objects = overlay("cpu-small")
    mesh = tomllib.loads(mesh_file(objects))
    router = of_kind(objects, "StatefulSet")["rollmesh-router"]
    service, count = router["spec"]["serviceName"], router["spec"]["replicas"]
    names = [f"rollmesh-router-{at}.{service}:7100" for at in range(count)]
    assert mesh["mesh"]["router"] == mesh["router"]["peers"] == ",".join(names)
    assert mesh["sidecar"]["advertise"].partition(":")[0] in of_kind(objects, "Service")


def test_with_postgres_pods_keep_nothing() -> None:
    objects = overlay("cpu-small+postgres")
    for service, variable in (("gateway", "JOURNAL"), ("collector", "STORE")):
        one = of_kind(objects, "StatefulSet")[f"rollmesh-{service}"]
        assert one["spec"]["replicas"] == 2
        assert not one["spec"].get("volumeClaimTemplates")
        (container,) = one["spec"]["template"]["spec"]["containers"]
        (env,) = container["env"]
        assert env["name"] == f"ROLLMESH_{service.upper()}_{variable}"
        assert env["valueFrom"] == {"secretKeyRef": {"name": "rollmesh-database", "key": "uri"}}
    policies = list(of_kind(objects, "NetworkPolicy").values())
    labels = {"app.kubernetes.io/name": "rollmesh"}
    database = Peer({"app": "postgres"}, namespace="databases")
    for service in ("gateway", "collector", "engine"):
        caller = Peer({**labels, SERVICE: service})
        assert allowed(policies, caller, database, 5432) == (service != "engine")


def test_no_secret_is_in_the_manifests() -> None:
    for path in MANIFESTS.rglob("*.yaml"):
        text = path.read_text()
        assert "kind: Secret\n" not in text, path
        assert not re.search(r"://[^/\s]*:[^/\s]*@", text), path
