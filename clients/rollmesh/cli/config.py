"""`rollmesh config`: checks a mesh file, and shows the settings that services have with it."""

import argparse
import ipaddress
import itertools
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from rollmesh.launch import plan_mesh
from rollmesh.runtime import (
    MODEL_SERVICES,
    SERVICES,
    Tables,
    from_file,
    mesh_config,
    mesh_models,
    mesh_problems,
    read_mesh,
    read_toml,
)
from rollmesh.runtime.access import AcceptedTokens, CallerConfig, Identity, TlsFiles
from rollmesh.runtime.config import (
    ConfigError,
    Given,
    Resolved,
    Setting,
    describe,
    examine,
    from_environment,
    has_secret,
    masked,
    resolve,
)
from rollmesh.runtime.rpc import LOCK, bind_host, check_exposed

# The settings of the installed services.


def installed() -> dict[str, type[Any]]:
    """Returns the settings' class of each service whose packages are installed."""
    found: dict[str, type[Any]] = {}
    for service in SERVICES:
        try:
            module = import_module(f"rollmesh.{service}.config")
        except ImportError:
            continue
        found[service] = getattr(module, f"{service.capitalize()}Config")
    return found


def environment(environ: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Returns the settings that the environment gives, by service."""
    found: dict[str, dict[str, str]] = {}
    for service, cls in installed().items():
        given = from_environment(describe(cls, service), environ)
        found[service] = {name: one.value for name, one in given.items()}
    return found


# The services of a mesh file, each with the settings that it would start with.


@dataclass(frozen=True, slots=True)
class Member:
    """A service, or the engines or gateways of one model."""

    service: str
    model: str
    """Its model, empty if its service has none, or the file has one model."""
    config: Any
    """Its settings."""
    given: Mapping[str, Given]
    """Their sources. The other settings have their defaults."""

    @property
    def label(self) -> str:
        """What errors call it: `gateway`, `engine of judge`."""
        return f"{self.service} of {self.model}" if self.model else self.service


def members(
    tables: Tables, path: str, classes: Mapping[str, type[Any]], environ: Mapping[str, str]
) -> tuple[list[Member], list[str]]:
    """Returns the services of a mesh file, and all problems but those of their settings."""
    found: list[Member] = []
    problems: list[str] = []
    for service, cls in classes.items():
        if service == "scorer" and service not in tables:
            continue
        for model in _models(tables, service):
            settings = describe(cls, service)
            try:
                given = from_file(tables, service, model, path, {one.name for one in settings})
            except ConfigError as error:
                problems.append(f"{service}.{error}")
                continue
            given |= from_environment(settings, environ)
            shown = {
                name: one.source if one.source.startswith("ROLLMESH_") else _in(service, one)
                for name, one in given.items()
            }.__getitem__
            values = {name: one.value for name, one in given.items()}
            config, wrong = examine(cls, values, f" in {path}", shown)
            problems += [one for one in wrong if one not in problems]
            if config is not None:
                found.append(Member(service, model, config, given))
    elsewhere = {one.model for one in found if getattr(one.config, "upstream", "")}
    run = [one for one in found if one.service != "engine" or one.model not in elsewhere]
    return run, problems


def own_problems(tables: Tables, path: str, classes: Mapping[str, type[Any]]) -> list[str]:
    """Returns the problems of the services' own tables."""
    models = tables.get("model", [])
    of_models = [one for one in models if isinstance(one, dict)] if isinstance(models, list) else []
    problems: list[str] = []
    for service, cls in classes.items():
        found = [(service, tables.get(service, {}))]
        if service in MODEL_SERVICES:
            found += [(f"model.{service}", one.get(service, {})) for one in of_models]
        for name, table in found:
            if isinstance(table, dict):
                shown = (name + ".{}").format
                problems += examine(cls, table, f" in {path}", shown)[1]
    return list(dict.fromkeys(problems))


def missing_packages(
    tables: Tables, path: str, classes: Mapping[str, type[Any]], environ: Mapping[str, str]
) -> list[str]:
    """Returns the packages that engines of a mesh file need and this machine lacks."""
    engine = {name: cls for name, cls in classes.items() if name == "engine"}
    found, _ = members(tables, path, engine, environ)
    missing = [f"engine.{problem}" for one in found if (problem := one.config.missing_package())]
    return list(dict.fromkeys(missing))


def _models(tables: Tables, service: str) -> Sequence[str]:
    models = mesh_models(tables) if service in MODEL_SERVICES else []
    return [one.config.name for one in models if one.infix and len(models) > 1] or [""]


def _in(service: str, given: Given) -> str:
    """Returns the name of a setting in errors, which names the service also if `[mesh]` gave it."""
    return given.shown if "." in given.shown else f"{service}.{given.shown}"


# What cannot work in a mesh although each setting by itself is right.

_CALLS = {
    "router": ("engine",),
    "engine": ("router",),
    "collector": ("router", "scorer"),
    "gateway": ("router", "engine", "collector"),
    "sidecar": ("router", "gateway"),
}
"""Whom each service calls."""
_PORTS = ("port", "metrics_port")
_ALL_ADDRESSES = {"", "0.0.0.0", "::"}  # noqa: S104 - what settings may say
_SAME_HOST = {"localhost": "127.0.0.1"}


def check_calls(members: Sequence[Member]) -> Iterator[str]:
    """Yields which services could not call others: tokens and TLS of both sides do not fit."""
    for caller, server in itertools.product(members, members):
        if server.service not in _CALLS.get(caller.service, ()):
            continue
        own, asked = caller.config, server.config
        serves_tls, calls_tls = bool(asked.tls_certificate_file), bool(own.tls_ca_file)
        if serves_tls and not calls_tls:
            yield (
                f"{caller.service}.tls_ca_file: is empty, and the {server.label} serves TLS; give "
                "the file of its CA, or certificates_dir under [mesh]"
            )
        if calls_tls and not serves_tls:
            yield (
                f"{server.service}.tls_certificate_file: is empty, and the {caller.label} calls "
                "over TLS; give its certificate and key, or certificates_dir under [mesh]"
            )
        asks = serves_tls and bool(asked.tls_ca_file) and asked.tls_client_certificates
        if asks and calls_tls and not own.tls_certificate_file:
            yield (
                f"{caller.service}.tls_certificate_file: is empty, and the {server.label} asks for "
                "one"
            )
        if asked.tokens_dir and not own.token_file and not (asks and own.tls_certificate_file):
            yield (
                f"{caller.service}.token_file: is empty, and the {server.label} accepts nobody "
                "without a token; `rollmesh tokens DIR` makes one for each service"
            )


def check_sizes(members: Sequence[Member]) -> Iterator[str]:
    """Yields limits of gateways that are above what those accept to whom they send."""
    limits = {"collector": "max_session_record_bytes", "engine": "max_session_image_bytes"}
    for gateway, other in itertools.product(members, members):
        if gateway.service != "gateway" or (limit := limits.get(other.service)) is None:
            continue
        most, sent = other.config.max_request_bytes, getattr(gateway.config, limit)
        if sent > most:
            yield (
                f"gateway.{limit}: is {sent}, and the {other.label} takes messages of {most} "
                f"bytes; lower it, or raise {other.service}.max_request_bytes"
            )


# The files that settings name: whether a service could use them on this machine.


def check_files(member: Member, absent: Path | None) -> Iterator[str]:
    """Yields the problems of a service's files, found by the code that reads them at its start."""
    config, service = member.config, member.service
    tokens_dir, token_file = getattr(config, "tokens_dir", ""), config.token_file
    if absent is not None and tokens_dir == str(absent / "accepted"):
        tokens_dir = ""
    if absent is not None and Path(token_file).parent == absent:
        token_file = ""
    if tokens_dir:
        yield from _said(service, lambda: AcceptedTokens(Path(tokens_dir)))
    yield from _said(service, lambda: Identity(CallerConfig(token_file=token_file)))
    if config.tls_certificate_file or config.tls_key_file or config.tls_ca_file:
        files = (config.tls_ca_file, config.tls_certificate_file, config.tls_key_file)
        yield from _said(service, lambda: TlsFiles(*files))
    if service == "sidecar":
        certificate, key = config.https_certificate_file, config.https_key_file
        if bool(certificate) != bool(key):
            missing = "https_key_file" if certificate else "https_certificate_file"
            yield f"sidecar.{missing}: is empty; a certificate and its key go together"
        elif certificate:
            https = import_module("rollmesh.sidecar")
            yield from _said(service, lambda: https.certificate_of(certificate, key))
    if service == "engine" and (problem := config.missing_package()):
        yield f"engine.{problem}"
    loads = service == "gateway" or (service == "engine" and config.loads_model)
    if loads and not config.model_path.is_dir() and not getattr(config, "upstream", ""):
        yield (
            f"{service}.model_path: {config.model_path} is no folder; give the one of the model, "
            "here or under [mesh]"
        )
    if service == "engine" and config.script and not os.access(config.script, os.R_OK):
        yield f"engine.script: {config.script} cannot be read"
    if (folder := getattr(config, "data_dir", None)) is not None:
        there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        if not there.is_dir():
            yield f"{service}.data_dir: {there} is no folder"
        elif not os.access(there, os.W_OK | os.X_OK):
            yield f"{service}.data_dir: {there} cannot be written by this user"


def _said(service: str, read: Callable[[], object]) -> Iterator[str]:
    try:
        read()
    except ConfigError as error:
        yield f"{service}.{error}"


_LISTENING = {"--host": "host", "--port": "port", "--metrics-port": "metrics_port"}


@dataclass(frozen=True, slots=True)
class Checked:
    """The problems and notes of a mesh file."""

    problems: list[str]
    notes: list[str]
    """Facts that are no problem and that an operator should know."""


def check_mesh(
    path: Path, classes: Mapping[str, type[Any]], environ: Mapping[str, str], *, files: bool
) -> Checked:
    """Returns the problems of a mesh file."""
    try:
        tables = read_toml(path)
    except ConfigError as error:
        return Checked([str(error)], [])
    notes = [
        f"[{name}] was not examined: its service is not installed"
        for name in SERVICES
        if name in tables and name not in classes
    ]
    if problems := mesh_problems(tables):
        return Checked(problems + own_problems(tables, str(path), classes), notes)
    found, problems = members(tables, str(path), classes, environ)
    if not any(one.startswith("scorer.") for one in problems):
        problems += ["scorer.function: is empty; give package.module:function"] * any(
            one.service == "scorer" and not one.config.function for one in found
        )
    problems += check_ports(tables, classes, environ)
    problems += [*check_calls(found), *check_sizes(found)]
    for one in found:
        problems += _check_exposed(one, notes)
    if files:
        secrets = [
            given.shown
            for member in found
            for given in member.given.values()
            if given.source.startswith(f"{path} ") and has_secret(given.value)
        ]
        if secrets and path.stat().st_mode & 0o077:
            problems.append(
                f"{secrets[0]}: has a password or a token, and others may read {path}; run: "
                f"chmod 0600 {path}, or give it by the environment"
            )
        absent = mesh_config(tables).tokens_path
        if absent is not None and (absent / "accepted").exists():
            absent = None
        if absent is not None:
            notes.append(
                f"{absent} has no tokens yet: `rollmesh up` makes them, and so does "
                f"`rollmesh tokens {absent}`"
            )
        for one in found:
            problems += check_files(one, absent)
    return Checked(list(dict.fromkeys(problems)), notes)


def check_ports(
    tables: Tables, classes: Mapping[str, type[Any]], environ: Mapping[str, str]
) -> Iterator[str]:
    """Yields the ports that two processes of one host would take, or why none can be planned."""
    try:
        specs = plan_mesh(tables, lambda: 0, mesh_config(tables).tokens_path, environment(environ))
    except ConfigError as error:
        yield str(error)
        return
    services = [spec.service for spec in specs]
    taken: list[tuple[str, str, str | None, int]] = []
    for spec in specs:
        if (cls := classes.get(spec.service)) is None:
            continue
        flags = (flag.partition("=") for flag in spec.flags)
        values = {_LISTENING[name]: text for name, _, text in flags if name in _LISTENING}
        if services.count(spec.service) == 1 and values["port"] == "0":
            del values["port"]  # started by itself it takes its default port
        if (config := examine(cls, values)[0]) is None:
            continue
        own = [(f"{spec.service}.{one}", config.host, getattr(config, one)) for one in _PORTS]
        if spec.http:
            http_host, _, http_port = spec.http.rpartition(":")
            own.append(("sidecar.port", http_host, int(http_port)))
        for shown, listens, port in own:
            if port <= 0:
                continue
            host = _SAME_HOST.get(listens, listens)
            for other, name, its_host, its_port in taken:
                one_host = host == its_host or bool({host, its_host} & _ALL_ADDRESSES)
                if port == its_port and one_host:
                    yield (
                        f"{shown}: {spec.name} would take port {port}, which is {name}'s "
                        f"({other}); give another one"
                    )
                    break
            taken.append((shown, spec.name, host, port))


def _check_exposed(member: Member, notes: list[str]) -> list[str]:
    """Returns why a service would refuse to listen where its settings say.

    Notes a service to which tokens would travel in plain text.
    """
    config = member.config
    shows = bool(config.token_file or config.tls_certificate_file)
    if member.service == "sidecar":
        remedy, locked = "--token-file", shows
    else:
        asks = config.tls_certificate_file and config.tls_ca_file and config.tls_client_certificates
        remedy, locked = LOCK, bool(config.tokens_dir or asks)
    try:
        host = bind_host(config)
        check_exposed(config, host, remedy, locked=locked)
    except ConfigError as error:
        return [f"{member.service}.{error}"]
    serves_tls, remedy = config.tls_certificate_file, "certificates_dir under [mesh] sets TLS"
    if member.service == "sidecar":
        serves_tls, remedy = config.https_certificate_file, "https_certificate_file sets HTTPS"
    if not serves_tls and not ipaddress.ip_address(host.strip("[]")).is_loopback:
        notes.append(f"{member.service}.host: {config.host} is reached in plain text; {remedy}")
    return []


# The settings of services, and their sources.

_COLUMN = 48


def _values(settings: list[Setting], found: Resolved[Any]) -> dict[str, dict[str, Any]]:
    """Returns value and source of each setting."""
    values: dict[str, dict[str, Any]] = {}
    for one in settings:
        # A refused value is shown as given.
        given = found.given[one.name].value if one.name in found.given else one.default
        value = given if found.config is None else getattr(found.config, one.name)
        shown = str(value) if isinstance(value, Path) else masked(value)
        values[one.name] = {"value": shown, "source": found.source(one.name)}
    return values


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        pairs = ", ".join(f"{json.dumps(str(key))} = {_toml(one)}" for key, one in value.items())
        return f"{{{pairs}}}"
    return json.dumps(value, default=str)


# The command.

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
    if options.tool == "show":
        return _show(options, flags)
    logging.disable(logging.WARNING)  # what services warn of at their start is a note here
    found = check_mesh(options.file, installed(), os.environ, files=not options.no_files)
    for note in found.notes:
        print(f"note: {note}")
    for problem in found.problems:
        print(f"{_PROG} check: {problem}", file=sys.stderr)
    if not found.problems:
        print(f"{options.file}: no problems")
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
                shown[heading] = _values(settings, found)
                if options.format == "json":
                    continue
                # Lines as of a mesh file, each with the source of its value.
                print(f"[{service}]" + (f"  # {heading}" if heading != service else ""))
                for name, one in shown[heading].items():
                    print(f"{name} = {_toml(one['value'])}".ljust(_COLUMN) + f"  # {one['source']}")
                print()
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
    """Yields heading and flags of a service, for each model of the file if it serves one.

    Raises:
        ConfigError: The file cannot be read, or is wrong outside the service's table.
    """
    argv = [*([f"--config={path}"] if path else []), *flags]
    named = f"ROLLMESH_{service}_MODEL".upper() in os.environ
    named = named or any(flag.startswith("--model") for flag in flags)
    for model in _models(read_mesh(path), service) if path and not named else [""]:
        yield (f"{service} of {model}", [*argv, f"--model={model}"]) if model else (service, argv)


if __name__ == "__main__":
    sys.exit(main())
