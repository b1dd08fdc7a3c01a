"""Makes a release: changelog, version, wheels, images, commit and tag. It pushes nothing.

python -m scripts.release 0.2.0 [--dry-run]
"""

import argparse
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).parents[1]
_VERSION = re.compile(r"\d+\.\d+\.\d+")
_PROJECT_VERSION = re.compile(r'(?m)^version = "(.*)"$')
_UNRELEASED = "## [Unreleased]\n"
_WHEEL_NAME = "-{version}-py3-none-any.whl"
_PAGES = ("README.md", "docs/**/*.md", "scripts/pages/*.py")
"""Files that may name a wheel."""
_CHAT = re.compile(r"(rollmesh-chat(?:\[mistral\])?==)[\d.]+")
"""The distribution of this repository that others of it need, in the same version."""


class ReleaseError(Exception):
    """The release cannot be made. The message says why."""


@dataclass(frozen=True, slots=True)
class Release:
    """One release of the tree in a folder."""

    version: str
    day: str
    """ISO date."""
    root: Path = ROOT

    def check(self) -> None:
        """Checks version, tree and tag.

        Raises:
            ReleaseError: Names what is in the way.
        """
        if not _VERSION.fullmatch(self.version):
            raise ReleaseError(f"version: {self.version!r} is not of the form X.Y.Z")
        if changed := self._git("status", "--porcelain"):
            raise ReleaseError(f"the tree has changes; commit or stash them:\n{changed}")
        if self._git("tag", "--list", self.tag):
            raise ReleaseError(f"the tag {self.tag} exists; choose the next version")

    @property
    def tag(self) -> str:
        """Name of the tag."""
        return f"v{self.version}"

    def files(self) -> dict[Path, str]:
        """Returns the files that change, with their new text.

        Raises:
            ReleaseError: A file lacks what is to be changed.
        """
        project = self._read("pyproject.toml")
        found = _PROJECT_VERSION.search(project)
        if found is None:
            raise ReleaseError("pyproject.toml: has no version")
        project = _PROJECT_VERSION.sub(f'version = "{self.version}"', project, count=1)
        old, new = (_WHEEL_NAME.format(version=one) for one in (found[1], self.version))
        texts = {
            "pyproject.toml": _CHAT.sub(rf"\g<1>{self.version}", project),
            "CHANGELOG.md": self._changelog(),
        }
        pages = sorted(one for pattern in _PAGES for one in self.root.glob(pattern))
        for page in (str(one.relative_to(self.root)) for one in pages):
            if old in (text := self._read(page)):
                texts[page] = text.replace(old, new)
        return {self.root / name: text for name, text in texts.items()}

    def commands(self) -> list[list[str]]:
        """Returns what is run once the files are written."""
        return [
            ["make", "wheel"],
            ["docker", "compose", "build"],
            ["git", "commit", "-qam", f"Release {self.version}"],
            ["git", "tag", "-a", self.tag, "-m", f"rollmesh {self.version}"],
        ]

    def make(self) -> None:
        """Writes the files and runs the commands. Nothing is committed before both builds work.

        Raises:
            subprocess.CalledProcessError: A command fails. The files are as they were.
        """
        before = {path: path.read_text("utf-8") for path in self.files()}
        for path, text in self.files().items():
            path.write_text(text, "utf-8")
        try:
            for command in self.commands():
                subprocess.run(command, cwd=self.root, check=True)
        except BaseException:
            for path, text in before.items():
                path.write_text(text, "utf-8")
            raise

    def _changelog(self) -> str:
        text = self._read("CHANGELOG.md")
        head, found, rest = text.partition(_UNRELEASED)
        if not found or not rest.partition("\n## ")[0].strip():
            raise ReleaseError("CHANGELOG.md: has nothing under [Unreleased]; say what changes")
        return f"{head}{_UNRELEASED}\n## [{self.version}] - {self.day}\n{rest}"

    def _read(self, name: str) -> str:
        return (self.root / name).read_text("utf-8")

    def _git(self, *words: str) -> str:
        done = subprocess.run(
            ["git", *words], cwd=self.root, check=True, capture_output=True, text=True
        )
        return done.stdout.strip()


def main(argv: Sequence[str], root: Path = ROOT) -> int:
    """Makes a release, or prints what would be done. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="release", description=__doc__)
    parser.add_argument("version", help="X.Y.Z")
    parser.add_argument("--dry-run", action="store_true", help="only print what would be done")
    asked = parser.parse_args(argv)
    release = Release(asked.version, datetime.now(UTC).date().isoformat(), root)
    try:
        release.check()
        for path in release.files():
            print(f"write {path.relative_to(root)}")
        for command in release.commands():
            print("run", " ".join(command))
        if not asked.dry_run:
            release.make()
    except ReleaseError as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
