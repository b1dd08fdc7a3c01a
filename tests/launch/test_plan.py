"""What a mesh file says, what is started for it, and when it is started again."""

from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from rollmesh.collector import CollectorConfig
from rollmesh.engine import EngineConfig
from rollmesh.gateway import GatewayConfig
from rollmesh.launch import ProcessSpec, Restarts, plan_mesh, visible_gpus
from rollmesh.router import RouterConfig
from rollmesh.runtime import Backoff, mesh_config, read_mesh
from rollmesh.runtime.config import ConfigError, parse_config
from rollmesh.scorer import ScorerConfig
from rollmesh.sidecar import SidecarConfig

CONFIGS: dict[str, type[Any]] = {
    "router": RouterConfig,
    "engine": EngineConfig,
    "collector": CollectorConfig,
    "gateway": GatewayConfig,
    "sidecar": SidecarConfig,
    "scorer": ScorerConfig,
}


def ports(first: int = 9000) -> Callable[[], int]:
    numbers = count(first)
    return lambda: next(numbers)


def plan(**tables: Any) -> dict[str, ProcessSpec]:
    return {spec.name: spec for spec in plan_mesh(tables, ports())}


def config_of(spec: ProcessSpec) -> Any:
    """Returns the settings that the process itself will read from its flags."""
    return parse_config(CONFIGS[spec.service], spec.service, spec.flags, {})


def written(folder: Path, text: str | bytes) -> Path:
    path = folder / "mesh.toml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_a_mesh_file_is_read_into_its_tables(tmp_path: Path) -> None:
    text = '[mesh]\nengines = 2\n[engine]\nbackend = "scripted"\n[sidecar]\nport = 8080'
    assert read_mesh(written(tmp_path, text)) == {
        "mesh": {"engines": 2},
        "engine": {"backend": "scripted"},
        "sidecar": {"port": 8080},
    }


def test_no_file_is_a_mesh_of_defaults() -> None:
    assert read_mesh(None) == {}
    assert list(plan()) == ["router", "engine-0", "collector", "gateway-0", "sidecar"]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        pytest.param("[mesh", "config", id="no-toml"),
        pytest.param(b'[mesh]\nhost = "\xff"', "config", id="no-utf-8"),
        pytest.param("[engines]", "engines", id="unknown-table"),
        pytest.param("engine = 2", "engine", id="no-table"),
        pytest.param("[mesh]\nengine = 2", "mesh.engine", id="unknown-key"),
        pytest.param("[model]\nname = 'a'", "model", id="one-model-table"),
        pytest.param("model = []", "model", id="no-model"),
        pytest.param("[[model]]\nengines = 2", "model.name", id="model-without-a-name"),
        pytest.param("[[model]]\nname = 'a'\n" * 2, "model.name", id="model-named-twice"),
        pytest.param("[[model]]\nname = 'a'\nengines = 0", "model.engines", id="no-engines"),
        pytest.param("[[model]]\nname = 'a'\nsize = 1", "model.size", id="unknown-of-a-model"),
        pytest.param("[[model]]\nname = 'a'\nengine = 1", "model.engine", id="no-flags"),
        pytest.param("[mesh]\nmodel = 'a'\n[[model]]\nname = 'b'", "mesh.model", id="model-twice"),
    ],
)
def test_a_bad_mesh_file_is_named(tmp_path: Path, text: str | bytes, named: str) -> None:
    with pytest.raises(ConfigError, match=f"^{named}: "):
        read_mesh(written(tmp_path, text))


def test_a_missing_mesh_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"^config: {tmp_path / 'none.toml'}"):
        read_mesh(tmp_path / "none.toml")


@pytest.mark.parametrize("engines", [0, -1, "two", 1.5, True])
def test_a_number_of_engines_that_is_none_is_named(engines: object) -> None:
    with pytest.raises(ConfigError, match=r"^mesh\.engines: "):
        plan(mesh={"engines": engines})


def test_two_engines_do_not_attach_to_one_server() -> None:
    with pytest.raises(ConfigError, match=r"^mesh\.engines: is 2, and engine\.attach names one"):
        plan(mesh={"engines": 2}, engine={"attach": "http://127.0.0.1:8000"})
    assert plan(mesh={"engines": 1}, engine={"attach": "http://127.0.0.1:8000"})


@pytest.mark.parametrize(
    ("table", "setting", "value"),
    [("engine", "port", "http"), ("sidecar", "port", [1]), ("gateway", "grace_ms", "soon")],
)
def test_a_setting_that_is_no_number_is_named(table: str, setting: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"^{table}\.{setting}: "):
        plan(**{table: {setting: value}})


