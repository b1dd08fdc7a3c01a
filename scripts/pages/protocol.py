"""Generates the protocol reference from the comments of the protos.

    python -m scripts.pages.protocol > build/reference/protocol.md

protoc parses the protos. This only walks its descriptors.
"""

import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from textwrap import dedent
from typing import Any

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    ServiceDescriptorProto,
)
from grpc_tools import protoc

ROOT = Path(__file__).parents[2]
_PROTOS = ROOT / "protos"
# Numbers of the fields of FileDescriptorProto and DescriptorProto that source locations count by.
_MESSAGE, _ENUM, _SERVICE = 4, 5, 6
_PACKAGE = (2,)
_FIELD, _NESTED, _NESTED_ENUM, _METHOD, _VALUE = 2, 3, 4, 2, 2
_INTRO = """# Protocol reference

The services and messages of `rollmesh.v1`, generated from the comments in `protos/rollmesh/v1`.
Errors are gRPC statuses with a typed reason: [errors](../../docs/errors.md).

The contract only grows: fields, numbers and names stay as they are, and an addition raises
`api_revision` of `GetServerInfo`. Clients may be built from this release and used with later ones.
"""


@dataclass(frozen=True, slots=True)
class Commented:
    """A proto file with its comments, by the path of what they stand above."""

    file: FileDescriptorProto
    comments: Mapping[tuple[int, ...], str]

    def comment(self, *path: int) -> str:
        """Returns the comment at a path of field numbers and indexes.

        That of the file is Markdown. All others are in one line.
        """
        return self.comments.get(path, "")


def compile_protos(folder: Path = _PROTOS) -> list[Commented]:
    """Returns our proto files, parsed by protoc, in the order of their names.

    Raises:
        ValueError: protoc refuses a file. It has said why.
    """
    names = sorted(str(path.relative_to(folder)) for path in folder.glob("rollmesh/v1/*.proto"))
    known = resources.files("grpc_tools") / "_proto"
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(temporary) / "all.binpb"
        flags = ["--include_source_info", f"--descriptor_set_out={out}"]
        if protoc.main(["protoc", f"-I{folder}", f"-I{known}", *flags, *names]):
            raise ValueError("protoc refuses the protos")
        found = FileDescriptorSet.FromString(out.read_bytes())
    return [Commented(file, _comments(file)) for file in found.file]


def page(files: Sequence[Commented]) -> str:
    """Returns the reference as Markdown: services first, then messages and enums by file."""
    parts = [_INTRO.rstrip()]
    for one in files:
        for at, service in enumerate(one.file.service):
            parts += _service(one, service, _SERVICE, at)
    for one in files:
        parts.append(f"## {Path(one.file.name).name}")
        parts.append(one.comment(*_PACKAGE))
        for at, message in enumerate(one.file.message_type):
            parts += _message(one, message, "", (_MESSAGE, at))
        for at, enum in enumerate(one.file.enum_type):
            parts += _enum(one, enum, "", (_ENUM, at))
    return "\n\n".join(part for part in parts if part) + "\n"


def _comments(file: FileDescriptorProto) -> dict[tuple[int, ...], str]:
    found = {
        tuple(place.path): place.leading_comments or place.trailing_comments
        for place in file.source_code_info.location
    }
    return {
        path: dedent(text).strip() if path == _PACKAGE else " ".join(text.split())
        for path, text in found.items()
    }


def _service(one: Commented, service: ServiceDescriptorProto, *path: int) -> Iterator[str]:
    yield f"## {service.name}"
    yield one.comment(*path)
    for at, method in enumerate(service.method):
        asked = ("stream " if method.client_streaming else "") + _link(method.input_type)
        answered = ("stream " if method.server_streaming else "") + _link(method.output_type)
        yield f"### {service.name}.{method.name}"
        yield f"{asked} → {answered}"
        yield one.comment(*path, _METHOD, at)


def _message(
    one: Commented, message: DescriptorProto, prefix: str, path: tuple[int, ...]
) -> Iterator[str]:
    name = prefix + message.name
    yield f"({_anchor(name)})=\n### {name}"
    yield one.comment(*path)
    maps = {nested.name: nested for nested in message.nested_type if nested.options.map_entry}
    rows = [
        (f"`{field.name}`", _type(field, maps), one.comment(*path, _FIELD, at))
        for at, field in enumerate(message.field)
    ]
    yield _table(("field", "type", "meaning"), rows)
    for at, nested in enumerate(message.nested_type):
        if not nested.options.map_entry:
            yield from _message(one, nested, f"{name}.", (*path, _NESTED, at))
    for at, enum in enumerate(message.enum_type):
        yield from _enum(one, enum, f"{name}.", (*path, _NESTED_ENUM, at))


def _enum(
    one: Commented, enum: EnumDescriptorProto, prefix: str, path: tuple[int, ...]
) -> Iterator[str]:
    yield f"({_anchor(prefix + enum.name)})=\n### {prefix}{enum.name}"
    yield one.comment(*path)
    rows = [
        (f"`{value.name}`", str(value.number), one.comment(*path, _VALUE, at))
        for at, value in enumerate(enum.value)
    ]
    yield _table(("value", "number", "meaning"), rows)


def _type(field: FieldDescriptorProto, maps: Mapping[str, DescriptorProto]) -> str:
    entry = maps.get(field.type_name.rpartition(".")[2])
    if entry is not None:
        key, value = entry.field
        return f"map of {_type(key, {})} to {_type(value, {})}"
    name = FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()
    kind = _link(field.type_name) if field.type_name else name
    if field.label == FieldDescriptorProto.LABEL_REPEATED:
        return f"repeated {kind}"
    return f"optional {kind}" if field.proto3_optional else kind


def _link(full_name: str) -> str:
    name = full_name.removeprefix(".rollmesh.v1.")
    return f"`{name.removeprefix('.')}`" if name.startswith(".") else f"[{name}](#{_anchor(name)})"


def _anchor(name: str) -> str:
    return "proto-" + re.sub(r"\W", "-", name).lower()


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    if not rows:
        return ""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(
        f"| {' | '.join(str(cell).replace('|', chr(92) + '|') for cell in line)} |"
        for line in lines
    )


if __name__ == "__main__":
    sys.stdout.write(page(compile_protos()))
