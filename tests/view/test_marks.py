"""What happens to a mesh, as marks on the curves of a real browser."""

from pathlib import Path

import numpy as np
import pytest

from tests.fleets import gateway_fleet
from tests.view.browser import CHROMIUM, browser
from tests.view.test_viewer import viewer

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.skipif(not CHROMIUM, reason="chromium is not installed: apt-get install chromium"),
]
MARKS = "[...document.querySelectorAll('.event title')].map(one => one.textContent)"
TOLD = "[...document.querySelectorAll('td.text')].map(one => one.textContent)"


async def test_a_push_a_killed_engine_and_a_takeover_are_marks_with_their_words(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    async with (
        gateway_fleet(tmp_path, tokenizer_dir, [], 500) as fleet,
        viewer(fleet.mesh) as http,
        browser(str(http.base_url)) as page,
    ):
        processes = fleet.mesh.processes
        (engine,) = [
            one.hello.replica_id
            for one in (await fleet.client.replicas()).replicas
            if one.hello.address == processes["engine"].address
        ]
        await fleet.session_at("gateway-0")
        await page.open("#/run?by=time", "Leases of engines")

        async def shows(name: str) -> None:
            wanted = f"one => one.startsWith({name!r})"
            await page.until(f"{MARKS}.some({wanted})")
            assert await page.run(f"{TOLD}.some({wanted})")

        await fleet.client.push_weights({"w": np.zeros(1, np.float32)}, 1)
        await shows("version 1 of policy pushed")
        await processes["engine"].kill()
        await shows(f"engine {engine} left")
        await processes["gateway-0"].kill()
        await shows("gateway gateway-0 left")
        await shows("gateway gateway-1 took 1 journals over")
        assert page.events == []
