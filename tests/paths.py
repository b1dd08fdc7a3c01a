"""Where tests find what is not Python: the repository, its docs, its scripts, files of packages."""

from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[1]


def package_folder(name: str) -> Path:
    """Returns the folder of an installed package, without importing it."""
    spec = find_spec(name)
    assert spec is not None, f"{name} is not installed"
    assert spec.origin is not None
    return Path(spec.origin).parent
