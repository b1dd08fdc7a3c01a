"""Where the processes of a mesh are to run in a Ray cluster."""

from typing import Any

import pytest

from rollmesh.integrations.ray import Home, Node, further, pattern, places, same_kind, spread
from rollmesh.runtime.config import ConfigError

FLEET = {"mesh": {"routers": 2, "engines": 2, "gateways": 3, "sidecars": 2}}
SHARED = {"collector": {"store": "postgresql://db/rollmesh"}}


def homes(tables: Any) -> dict[str, Home]:
    return {one.process.name: one.home for one in places(tables)}


def test_services_with_files_stay_at_the_disk_and_others_spread() -> None:
    found = homes({**FLEET, "scorer": {"function": "a:b"}})
    at_disk = {name for name, home in found.items() if home is Home.DISK}
    assert at_disk == {"router", "router-1", "scorer", "collector"}
    groups = {name for name, home in found.items() if home is Home.ANY}
    assert groups == {"engine-0", "engine-1"}


def test_collectors_with_a_database_spread() -> None:
    tables = {"mesh": {"collectors": 2}, **SHARED}
    found = homes(tables)
    assert found["collector"] is found["collector-1"] is Home.SPREAD


@pytest.mark.parametrize(
    ("tables", "gpus"),
    [
        ({}, 0),
        ({"mesh": {"gpus_per_engine": 4}}, 4),
        ({"engine": {"vllm": {"tensor_parallel_size": 2}}}, 2),
        ({"mesh": {"gpus_per_engine": 1}, "engine": {"vllm": {"tensor_parallel_size": 2}}}, 1),
    ],
)
def test_an_engine_has_the_gpus_that_its_model_is_split_over(tables: Any, gpus: float) -> None:
    (engine,) = [one for one in places(tables) if one.process.service == "engine"]
    assert engine.gpus == gpus


def test_models_share_no_gpus() -> None:
    tables = {"model": [{"name": "a", "gpus_per_engine": 2}, {"name": "b"}]}
    found = {one.process.name: one.gpus for one in places(tables)}
    assert (found["engine-a-0"], found["engine-b-0"]) == (2, 0)


def test_cpus_come_from_the_table() -> None:
    found = {one.process.name: one.cpus for one in places({"ray": {"engine_cpus": 3}})}
    assert (found["engine-0"], found["router"], found["sidecar"]) == (3, 0, 0.5)


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        ({"ray": {"engine_cpu": 3}}, "engine_cpu: unknown setting"),
        ({"ray": {"engine_cpus": -1}}, "ray.engine_cpus: is -1"),
        ({"engine": {"vllm": {"tensor_parallel_size": "2"}}}, "engine.vllm.tensor_parallel_size"),
        ({"engine": {"vllm": {"tensor_parallel_size": 10**400}}}, "at most 512"),
    ],
)
def test_a_wrong_setting_is_named(tables: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        places(tables)


NODES = [Node("small", 2), Node("large", 8), Node("other", 8)]


@pytest.mark.parametrize(
    ("taken", "nodes"),
    [
        ([], ["large", "other", "small"]),
        (["large"], ["other", "small", "large"]),
        (["large", "other", "small"], ["large", "other", "small"]),
        (["gone", "gone"], ["large", "other", "small"]),
    ],
)
def test_a_gateway_goes_where_the_fewest_are(taken: list[str], nodes: list[str]) -> None:
    gateways = [one for one in places(FLEET) if one.process.service == "gateway"]
    assert list(spread(gateways, NODES, taken).values()) == nodes


def test_a_node_that_is_too_small_gets_none() -> None:
    tables = {**FLEET, "ray": {"gateway_cpus": 4}}
    gateways = [one for one in places(tables) if one.process.service == "gateway"]
    assert set(spread(gateways, NODES, []).values()) == {"large", "other"}
    assert spread(gateways, NODES[:1], []) == {}


def names(found: list[Any]) -> list[str]:
    return [one.process.name for one in found]


def test_further_ones_take_the_lowest_free_numbers() -> None:
    taken = ["engine-0", "engine-2", "sidecar"]
    assert names(further(FLEET, "engine", "", taken, 2)) == ["engine-1", "engine-3"]
    assert names(further(FLEET, "sidecar", "", taken, 1)) == ["sidecar-1"]


def test_the_ports_of_a_further_gateway_that_serves_agents_count_up() -> None:
    ports = {"gateway": {"port": 7200}, "sidecar": {"port": 8000}}
    (found,) = further({"mesh": {"sidecars": 0}, **ports}, "gateway", "", ["gateway-0"], 1)
    assert found.process.http is not None
    assert (found.process.port, found.process.http.port) == (7201, 8001)


def test_the_processes_of_a_model_are_not_mixed_with_others() -> None:
    tables = {"model": [{"name": "a"}, {"name": "a-0"}]}
    running = ["engine-a-0", "engine-a-10", "engine-a-9", "engine-a-0-0", "engine-a-0-1"]
    assert same_kind(pattern(tables, "engine", "a"), running) == [
        "engine-a-0",
        "engine-a-9",
        "engine-a-10",
    ]
    assert same_kind(pattern(tables, "engine", "a-0"), running) == ["engine-a-0-0", "engine-a-0-1"]


@pytest.mark.parametrize("model", ["", "c"])
def test_a_model_must_be_one_of_several(model: str) -> None:
    with pytest.raises(ConfigError, match="give one of a, b"):
        pattern({"model": [{"name": "a"}, {"name": "b"}]}, "engine", model)
