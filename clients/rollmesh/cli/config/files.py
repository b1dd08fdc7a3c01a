"""The files that settings name: whether a service could use them on this machine."""

import os
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from rollmesh.cli.config.members import Member
from rollmesh.runtime.access.identity import CallerConfig, Identity
from rollmesh.runtime.access.tls import TlsFiles
from rollmesh.runtime.access.tokens import AcceptedTokens
from rollmesh.runtime.config import ConfigError


def check_files(member: Member, absent: Path | None) -> Iterator[str]:
    """Yields what is wrong with the files of a service, by the code that reads them at its start.

    Args:
        member: The service.
        absent: Folder of the mesh's tokens if it is not there yet: `rollmesh up` makes it.
    """
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
        yield from _check_https(config)
    loads = service == "gateway" or (service == "engine" and config.backend == "vllm")
    if loads and not config.model_path.is_dir():
        yield (
            f"{service}.model_path: {config.model_path} is no folder; give the one of the model, "
            "here or under [mesh]"
        )
    if service == "engine" and config.script and not os.access(config.script, os.R_OK):
        yield f"engine.script: {config.script} cannot be read"
    if hasattr(config, "data_dir"):
        yield from _check_folder(f"{service}.data_dir", config.data_dir)


def check_private(path: Path, secrets: Sequence[str]) -> Iterator[str]:
    """Yields that others may read a mesh file with secrets.

    Args:
        path: The mesh file.
        secrets: The settings in it that have a secret.
    """
    if secrets and path.stat().st_mode & 0o077:
        yield (
            f"{secrets[0]}: has a password or a token, and others may read {path}; run: chmod 0600 "
            f"{path}, or give it by the environment"
        )


def _check_https(config: Any) -> Iterator[str]:
    certificate, key = config.https_certificate_file, config.https_key_file
    if bool(certificate) != bool(key):
        missing = "https_key_file" if certificate else "https_certificate_file"
        yield f"sidecar.{missing}: is empty; a certificate and its key go together"
    elif certificate:
        https = import_module("rollmesh.sidecar.http.https")
        yield from _said("sidecar", lambda: https.Certificate(certificate, key))


def _check_folder(setting: str, folder: Path) -> Iterator[str]:
    """Yields why a service could not make files in a folder, or make the folder."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        yield f"{setting}: {there} is no folder"
    elif not os.access(there, os.W_OK | os.X_OK):
        yield f"{setting}: {there} cannot be written by this user"


def _said(service: str, read: Callable[[], object]) -> Iterator[str]:
    try:
        read()
    except ConfigError as error:
        yield f"{service}.{error}"
