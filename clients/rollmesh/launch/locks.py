"""The tokens of a mesh."""

from pathlib import Path

from rollmesh.runtime.access.making import make_tokens
from rollmesh.runtime.config import ConfigError, MeshConfig


def mesh_tokens(mesh: MeshConfig) -> Path | None:
    """Returns the folder of a mesh's tokens, which are made if there are none; None if it is open.

    Raises:
        ConfigError: They cannot be written.
    """
    if mesh.tokens_path is None:
        return None
    folder = mesh.tokens_path.resolve()
    if not (folder / "accepted").exists():
        try:
            make_tokens(folder)
        except OSError as error:
            name = "locks_dir" if mesh.locks_dir else "data_dir"
            raise ConfigError(f"mesh.{name}: {error}") from error
    return folder