def test_processes_start_in_the_order_in_which_they_need_each_other() -> None:
    assert list(plan(mesh={"engines": 3})) == [
        "router",
        "engine-0",
        "engine-1",
        "engine-2",
        "collector",
        "gateway-0",
        "sidecar",
    ]


def test_every_process_gets_the_addresses_of_the_others() -> None:
    specs = plan(mesh={"engines": 2, "host": "127.0.0.2"})
    found = {name: config_of(spec) for name, spec in specs.items()}
    for name, spec in specs.items():
        assert spec.address == f"127.0.0.2:{found[name].port}"
    assert len({spec.address for spec in specs.values()}) == 6
    router = specs["router"].address
    assert found["engine-0"].router == found["engine-1"].router == router
    assert (found["gateway-0"].router, found["gateway-0"].collector) == (router, "")
    assert found["collector"].router == router
    assert (found["sidecar"].router, found["sidecar"].gateway) == (router, "")


def test_gateways_and_sidecars_are_as_many_as_the_file_says() -> None:
    specs = plan(mesh={"gateways": 3, "sidecars": 2}, gateway={"port": 7200})
    found = {name: config_of(spec) for name, spec in specs.items()}
    gateways = [found[f"gateway-{at}"] for at in range(3)]
    assert [one.gateway_id for one in gateways] == ["gateway-0", "gateway-1", "gateway-2"]
    assert [one.port for one in gateways] == [7200, 7201, 7202]
    assert [one.data_dir.name for one in gateways] == ["gateway", "gateway-1", "gateway-2"]
    assert {found[name].router for name in ("sidecar", "sidecar-1")} == {specs["router"].address}


def test_gateways_serve_agents_in_a_mesh_without_sidecars() -> None:
    specs = plan(
        mesh={"gateways": 2, "sidecars": 0, "host": "127.0.0.2"},
        sidecar={"port": 8000, "body_timeout_ms": 900_000, "metrics_port": 9100},
        gateway={"metrics_port": 9200},
    )
    assert [one.service for one in specs.values()] == [
        *("router", "engine", "collector", "gateway", "gateway")
    ]
    gateways = [specs["gateway-0"], specs["gateway-1"]]
    assert [one.http for one in gateways] == ["127.0.0.2:8000", "127.0.0.2:8001"]
    for at, one in enumerate(gateways):
        http, *flags = one.flags
        assert http == f"--http={8000 + at}"
        assert parse_config(GatewayConfig, "gateway", flags, {}).metrics_port == 9200 + at
        door = parse_config(SidecarConfig, "sidecar", (), one.variables)
        assert (door.host, door.body_timeout_ms, door.metrics_port) == ("127.0.0.2", 900_000, -1)
        assert door.router == specs["router"].address


def test_every_process_gets_all_routers_and_each_router_its_peers() -> None:
    specs = plan(mesh={"routers": 2}, router={"port": 7100})
    found = {name: config_of(spec) for name, spec in specs.items()}
    routers = [found[name] for name in ("router", "router-1")]
    assert [one.port for one in routers] == [7100, 7101]
    assert [one.peers for one in routers] == ["127.0.0.1:7101", "127.0.0.1:7100"]
    assert [one.data_dir.name for one in routers] == ["router", "router-1"]
    for name in ("engine-0", "collector", "gateway-0", "sidecar"):
        assert found[name].router == "127.0.0.1:7100,127.0.0.1:7101"


def test_each_model_of_a_mesh_has_its_own_engines_and_gateways() -> None:
    specs = plan(
        mesh={"model_path": "base", "gpus_per_engine": 1},
        engine={"backend": "vllm", "dtype": "float32", "vllm": {"a": 1, "b": 1}},
        model=[
            {"name": "policy", "engines": 2, "gateways": 2},
            {
                "name": "org/judge",
                "model_path": "judge",
                "gpus_per_engine": 2,
                "engine": {"dtype": "bfloat16", "vllm": {"b": 2}},
            },
        ],
    )
    assert list(specs) == [
        "router",
        *("engine-policy-0", "engine-policy-1", "engine-org_judge-0", "collector"),
        *("gateway-policy-0", "gateway-policy-1", "gateway-org_judge-0", "sidecar"),
    ]
    first, judge = (config_of(specs[f"engine-{name}-0"]) for name in ("policy", "org_judge"))
    assert (first.model, first.model_path, first.dtype) == ("policy", Path("base"), "float32")
    assert (judge.model, judge.model_path, judge.dtype) == ("org/judge", Path("judge"), "bfloat16")
    assert (first.vllm, judge.vllm) == ({"a": 1, "b": 1}, {"a": 1, "b": 2})
    assert [specs[f"engine-{name}"].gpus for name in ("policy-0", "policy-1", "org_judge-0")] == [
        (0,),
        (1,),
        (2, 3),
    ]
    gateways = [config_of(one) for one in specs.values() if one.service == "gateway"]
    assert [(one.model, one.gateway_id) for one in gateways] == [
        ("policy", "gateway-policy-0"),
        ("policy", "gateway-policy-1"),
        ("org/judge", "gateway-org_judge-0"),
    ]
    assert len({one.data_dir for one in gateways}) == 3


