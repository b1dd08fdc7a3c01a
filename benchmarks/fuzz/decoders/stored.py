"""Targets: files that operators write, images, and rows of damaged stores."""

import io
import json
import tempfile
import zlib
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.fuzz.decoders.target import (
    Target,
    any_bytes,
    expect,
    framed,
    frames,
    json_value,
    message_of,
    one_frame,
    text_with,
)
from rollmesh.chat import RenderContext
from rollmesh.cli import check_mesh, installed
from rollmesh.client import SessionResult
from rollmesh.collector import join, read_head, split
from rollmesh.gateway import Letter, write_letters
from rollmesh.launch import plan_mesh
from rollmesh.runtime import read_mesh
from rollmesh.runtime.access import AcceptedTokens, PresentedToken, TokensOfFile, write_private
from rollmesh.runtime.codec import (
    ImageLimits,
    check_image,
    decode_image,
    pack_ids,
    pack_logprobs,
    read_data_url,
)
from rollmesh.runtime.config import ConfigError
from rollmesh.runtime.errors import RollmeshError
from rollmesh.v1 import gateway_pb2, session_pb2
from tests.collector.records import record

_KEY = b"context"
_TOKEN = "t" * 40
_CHECKED = 16
"""One mesh file in so many is checked too, which takes milliseconds."""
_MESH = """
[mesh]
data_dir = "var"
engines = 2
[engine]
backend = "scripted"
port = 7400
reply_tokens = 24
[engine.vllm]
tensor_parallel_size = 2
[scorer]
function = "a:b"
[gateway]
max_context_tokens = 512
[[model]]
name = "judge"
model_path = "x"
[model.engine]
max_context_tokens = 8192
"""
_LIMITS = ImageLimits(max_bytes=65_536, max_pixels=4096)


@cache
def _folder() -> Path:
    at = "/dev/shm" if Path("/dev/shm").is_dir() else None  # noqa: S108 - not a fixed name in it
    return Path(tempfile.mkdtemp(prefix="rollmesh-fuzz-", dir=at))


def _tokens(data: bytes) -> None:
    folder = _folder() / "tokens"
    if not folder.exists():
        write_private(folder, {"accepted/trainer": b"", "own.token": b""})
    for name in ("accepted/trainer", "own.token"):
        (folder / name).write_bytes(data)
    for read in (
        lambda: AcceptedTokens(folder / "accepted").roles(_TOKEN),
        lambda: TokensOfFile("metrics_token_file", folder / "own.token").has(_TOKEN),
        lambda: PresentedToken(folder / "own.token").metadata(),
    ):
        try:
            found: Any = read()
        except ConfigError:
            continue
        if isinstance(found, tuple):
            expect(found[1].isascii() and found[1].isprintable(), "unprintable metadata")
        elif found:
            expect(_TOKEN.encode() in data or b"sha256:" in data, "another token")


def _config(data: bytes) -> None:
    path = _folder() / "mesh.toml"
    path.write_bytes(data)
    try:
        specs = plan_mesh(read_mesh(path), lambda: 1)
    except ConfigError:
        specs = []
    if zlib.crc32(data) % _CHECKED == 0:
        problems = check_mesh(path, installed(), {}, files=False).problems
        expect(bool(specs or problems), "what has no problem cannot be planned")


def _image(data: bytes) -> None:
    found = check_image(data, "image", limits=_LIMITS)
    expect(decode_image(data).size == (found.width, found.height), "another size")


@cache
def _images() -> list[bytes]:
    made: list[bytes] = []
    for mode, name in (("RGB", "PNG"), ("P", "PNG"), ("L", "JPEG"), ("RGB", "WEBP"), ("P", "GIF")):
        file = io.BytesIO()
        Image.new(mode, (3, 2)).save(file, name)
        made.append(file.getvalue())
    return made


def _data_url(data: bytes) -> None:
    media_type, image = read_data_url(data.decode("utf-8", "replace"), "image", 64)
    expect(len(image) <= 66, f"{len(image)} bytes of {media_type}")


def _stored_session(data: bytes) -> None:
    """Head and arrays of the collector's store."""
    head, arrays = (*frames(data), b"", b"")[:2]
    found = join(read_head("fuzz", head), arrays)
    SessionResult.from_proto(found)


def _session_seed() -> bytes:
    head, arrays = split(record("fuzz", "g"))
    return framed([head, b"".join(arrays)])


def _letter(data: bytes) -> None:
    """A closed session in a gateway's journal: a record, or a dead letter that says why not."""
    try:
        found = json.loads(data)
        spec, request, *rows = found
        made = [_row(row) for row in rows]
    except (ValueError, TypeError, RecursionError, AttributeError, KeyError, OverflowError):
        return  # no row of a database
    if not isinstance(spec, str) or not isinstance(request, str):
        return
    context = RenderContext(b"", b"")
    body = request.encode("latin-1", "replace")
    letter = Letter("s", spec, b"", body, 5, {_KEY: context}, made, [], [])
    expect(len([*write_letters([letter], limit_s=60.0)]) == 1, "neither a record nor an error")


