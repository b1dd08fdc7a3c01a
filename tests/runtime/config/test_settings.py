"""Settings: where they come from, and what is said about bad ones."""

import re
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated

import pytest

from rollmesh.collector import CollectorConfig
from rollmesh.engine import EngineConfig
from rollmesh.gateway import GatewayConfig
from rollmesh.router import RouterConfig
from rollmesh.runtime.config import (
    Bounds,
    Config,
    ConfigError,
    OneOf,
    Setting,
    describe,
    parse_config,
)
from rollmesh.sidecar import RelayConfig, SidecarConfig

SERVICES = (
    RouterConfig,
    EngineConfig,
    CollectorConfig,
    GatewayConfig,
    SidecarConfig,
    RelayConfig,
)


@dataclass(frozen=True, kw_only=True)
class Inherited(Config):
    """Settings of any service."""

    host: str = "localhost"
    """Address to listen on."""
    max_nodes: int = 1
    """Said by the base class."""


@dataclass(frozen=True, kw_only=True)
class Settings(Inherited):
    """Settings of a probe."""

    max_nodes: Annotated[int, Bounds(-5)] = 7
    """Most nodes of a tree."""
    share: Annotated[float, Bounds(0, 1)] = 0.5
    """Part of the memory, at most 90 %."""
    strict: bool = False
    """Whether to be strict
    about everything."""
    data_dir: Path = Path("var/probe")
    """Folder of the store."""
    history: Annotated[str, OneOf(("keep", "rewrite"))] = "keep"
    """What becomes of history."""
    vllm: dict[str, int] = field(default_factory=dict)
    """Options of the backend."""


def parse(*argv: str, **environ: str) -> Settings:
    return parse_config(Settings, "probe", argv, environ)


def file_of(folder: Path, text: str) -> str:
    path = folder / "probe.toml"
    path.write_text(f"[probe]\n{text}")
    return f"--config={path}"


def test_without_anything_all_is_default() -> None:
    assert parse() == Settings()


@pytest.mark.parametrize(
    ("flag", "variable", "file", "expected"),
    [
        pytest.param(None, None, None, 7, id="default"),
        pytest.param(None, None, 2, 2, id="file-beats-default"),
        pytest.param(None, 3, 2, 3, id="environment-beats-file"),
        pytest.param(4, 3, 2, 4, id="flag-beats-environment"),
        pytest.param(4, None, 2, 4, id="flag-beats-file"),
        pytest.param(7, 3, 2, 7, id="a-flag-that-equals-the-default-beats-all"),
        pytest.param(0, 3, 2, 0, id="zero-is-a-value"),
    ],
)
def test_precedence(
    tmp_path: Path, flag: int | None, variable: int | None, file: int | None, expected: int
) -> None:
    argv = [] if flag is None else [f"--max-nodes={flag}"]
    if file is not None:
        argv.append(file_of(tmp_path, f"max_nodes = {file}"))
    environ = {} if variable is None else {"ROLLMESH_PROBE_MAX_NODES": str(variable)}
    assert parse(*argv, **environ) == Settings(max_nodes=expected)


def test_each_source_fills_the_gaps_of_the_stronger_ones(tmp_path: Path) -> None:
    file = file_of(tmp_path, 'host = "h"\nmax_nodes = 2\nshare = 0.25\nstrict = true')
    found = parse(file, "--max-nodes", "3", ROLLMESH_PROBE_DATA_DIR="/data")
    assert found == Settings(host="h", max_nodes=3, share=0.25, strict=True, data_dir=Path("/data"))


def test_variables_of_another_service_are_not_read() -> None:
    assert parse(ROLLMESH_ROUTER_MAX_NODES="3", MAX_NODES="4") == Settings()


@pytest.mark.parametrize("given", [["--max-nodes=-1"], ["--max-nodes", "-1"]])
def test_numbers_may_be_negative(given: list[str]) -> None:
    assert parse(*given).max_nodes == -1


@pytest.mark.parametrize(
    ("text", "expected"),
    [(text, True) for text in ("1", "true", "True", "YES", "on")]
    + [(text, False) for text in ("0", "false", "False", "no", "OFF")],
)
def test_booleans(text: str, expected: bool) -> None:  # a table
    assert parse(f"--strict={text}").strict is expected


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("max_nodes", "many"),
        ("max_nodes", "1.5"),
        ("max_nodes", ""),
        ("share", "half"),
        ("strict", "perhaps"),
        ("strict", ""),
    ],
)
def test_a_value_of_the_wrong_form_names_its_setting(setting: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"^{setting}: is {value!r}; give "):
        parse(f"--{setting.replace('_', '-')}={value}")
    with pytest.raises(ConfigError, match=f"^{setting}: "):
        parse(**{f"ROLLMESH_PROBE_{setting.upper()}": value})


