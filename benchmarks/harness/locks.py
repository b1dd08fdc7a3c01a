"""A mesh whose services show tokens, and talk over mutual TLS too."""

from pathlib import Path
from typing import Any

from rollmesh.runtime.access import make_tokens
from tests.trial_certificates import make_certificates

_SERVICES = ("router", "engine", "collector", "gateway", "sidecar")


def lock(
    tables: dict[str, Any], folder: Path, *, certificates: bool = True
) -> tuple[Path, dict[str, str]]:
    """Makes certificates and tokens, and gives every service of a mesh file its own certificate.

    Args:
        tables: From `read_mesh`. Changed.
        folder: Where the files are written.
        certificates: Whether there are certificates beside the tokens.

    Returns:
        The folder of the tokens, for `plan_mesh`, and what the addresses of a trainer have.
    """
    make_tokens(folder / "tokens")
    token_file = str(folder / "tokens" / "trainer.token")
    if not certificates:
        return folder / "tokens", {"token_file": token_file}
    make_certificates(folder / "certs")
    for service in _SERVICES:
        tables[service] = {**tables.get(service, {}), **_shown(folder, service)}
    return folder / "tokens", {"token_file": token_file, **_shown(folder, "trainer")}


def _shown(folder: Path, role: str) -> dict[str, str]:
    certs = folder / "certs"
    return {
        "tls_ca_file": f"{certs}/ca.crt",
        "tls_certificate_file": f"{certs}/{role}.crt",
        "tls_key_file": f"{certs}/{role}.key",
    }
