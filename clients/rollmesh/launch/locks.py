"""The tokens of a mesh."""

import fcntl
import os
from pathlib import Path

from rollmesh.runtime import MeshConfig, make_folder
from rollmesh.runtime.access import make_tokens
from rollmesh.runtime.config import ConfigError


def mesh_tokens(mesh: MeshConfig) -> Path | None:
    """Returns the folder of a mesh's tokens, made if missing, or None if the mesh is open.

    Raises:
        ConfigError: They cannot be written.
    """
    if mesh.tokens_path is None:
        return None
    folder = mesh.tokens_path.resolve()
    try:
        make_folder(folder)
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)  # one process makes the tokens
            if not (folder / "accepted").exists():
                make_tokens(folder)
        finally:
            os.close(descriptor)
    except OSError as error:
        name = "locks_dir" if mesh.locks_dir else "data_dir"
        raise ConfigError(f"mesh.{name}: {error}") from error
    return folder


def trainer_files(mesh: MeshConfig, tokens: Path | None) -> dict[str, str]:
    """Returns the files with which a trainer gets in, by their names in `MeshAddresses`."""
    shown = {"token_file": str(tokens / "trainer.token")} if tokens else {}
    if mesh.certificates_dir:
        folder = Path(mesh.certificates_dir).resolve()
        shown["tls_ca_file"] = str(folder / "ca.crt")
        shown["tls_certificate_file"] = str(folder / "trainer.crt")
        shown["tls_key_file"] = str(folder / "trainer.key")
        shown["tls_server_name"] = mesh.tls_server_name
    return shown
