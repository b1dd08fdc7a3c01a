"""What README and docs show: fenced blocks, as they stand in the pages."""

import re
from dataclasses import dataclass

from tests.paths import ROOT

PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    ROOT / "benchmarks" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block."""

    page: str
    """Path of the page from the root."""
    number: int
    """Counts the page's blocks of this language from 1."""
    language: str
    text: str

    @property
    def name(self) -> str:
        return f"{self.page} {self.language} {self.number}"


def blocks(language: str) -> list[Block]:
    """Returns the blocks of a language, in all pages."""
    found: list[Block] = []
    for path in PAGES:
        page = str(path.relative_to(ROOT))
        texts = [text for name, text in _FENCE.findall(path.read_text("utf-8")) if name == language]
        found += [Block(page, at, language, text) for at, text in enumerate(texts, 1)]
    return found
