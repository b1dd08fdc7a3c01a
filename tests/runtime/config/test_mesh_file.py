"""One file for all services: what each takes from it when it is started by itself."""

from pathlib import Path
from typing import Any

import pytest

from rollmesh.collector import CollectorConfig
from rollmesh.engine import EngineConfig
from rollmesh.gateway import GatewayConfig
from rollmesh.router import RouterConfig
from rollmesh.runtime import SERVICES, mesh_problems, read_mesh
from rollmesh.runtime.config import LOCAL_ROUTER, SCORER_PORT, ConfigError, parse_config, resolve
from rollmesh.scorer import ScorerConfig
from rollmesh.sidecar import SidecarConfig

CONFIGS: dict[str, type[Any]] = {
    "router": RouterConfig,
    "engine": EngineConfig,
    "scorer": ScorerConfig,
    "collector": CollectorConfig,
    "gateway": GatewayConfig,
    "sidecar": SidecarConfig,
}


def started(folder: Path, text: str, service: str, *flags: str, **environ: str) -> dict[str, Any]:
    """Returns the settings that a service has with a file."""
    path = folder / "mesh.toml"
    path.write_text(text)
    argv = [f"--config={path}", *flags]
    return dict(vars(parse_config(CONFIGS[service], service, argv, environ)))


def given(found: dict[str, Any], *names: str) -> tuple[Any, ...]:
    return tuple(found[name] for name in names)


def test_every_service_reads_the_shared_settings(tmp_path: Path) -> None:
    text = """
    [mesh]
    host = "127.0.0.2"
    data_dir = "data"
    locks_dir = "/locks"
    certificates_dir = "/certs"
    tls_server_name = "rollmesh"
    """
    for service in SERVICES:
        found = started(tmp_path, text, service)
        assert given(found, "host", "tls_server_name") == ("127.0.0.2", "rollmesh")
        assert found["tls_certificate_file"] == f"/certs/{service}.crt"
        assert given(found, "tls_key_file", "tls_ca_file") == (
            f"/certs/{service}.key",
            "/certs/ca.crt",
        )
        if service in {"router", "collector", "gateway"}:
            assert found["data_dir"] == Path("data") / service
        if service not in {"router", "scorer"}:
            assert found["router"] == "127.0.0.2:7100"
        assert found["token_file"] == ("" if service == "scorer" else f"/locks/{service}.token")
        assert found.get("tokens_dir") == (None if service == "sidecar" else "/locks/accepted")


def test_every_service_sends_the_traces_of_the_file(tmp_path: Path) -> None:
    text = """
    [traces]
    endpoint = "http://collector:4317"
    protocol = "grpc"
    ratio = 0.5
    [gateway]
    traces_content = true
    """
    for service in SERVICES:
        found = started(tmp_path, text, service)
        assert given(found, "traces_endpoint", "traces_protocol", "traces_ratio") == (
            "http://collector:4317", "grpc", 0.5,
        )  # fmt: skip
        assert found["traces_content"] == (service == "gateway")
    argv = [f"--config={tmp_path / 'mesh.toml'}"]
    sources = resolve(RouterConfig, "router", argv, {})
    assert sources.source("traces_ratio") == f"{tmp_path / 'mesh.toml'} [traces]"
    (problem,) = mesh_problems({"traces": {"endpont": "http://a"}})
    assert problem == "traces.endpont: unknown setting; did you mean endpoint?"
    (problem,) = mesh_problems({"traces": {"ratio": 2}})
    assert problem == "traces.ratio: is 2.0; give at most 1"


def test_a_file_without_a_mesh_table_is_a_locked_mesh_of_defaults(tmp_path: Path) -> None:
    found = started(tmp_path, "[gateway]\nmax_sessions = 5", "gateway")
    assert given(found, "max_sessions", "router", "data_dir", "tokens_dir") == (
        5,
        LOCAL_ROUTER,
        Path("var/mesh/gateway"),
        "var/mesh/tokens/accepted",
    )
    assert started(tmp_path, "[mesh]\ntokens = false", "gateway")["tokens_dir"] == ""


