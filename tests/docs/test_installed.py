"""The wheel, installed into an environment that has never seen this repository."""

import asyncio
import os
import re
import shutil
import subprocess
import sys
import threading
import tomllib
import zipfile
from collections.abc import AsyncIterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import distribution
from pathlib import Path
from xml.etree import ElementTree

import pytest
import typing_extensions
from openai import AsyncOpenAI

from rollmesh.client import Client, MeshAddresses
from tests.docs.chat_page import CHECK, SETUP
from tests.docs.pages import blocks
from tests.paths import ROOT, package_folder

LOCK = ROOT / "requirements" / "mesh.txt"
FROM_THE_WHEEL = (
    "images/test_placing.py",
    "parsing/test_answer.py",
    "parsing/test_channels.py",
    "parsing/test_decoding.py",
    "parsing/test_formats.py",
    "parsing/test_python_literals.py",
    "templates/test_continuation.py",
    "templates/test_remembered.py",
    "test_canonical.py",
)
TEST_PACKAGES = (
    *("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments", "py.py"),
    *("hypothesis", "_hypothesis_globals.py", "sortedcontainers", "attr", "attrs", "trl"),
)
FIXTURES = """
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from rollmesh.chat.templates import Continuation
from rollmesh.chat.templates import load_model

slow = [HealthCheck.too_slow]
settings.register_profile("few", deadline=None, max_examples=10, suppress_health_check=slow)
settings.load_profile("few")


@pytest.fixture(scope="session")
def tokenizer_dir():
    return Path({model!r})


@pytest.fixture(scope="session")
def tokenizer(tokenizer_dir):
    return load_model(tokenizer_dir)[1]


@pytest.fixture(scope="session")
def continuation(tokenizer_dir):
    return Continuation(*load_model(tokenizer_dir))
"""
MESH = """
[mesh]
data_dir = "data"
model_path = "{model}"

[engine]
backend = "scripted"
vocabulary_tokens = 500
reply_tokens = 4
"""


def call(
    *command: str | Path, folder: Path, packages: Path | None = None
) -> subprocess.CompletedProcess[str]:
    environ = {"PATH": os.environ["PATH"], "HOME": str(folder), "PYTHONPATH": str(packages or "")}
    return subprocess.run(
        command, cwd=folder, env=environ, capture_output=True, text=True, timeout=250, check=False
    )


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The wheels by distribution, built from a copy of the sources as `make wheel` does."""
    source, folder = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheels")
    for name in ("protos", "services", "clients"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = (sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder)
    for project in (".", "services/gateway/chat", "clients/conformance"):
        done = call(*build, folder=source / project)
        assert done.returncode == 0, done.stderr
    return {one.name.partition("-")[0]: one for one in folder.iterdir()}


def install(folder: Path, *wheels: Path) -> Path:
    """Returns the commands of a fresh environment with wheels, and nothing that they need."""
    python = (sys.executable, "-m")
    into = ("--python", "env", "-q", "--disable-pip-version-check", "install")
    done = [call(*python, "venv", "--without-pip", "env", folder=folder)]
    done += [call(*python, "pip", *into, "--no-deps", "--no-index", *wheels, folder=folder)]
    assert [one.stderr for one in done if one.returncode] == []
    return folder / "env" / "bin"


@pytest.fixture(scope="module")
def commands(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Commands of an environment with rollmesh and the library that its gateway needs."""
    folder = tmp_path_factory.mktemp("installed")
    return install(folder, wheels["rollmesh"], wheels["rollmesh_chat"])


def test_no_file_is_in_two_wheels_and_each_names_the_others_version(
    wheels: dict[str, Path],
) -> None:
    files: list[str] = []
    needs: dict[str, set[str]] = {}
    for name, wheel in wheels.items():
        with zipfile.ZipFile(wheel) as archive:
            files += archive.namelist()
            (metadata,) = (one for one in archive.namelist() if one.endswith("dist-info/METADATA"))
            text = archive.read(metadata).decode()
        needs[name] = set(re.findall(r"(?m)^Requires-Dist: (rollmesh-[\w.=[\]-]+)", text))
    assert len(files) == len(set(files))
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    chat = {f"rollmesh-chat=={version}", f"rollmesh-chat[mistral]=={version}"}
    assert needs == {"rollmesh": chat, "rollmesh_chat": set(), "rollmesh_conformance": set()}


