"""`rollmesh view`: shows runs, groups, sessions and tokens of a mesh or a record in a browser."""

import argparse
import asyncio
import json
import os
import re
import socket
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, closing, contextmanager
from functools import partial
from pathlib import Path

import uvicorn
from tokenizers import Tokenizer

from rollmesh.batches import PackageMissingError
from rollmesh.client import Client, MeshAddresses, Observer
from rollmesh.launch import VIEW_PORT
from rollmesh.runtime.access import identity
from rollmesh.runtime.config import LOCAL_ROUTER, ConfigError
from rollmesh.runtime.process import stop_signals
from rollmesh.runtime.telemetry import configure_logging
from rollmesh.view import Index, Viewer, ViewSettings
from rollmesh.view.app import Source
from rollmesh.view.mesh import Mesh

_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_REQUESTS, _GRACE_S = 64, 5
_LEAST_KEY = 32


def main() -> int:
    """Returns the exit code: 0 after a stop, 1 if the port is taken, 2 for a bad flag."""
    parser = argparse.ArgumentParser(prog="rollmesh view", description=__doc__)
    parser.add_argument("--router", default="", help=f"host:port of the routers [{LOCAL_ROUTER}]")
    parser.add_argument("--collector", default="", help="host:port; default: those of the routers")
    parser.add_argument(
        "--record",
        type=Path,
        help="folder of a record: is shown alone, or with --router beside the mesh",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at")
    parser.add_argument("--port", type=int, default=VIEW_PORT, help="0 chooses a free one")
    parser.add_argument(
        "--allow-host", action="append", default=[], help="further name in a browser's URL"
    )
    parser.add_argument("--key-file", type=Path, help="file with the key that browsers must show")
    parser.add_argument("--tokenizer", type=Path, help="folder of the model: shows tokens as text")
    parser.add_argument(
        "--view-module",
        action="append",
        default=[],
        metavar="NAME=FILE",
        help='JavaScript module that shows sessions whose metadata["view"] is NAME',
    )
    parser.add_argument("--supervised", choices=("true",), help="ends with its standard input")
    identity.add_flags(parser)
    options = parser.parse_args()
    configure_logging("view", "warning")
    return identity.run_tool(parser.prog, options, os.environ, partial(_serve, options))


async def _serve(options: argparse.Namespace) -> list[str]:
    """Serves until a stop. Returns why it could not."""
    tokenizer = _tokenizer(options.tokenizer)
    settings = ViewSettings(
        hosts=frozenset({*_LOOPBACK, options.host, *options.allow_host}),
        key=_key(options.key_file, options.host),
        decode=tokenizer and partial(_decoded, tokenizer),
        special=_special(tokenizer),
        modules=dict(map(_module, options.view_module)),
    )
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    with (
        closing(Index()) as index,
        socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener,
        stop_signals(supervised=bool(options.supervised)) as stop,
    ):
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((options.host, options.port))
            listener.listen()  # before READY is said
        except (OSError, OverflowError) as error:
            return [f"{options.host}:{options.port}: {error.args[-1]}; give another --port"]
        async with _mesh(options, index) as mesh:
            record = None if options.record is None else _record(options.record, index)
            viewer = Viewer(index, settings, mesh=mesh, record=record)
            server = _Server(
                uvicorn.Config(
                    viewer.app,
                    lifespan="off",
                    ws="none",
                    proxy_headers=False,
                    access_log=False,
                    log_config=None,
                    limit_concurrency=_REQUESTS,
                    timeout_graceful_shutdown=_GRACE_S,
                )
            )
            async with asyncio.TaskGroup() as group:
                reading = group.create_task(viewer.follow())
                serving = group.create_task(server.serve([listener]))
                serving.add_done_callback(lambda _: stop.set())
                group.create_task(_stopped(stop, server, reading))
                host = f"[{options.host}]" if ":" in options.host else options.host
                port = listener.getsockname()[1]
                url = f"http://{host}:{port}/"
                print("READY", json.dumps({"port": port, "url": url}), flush=True)
    return []


@asynccontextmanager
async def _mesh(options: argparse.Namespace, index: Index) -> AsyncIterator[Mesh | None]:
    """Connects to the mesh of the flags. None: they name a record alone."""
    if options.record and not (options.router or options.collector):
        yield None
        return
    addresses = MeshAddresses(
        router=options.router or LOCAL_ROUTER,
        collector=options.collector,
        **identity.given(options),
    )
    async with Client(addresses) as client, Observer(addresses) as observer:
        yield Mesh(client, observer, index)


def _record(folder: Path, index: Index) -> Source:
    """Opens a record.

    Raises:
        ConfigError: The folder is no record.
        PackageMissingError: The package pyarrow is missing.
    """
    try:
        from rollmesh.view.record import Record
    except ImportError as error:
        raise PackageMissingError("pyarrow", "--record") from error
    return Record(folder, index)


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Installs no signal handlers."""
        yield


async def _stopped(
    stop: asyncio.Event, server: uvicorn.Server, reading: asyncio.Task[None]
) -> None:
    await stop.wait()
    server.should_exit = True
    reading.cancel()


def _key(path: Path | None, host: str) -> str:
    """Returns the key of a file.

    Raises:
        ConfigError: The file cannot be read or has a short key, or it is needed.
    """
    if path is None:
        if host not in _LOOPBACK:
            raise ConfigError("key-file: is needed at an address that others reach")
        return ""
    try:
        key = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"key-file: {path}: {error}") from error
    if len(key) < _LEAST_KEY:
        raise ConfigError(f"key-file: {path}: has fewer than {_LEAST_KEY} characters")
    return key


def _module(given: str) -> tuple[str, bytes]:
    """Returns the name of a module and its text.

    Raises:
        ConfigError: It is not NAME=FILE, or the file cannot be read.
    """
    name, _, path = given.partition("=")
    if not re.fullmatch(r"[\w-]{1,64}", name, re.ASCII) or not path:
        raise ConfigError(
            f"view-module: {given[:100]!r} is not NAME=FILE; a name has letters, digits, _ and -"
        )
    try:
        return name, Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"view-module: {path}: {error.strerror}") from error


def _tokenizer(model: Path | None) -> Tokenizer | None:
    """Reads the tokenizer of a model's folder.

    Raises:
        ConfigError: The folder has none.
    """
    if model is None:
        return None
    file = model / "tokenizer.json"
    if not file.is_file():
        raise ConfigError(f"tokenizer: there is no {file}; give the folder of the model")
    return Tokenizer.from_file(str(file))


def _decoded(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False))


def _special(tokenizer: Tokenizer | None) -> list[int]:
    added = {} if tokenizer is None else tokenizer.get_added_tokens_decoder()
    return sorted(one for one, token in added.items() if token.special)


if __name__ == "__main__":
    sys.exit(main())
