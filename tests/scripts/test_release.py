"""A release of a small repository: refusals, dry runs, and results."""

import subprocess
from pathlib import Path

import pytest

from scripts.release import Release, ReleaseError, main
from tests.paths import ROOT

CHANGELOG = "# Changelog\n\n## [Unreleased]\n\n### Added\n\n- A thing.\n\n## [0.1.0] - 2026-01-01\n"
FILES = {
    "pyproject.toml": 'version = "0.1.0"\nneeds = ["rollmesh-chat[mistral]==0.1.0"]\n',
    "CHANGELOG.md": CHANGELOG,
    "README.md": "pip install 'dist/rollmesh-0.1.0-py3-none-any.whl[mesh]'\n",
    "docs/getting-started.md": "pip install 'dist/rollmesh-0.1.0-py3-none-any.whl[mesh]'\n",
}


def git(folder: Path, *words: str) -> str:
    done = subprocess.run(["git", *words], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    git(tmp_path, "init", "-q")
    git(tmp_path, "config", "user.name", "a")
    git(tmp_path, "config", "user.email", "a@example.org")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    return tmp_path


def test_a_dry_run_says_what_would_be_done_and_does_nothing(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["0.2.0", "--dry-run"], repository) == 0
    said = capsys.readouterr().out
    for what in (
        "write CHANGELOG.md",
        "make wheel",
        "docker compose build",
        "v0.2.0",
    ):
        assert what in said
    assert git(repository, "status", "--porcelain") == ""
    assert git(repository, "tag", "--list") == ""


def test_a_tree_with_changes_is_refused(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (repository / "README.md").write_text("changed\n")
    assert main(["0.2.0", "--dry-run"], repository) == 1
    assert "README.md" in capsys.readouterr().err


@pytest.mark.parametrize("version", ["0.2", "v0.2.0", "next"])
def test_a_version_of_another_form_is_refused(repository: Path, version: str) -> None:
    with pytest.raises(ReleaseError, match=r"X\.Y\.Z"):
        Release(version, "2026-01-02", repository).check()


def test_a_version_that_has_a_tag_is_refused(repository: Path) -> None:
    git(repository, "tag", "v0.2.0")
    with pytest.raises(ReleaseError, match=r"v0\.2\.0 exists"):
        Release("0.2.0", "2026-01-02", repository).check()


def test_an_empty_changelog_is_refused(repository: Path) -> None:
    (repository / "CHANGELOG.md").write_text("# Changelog\n\n## [Unreleased]\n\n## [0.1.0]\n")
    with pytest.raises(ReleaseError, match="Unreleased"):
        Release("0.2.0", "2026-01-02", repository).files()


class WithoutBuilds(Release):
    """Leaves out the wheel and the images, which other tests build."""

    def commands(self) -> list[list[str]]:
        return [command for command in super().commands() if command[0] == "git"]


def test_a_release_has_a_changelog_a_version_a_commit_and_a_tag(repository: Path) -> None:
    WithoutBuilds("0.2.0", "2026-01-02", repository).make()
    changelog = (repository / "CHANGELOG.md").read_text()
    assert "## [Unreleased]\n\n## [0.2.0] - 2026-01-02\n\n### Added\n\n- A thing." in changelog
    project = (repository / "pyproject.toml").read_text()
    assert 'version = "0.2.0"\nneeds = ["rollmesh-chat[mistral]==0.2.0"]' in project
    assert "rollmesh-0.2.0-py3" in (repository / "README.md").read_text()
    assert git(repository, "log", "-1", "--format=%s") == "Release 0.2.0"
    assert git(repository, "describe") == "v0.2.0"
    assert git(repository, "status", "--porcelain") == ""


class FailingBuild(Release):
    def commands(self) -> list[list[str]]:
        return [["false"], *super().commands()]


def test_a_build_that_fails_leaves_no_trace(repository: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError):
        FailingBuild("0.2.0", "2026-01-02", repository).make()
    assert git(repository, "status", "--porcelain") == ""
    assert git(repository, "tag", "--list") == ""


def test_the_next_release_of_this_repository_can_be_made() -> None:
    changed = Release("9.9.9", "2026-01-02").files()
    assert changed[ROOT / "pyproject.toml"].count("==9.9.9") == 2
    assert "rollmesh-9.9.9-py3" in changed[ROOT / "README.md"]
    for page in ("docs/conformance.md", "scripts/pages/conformance.py"):
        assert "rollmesh_conformance-9.9.9-py3" in changed[ROOT / page]
    assert "## [9.9.9] - 2026-01-02" in changed[ROOT / "CHANGELOG.md"]