def _row(fields: dict[str, Any]) -> tuple[Any, ...]:
    """Returns a row with the types that its columns have."""
    number = {name: int(fields[name]) for name in ("node_id", "parent_id", "scaffold")}
    if max(map(abs, number.values())) >= 1 << 63:
        raise ValueError("no integer of a database")
    ids = np.array(fields["token_ids"], np.uint32)
    logprobs, sample = fields["logprobs"], fields["sample"]
    with np.errstate(over="ignore"):
        packed = None if logprobs is None else pack_logprobs(np.array(logprobs, np.float32))
    return (
        1,
        number["node_id"],
        number["parent_id"],
        _KEY,
        str(fields["messages"]),
        pack_ids(ids)[: len(ids) * 4 - int(fields.get("cut", 0))],
        number["scaffold"],
        str(fields["reasons"]),
        None if sample is None else str(sample),
        packed,
        None,
        None if fields["answer"] is None else str(fields["answer"]),
        *(None, None, None),
    )


def _letter_seed() -> bytes:
    spec = {"session_id": "s", "opened_unix_ms": 1, "metadata": {"a": "b"}}
    said: dict[str, Any] = {"role": "user", "content": "go", "tool_calls": []}
    said |= {"tool_call_id": "", "reasoning": "", "name": "", "images": [], "echo_of": 0}
    answer: dict[str, Any] = {
        "answer_id": "chatcmpl-s-2",
        "fingerprint": "f",
        "idempotency_key": "",
    }
    answer |= {"created_unix_ms": 3, "lineage": None}
    question: dict[str, Any] = {"node_id": 1, "parent_id": 0, "messages": json.dumps([said])}
    question |= {"token_ids": [5, 6], "scaffold": 2, "reasons": "[]"}
    question |= {"sample": None, "logprobs": None, "answer": None}
    reply = {**question, "node_id": 2, "parent_id": 1, "token_ids": [7, 8, 2], "scaffold": 0}
    reply |= {"messages": json.dumps([{**said, "role": "assistant"}]), "reasons": "[1]"}
    reply |= {"sample": json.dumps([[[0, 0, 3, "engine-0"]], 1, 2, 0, 9])}
    reply |= {"logprobs": [-0.5, -0.5, -0.5], "answer": json.dumps(answer)}
    close = gateway_pb2.CloseSessionRequest(outcome=session_pb2.SESSION_OUTCOME_COMPLETED)
    request = close.SerializeToString().decode("latin-1")
    return json.dumps([json.dumps(spec), request, question, reply]).encode()


def _nested_json(rng: Any, data: bytes) -> bytes:
    """Changes a row, or within one of its columns that are JSON themselves."""
    try:
        found = json.loads(data)
        at = rng.randrange(len(found))
        column = found[at]
        if isinstance(column, str):
            found[at] = json_value(rng, column.encode()).decode("utf-8", "replace")
        else:
            name = rng.choice(("messages", "sample", "answer", "reasons"))
            column[name] = json_value(rng, column[name].encode()).decode("utf-8", "surrogatepass")
        made = json.dumps(found).encode()
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return json_value(rng, data)
    return made if rng.random() < 0.7 else json_value(rng, data)


_TOML = (
    *("[mesh]\n", "[[model]]\n", "[engine]\n", "[gateway]\n", "[ray]\n", "[sidecar]\n", "\n"),
    *("port = 0\n", "port = 70000\n", "host = '0.0.0.0'\n", "engines = -1\n", "engines = 0\n"),
    *(
        "collectors = 2\n",
        "routers = 2\n",
        "name = 'b'\n",
        "tokens = false\n",
        "metrics_port = 1\n",
    ),
    *("store = 'postgresql://u:p@h/d'\n", "router = 'a:1,b:2'\n", "advertise = 'x'\n", "'", '"'),
    *("certificates_dir = 'c'\n", "gpus_per_engine = 1\n", "grace_ms = 1.5\n", "= ", "nan", "1e9"),
)
_TOKENS = ("# x\n", "\n", "sha256:", _TOKEN, "sha256:" + "0" * 64, " ", "\t", "\x00", "\u00e4")
_URL = ("data:", "image/png", ";base64", ",", "AAAA", "=", "%20", ";charset=x", "\n", " ")
TARGETS = (
    Target("tokens", _tokens, lambda: [f"# a\n{_TOKEN}\n".encode()], text_with(_TOKENS)),
    Target("mesh file", _config, lambda: [_MESH.encode()], text_with(_TOML)),
    Target("image", _image, _images, any_bytes),
    Target("data URL", _data_url, lambda: [b"data:image/png;base64,AAAA"], text_with(_URL)),
    Target(
        "session of a store",
        _stored_session,
        lambda: [_session_seed()],
        one_frame(message_of(session_pb2.SessionRecord), any_bytes),
        errors=(RollmeshError,),
    ),
    Target("letter of a journal", _letter, lambda: [_letter_seed()], _nested_json),
)
