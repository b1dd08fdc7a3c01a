"""Every command and configuration that the pages show is one that there is."""

import io
import re
import runpy
import shlex
import sys
import tomllib
from contextlib import redirect_stdout
from dataclasses import fields
from functools import cache
from itertools import count
from unittest.mock import patch

import pytest

from rollmesh.collector import TOOLS as COLLECTOR_TOOLS
from rollmesh.gateway import TOOLS as GATEWAY_TOOLS
from rollmesh.launch import plan_mesh
from rollmesh.runtime import SERVICES, read_mesh
from rollmesh.runtime.access import CallerConfig
from tests.docs.pages import PAGES, Block, blocks
from tests.paths import ROOT

LANGUAGES = {"python", "toml", "sh", "json", "text"}
"""What a block may be. `text` is shown and not run."""
_TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
_VARIABLES = {f"ROLLMESH_{one.name}".upper() for one in fields(CallerConfig)} | {
    "https_proxy",
    "RAY_AUTH_MODE",
}
_MODULES = {
    "status": "rollmesh.cli.status",
    "tail": "rollmesh.cli.tail",
    "top": "rollmesh.cli.top",
    "doctor": "rollmesh.cli.doctor",
    "import": "rollmesh.cli.imports",
    "view": "rollmesh.view",
    "archive": "rollmesh.record.archive",
    "export": "rollmesh.record.export",
    "up": "rollmesh.cli.up",
    "conformance": "rollmesh.conformance",
    "tokens": "rollmesh.runtime.access",
}
_TOOLS = {
    "collector": set(COLLECTOR_TOOLS),
    "gateway": set(GATEWAY_TOOLS),
    "router": {"forget-weights"},
}


def commands() -> list[tuple[str, list[str]]]:
    """Every line of every `sh` block, as words."""
    return [
        (block.name, words)
        for block in blocks("sh")
        for line in block.text.splitlines()
        if (words := shlex.split(line, comments=True))
    ]


@cache
def helps(module: str, *tool: str) -> str:
    """What `python -m module tool --help` prints."""
    is_package = hasattr(sys.modules.get(module), "__path__")
    run = f"{module}.__main__" if is_package else module
    loaded = sys.modules.pop(run, None)  # by another command
    with (
        patch.object(sys, "argv", [module, *tool, "--help"]),
        redirect_stdout(io.StringIO()) as printed,
        pytest.raises(SystemExit) as ended,
    ):
        runpy.run_module(module, run_name="__main__")
    if loaded is not None:
        sys.modules[run] = loaded
    assert not ended.value.code
    return printed.getvalue()


def check_flags(words: list[str], known: str) -> None:
    for word in words:
        if word.startswith("--"):
            assert re.search(rf"{re.escape(word.partition('=')[0])}(?![\w-])", known), word


def test_every_block_names_its_kind() -> None:
    for path in PAGES:
        fences = re.findall(r"^```(\w*)$", path.read_text("utf-8"), re.M)
        for language in fences[::2]:
            assert language in LANGUAGES, f"{path.name}: a block of {language!r}"


@pytest.mark.parametrize(
    ("where", "words"), [pytest.param(*one, id=" ".join(one[1])[:60]) for one in commands()]
)
def test_a_command_that_is_shown_exists(where: str, words: list[str]) -> None:
    match words:
        case ["make", *targets]:
            assert {target for target in targets if "=" not in target} <= _TARGETS, where
        case ["rollmesh", *rest]:
            check_rollmesh(where, rest)
        case ["export", *variables]:
            assert {one.partition("=")[0] for one in variables} <= _VARIABLES, where
        case ["pip", "install", wheel] if "[" not in wheel and "_" in wheel.partition("-")[0]:
            assert re.fullmatch(
                r"dist/rollmesh_(chat|conformance)-[\d.]+-py3-none-any\.whl", wheel
            ), where
        case ["rollmesh-conformance", *flags]:
            check_flags(flags, helps("rollmesh.conformance"))
        case ["pip", "install", wheel] | ["pip", "install", "--find-links", "dist", wheel]:
            assert wheel.startswith("dist/rollmesh-"), where
            project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
            assert f"-{project['version']}-py3" in wheel
            assert wheel.rstrip("]").partition("[")[2] in project["optional-dependencies"]
        case ["python", "-m", "examples.tiny_model", *_]:
            pass  # test_first_agent runs it
        case ["deploy/certs.sh", *_]:
            pass  # test_trial_certificates runs it
        case ["docker", "compose" | "cp", *_]:
            pass  # tests/docker runs it
        case ["kubectl", verb, *rest]:
            check_kubectl(verb, rest)
        case ["ray", verb, *flags]:
            check_ray(verb, flags)
        case _:
            pytest.fail(f"{where}: nothing tests {words}")


