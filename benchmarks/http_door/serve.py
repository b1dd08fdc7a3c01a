"""Serves the door's small application: `python serve.py SERVER PORT`.

It is run by its path in an environment with the servers alone, so it imports nothing of its
package. `bounded`, the sidecar's own server, is run in the environment of rollmesh.
"""

import asyncio
import sys
from typing import Any

_ANSWER = b'{"answer":"' + b"x" * 600 + b'"}'
_HEADERS = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(_ANSWER))]
_LIMIT_S = 2
"""For every time limit that a server has."""


async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
    """Reads a request's body and answers with 600 bytes of JSON."""
    if scope["type"] != "http":
        return
    parts: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            break
    b"".join(parts)
    await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
    await send({"type": "http.response.body", "body": _ANSWER})


def _uvicorn(http: str, port: int) -> None:
    import uvicorn  # noqa: PLC0415

    uvicorn.run(
        app, port=port, http=http, loop="uvloop", ws="none", lifespan="off",
        access_log=False, log_level="critical", timeout_keep_alive=_LIMIT_S,
    )  # fmt: skip


def _hypercorn(port: int) -> None:
    import hypercorn.asyncio  # noqa: PLC0415
    import uvloop  # noqa: PLC0415
    from hypercorn.config import Config  # noqa: PLC0415

    config = Config()
    config.bind = [f"127.0.0.1:{port}"]
    config.accesslog = config.errorlog = None
    config.keep_alive_timeout = config.read_timeout = _LIMIT_S
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(hypercorn.asyncio.serve(app, config))


def _granian(port: int) -> None:
    from granian import Granian  # noqa: PLC0415
    from granian.constants import Interfaces, Loops  # noqa: PLC0415
    from granian.http import HTTP1Settings  # noqa: PLC0415

    Granian(
        "serve:app", port=port, interface=Interfaces.ASGINL, loop=Loops.uvloop, log_enabled=False,
        http1_settings=HTTP1Settings(header_read_timeout=_LIMIT_S * 1000),
    ).serve()  # fmt: skip


def _bounded(port: int) -> None:
    import socket  # noqa: PLC0415

    import uvloop  # noqa: PLC0415

    from rollmesh.sidecar.config import SidecarConfig  # noqa: PLC0415
    from rollmesh.sidecar.http.server import HttpServer  # noqa: PLC0415

    limit_ms = _LIMIT_S * 1000
    config = SidecarConfig(
        head_timeout_ms=limit_ms, body_idle_timeout_ms=limit_ms, idle_timeout_ms=limit_ms
    )
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(HttpServer(app, config).serve([listener]))  # type: ignore[arg-type]


def main() -> None:
    """Serves until the process is ended."""
    name, port = sys.argv[1], int(sys.argv[2])
    match name:
        case "httptools" | "h11":
            _uvicorn(name, port)
        case "hypercorn":
            _hypercorn(port)
        case "granian":
            _granian(port)
        case _:
            _bounded(port)


if __name__ == "__main__":
    main()
