"""The contract from another language: stubs that are generated, and no SDK."""

import asyncio
import importlib
import json
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest
from google.protobuf.compiler import plugin_pb2
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorProto

from tests.meshes import scripted_mesh
from tests.paths import ROOT

SOURCES = ROOT / "tests" / "contract" / "typescript"
OPTIONS = [
    "outputServices=grpc-js",
    "esModuleInterop=true",
    "importSuffix=.js",
    "env=node",
    "forceLong=string",
    "oneof=unions",
    "useExactTypes=false",
]
REPLIES = [("What is 6 plus 7?", "It is 13."), ("And now?", "Still 13.")]


async def run(folder: Path, *command: str) -> str:
    """Runs a command to its end. Returns what it printed."""
    process = await asyncio.create_subprocess_exec(
        *command, cwd=folder, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(300):
        out, err = await process.communicate()
    assert process.returncode == 0, f"{command}: {out.decode()} {err.decode()}"
    return out.decode()


async def registry_answers(folder: Path) -> bool:
    process = await asyncio.create_subprocess_exec(
        "npm", "view", "typescript", "version", cwd=folder, stdout=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(120):
            out, _ = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
        return False
    return process.returncode == 0 and bool(out)


def built_program(tmp_path: Path) -> Path:
    """Copies the program. What is built of it stays out of the tree."""
    folder = tmp_path / "typescript"
    names = ("package.json", "package-lock.json", "tsconfig.json", "main.ts")
    folder.mkdir()
    for name in names:
        shutil.copy(SOURCES / name, folder / name)
    return folder


def generate_stubs(folder: Path) -> None:
    """Runs the plugin ts-proto as protoc does, on the descriptors of our Python stubs."""
    names = [f"rollmesh/v1/{path.name}" for path in ROOT.glob("protos/rollmesh/v1/*.proto")]
    files = [file_of(name) for name in names]
    request = plugin_pb2.CodeGeneratorRequest(
        file_to_generate=names,
        parameter=",".join(OPTIONS),
        proto_file=map(proto_of, with_imports(files)),
    )
    plugin = folder / "node_modules/.bin/protoc-gen-ts_proto"
    done = subprocess.run(
        [plugin], input=request.SerializeToString(), capture_output=True, check=True, timeout=120
    )
    response = plugin_pb2.CodeGeneratorResponse.FromString(done.stdout)
    assert not response.error
    for file in response.file:
        path = folder / "gen" / file.name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(file.content)


def file_of(name: str) -> FileDescriptor:
    module = name.removesuffix(".proto").replace("/", ".")
    found: FileDescriptor = importlib.import_module(f"{module}_pb2").DESCRIPTOR
    return found


def with_imports(files: Iterable[FileDescriptor]) -> list[FileDescriptor]:
    """The files and all that they import, imports first, each once."""
    found: dict[str, FileDescriptor] = {}
    for file in files:
        for one in (*with_imports(file.dependencies), file):
            found.setdefault(one.name, one)
    return list(found.values())


def proto_of(file: FileDescriptor) -> FileDescriptorProto:
    proto = FileDescriptorProto()
    file.CopyToProto(proto)
    return proto


@pytest.mark.long
@pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed")
async def test_a_typescript_program_chats_and_reads_its_trajectory(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    folder = built_program(tmp_path)
    if not await registry_answers(folder):
        pytest.skip("npm's registry does not answer")
    await run(folder, "npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund")
    generate_stubs(folder)
    await run(folder, "npx", "tsc")
    async with scripted_mesh(tmp_path / "mesh", tokenizer_dir, REPLIES) as mesh:
        addresses = mesh.addresses.gateway, mesh.addresses.collector
        seen = json.loads(await run(folder, "node", "build/main.js", *addresses))
    assert seen["service"] == "rollmesh.v1.GatewayService"
    assert seen["apiRevision"] >= 1
    assert (seen["first"], seen["streamed"]) == ("It is 13.", "Still 13.")
    assert seen["closed"] == seen["read"] != []
    assert (seen["reward"], seen["turns"]) == (1, 2)
    assert seen["tokens"] == seen["logprobs"] == seen["mask"] > seen["trained"] > 0
