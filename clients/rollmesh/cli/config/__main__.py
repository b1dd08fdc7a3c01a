"""`rollmesh config`: checks a mesh file, and shows what services make of it."""

import argparse
import json
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rollmesh.cli.config.checking import check_mesh
from rollmesh.cli.config.showing import show_json, show_text
from rollmesh.cli.services import installed
from rollmesh.runtime.config import (
    MODEL_SERVICES,
    SERVICES,
    ConfigError,
    describe,
    mesh_models,
    read_mesh,
    resolve,
)

_PROG = "rollmesh config"


def main() -> int:
    """Returns the exit code: 0, or 2 if a setting is wrong."""
    parser = argparse.ArgumentParser(prog=_PROG, description=__doc__)
    tools = parser.add_subparsers(dest="tool", required=True)
    check = tools.add_parser("check", help="says everything that is wrong with a mesh file")
    check.add_argument("file", metavar="FILE", type=Path, help="the mesh file")
    check.add_argument(
        "--no-files",
        action="store_true",
        help="do not look at the files that it names, such as those of another machine",
    )
    show = tools.add_parser(
        "show",
        help="prints every setting and who gave it: a flag, the environment, the file, its default",
        epilog="Further flags are those of the service, as it would be started with them.",
    )
    show.add_argument("service", nargs="?", choices=SERVICES, metavar="SERVICE", help="only this")
    show.add_argument("--config", type=Path, help="the mesh file")
    show.add_argument("--format", choices=("text", "json"), default="text")
    options, flags = parser.parse_known_args()
    if flags and (options.tool != "show" or options.service is None):
        parser.error(f"{flags[0]}: give the service whose flag it is")
    if options.tool == "check":
        return _check(options.file, files=not options.no_files)
    return _show(options, flags)


def _check(path: Path, *, files: bool) -> int:
    logging.disable(logging.WARNING)  # what services warn of at their start is a note here
    found = check_mesh(path, installed(), os.environ, files=files)
    for note in found.notes:
        print(f"note: {note}")
    for problem in found.problems:
        print(f"{_PROG} check: {problem}", file=sys.stderr)
    if not found.problems:
        print(f"{path}: no problems")
    return 2 if found.problems else 0


def _show(options: argparse.Namespace, flags: Sequence[str]) -> int:
    classes = installed()
    services = [options.service] if options.service else list(classes)
    problems: list[str] = []
    shown: dict[str, Any] = {}
    for service in services:
        if service not in classes:
            print(f"{_PROG} show: {service} is not installed", file=sys.stderr)
            return 2
        settings = describe(classes[service], service)
        try:
            for heading, argv in _processes(service, options.config, flags):
                found = resolve(classes[service], service, argv, os.environ)
                problems += found.problems
                shown[heading] = show_json(settings, found)
                if options.format == "text":
                    print("\n".join(show_text(heading, settings, found)), end="\n\n")
        except ConfigError as error:
            problems.append(str(error))
            break
    if options.format == "json":
        print(json.dumps(shown, indent=2, default=str))
    for problem in dict.fromkeys(problems):
        print(f"{_PROG} show: {problem}", file=sys.stderr)
    return 2 if problems else 0


def _processes(
    service: str, path: Path | None, flags: Sequence[str]
) -> Iterator[tuple[str, list[str]]]:
    """Yields heading and flags of a service; of its engines or gateways for each model of the file.

    Raises:
        ConfigError: The file cannot be read, or is wrong outside the service's table.
    """
    argv = [*([f"--config={path}"] if path else []), *flags]
    models = mesh_models(read_mesh(path)) if path and service in MODEL_SERVICES else []
    named = f"ROLLMESH_{service}_MODEL".upper() in os.environ
    if len(models) < 2 or named or any(flag.startswith("--model") for flag in flags):
        yield service, argv
        return
    for model in models:
        yield f"{service} of {model.config.name}", [*argv, f"--model={model.config.name}"]


if __name__ == "__main__":
    sys.exit(main())
