"""A reader understands each part from the modules that README lists for it."""

import re

import pytest

from tests.paths import ROOT

_ROW = re.compile(r"^\| (\w+) \| `([\w/]+)` \| (`.*`) \|$", re.MULTILINE)
PARTS = {
    name: (folder, modules)
    for name, folder, modules in _ROW.findall((ROOT / "README.md").read_text())
}
MOST_LINES = 1_500


def test_every_service_has_a_path() -> None:
    assert {"engine", "router", "gateway", "collector", "sidecar", "client", "mesh"} == set(PARTS)


@pytest.mark.parametrize("part", PARTS)
def test_a_path_is_short_and_its_package_names_it(part: str) -> None:
    folder, modules = PARTS[part]
    files = [ROOT / folder / f"{name}.py" for name in re.findall(r"`(\w+)`", modules)]
    assert sum(len(file.read_text().splitlines()) for file in files) <= MOST_LINES
    assert f"Read first: {modules}." in (ROOT / folder / "__init__.py").read_text()