def test_a_model_that_is_served_elsewhere_has_a_gateway_and_no_engines() -> None:
    away = {"name": "away", "gateway": {"upstream": "https://api.example.com/v1"}}
    specs = plan(model=[{"name": "policy"}, away])
    gateway = config_of(specs["gateway-away-0"])
    assert (gateway.model, gateway.upstream) == ("away", "https://api.example.com/v1")
    assert "engine-policy-0" in specs
    assert "engine-away-0" not in specs


def test_engines_of_all_models_count_up_from_one_port_and_a_model_may_have_its_own() -> None:
    models: list[dict[str, Any]] = [{"name": "a", "engines": 2}, {"name": "b", "engines": 2}]
    specs = plan(engine={"port": 7400}, model=models)
    assert [one.address for one in specs.values() if one.service == "engine"] == [
        f"127.0.0.1:{port}" for port in (7400, 7401, 7402, 7403)
    ]
    models[1]["engine"] = {"port": 7500}
    specs = plan(engine={"port": 7400}, model=models)
    assert [one.address for one in specs.values() if one.service == "engine"] == [
        f"127.0.0.1:{port}" for port in (7400, 7401, 7500, 7501)
    ]


def test_collectors_that_share_a_store_are_as_many_as_the_file_says() -> None:
    store = "postgresql://user@db/rollmesh"
    specs = plan(mesh={"collectors": 2}, collector={"store": store, "port": 7300})
    found = [config_of(specs[name]) for name in ("collector", "collector-1")]
    assert [(one.store, one.port) for one in found] == [(store, 7300), (store, 7301)]


@pytest.mark.parametrize("table", [{}, {"store": "sqlite"}])
def test_collectors_with_a_store_each_are_refused(table: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"^mesh\.collectors: is 2, .* store = \"postgresql://"):
        plan(mesh={"collectors": 2}, collector=table)


def test_a_mesh_file_with_a_scorer_runs_it_for_its_collector() -> None:
    specs = plan(scorer={"function": "rewards:score", "workers": 4})
    scorer = config_of(specs["scorer"])
    assert (scorer.function, scorer.workers) == ("rewards:score", 4)
    collector = config_of(specs["collector"])
    assert collector.scorer == specs["scorer"].address
    assert collector.scorer_concurrency == 4


def test_a_collector_may_score_fewer_sessions_than_its_scorer_has_workers() -> None:
    specs = plan(
        scorer={"function": "rewards:score", "workers": 4}, collector={"scorer_concurrency": 1}
    )
    assert config_of(specs["collector"]).scorer_concurrency == 1


def test_every_engine_and_gateway_has_its_own_id() -> None:
    specs = plan(mesh={"engines": 2})
    assert [config_of(specs[name]).engine_id for name in ("engine-0", "engine-1")] == [
        "engine-0",
        "engine-1",
    ]
    assert config_of(specs["gateway-0"]).gateway_id == "gateway-0"


def test_a_services_table_becomes_its_flags() -> None:
    table = {"enforce_eager": True, "gpu_memory_utilization": 0.5, "lease_capacity": 4}
    found = config_of(plan(engine=table)["engine-0"])
    assert (found.enforce_eager, found.gpu_memory_utilization, found.lease_capacity) == (
        True,
        0.5,
        4,
    )


def test_a_password_of_a_table_is_no_flag() -> None:
    url = "postgresql://user:hunter2@host/mesh"
    spec = plan(collector={"store": url})["collector"]
    assert not any("hunter2" in flag for flag in spec.flags)
    assert parse_config(CollectorConfig, "collector", spec.flags, spec.variables).store == url


def test_the_environment_wins_over_the_file_here_too() -> None:
    tables = {"mesh": {"engines": 2}, "engine": {"dtype": "float32", "port": 7400}}
    environment = {"engine": {"dtype": "bfloat16", "port": "7450", "metrics_port": "9100"}}
    specs = {one.name: one for one in plan_mesh(tables, ports(), None, environment)}
    found = [config_of(specs[name]) for name in ("engine-0", "engine-1")]
    assert [one.dtype for one in found] == ["bfloat16"] * 2
    assert [one.port for one in found] == [7450, 7451]
    assert [one.metrics_port for one in found] == [9100, 9101]


