"""The versions of Python that packages and pages name are the tested ones."""

import json
import re
import tomllib

import pytest

from tests.paths import ROOT

_NIGHTLY = (ROOT / ".github" / "workflows" / "nightly.yml").read_text()
TESTED: list[str] = json.loads(re.findall(r"^ +python: (\[.*\])$", _NIGHTLY, re.MULTILINE)[0])
_CLASSIFIER = "Programming Language :: Python :: "


@pytest.mark.parametrize("folder", [".", "clients/conformance", "services/gateway/chat"])
def test_a_package_names_the_tested_versions(folder: str) -> None:
    project = tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]
    named = [one for one in project["classifiers"] if one.startswith(_CLASSIFIER)]
    assert named == [f"{_CLASSIFIER}{version}" for version in TESTED]
    assert project["requires-python"] == f">={TESTED[0]}"


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "docs/getting-started.md"])
def test_a_page_names_the_tested_versions(page: str) -> None:
    *first, last = TESTED
    assert f"on {', '.join(first)} and {last}" in (ROOT / page).read_text()