@pytest.mark.parametrize("text", ["[1]", '{"a": ', '{"a":' * 100_000], ids=len)
def test_a_table_of_another_form_names_its_setting(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^vllm: is "):
        parse(f"--vllm={text}")


@pytest.mark.parametrize(
    "line",
    [
        'max_nodes = "many"',
        "max_nodes = 7.9",
        "max_nodes = true",
        "max_nodes = [7]",
        "strict = 7",
        "data_dir = 7",
        'host = ["a", "b"]',
        "host = {a = 1}",
    ],
)
def test_a_value_of_the_wrong_kind_in_the_file_names_its_setting(tmp_path: Path, line: str) -> None:
    with pytest.raises(ConfigError, match=f"^probe.{line.split(maxsplit=1)[0]}: "):
        parse(file_of(tmp_path, line))


def test_a_whole_number_in_the_file_is_also_a_float(tmp_path: Path) -> None:
    assert parse(file_of(tmp_path, "share = 1")).share == 1.0


def test_an_unknown_key_is_named_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^probe\.max_node: unknown.*probe\.toml.*max_nodes"):
        parse(file_of(tmp_path, "max_node = 3"))


@pytest.mark.parametrize("content", [None, b"max_nodes = ", b'host = "\xff"'])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "probe.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=f"^config: {path}: "):
        parse(f"--config={path}")


def test_an_unknown_flag_ends_with_2_and_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse("--max-nods=3")
    assert caught.value.code == 2
    assert "--max-nods" in capsys.readouterr().err


def test_help_says_the_docstring_the_default_and_the_bound_of_every_setting(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    with pytest.raises(SystemExit) as caught:
        parse("--help")
    assert caught.value.code == 0
    told = dict(re.findall(r"^  (--\S+) \S+\s+(\S.*)", capsys.readouterr().out, re.M))
    assert told == {
        "--config": "TOML file of the mesh: [mesh], and a table for each service",
        "--host": "Address to listen on. [default: localhost]",
        "--max-nodes": "Most nodes of a tree. [default: 7, at least -5]",
        "--share": "Part of the memory, at most 90 %. [default: 0.5, at least 0, at most 1]",
        "--strict": "Whether to be strict about everything. [default: false]",
        "--data-dir": "Folder of the store. [default: var/probe]",
        "--history": "What becomes of history. [default: keep, one of keep, rewrite]",
        "--vllm": "Options of the backend.",
    }


def test_settings_are_described_in_order_base_class_first() -> None:
    told = {setting.name: setting for setting in describe(Settings, "probe")}
    assert list(told) == [one.name for one in fields(Settings)]
    assert told["max_nodes"] == Setting(
        name="max_nodes",
        flag="--max-nodes",
        variable="ROLLMESH_PROBE_MAX_NODES",
        kind=int,
        default=7,
        bound=Bounds(-5),
        doc="Most nodes of a tree.",
    )
    assert told["host"].bound is None
    assert told["strict"].doc == "Whether to be strict about everything."
    assert (told["vllm"].kind, told["vllm"].default) == (dict, {})


@pytest.mark.parametrize("config", SERVICES, ids=lambda cls: cls.__name__)
def test_every_setting_of_every_service_has_its_help(config: type) -> None:
    for setting in describe(config, "any"):
        assert setting.doc.endswith("."), setting.name


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--max-nodes=-6", "max_nodes: is -6; give at least -5"),
        ("--share=1.5", "share: is 1.5; give at most 1"),
        ("--share=nan", "share: is nan; give at least 0"),
        ("--history=drop", "history: is 'drop'; give one of keep, rewrite"),
    ],
)
def test_a_value_out_of_bounds_is_named_with_its_bound(flag: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"^{said}$"):
        parse(flag)


def numbers_of(config: type) -> list[str]:
    """Names of the settings that are numbers."""
    return [setting.name for setting in describe(config, "any") if setting.kind in {int, float}]


@pytest.mark.parametrize(
    ("config", "setting", "value"),
    [
        *(
            pytest.param(config, name, "-2", id=f"{config.__name__}-{name}")
            for config in SERVICES
            for name in numbers_of(config)
        ),
        pytest.param(RouterConfig, "keepalive_ms", "0", id="always-asked"),
        pytest.param(RouterConfig, "max_request_bytes", "0", id="no-request"),
        pytest.param(RouterConfig, "control_timeout_ms", "0", id="no-time-for-engines"),
        pytest.param(EngineConfig, "lease_capacity", "0", id="no-lease"),
        pytest.param(EngineConfig, "reply_tokens", "0", id="no-token"),
        pytest.param(EngineConfig, "vocabulary_tokens", "-1", id="no-words"),
        pytest.param(EngineConfig, "tokens_per_second", "nan", id="no-number"),
        pytest.param(GatewayConfig, "max_sessions", "0", id="no-session"),
        pytest.param(GatewayConfig, "turn_timeout_ms", "0", id="no-time-for-turns"),
        pytest.param(GatewayConfig, "workers", "0", id="no-thread"),
        pytest.param(SidecarConfig, "keep_alive_ms", "0", id="nothing-but-comments"),
        pytest.param(SidecarConfig, "max_body_bytes", "0", id="no-body"),
    ],
)
def test_a_number_that_no_service_can_work_with_is_named_at_the_start(
    config: type, setting: str, value: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{setting}: is {value}.*; give at least "):
        parse_config(config, "any", [f"--{setting.replace('_', '-')}={value}"], {})


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://user:hunter2@host:5432/mesh",
        "postgresql://:hunter2@host/mesh",
        "postgresql://user@host/mesh?sslmode=require&password=hunter2",
        "postgresql://user:hunter2@two@host/mesh",
        "host=a password = hunter2",
    ],
)
def test_a_password_comes_by_file_or_environment_and_never_by_a_flag(
    tmp_path: Path, url: str
) -> None:
    for argv in (["--store", url], [f"--store={url}"]):
        with pytest.raises(ConfigError, match=r"^store: .*ROLLMESH_COLLECTOR_STORE") as caught:
            parse_config(CollectorConfig, "collector", argv, {})
        assert "hunter2" not in str(caught.value)


def test_a_database_without_a_password_may_be_a_flag_and_one_with_it_a_variable() -> None:
    plain, secret = "postgresql://user@host:5432/mesh", "postgresql://user:hunter2@host:5432/mesh"
    assert parse_config(CollectorConfig, "collector", [f"--store={plain}"], {}).store == plain
    environ = {"ROLLMESH_COLLECTOR_STORE": secret}
    assert parse_config(CollectorConfig, "collector", [], environ).store == secret
