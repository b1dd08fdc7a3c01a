"""Sphinx settings of the documentation site, which `make docs` builds.

The source folder is the repository's root, so links between pages work here as they do on GitHub.
"""

import tomllib
from pathlib import Path

project = "rollmesh"
author = "The rollmesh authors"
_project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text("utf-8"))
version = release = _project["project"]["version"]

root_doc = "docs/index"
include_patterns = [
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "benchmarks/README.md",
    "build/reference/protocol.md",
    "docs/**",
]
exclude_patterns = ["docs/_templates"]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_default_options = {"members": True, "show-inheritance": True}
napoleon_google_docstring = True
napoleon_numpy_docstring = False

templates_path = ["_templates"]
html_theme = "furo"
html_title = "rollmesh"
html_additional_pages = {"index": "redirect.html"}
html_copy_source = False