def test_settings_of_other_services_are_left_to_them(tmp_path: Path) -> None:
    text = "[router]\nnonsense = 1\n[engine]\nport = 7400\n[gateway]\nmax_sessions = 5"
    assert started(tmp_path, text, "gateway")["max_sessions"] == 5
    with pytest.raises(ConfigError, match=r"^router\.nonsense: unknown setting in .*mesh\.toml; "):
        started(tmp_path, text, "router")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[gatway]", r"gatway: is not a table of a mesh file; did you mean \[gateway\]\?"),
        ("max_sessions = 5", "max_sessions: is not a table of a mesh file; give collector, "),
        ("gateway = 5", r"gateway: is not a table; write \[gateway\]"),
        ("[mesh]\nhosts = 'h'", "mesh.hosts: unknown setting; did you mean host?"),
        ("[mesh]\nengines = 0", "mesh.engines: is 0; give at least 1"),
        (f"[mesh]\nrouters = {10**18}", "mesh.routers: is 10+; give at most 4096"),
        ("[engine.vllm]\nseeds = [0x" + "f" * 6000 + "]", "config: .*an integer has 24000 bits"),
        ("[gateway]\nmax_sesions = 5", "gateway.max_sesions: unknown .* did you mean max_sessions"),
        ("[gateway]\nmax_sessions = 0", "gateway.max_sessions: is 0; give at least 1"),
        ("[gateway]\nmax_sessions = 'x'", "gateway.max_sessions: is 'x'; give an integer"),
    ],
)
def test_errors_name_the_table_of_a_setting(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"^{said}"):
        started(tmp_path, text, "gateway")


