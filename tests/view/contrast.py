"""Contrast of what a page shows, by the formulas of WCAG 2: text, and marks that tell something."""

from pathlib import Path
from typing import Any

from tests.view.browser import Page

TEXT, MARK = 4.5, 3.0
"""Least contrasts of level AA."""
_MEASURE = Path(__file__).with_suffix(".js").read_text()


async def too_weak(page: Page) -> tuple[int, list[Any]]:
    """Measures the page as it is. Returns how many things were measured, and those too weak."""
    found: list[list[Any]] = await page.run(_MEASURE)
    weak = [one for one in found if one[3] < (TEXT if one[0] == "text" else MARK)]
    return len(found), weak
