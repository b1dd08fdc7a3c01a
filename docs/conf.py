"""Sphinx settings of the documentation site, which `make docs` builds.

The source folder is the repository's root, so links between pages work here as they do on GitHub.
"""

import tomllib
from pathlib import Path
from typing import Any

project = "rollmesh"
author = "The rollmesh authors"
_project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text("utf-8"))
version = release = _project["project"]["version"]

root_doc = "docs/index"
include_patterns = [
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "benchmarks/README.md",
    "build/reference/protocol.md",
    "docs/**",
]
exclude_patterns = ["docs/_templates", "docs/_static"]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_default_options = {"members": True, "show-inheritance": True}
napoleon_google_docstring = True
napoleon_numpy_docstring = False
default_role = "code"  # docstrings are written with single backticks

templates_path = ["_templates"]
html_theme = "furo"
html_title = "rollmesh"
html_additional_pages = {"index": "redirect.html"}
html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["site.css"]


def _keep_prose(_app: Any, what: str, *rest: Any) -> None:
    """Makes napoleon leave an attribute's docstring alone: it takes "host: port" for a type."""
    if what in {"attribute", "data", "property"}:
        lines: list[str] = rest[-1]
        lines.insert(0, "")


def setup(app: Any) -> None:
    """Is called by Sphinx; the handler comes before napoleon's, which has the default priority."""
    app.connect("autodoc-process-docstring", _keep_prose, priority=400)
