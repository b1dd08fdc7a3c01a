"""The `rollmesh` command: starts a service, a mesh on this machine, or a tool.

It imports nothing but the standard library, so that it works, and says what is missing, wherever
any part of rollmesh is installed.
"""

import os
import sys
from dataclasses import dataclass
from importlib import metadata, util

_USAGE = """usage: rollmesh up [--config mesh.toml]
       rollmesh ray up --config mesh.toml
       rollmesh ray status|scale|targets|down
                                       a mesh on a Ray cluster
       rollmesh SERVICE [flags]        router, engine, collector, gateway or sidecar
       rollmesh scorer module:function [flags]
                                       serves a reward function to collectors
       rollmesh SERVICE --help         lists the service's flags
       rollmesh probe SERVICE          exits 0 if a service of this host serves
       rollmesh router forget-weights [--model NAME]
       rollmesh collector delete|export|inspect|replay [flags]
       rollmesh gateway dead-letters list|retry|drop [flags]
       rollmesh gateway revoke-key SESSION_ID  ends a session's key
       rollmesh template check MODEL   shows what a gateway finds about a chat template
       rollmesh conformance --base-url URL --key-file FILE
                                       checks any server as agents would use it
       rollmesh config check FILE      says everything that is wrong with a mesh file
       rollmesh config show [SERVICE] [--config FILE]
                                       prints every setting and who gave it
       rollmesh tokens DIR             makes a token for each role of a mesh
       rollmesh certs DIR              makes a CA and certificates for a trial of TLS
       rollmesh --version
"""


@dataclass(frozen=True, slots=True)
class _Command:
    module: str
    extra: str
    """Extra of the distribution that installs what it imports."""
    imports: tuple[str, ...]
    """Packages of that extra that it cannot do without."""


_SERVER = ("grpc_health", "grpc_reflection", "prometheus_client", "uvloop")
_GATEWAY = (*_SERVER, "tokenizers", "jinja2")
_COMMANDS = {
    ("router",): _Command("rollmesh.router", "router", _SERVER),
    ("engine",): _Command("rollmesh.engine", "engine", (*_SERVER, "safetensors")),
    ("collector",): _Command("rollmesh.collector", "collector", (*_SERVER, "psycopg")),
    ("gateway",): _Command("rollmesh.gateway", "gateway", _GATEWAY),
    ("sidecar",): _Command("rollmesh.sidecar", "sidecar", (*_SERVER, "starlette", "orjson")),
    ("scorer",): _Command("rollmesh.scorer", "scorer", _SERVER),
    ("template", "check"): _Command("rollmesh.chat.check", "gateway", _GATEWAY),
    ("conformance",): _Command("rollmesh.conformance", "conformance", ("httpx2",)),
    ("config",): _Command("rollmesh.cli.config", "router", _SERVER),
    ("probe",): _Command("rollmesh.runtime.probe", "router", ("grpc_health",)),
    ("tokens",): _Command("rollmesh.runtime.access", "router", ()),
    ("certs",): _Command("rollmesh.cli.certs", "certs", ("cryptography",)),
    ("up",): _Command(
        "rollmesh.cli.up",
        "mesh",
        (*_GATEWAY, "safetensors", "psycopg", "starlette", "orjson"),
    ),
    ("ray",): _Command(
        "rollmesh.cli.ray",
        "ray",
        ("ray", *_GATEWAY, "safetensors", "psycopg", "starlette", "orjson"),
    ),
}
"""Each command runs as `python -m` of its module."""


def main() -> int:
    """Becomes the command that the arguments name; returns only where it cannot."""
    arguments = sys.argv[1:]
    for words, command in _COMMANDS.items():
        if tuple(arguments[: len(words)]) == words:
            return _run(" ".join(words), command, arguments[len(words) :])
    if arguments == ["--version"]:
        print(f"rollmesh {metadata.version('rollmesh')}")
        return 0
    asked = arguments in (["--help"], ["-h"])
    print(_USAGE, end="", file=sys.stdout if asked else sys.stderr)
    return 0 if asked else 2


def _run(name: str, command: _Command, arguments: list[str]) -> int:
    missing = [package for package in command.imports if util.find_spec(package) is None]
    if not missing:
        os.execv(sys.executable, [sys.executable, "-m", command.module, *arguments])  # noqa: S606
    print(
        f"rollmesh {name}: {', '.join(missing)} not installed; "
        f"run: pip install 'rollmesh[{command.extra}]'",
        file=sys.stderr,
    )
    return 2


if __name__ == "__main__":
    sys.exit(main())
