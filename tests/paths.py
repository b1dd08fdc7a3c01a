"""Where tests find what is not Python: the repository, its docs, its scripts."""

from pathlib import Path

ROOT = Path(__file__).parents[1]