@pytest.fixture(scope="module")
def mesh_packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packages of `rollmesh[mesh]` by its lock, and no others."""
    folder = tmp_path_factory.mktemp("packages")
    for name, version in re.findall(r"^([\w.-]+)==(\S+)", LOCK.read_text(), re.MULTILINE):
        found = distribution(name)
        assert found.version == version
        tops = {one.parts[0] for one in found.files or () if one.parts[0] != ".."}
        for top in tops - {"__pycache__"}:
            if not (folder / top).exists():
                (folder / top).symlink_to(str(found.locate_file(top)))
    return folder


def test_it_says_its_version(commands: Path, tmp_path: Path) -> None:
    done = call(commands / "rollmesh", "--version", folder=tmp_path)
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert (done.returncode, done.stdout) == (0, f"rollmesh {version}\n")


async def until_up(output: asyncio.StreamReader) -> AsyncIterator[str]:
    async for line in output:
        yield line.decode()
        if line.startswith(b"UP "):
            return


async def test_a_mesh_runs_from_it(
    commands: Path, mesh_packages: Path, tmp_path: Path, tokenizer_dir: Path
) -> None:
    (tmp_path / "mesh.toml").write_text(MESH.format(model=tokenizer_dir))
    process = await asyncio.create_subprocess_exec(
        commands / "rollmesh",
        "up",
        "--config=mesh.toml",
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(mesh_packages)},
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(200):
            lines = [line async for line in until_up(process.stdout)]
            addresses = MeshAddresses.from_json(lines[-1].removeprefix("UP "))
            async with Client(addresses) as client, client.session() as session:
                agent = AsyncOpenAI(base_url=session.base_url, api_key=session.api_key)
                async with agent:
                    answer = await agent.chat.completions.create(
                        model="policy", messages=[{"role": "user", "content": "hello"}]
                    )
            assert answer.usage is not None
            assert answer.usage.completion_tokens == 4
    finally:
        if process.returncode is None:
            process.terminate()
        assert await process.wait() == 0


@pytest.mark.parametrize(
    ("words", "extra"),
    [(["up"], "mesh"), (["gateway"], "gateway"), (["template", "check", "x"], "gateway")],
)
def test_a_missing_package_is_named(
    commands: Path, tmp_path: Path, words: list[str], extra: str
) -> None:
    done = call(commands / "rollmesh", *words, folder=tmp_path)
    assert done.returncode == 2
    assert f"rollmesh {words[0]}" in done.stderr
    assert f"pip install 'rollmesh[{extra}]'" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["rooter"], "there is no command 'rooter'; did you mean 'router'?"),
        (["config", "chek"], "chek"),
        (["quite-another"], "there is no command 'quite-another'\n"),
    ],
)
def test_an_unknown_command_is_named(
    commands: Path, mesh_packages: Path, tmp_path: Path, words: list[str], said: str
) -> None:
    done = call(commands / "rollmesh", *words, folder=tmp_path, packages=mesh_packages)
    assert (done.returncode, said in done.stderr) == (2, True), done.stderr


@pytest.mark.parametrize("words", [["up", "--config"], ["config", "check"]])
def test_a_mesh_file_that_needs_vllm_says_how_to_install_it(
    commands: Path, mesh_packages: Path, tmp_path: Path, tokenizer_dir: Path, words: list[str]
) -> None:
    file = tmp_path / "mesh.toml"
    file.write_text(MESH.format(model=tokenizer_dir).replace('"scripted"', '"vllm"'))
    done = call(commands / "rollmesh", *words, file, folder=tmp_path, packages=mesh_packages)
    assert done.returncode == 2
    assert "engine.backend: the package vllm is not installed; run: pip install" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.fixture(scope="module")
def chat_alone(
    wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """The Python of an environment with rollmesh-chat alone, and the packages that it needs."""
    folder = tmp_path_factory.mktemp("chat")
    python = install(folder, wheels["rollmesh_chat"]) / "python"
    packages = folder / "packages"
    packages.mkdir()
    for name in ("jinja2", "markupsafe", "numpy", "PIL", "tokenizers"):
        (packages / name).symlink_to(package_folder(name))
    for libraries in package_folder("numpy").parent.glob("*.libs"):
        (packages / libraries.name).symlink_to(libraries)
    return python, packages


def test_chat_stands_alone(
    chat_alone: tuple[Path, Path], tmp_path: Path, tokenizer_dir: Path
) -> None:
    """The page's example renders and parses two turns without gRPC and asyncio."""
    python, packages = chat_alone
    (example,) = (one.text for one in blocks("python") if one.page == "docs/chat.md")
    model = f"model_path = {str(tokenizer_dir)!r}"
    alone = "import sys, rollmesh.chat\nassert sorted(rollmesh.__path__) == rollmesh.__path__[:1]"
    loaded = "assert not {'grpc', 'asyncio', 'google'} & set(sys.modules), sorted(sys.modules)"
    script = "\n".join((alone, model, SETUP, example, CHECK, loaded))
    done = call(python, "-c", script, folder=tmp_path, packages=packages)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("multiply ")