def test_a_file_means_the_same_to_a_service_that_is_started_by_itself(tmp_path: Path) -> None:
    text = """
    [mesh]
    data_dir = "data"
    host = "127.0.0.2"
    model = "coder"
    certificates_dir = "certs"
    [router]
    port = 7150
    [scorer]
    function = "a:b"
    port = 7550
    [gateway]
    max_sessions = 5
    """
    path = written(tmp_path, text)
    tables = read_mesh(path)
    decided = {"port", "engine_id", "gateway_id"}
    specs = plan_mesh(tables, ports(), mesh_config(tables).tokens_path)
    assert len(specs) == 6
    for spec in specs:
        cls = CONFIGS[spec.service]
        alone = vars(parse_config(cls, spec.service, [f"--config={path}"], {}))
        planned = vars(config_of(spec))
        assert {name for name in alone if alone[name] != planned[name]} <= decided


def test_others_use_the_host_of_a_services_table() -> None:
    specs = plan(router={"host": "127.0.0.9"})
    assert config_of(specs["router"]).host == "127.0.0.9"
    assert config_of(specs["engine-0"]).router.startswith("127.0.0.9:")


def test_the_time_to_stop_is_the_grace_of_the_service() -> None:
    specs = plan(engine={"grace_ms": 500})
    assert specs["engine-0"].grace_ms == config_of(specs["engine-0"]).grace_ms == 500
    assert specs["router"].grace_ms == config_of(specs["router"]).grace_ms


@pytest.mark.parametrize(
    ("up_ms", "delays_ms"),
    [
        pytest.param([10], [0], id="the-first-time-at-once"),
        pytest.param([10] * 4, [0, 200, 400, 800], id="then-later-and-later"),
        pytest.param([10] * 9, [0, 200, 400, 800, 1600, 3200, 6400, 10_000, 10_000], id="bounded"),
        pytest.param([10, 10, 30_000, 10], [0, 200, 0, 200], id="anew-after-a-steady-time"),
        pytest.param([10, 10, 29_999], [0, 200, 400], id="not-quite-steady"),
    ],
)
def test_restarts(up_ms: list[int], delays_ms: list[int]) -> None:
    restarts = Restarts(Backoff(0.2, 10.0, dice=lambda: 1.0))
    assert [restarts.died(up) for up in up_ms] == delays_ms


def test_each_engine_sees_its_own_gpus() -> None:
    specs = plan(mesh={"engines": 3, "gpus_per_engine": 2})
    seen = {name: visible_gpus(spec, {}) for name, spec in specs.items()}
    assert seen["engine-0"] == {"CUDA_VISIBLE_DEVICES": "0,1"}
    assert seen["engine-2"] == {"CUDA_VISIBLE_DEVICES": "4,5"}
    assert seen["gateway-0"] == {}
    few = {"CUDA_VISIBLE_DEVICES": "7,GPU-8,2,3"}
    assert visible_gpus(specs["engine-1"], few) == {"CUDA_VISIBLE_DEVICES": "2,3"}
    with pytest.raises(ConfigError, match="engine-2 needs GPU 5 and CUDA_VISIBLE_DEVICES=7,GPU-8"):
        visible_gpus(specs["engine-2"], few)


def test_engines_see_all_gpus_by_default() -> None:
    assert visible_gpus(plan()["engine-0"], {"CUDA_VISIBLE_DEVICES": "1"}) == {}
    with pytest.raises(ConfigError, match="gpus_per_engine: is -1"):
        plan(mesh={"gpus_per_engine": -1})


def test_every_process_is_locked_by_the_tokens_that_it_needs(tmp_path: Path) -> None:
    tables: dict[str, Any] = {"scorer": {"function": "a:b"}, "engine": {"token_file": "/own"}}
    specs = {spec.name: spec for spec in plan_mesh(tables, ports(), tmp_path)}
    accepting = {name for name, spec in specs.items() if hasattr(config_of(spec), "tokens_dir")}
    assert accepting == set(specs) - {"sidecar"}
    assert {config_of(specs[name]).tokens_dir for name in accepting} == {str(tmp_path / "accepted")}
    assert {name: config_of(spec).token_file for name, spec in specs.items()} == {
        "router": str(tmp_path / "router.token"),
        "engine-0": "/own",
        "scorer": "",
        "collector": str(tmp_path / "collector.token"),
        "gateway-0": str(tmp_path / "gateway.token"),
        "sidecar": str(tmp_path / "sidecar.token"),
    }
