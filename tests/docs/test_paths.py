"""Every file and folder that the pages name exists in the repository."""

import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

from tests.docs.pages import PAGES
from tests.paths import ROOT

_FENCED = re.compile(r"^```.*?^```$", re.M | re.S)
_QUOTED = re.compile(r"`([\w.][\w./-]*)`")
_LISTED = re.compile(r"^    ([\w./-]+/)(?=\s)", re.M)
_ENDINGS = (".py", ".proto", ".toml", ".md", ".rst", ".txt", ".yml", ".sh")
_MADE = (
    "build/",
    "var/",
    ".../",
    "training/",
    "rollout_corr/",
    "actor/",
    "sampling/",
    "clip_ratio/",
    "_set_aside/",
)
"""Where programs write, URLs, and metrics of verl and TRL."""
_OTHER = {
    "additional_chat_templates/",
    "application/json",
    "arrays/",
    "collector/arrays/",
    "collector/collector.sqlite",
    "gateway/journal.sqlite",
    "text/plain",
}
"""Files of a model, of a mesh's `data_dir`, and media types."""


@cache
def tracked() -> set[str]:
    """The paths of all files and folders that git knows."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    files = [Path(line) for line in listed.stdout.splitlines()]
    return {str(path) for file in files for path in (file, *file.parents)}


def exists(name: str) -> bool:
    """Whether a path leads somewhere from the root, or from any folder below it."""
    name = name.rstrip("/")
    return any(path == name or path.endswith(f"/{name}") for path in tracked())


def named(page: Path) -> set[str]:
    text = _FENCED.sub("", page.read_text("utf-8"))
    words = {*_QUOTED.findall(text), *_LISTED.findall(text)}
    paths = {word for word in words if "/" in word or word.endswith(_ENDINGS)}
    return {path for path in paths - _OTHER if not path.startswith(_MADE)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_path_that_a_page_names_exists(page: Path) -> None:
    assert {path for path in named(page) if not exists(path)} == set()


def test_the_paths_of_the_contributors_guide_are_found() -> None:
    found = named(ROOT / "CONTRIBUTING.md")
    assert {"services/gateway/rollmesh/chat/", "collector/store.py"} <= found
