"""An actor of a mesh, and the calls of drivers to actors, without a Ray cluster."""

import tempfile
from pathlib import Path
from typing import Any

import pytest
import ray

from rollmesh.integrations.ray import Mesh, ServiceActor, Status
from rollmesh.launch import Process


@pytest.fixture(autouse=True)
def node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Says where the actor is."""

    class Context:
        def get_node_id(self) -> str:
            return "node"

    monkeypatch.setattr(ray, "get_runtime_context", Context)
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")


def actor(table: dict[str, Any]) -> ServiceActor:
    process = Process("gateway-1", "gateway", 1, table)
    return ServiceActor(process, {}, "", ["127.0.0.1:1"], "", {"gateway.token": b"t"})


@pytest.mark.parametrize("name", ["grace_ms", "metrics_port"])
def test_a_service_with_a_setting_that_is_no_number_says_so(name: str) -> None:
    one = actor({name: "soon"})
    found = one.status()
    assert found.failed
    assert found.problem.endswith(f"gateway.{name}: is 'soon'; give an integer")
    assert (found.name, found.node_id, found.starts) == ("gateway-1", "node", 0)
    one.stop()


def test_a_service_whose_node_has_no_room_for_its_files_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    one = actor({})
    assert one.status().failed
    assert "No such file or directory" in one.status().problem
    one.stop()


def test_a_service_that_ends_while_it_is_to_be_stopped_stops_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    killed: list[str] = []

    class Actor:
        def __init__(self, name: str) -> None:
            self.name = name
            self.stop = self

        def remote(self) -> str:
            return self.name

    def get_actor(name: str, namespace: str) -> Actor:
        if name == "mesh/engine-0":
            raise ValueError(f"no actor {name}")
        return Actor(name)

    def kill(one: Actor, no_restart: bool) -> None:
        killed.append(one.name)

    mesh = Mesh.__new__(Mesh)
    mesh.name = "mesh"
    names = ["engine-0", "engine-1"]
    placed = [Status(name, "engine", node_id="node") for name in names]
    monkeypatch.setattr(mesh, "status", lambda: placed)
    monkeypatch.setattr(ray, "get_actor", get_actor)
    monkeypatch.setattr(ray, "wait", lambda refs, **_: (refs, []))
    monkeypatch.setattr(ray, "kill", kill)
    mesh.take_back(names)
    assert killed == ["mesh/engine-1"]
