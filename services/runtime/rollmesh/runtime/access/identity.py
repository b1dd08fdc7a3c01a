"""Client credentials of this process: a token, a certificate, or both. Tools take them as flags."""

import asyncio
import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from rollmesh.runtime.access.tls import TlsFiles
from rollmesh.runtime.access.tokens import PresentedToken
from rollmesh.runtime.config import Config, ConfigError, describe
from rollmesh.runtime.errors import RollmeshError


@dataclass(frozen=True, kw_only=True)
class CallerConfig(Config):
    """Files with the credentials of a caller."""

    token_file: str = ""
    """File with the token that this process presents to the services that it calls. Its first line
    counts. It is read again when it changes. Others must not be able to read it (mode 0600)."""

    tls_certificate_file: str = ""
    """File with the certificate of this process and those between it and the CA, PEM. A service
    serves TLS with it, and callers show it where certificates are asked for. It is read again when
    it changes."""
    tls_key_file: str = ""
    """File with the key of the certificate, PEM. Others must not be able to read it (mode 0600)."""
    tls_ca_file: str = ""
    """File with the certificates of the CAs by which this process knows others, PEM. With it, all
    services are called over TLS, without it in plain text."""
    tls_server_name: str = ""
    """Name that the certificates of services must have. Empty means the host of their address."""

    def or_of(self, environ: Mapping[str, str]) -> "CallerConfig":
        """Returns these files, and for the others what `ROLLMESH_TOKEN_FILE` and so on name."""
        return CallerConfig(
            **{
                one.name: getattr(self, one.name) or environ.get(f"ROLLMESH_{one.name}".upper(), "")
                for one in fields(CallerConfig)
            }
        )


class Identity:
    """The credentials of a caller."""

    def __init__(self, config: CallerConfig) -> None:
        """Reads the files.

        Raises:
            ConfigError: One of them cannot be read, or others may read it.
        """
        self.token = PresentedToken(Path(config.token_file)) if config.token_file else None
        """The token that it presents, or None if it has none."""
        self.tls: TlsFiles | None = None
        """Certificates for calls over TLS, or None for calls in plain text."""
        if config.tls_ca_file:
            self.tls = TlsFiles(
                config.tls_ca_file, config.tls_certificate_file, config.tls_key_file
            )
        self.tls_server_name = config.tls_server_name
        """Name that certificates of services must have. Empty means the host of the address."""


def add_flags(parser: ArgumentParser) -> None:
    """Adds the flags of a tool that calls services: `--token-file` and so on."""
    for setting in describe(CallerConfig, ""):
        variable = f"ROLLMESH_{setting.name}".upper()
        text = f"{setting.doc} [default: that of {variable}]"
        parser.add_argument(setting.flag, default="", help=text)


def given(options: Namespace) -> dict[str, str]:
    """Returns the flags of `add_flags`, by the names of `CallerConfig`."""
    return {one.name: getattr(options, one.name) for one in fields(CallerConfig)}


def run_tool(
    name: str,
    options: Namespace,
    environ: Mapping[str, str],
    work: Callable[[], Coroutine[Any, Any, Sequence[str] | None]],
) -> int:
    """Runs a tool with the credentials that its flags or the environment name.

    Args:
        name: The command, which its errors begin with.
        options: Parsed flags, with those of `add_flags`.
        environ: The environment.
        work: Prints what it finds, and returns the errors that did not end it.

    Returns:
        The exit code: 0, 1 after an error, 2 for an invalid setting.
    """
    code, errors = 1, list[str]()
    try:
        present(Identity(CallerConfig(**given(options)).or_of(environ)))
        found: Sequence[str] | None = asyncio.run(work())
        errors += found or ()
        sys.stdout.flush()
    except ConfigError as error:
        code, errors = 2, [str(error)]
    except RollmeshError as error:
        errors = [error.message]
    except BrokenPipeError:  # the reader has seen enough, as `head` has
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return code
    for one in errors:
        sys.stderr.write(f"{name}: {one}\n")
    return code if errors else 0


_of_process = Identity(CallerConfig())


def present(identity: Identity) -> None:
    """Makes this process show an identity in all calls that are given no other."""
    global _of_process  # noqa: PLW0603 - like its log, a process has one
    _of_process = identity


def presented() -> Identity:
    """Returns the credentials of this process."""
    return _of_process
