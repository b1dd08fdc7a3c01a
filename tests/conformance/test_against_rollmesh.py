"""The kit against a mesh: everything that agents rely on holds."""

import asyncio
import os
import shutil
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
import pytest_asyncio

from benchmarks.peers.door import door
from benchmarks.peers.ours import Ours
from rollmesh.conformance import CALCULATE, NO_TEXT, OTHER_IDS
from tests.meshes import Mesh, scripted_mesh

CALL = '{"name": "calculator", "arguments": {"a": 6,  "b":7, "note": "caf\\u00e9 "}}'
RULES: list[tuple[str, str | list[str]]] = [
    ("calculator: what is 6 times 7?", f"<tool_call>\n{CALL}\n</tool_call>"),
    ("What is 6 times 7?", "The answer is 42. I am not sure. The answer is 42. I am not sure."),
    (NO_TEXT, ""),
    (OTHER_IDS, list("It is 42.")),
]
CONTEXT = 2048
NO_OCCASION = {"retry-after", "thinking", "served", "missing-ids"}
"""The mesh is never busy, and the model does not think. One protocol need not be served. No engine
leaves out the ids of an answer."""
GLUE = "{{- '<|im_start|>assistant\\n' }}\n"
EMPTY_THOUGHT = "{%- if enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(tmp_path_factory: pytest.TempPathFactory, vision_dir: Path) -> AsyncIterator[Mesh]:
    folder = tmp_path_factory.mktemp("mesh")
    model = shutil.copytree(vision_dir, folder / "model")
    template = model / "chat_template.jinja"
    text = template.read_text()
    assert text.count(GLUE) == 1
    template.write_text(text.replace(GLUE, f"{GLUE}{EMPTY_THOUGHT}"))
    async with scripted_mesh(folder, model, RULES, max_context_tokens=CONTEXT) as mesh:
        yield mesh


async def conformance(*flags: object, key: str = "") -> tuple[int, str, str]:
    """Exit code, output and errors of the command."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "rollmesh.cli", "conformance", *map(str, flags),
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "ROLLMESH_CONFORMANCE_KEY": key},
    )  # fmt: skip
    output, errors = await process.communicate()
    return process.returncode or 0, output.decode(), errors.decode()


async def test_a_mesh_passes_all_checks(mesh: Mesh, tmp_path: Path) -> None:
    assert CALCULATE.endswith(RULES[0][0])
    report = tmp_path / "report.xml"
    async with (
        mesh.client() as client,
        client.session() as session,
        door(Ours(client)) as capture,
    ):
        code, output, errors = await conformance(
            "--base-url", session.keyless_url, "--junit", report, "--context-tokens", CONTEXT,
            "--capture-url", capture,
            key=session.api_key,
        )  # fmt: skip
    assert code == 0, output + errors
    suite = ET.parse(report).getroot()[0]  # noqa: S314 - our own file
    names = {case.attrib["name"] for case in suite if case.find("skipped") is not None}
    assert suite.attrib["failures"] == "0", output
    assert names <= NO_OCCASION, output
