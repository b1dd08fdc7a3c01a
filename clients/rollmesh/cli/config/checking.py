"""`rollmesh config check`: every problem of a mesh file in one go."""

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollmesh.cli.config.checks import (
    Listener,
    check_calls,
    check_ports,
    check_sizes,
    listeners_of,
)
from rollmesh.cli.config.files import check_files, check_private
from rollmesh.cli.config.members import Member, members, own_problems
from rollmesh.cli.services import environment
from rollmesh.launch.plan import plan_mesh
from rollmesh.runtime.config import (
    SERVICES,
    ConfigError,
    Tables,
    examine,
    has_secret,
    mesh_config,
    mesh_problems,
    read_file,
)
from rollmesh.runtime.rpc.listening import bind_host
from rollmesh.runtime.rpc.locks import LOCK, check_exposed

_LISTENING = {"--host": "host", "--port": "port", "--metrics-port": "metrics_port"}


@dataclass(frozen=True, slots=True)
class Checked:
    """What was found about a mesh file."""

    problems: list[str]
    notes: list[str]
    """What is no problem, and an operator should know."""


def check_mesh(
    path: Path, classes: Mapping[str, type[Any]], environ: Mapping[str, str], *, files: bool
) -> Checked:
    """Returns what is wrong with a mesh file.

    Args:
        path: The file.
        classes: Settings of the installed services; tables of others are not examined.
        environ: The environment, which wins over the file.
        files: Whether the files that settings name are looked at too.
    """
    try:
        tables = read_file(path)
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
    problems += _check_ports(tables, classes, environ)
    problems += [*check_calls(found), *check_sizes(found)]
    for one in found:
        problems += _check_exposed(one, notes)
    if files:
        problems += check_private(path, [one for member in found for one in _secrets(member, path)])
        absent = _absent_tokens(tables, notes)
        for one in found:
            problems += check_files(one, absent)
    return Checked(list(dict.fromkeys(problems)), notes)


def _check_ports(
    tables: Tables, classes: Mapping[str, type[Any]], environ: Mapping[str, str]
) -> Sequence[str]:
    """Returns the ports that collide, and why the processes cannot be planned."""
    tokens = mesh_config(tables).tokens_path
    try:
        specs = plan_mesh(tables, lambda: 0, tokens, environment(environ))
    except ConfigError as error:
        return [str(error)]
    services = [spec.service for spec in specs]
    listeners: list[Listener] = []
    for spec in specs:
        cls = classes.get(spec.service)
        if cls is None:
            continue
        flags = (flag.partition("=") for flag in spec.flags)
        values = {_LISTENING[name]: text for name, _, text in flags if name in _LISTENING}
        if services.count(spec.service) == 1 and values["port"] == "0":
            del values["port"]  # started by itself it takes its default port
        if (config := examine(cls, values)[0]) is not None:
            listeners += listeners_of(spec.service, spec.name, config)
    return list(check_ports(listeners))


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


def _secrets(member: Member, path: Path) -> list[str]:
    """Returns the settings that have a secret in the file."""
    return [
        one.shown
        for one in member.given.values()
        if one.source.startswith(f"{path} ") and has_secret(one.value)
    ]


def _absent_tokens(tables: Tables, notes: list[str]) -> Path | None:
    """Returns the folder of the mesh's tokens if there is none yet, and notes it."""
    folder = mesh_config(tables).tokens_path
    if folder is None or (folder / "accepted").exists():
        return None
    notes.append(
        f"{folder} has no tokens yet: `rollmesh up` makes them, and so does "
        f"`rollmesh tokens {folder}`"
    )
    return folder
