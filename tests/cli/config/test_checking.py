"""`rollmesh config check`: every problem in one go, each with its table, and no false alarm."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from rollmesh.cli import check_mesh, installed
from rollmesh.runtime import SERVICES
from rollmesh.runtime.access import make_tokens
from tests.trial_certificates import copy_certificates


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def problems(text: str, /, *, files: bool = False, **environ: str) -> list[str]:
    path = Path("mesh.toml")
    path.write_text(text)
    return check_mesh(path, installed(), environ, files=files).problems


def names(found: list[str]) -> list[str]:
    return [problem.partition(": ")[0] for problem in found]


def test_every_service_is_examined() -> None:
    assert tuple(installed()) == SERVICES


def test_every_problem_is_said_in_one_go() -> None:
    found = problems(
        """
        [mesh]
        engine = 2
        hots = "h"
        [gatway]
        [router]
        peer = "x"
        [engine]
        dtyp = "float32"
        max_images = -1
        [collector]
        store = "mysql"
        tick_ms = 0
        """
    )
    assert names(found) == [
        "gatway",
        "mesh.engine",
        "mesh.hots",
        "router.peer",
        "engine.dtyp",
        "engine.max_images",
        "collector.tick_ms",
        "collector.store",
    ]
    assert all(";" in problem or "give" in problem for problem in found)  # each has a remedy


@pytest.mark.parametrize(
    ("text", "named"),
    [
        pytest.param("", [], id="nothing"),
        pytest.param("[engine]\nport = 7400\n[mesh]\nengines = 3", [], id="counted-up"),
        pytest.param(
            "[engine]\nport = 7400\n[mesh]\nengines = 3\n[router]\nport = 7402",
            ["engine.port"],
            id="counted-up-into-another",
        ),
        pytest.param("[sidecar]\nport = 7200", ["sidecar.port"], id="a-default-port"),
        pytest.param(
            "[sidecar]\nport = 7200\nhost = '127.0.0.2'", [], id="the-same-port-of-another-address"
        ),
        pytest.param(
            "[mesh]\nhost = '127.0.0.2'\n[sidecar]\nport = 7200\nhost = '0.0.0.0'",
            ["sidecar.port"],
            id="all-addresses",
        ),
        pytest.param("[gateway]\nmetrics_port = 8000", ["sidecar.port"], id="a-metrics-port"),
        pytest.param("[mesh]\ncollectors = 2", ["mesh.collectors"], id="a-store-each"),
        pytest.param("[scorer]", ["scorer.function"], id="no-function"),
        pytest.param(
            "[mesh]\ntokens = false\nhost = '0.0.0.0'",
            [f"{one}.host" for one in SERVICES if one != "scorer"],
            id="open-to-all",
        ),
        pytest.param("[mesh]\nhost = '0.0.0.0'", [], id="locked"),
        pytest.param(
            "[engine]\ntoken_file = ''", ["engine.token_file"], id="nothing-to-show-to-routers"
        ),
        pytest.param(
            "[router]\ntls_certificate_file = 'a'\ntls_key_file = 'b'",
            [f"{one}.tls_ca_file" for one in ("engine", "collector", "gateway", "sidecar")],
            id="plain-text-to-tls",
        ),
        pytest.param(
            "[sidecar]\ntls_ca_file = 'a'",
            ["router.tls_certificate_file", "gateway.tls_certificate_file"],
            id="tls-to-plain-text",
        ),
        pytest.param("[mesh]\ncertificates_dir = 'c'", [], id="tls-everywhere"),
        pytest.param(
            "[mesh]\ncertificates_dir = 'c'\n"
            "[sidecar]\ntls_certificate_file = ''\ntls_key_file = ''",
            ["sidecar.tls_certificate_file"],
            id="no-certificate-to-show",
        ),
        pytest.param(
            "[collector]\nmax_request_bytes = 1000",
            ["gateway.max_session_record_bytes"],
            id="records-too-large",
        ),
        pytest.param(
            "[engine]\nmax_request_bytes = 1000",
            ["gateway.max_session_image_bytes"],
            id="images-too-large",
        ),
        pytest.param(
            "[engine]\nport = 7400\n[[model]]\nname = 'a'\n[[model]]\nname = 'b'\n"
            "[model.engine]\ndtyp = 1",
            ["model.engine.dtyp"],
            id="of-a-model",
        ),
    ],
)
def test_what_cannot_work_together_is_named(text: str, named: list[str]) -> None:
    assert sorted(set(names(problems(text)))) == sorted(named)


def test_the_environment_counts_and_is_named() -> None:
    text = "[gateway]\nmax_sessions = 0"
    assert names(problems(text)) == ["gateway.max_sessions"]
    assert problems(text, ROLLMESH_GATEWAY_MAX_SESSIONS="5") == []
    assert names(problems("", ROLLMESH_GATEWAY_MAX_SESSIONS="0")) == [
        "ROLLMESH_GATEWAY_MAX_SESSIONS"
    ]


def test_a_file_that_is_no_toml_is_one_problem() -> None:
    assert names(problems("[mesh")) == ["config"]


def with_model(text: str) -> str:
    return f"{text}\n[mesh]\nmodel_path = 'model'\n"


def test_tokens_that_are_not_made_yet_are_a_note_and_no_problem(in_folder: Path) -> None:
    Path("mesh.toml").write_text(with_model(""))
    found = check_mesh(Path("mesh.toml"), installed(), {}, files=True)
    assert found.problems == []
    assert [note.partition(" ")[0] for note in found.notes] == ["var/mesh/tokens"]


def test_services_reached_in_plain_text_are_noted() -> None:
    text = "[mesh]\nhost = '0.0.0.0'\n{}[sidecar]\nhost = '127.0.0.1'"
    for certificates, noted in (("", 4), ("certificates_dir = 'c'\n", 0)):
        Path("mesh.toml").write_text(text.format(certificates))
        found = check_mesh(Path("mesh.toml"), installed(), {}, files=False)
        assert found.problems == []
        assert len(found.notes) == noted


def test_tokens_that_others_may_read_or_that_are_missing_are_named(in_folder: Path) -> None:
    make_tokens(in_folder / "var/mesh/tokens")
    assert problems(with_model(""), files=True) == []
    (in_folder / "var/mesh/tokens/accepted/trainer").chmod(0o644)
    (in_folder / "var/mesh/tokens/engine.token").unlink()
    found = problems(with_model("[gateway]\ntokens_dir = 'none'"), files=True)
    accepting = ("router", "engine", "collector", "gateway")
    assert sorted(names(found)) == sorted(
        [*(f"{one}.tokens_dir" for one in accepting), "engine.token_file"]
    )
    assert "chmod 0600" in found[names(found).index("router.tokens_dir")]


def test_a_file_with_a_password_that_others_may_read_is_named(in_folder: Path) -> None:
    text = with_model("[collector]\nstore = 'postgresql://user:hunter2@host/mesh'\n")
    Path("mesh.toml").touch(mode=0o600)
    assert problems(text, files=True) == []
    Path("mesh.toml").chmod(0o644)
    (found,) = problems(text, files=True)
    assert found.startswith("collector.store: ")
    assert "chmod 0600 mesh.toml" in found
    assert "hunter2" not in found
    assert problems(text) == []


def test_certificates_are_read_as_services_read_them(in_folder: Path) -> None:
    make_tokens(in_folder / "var/mesh/tokens")
    copy_certificates(in_folder / "certs")
    text = "[mesh]\nmodel_path = 'model'\ncertificates_dir = 'certs'\n"
    assert problems(text, files=True) == []
    (in_folder / "certs/engine.key").chmod(0o644)
    (in_folder / "certs/gateway.crt").write_text("no PEM")
    https = "[sidecar]\nhttps_certificate_file = 'certs/sidecar.crt'\n"
    assert names(problems(text + https, files=True)) == [
        "engine.tls_key_file",
        "gateway.tls_certificate_file",
        "sidecar.https_key_file",
    ]
    https += "https_key_file = 'certs/router.key'\n"
    assert "sidecar.https_certificate_file" in names(problems(text + https, files=True))


def test_folders_that_cannot_be_are_named(in_folder: Path) -> None:
    (in_folder / "file").touch()
    text = "[mesh]\ndata_dir = 'file/x'\nmodel_path = 'none'\n[engine]\nscript = 'none.json'"
    assert sorted(names(problems(text, files=True))) == [
        "collector.data_dir",
        "engine.model_path",
        "engine.script",
        "gateway.data_dir",
        "gateway.model_path",
        "router.data_dir",
    ]


_NAMES = ("mesh", "model", *SERVICES, "nonsense")
_SETTINGS = ("host", "port", "model", "name", "router", "engines", "workers", "vllm", "store", "x")
_SCALARS = st.one_of(
    st.integers(-2, 2**40),
    st.booleans(),
    st.sampled_from(("", "a", "0", "-1", "sqlite", "127.0.0.1", "a:b", "[", "\n")),
)
_TABLES = st.dictionaries(
    st.sampled_from((*_SETTINGS, "engine", "gateway")),
    st.recursive(
        _SCALARS,
        lambda one: (
            st.lists(one, max_size=2) | st.dictionaries(st.sampled_from(_SETTINGS), one, max_size=3)
        ),
        max_leaves=5,
    ),
    max_size=6,
)


@given(
    st.dictionaries(
        st.sampled_from(_NAMES), _SCALARS | _TABLES | st.lists(_TABLES, max_size=3), max_size=6
    )
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_file_gets_problems_and_no_exception(in_folder: Path, tables: dict[str, Any]) -> None:
    text = "".join(f"{name} = {toml(value)}\n" for name, value in tables.items())
    found = problems(text, files=True)
    assert all(": " in problem for problem in found)


def toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {toml(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    return json.dumps(value)


@pytest.mark.parametrize(
    ("text", "code"), [("[mesh]\nengines = 2", 0), ("[mesh]\nengines = 0\n[x]", 2)]
)
def test_the_command_ends_with_its_code_and_a_line_for_each_problem(text: str, code: int) -> None:
    Path("mesh.toml").write_text(text)
    command = (sys.executable, "-m", "rollmesh.cli", "config", "check", "mesh.toml", "--no-files")
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == code
    assert len(done.stderr.splitlines()) == code
    assert ("no problems" in done.stdout) == (code == 0)