def test_a_refused_combination_is_named_with_its_table(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^collector\.store: give sqlite, or postgresql://"):
        started(tmp_path, "[collector]\nstore = 'mysql'", "collector")


def test_flags_win_over_the_environment_and_that_over_table_and_mesh(tmp_path: Path) -> None:
    text = "[mesh]\nhost = '127.0.0.2'\ndata_dir = 'data'\n[router]\nhost = '127.0.0.3'"
    assert started(tmp_path, text, "router")["host"] == "127.0.0.3"
    environ = {"ROLLMESH_ROUTER_HOST": "127.0.0.4"}
    assert started(tmp_path, text, "router", **environ)["host"] == "127.0.0.4"
    assert started(tmp_path, text, "router", "--host=::1", **environ)["host"] == "::1"


def test_each_setting_has_its_source(tmp_path: Path) -> None:
    path = tmp_path / "mesh.toml"
    path.write_text("[mesh]\nhost = '127.0.0.2'\n[router]\nport = 7200\ngather_ms = 1")
    argv = [f"--config={path}", "--gather-ms=3"]
    found = resolve(RouterConfig, "router", argv, {"ROLLMESH_ROUTER_IMBALANCE_MARGIN": "9"})
    names = ("host", "port", "gather_ms", "imbalance_margin", "queue_limit")
    assert {name: found.source(name) for name in names} == {
        "host": f"{path} [mesh]",
        "port": f"{path} [router]",
        "gather_ms": "--gather-ms",
        "imbalance_margin": "ROLLMESH_ROUTER_IMBALANCE_MARGIN",
        "queue_limit": "default",
    }


@pytest.mark.parametrize(
    ("text", "routers"),
    [
        ("[router]\nport = 7150", "127.0.0.1:7150"),
        ("[mesh]\nrouters = 2", "127.0.0.1:7100,127.0.0.1:7101"),
        ("[mesh]\nhost = '0.0.0.0'", "127.0.0.1:7100"),
        ("[mesh]\nhost = '::'", "[::1]:7100"),
        ("[mesh]\nhost = '127.0.0.2'\n[router]\nhost = '127.0.0.3'", "127.0.0.3:7100"),
        ("[router]\nadvertise = 'node-1:7100'", "node-1:7100"),
        ("[mesh]\nrouter = 'a:7100,b:7100'\n[router]\nport = 7150", "a:7100,b:7100"),
        ("[mesh]\nrouter = 'a:7100'\n[engine]\nrouter = 'b:7100'", "b:7100"),
    ],
)
def test_callers_of_the_router_use_its_address_of_the_file(
    tmp_path: Path, text: str, routers: str
) -> None:
    assert started(tmp_path, text, "engine")["router"] == routers


def test_routers_of_the_file_are_peers(tmp_path: Path) -> None:
    text = "[mesh]\nrouter = 'a:7100,b:7100'"
    assert started(tmp_path, text, "router")["peers"] == "a:7100,b:7100"
    text = "[mesh]\nrouters = 2"
    assert started(tmp_path, text, "router")["peers"] == "127.0.0.1:7100,127.0.0.1:7101"
    assert started(tmp_path, "[mesh]", "router")["peers"] == ""


def test_a_collector_finds_the_scorer_of_the_file(tmp_path: Path) -> None:
    text = "[scorer]\nfunction = 'a:b'\nworkers = 4"
    found = started(tmp_path, text, "collector")
    assert given(found, "scorer", "scorer_concurrency") == (f"127.0.0.1:{SCORER_PORT}", 4)
    assert started(tmp_path, "[collector]", "collector")["scorer"] == ""


MODELS = """
[mesh]
model_path = "base"
[engine]
dtype = "float32"
[engine.vllm]
a = 1
[[model]]
name = "policy"
[[model]]
name = "judge"
model_path = "judge"
[model.engine]
dtype = "bfloat16"
[model.engine.vllm]
b = 2
"""


def test_an_engine_is_of_the_model_that_its_flag_names(tmp_path: Path) -> None:
    found = started(tmp_path, MODELS, "engine", "--model=judge")
    assert given(found, "model", "model_path", "dtype", "vllm") == (
        "judge",
        Path("judge"),
        "bfloat16",
        {"a": 1, "b": 2},
    )
    found = started(tmp_path, MODELS, "engine", ROLLMESH_ENGINE_MODEL="policy")
    assert given(found, "model", "model_path", "dtype") == ("policy", Path("base"), "float32")


@pytest.mark.parametrize("flags", [(), ("--model=other",)])
def test_the_error_of_an_unknown_model_lists_the_models(
    tmp_path: Path, flags: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError, match=r"^model: .*; give --model, one of policy, judge$"):
        started(tmp_path, MODELS, "engine", *flags)


def test_all_problems_of_the_tables_are_found_in_one_go() -> None:
    tables: dict[str, Any] = {
        "gatway": {},
        "engine": 3,
        "mesh": {"engines": 0, "hosts": "h"},
        "model": [{"engines": 0, "name": "a"}, {"size": 1, "name": "b"}, {}],
    }
    assert [problem.partition(": ")[0] for problem in mesh_problems(tables)] == [
        "gatway",
        "engine",
        "mesh.engines",
        "mesh.hosts",
        "model.engines",
        "model.size",
        "model.name",
    ]


def test_defaults_of_services_fit_each_other_by_one_constant() -> None:
    assert f"127.0.0.1:{RouterConfig.port}" == LOCAL_ROUTER
    for config in (EngineConfig, CollectorConfig, GatewayConfig, SidecarConfig):
        assert config.router == LOCAL_ROUTER
    assert ScorerConfig.port == SCORER_PORT


def test_a_file_that_is_nested_too_deeply_is_refused_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "mesh.toml"
    path.write_text(f"[engine.vllm]\nx = {'[' * 5_000}{']' * 5_000}\n")
    with pytest.raises(ConfigError, match=r"mesh.toml: is nested too deeply"):
        read_mesh(path)
