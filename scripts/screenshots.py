"""Takes the pictures of docs/viewer.md from a viewer: `python -m scripts.screenshots URL`.

It needs Chromium. The viewer should show a finished demo.
"""

import asyncio
import json
import sys

from tests.paths import ROOT
from tests.view.browser import Page, browser

_FOLDER = ROOT / "docs" / "_static"
_THEME = "document.documentElement.dataset.theme = "


async def main(url: str) -> None:
    """Opens the pages one after the other and writes a picture of each."""
    async with browser(url.rstrip("/")) as page:
        await page.run(f"{_THEME}'light'")
        await page.open("#/run?by=version", "Reasons")
        await _picture(page, "viewer-run")
        await page.open("#/groups?order=largest+spread", "found")
        await _picture(page, "viewer-groups")
        await page.open("#/sessions?order=most+turns", "found")
        await page.until("document.querySelector('td.id a') !== null")
        first = "document.querySelector('td.id a').getAttribute('href')"
        session = await page.run(first)
        await page.open(session, "Session")
        await page.click("Tokens")
        await page.until("document.querySelectorAll('.tokens b').length > 0")
        await _picture(page, "viewer-session")
        await page.run(f"{_THEME}'dark'")
        await _picture(page, "viewer-session-dark")


async def _picture(page: Page, name: str) -> None:
    await page.run("new Promise((done) => requestAnimationFrame(() => setTimeout(done, 300)))")
    await page.picture(_FOLDER / f"{name}.png")
    print(json.dumps({"written": f"docs/_static/{name}.png"}))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