def test_a_command_that_a_sentence_names_exists() -> None:
    for path in PAGES:
        if path.name == "CHANGELOG.md":  # which says what is gone
            continue
        text = re.sub(r"^```.*?^```$", "", path.read_text("utf-8"), flags=re.M | re.S)
        for command in re.findall(r"`rollmesh\s+([a-z][^`:]*)`", text):
            words = re.sub(r"(--[\w-]+)\s+([^-\s])", r"\1=\2", command).split()
            check_rollmesh(f"{path.name}: {command}", words)


def check_kubectl(verb: str, words: list[str]) -> None:
    """What is applied is in the repository, where tests/kubernetes renders and runs it."""
    assert verb in {"apply", "create", "get"}
    if verb == "apply":
        flag, folder = words
        assert flag == "-k"
        assert (ROOT / folder / "kustomization.yaml").exists()


def check_ray(verb: str, flags: list[str]) -> None:
    scripts = pytest.importorskip("ray.scripts.scripts", reason="has the commands of Ray")
    known = {flag for one in scripts.cli.commands[verb].params for flag in one.opts}
    assert {flag.partition("=")[0] for flag in flags} <= known


def check_rollmesh(where: str, words: list[str]) -> None:
    match words:
        case ["--version"]:
            assert "--version" in helps("rollmesh.cli")
        case [tool, *rest] if tool in _MODULES:
            check_flags(rest, helps(_MODULES[tool]))
        case ["config", "show", service, *rest] if service in SERVICES:
            check_flags(rest, helps("rollmesh.cli.config", "show") + helps(f"rollmesh.{service}"))
        case ["config", tool, *rest]:
            check_flags(rest, helps("rollmesh.cli.config", tool))
        case ["ray"] | ["probe", *_]:
            pass  # tests/runtime/test_probe runs it
        case ["ray", tool, *rest]:
            check_flags(rest, helps("rollmesh.cli.ray", tool))
        case ["harbor", tool, *rest]:
            check_flags(rest, helps("rollmesh.cli.harbor", tool))
        case ["template", "check", *rest]:
            check_flags(rest, helps("rollmesh.chat.check"))
        case [service, tool, *rest] if tool in _TOOLS.get(service, ()):
            check_flags(rest, helps(f"rollmesh.{service}", tool))
        case ["scorer", function, *flags]:
            assert ":" in function, where
            check_flags(flags, helps("rollmesh.scorer"))
        case ["gateway", *flags] if any(flag.startswith("--http") for flag in flags):
            check_flags(flags, helps("rollmesh.cli.gateway"))
        case ["relay", *flags]:
            check_flags(flags, helps("rollmesh.cli.relay"))
        case [service, *flags] if service in SERVICES:
            assert all(flag.startswith("--") for flag in flags), f"{where}: no tool {flags}"
            check_flags(flags, helps(f"rollmesh.{service}"))
        case _:
            pytest.fail(f"{where}: nothing tests rollmesh {words}")


@pytest.mark.parametrize("block", blocks("toml"), ids=lambda block: block.name)
def test_a_mesh_that_is_shown_can_be_planned(
    block: Block, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("shown") / "mesh.toml"
    path.write_text(block.text)
    ports = count(20_000)
    for spec in plan_mesh(read_mesh(path), ports.__next__):
        check_flags(list(spec.flags), helps(f"rollmesh.{spec.service}"))
