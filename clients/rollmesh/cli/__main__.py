"""The `rollmesh` command: starts a service, a mesh on this machine, or a tool.

It imports nothing but the standard library, so that it works, and names missing packages, wherever
any part of rollmesh is installed.
"""

import difflib
import os
import re
import sys
from importlib import metadata
from importlib.util import find_spec

_COMMANDS = {
    "up": ("rollmesh.cli.up", "mesh"),
    "ray": ("rollmesh.cli.ray", "ray"),
    "harbor": ("rollmesh.cli.harbor", "harbor"),
    "router": ("rollmesh.router", "router"),
    "engine": ("rollmesh.engine", "engine"),
    "collector": ("rollmesh.collector", "collector"),
    "gateway": ("rollmesh.gateway", "gateway"),
    "sidecar": ("rollmesh.sidecar", "sidecar"),
    "relay": ("rollmesh.cli.relay", "sidecar"),
    "scorer": ("rollmesh.scorer", "scorer"),
    "status": ("rollmesh.cli.status", ""),
    "top": ("rollmesh.cli.top", "top"),
    "tail": ("rollmesh.cli.tail", ""),
    "doctor": ("rollmesh.cli.doctor", ""),
    "import": ("rollmesh.cli.imports", ""),
    "view": ("rollmesh.view", "view"),
    "export": ("rollmesh.record.export", "record"),
    "archive": ("rollmesh.record.archive", "record"),
    "probe": ("rollmesh.runtime.probe", "router"),
    "template check": ("rollmesh.chat.check", "gateway"),
    "conformance": ("rollmesh.conformance", ""),
    "config": ("rollmesh.cli.config", "router"),
    "tokens": ("rollmesh.runtime.access", ""),
}
"""The module of each command, which runs as `python -m`, and the extra that it needs."""
_FORMS = {
    "up [--config mesh.toml]": "runs a mesh on this machine",
    "ray up --config mesh.toml": "runs a mesh on a Ray cluster",
    "ray status|scale|targets|down": "shows, scales and stops it",
    "harbor connect --server URL --session NAME": "answers the agents of a Harbor server",
    "SERVICE [flags]": "starts a router, engine, collector, gateway or sidecar",
    "SERVICE --help": "lists the flags of the service",
    "scorer module:function [flags]": "serves a reward function to collectors",
    "relay [flags]": "lets agents call sidecars that dial out to it",
    "status [--router HOST:PORT] [--json]": "shows members, weights, sessions and consumers",
    "top [--router HOST:PORT]": "shows the mesh on a terminal, with keys to sort and open",
    "tail [--router HOST:PORT] [--json]": "prints sessions as they end",
    "doctor [--router HOST:PORT] [--for 60s]": "names what goes wrong, and the remedies",
    "view [--router HOST:PORT] [--tokenizer DIR]": "shows runs, groups and sessions in a browser",
    "export --to FOLDER [--format FORMAT]": "writes stored sessions as Parquet or JSON lines",
    "import --session ID --node N [--count N]": "opens sessions that start from a node",
    "import --atif FILE [--count N]": "opens sessions that start from a conversation",
    "archive --to FOLDER [--consumer NAME]": "keeps writing sessions as Parquet as they end",
    "probe SERVICE": "exits 0 if a service of this host serves",
    "router forget-weights [--model NAME]": "drops the weights that routers keep",
    "collector delete|inspect|replay": "works on stored sessions",
    "gateway --http PORT [flags]": "starts a gateway that serves agents itself",
    "gateway sessions list|show|end|revoke-key": "works on open sessions and their keys",
    "gateway dead-letters list|retry|drop": "works on sessions that no collector takes",
    "template check MODEL": "shows what a gateway finds about a chat template",
    "conformance --base-url URL --key-file FILE": "checks any server as agents would use it",
    "config check FILE": "lists everything that is wrong with a mesh file",
    "config show [SERVICE] [--config FILE]": "prints every setting and its source",
    "tokens DIR": "makes a token for each role of a mesh",
    "--version": "",
}
"""The forms of the commands, for the usage."""
_REQUIREMENT = re.compile(r"([\w.-]+)(?:\[([\w,-]+)\])?")
_EXTRA = re.compile(r"extra == ['\"]([\w-]+)['\"]")


def main() -> int:
    """Becomes the named command. Returns only on failure."""
    arguments = sys.argv[1:]
    if arguments[:1] == ["gateway"] and any(one.split("=")[0] == "--http" for one in arguments):
        return _run("gateway --http", "rollmesh.cli.gateway", "mesh", arguments[1:])
    for name, (module, extra) in _COMMANDS.items():
        words = name.split()
        if arguments[: len(words)] == words:
            return _run(name, module, extra, arguments[len(words) :])
    if arguments == ["--version"]:
        print(f"rollmesh {metadata.version('rollmesh')}")
        return 0
    asked = arguments in (["--help"], ["-h"])
    if arguments and not asked:
        near = difflib.get_close_matches(" ".join(arguments[:2]), _COMMANDS, 1)
        near = near or difflib.get_close_matches(arguments[0], _COMMANDS, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        print(f"rollmesh: there is no command {arguments[0]!r}{hint}", file=sys.stderr)
    forms = (f"rollmesh {form}".ljust(52) + meaning for form, meaning in _FORMS.items())
    usage = "usage: " + "\n       ".join(one.rstrip() for one in forms)
    print(usage, file=sys.stdout if asked else sys.stderr)
    return 0 if asked else 2


def _run(name: str, module: str, extra: str, arguments: list[str]) -> int:
    missing = sorted(one for one in _packages(extra) if not _is_installed(one))
    if name == "conformance" and find_spec(module) is None:  # a distribution of its own
        print(f"rollmesh {name}: not installed; run: pip install rollmesh-{name}", file=sys.stderr)
        return 2
    if not missing:
        os.execv(sys.executable, [sys.executable, "-m", module, *arguments])  # noqa: S606
    print(
        f"rollmesh {name}: {', '.join(missing)} not installed; "
        f"run: pip install 'rollmesh[{extra}]'",
        file=sys.stderr,
    )
    return 2


def _packages(extra: str) -> set[str]:
    """Returns the packages of an extra of this distribution, and of the extras that it includes."""
    found: set[str] = set()
    for line in metadata.requires("rollmesh") or ():
        of = _EXTRA.search(line)
        name = _REQUIREMENT.match(line)
        if name is None or of is None or of[1] != extra:
            continue
        if name[1] == "rollmesh":
            found.update(*map(_packages, (name[2] or "").split(",")))
        else:
            found.add(name[1])
    return found


def _is_installed(package: str) -> bool:
    if package.startswith("rollmesh-"):  # an editable install has no metadata of it
        return find_spec(package.replace("-", ".")) is not None
    try:
        metadata.distribution(package)
    except metadata.PackageNotFoundError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
