"""A real Chromium without a window, driven by its DevTools protocol."""

import asyncio
import base64
import json
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
from websockets.asyncio.client import ClientConnection, connect

from tests.waiting import until

_CODES = {"Tab": (9, ""), "Enter": (13, "\r")}
_FOCUSED = """(one => one === document.body ? "" : one.getAttribute("aria-label")
  || one.labels?.[0]?.firstChild.textContent || one.innerText)(document.activeElement)"""
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or ""


class Page:
    """One tab. `events` has what went wrong in it: errors, dialogs, requests to elsewhere."""

    def __init__(self, socket: ClientConnection, base: str) -> None:
        self.base, self.events = base, list[str]()
        self._socket, self._last = socket, 0
        self._answers: dict[int, asyncio.Future[Any]] = {}

    async def listen(self) -> None:
        async for text in self._socket:
            said = json.loads(text)
            if "id" in said:
                self._answers.pop(said["id"]).set_result(said)
                continue
            found = said.get("params", {})
            if said["method"] in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.events.append(json.dumps(found)[:500])
            elif said["method"] == "Page.javascriptDialogOpening":
                self.events.append(f"dialog: {found['message']}")
            elif said["method"] == "Network.requestWillBeSent":
                url = found["request"]["url"]
                if not url.startswith((self.base, "data:")):
                    self.events.append(f"request: {url}")

    async def call(self, method: str, **params: Any) -> Any:
        self._last += 1
        answer = self._answers[self._last] = asyncio.get_running_loop().create_future()
        said = {"id": self._last, "method": method, "params": params}
        await self._socket.send(json.dumps(said))
        async with asyncio.timeout(240):
            found = await answer
        assert "error" not in found, found
        return found["result"]

    async def run(self, script: str) -> Any:
        """Runs an expression of JavaScript, which may be a promise. Returns its value."""
        found = await self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    async def open(self, address: str, shown: str) -> None:
        """Opens an address after "#" and waits for a text on the page."""
        await self.run(f"location.hash = {json.dumps(address)}")
        await self.until(
            f"document.querySelector('main').textContent.includes({json.dumps(shown)})"
        )

    async def until(self, script: str) -> Any:
        async def look() -> Any:
            return await self.run(script)

        return await until(look)

    async def click(self, text: str) -> None:
        """Clicks the first button or link with a text."""
        found = (
            "[...document.querySelectorAll('button,a')]"
            f".find(one => one.innerText.trim() === {json.dumps(text)})"
        )
        await self.until(f"Boolean({found})")
        await self.run(f"{found}.click()")

    async def press(self, key: str) -> None:
        """Presses a key, which does what the browser does for it."""
        code, text = _CODES.get(key, (0, ""))
        for kind in ("keyDown", "keyUp"):
            given = {"type": kind, "key": key, "code": key, "windowsVirtualKeyCode": code}
            await self.call("Input.dispatchKeyEvent", **given, text=text * (kind == "keyDown"))

    async def tab_to(self, name: str) -> None:
        """Presses Tab until the focus is at the control or the part with a name."""
        seen = []
        for _ in range(200):
            await self.press("Tab")
            seen.append(await self.run(_FOCUSED))
            if seen[-1] == name:
                return
        raise AssertionError(f"{name} is not reached by Tab, only {sorted(set(seen))}")

    async def picture(self, path: Path) -> None:
        found = await self.call("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(found["data"]))


@asynccontextmanager
async def browser(base: str) -> AsyncIterator[Page]:
    """Runs Chromium at a base URL until the block ends."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        process = await asyncio.create_subprocess_exec(
            *(CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu"),
            *("--disable-dev-shm-usage", "--remote-debugging-port=0", "--window-size=1280,900"),
            *(f"--user-data-dir={folder}", "about:blank"),
            stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        try:
            file = Path(folder) / "DevToolsActivePort"
            port = await until(lambda: file.exists() and file.read_text().partition("\n")[0])
            async with httpx2.AsyncClient() as http:
                tabs = (await http.get(f"http://127.0.0.1:{port}/json")).json()
            (tab,) = [one for one in tabs if one["type"] == "page"]
            address = tab["webSocketDebuggerUrl"]
            async with connect(address, max_size=None) as socket, AsyncExitStack() as stack:
                page = Page(socket, base)
                listening = asyncio.create_task(page.listen())
                stack.callback(listening.cancel)
                for domain in ("Runtime", "Log", "Page", "Network"):
                    await page.call(f"{domain}.enable")
                await page.call("Page.navigate", url=base)
                await page.until("document.querySelector('main h1') !== null")
                yield page
        finally:
            process.kill()
            await process.wait()