@pytest.mark.long
def test_the_tests_of_chat_pass_on_its_wheel(
    chat_alone: tuple[Path, Path], tmp_path: Path, tokenizer_dir: Path
) -> None:
    """All that need no reference: no transformers, vLLM, xgrammar or mistral-common."""
    python, needed = chat_alone
    packages = tmp_path / "packages"
    shutil.copytree(needed, packages, symlinks=True)
    for name in TEST_PACKAGES:
        (packages / name).symlink_to(package_folder("pytest").parent / name)
    shutil.copytree(ROOT / "tests" / "chat", tmp_path / "tests" / "chat")
    shutil.copy(ROOT / "tests" / "paths.py", tmp_path / "tests")
    (tmp_path / "conftest.py").write_text(FIXTURES.format(model=str(tokenizer_dir)))
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --import-mode=importlib\n")
    done = call(
        *(python, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
        *(f"tests/chat/{one}" for one in FROM_THE_WHEEL),
        folder=tmp_path,
        packages=packages,
    )
    assert done.returncode == 0, done.stdout + done.stderr


class Nothing(BaseHTTPRequestHandler):
    """A server without a path."""

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("content-length", 0)))
        body = b'{"error": "is not served"}'
        self.send_response(404)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        self.do_GET()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the library's name
        """Says nothing."""


def test_the_kit_is_a_distribution_that_needs_only_httpx2(
    commands: Path, wheels: dict[str, Path], tmp_path: Path
) -> None:
    absent = call(commands / "rollmesh", "conformance", folder=tmp_path)
    assert (absent.returncode, absent.stdout) == (2, "")
    assert absent.stderr.endswith("not installed; run: pip install rollmesh-conformance\n")
    packages = kit_packages(wheels["rollmesh_conformance"], tmp_path)
    report = tmp_path / "report.xml"
    with ThreadingHTTPServer(("127.0.0.1", 0), Nothing) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        flags = ("--base-url", f"http://127.0.0.1:{server.server_port}/v1", "--junit", report)
        alone = call(
            sys.executable, "-S", "-m", "rollmesh.conformance", *flags,
            folder=tmp_path, packages=packages,
        )  # fmt: skip
        kit = (commands / "rollmesh", "conformance", *flags)
        done = call(*kit, folder=tmp_path, packages=packages)
        server.shutdown()
        serving.join()
    assert (alone.returncode, alone.stderr) == (1, "")
    assert (done.returncode, done.stderr) == (1, "")
    cases = {
        case.attrib["name"]: [one.tag for one in case]
        for case in ElementTree.parse(report).getroot()[0]  # noqa: S314 - the kit wrote it
    }
    assert (cases["models"], cases["unknown-path"]) == (["failure"], [])
    assert cases["served"] == ["skipped"]  # each protocol


def kit_packages(wheel: Path, folder: Path) -> Path:
    """The kit's wheel, unpacked beside the packages that it needs."""
    packages = folder / "packages"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
    assert [one.name for one in (packages / "rollmesh").iterdir()] == ["conformance"]
    for name in ("httpx2", "httpcore2", "anyio", "h11", "idna", "truststore"):
        package = package_folder(name)
        for path in (package, *package.parent.glob(f"{name}-*.dist-info")):
            (packages / path.name).symlink_to(path)
    module = Path(typing_extensions.__file__)
    (packages / module.name).symlink_to(module)
    return packages


def test_the_lock_has_the_packages_of_the_extra(mesh_packages: Path) -> None:
    """So what `pip install rollmesh[mesh]` brings is what these tests ran with."""
    for name in ("grpc", "uvloop", "tokenizers", "psycopg", "starlette", "safetensors"):
        assert (mesh_packages / name).is_dir()
    assert not {"torch", "vllm", "ray", "pytest"} & {one.name for one in mesh_packages.iterdir()}
