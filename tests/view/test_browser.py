import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from rollmesh.client import Rewards, start_of_atif
from tests.meshes import Mesh, scripted_mesh
from tests.models import make_tokenizer_dir
from tests.view.browser import CHROMIUM, Page, browser
from tests.view.contrast import too_weak
from tests.view.test_viewer import HOSTILE, conversation, listed, turn, viewer
from tests.waiting import until

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.skipif(not CHROMIUM, reason="chromium is not installed: apt-get install chromium"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def shared(
    tmp_path_factory: pytest.TempPathFactory, tokenizer_dir: Path
) -> AsyncIterator[Mesh]:
    async with scripted_mesh(tmp_path_factory.mktemp("browsed"), tokenizer_dir) as mesh:
        yield mesh


async def test_a_reader_goes_from_the_run_to_a_token(shared: Mesh) -> None:
    async with shared.client() as client, viewer(shared) as http:
        group = {"group_id": "g", "group_size": 2, "run_id": "r"}
        await conversation(shared, client, sample_index=0, **group)
        session = await conversation(shared, client, sample_index=1, **group)
        await listed(http, run_id="r")
        async with browser(str(http.base_url)) as page:
            await page.open("#/run", "Share with a reward of at least 1")
            await page.until("document.querySelectorAll('svg circle').length > 3")
            await page.open("#/groups", "no variance")
            await page.click("g")
            await page.until("document.querySelectorAll('tbody tr').length === 2")
            await page.click(session.session_id)
            await page.until("document.querySelectorAll('.node').length > 2")
            shown = await page.run("document.querySelector('main').textContent")
            assert HOSTILE in shown
            await page.click("Tokens")
            trained = await page.until("document.querySelectorAll('.tokens b.train').length")
            assert trained == 16  # the main path has two of the three answers
            title = await page.run("document.querySelector('.tokens b.train').title")
            assert title.startswith("id ")
            assert title.endswith("trained, version 0")
            await page.click("log-probability")
            await page.until("document.querySelectorAll('.tokens.logprob b[class*=l]').length")
            await page.until("document.querySelector('.tree').textContent.includes('root')")
            await a_branch_is_chosen_by_keyboard(page)
            assert page.events == []


async def a_branch_is_chosen_by_keyboard(page: Page) -> None:
    """Goes from the last node of the path to the other root, and chooses it."""
    chosen = "document.activeElement.getAttribute('aria-selected')"
    await page.run("document.querySelector('.tree [tabindex=\"0\"]').focus()")
    assert await page.run(chosen) == "true"
    for _ in range(9):
        await page.press("ArrowUp")
    await page.press("ArrowRight")
    if await page.run(chosen) == "true":
        await page.press("ArrowLeft")
    assert await page.run(chosen) == "false"
    await page.press("Enter")
    assert await page.run(chosen) == "true"


async def test_tokens_are_coloured_by_what_the_trainer_wrote_back(
    shared: Mesh, tmp_path: Path
) -> None:
    module = tmp_path / "maze.js"
    module.write_text("export default (session, box) => box.append(`maze of ${session.turns}`)")
    async with shared.client() as client, viewer(shared, view_module=f"maze={module}") as http:
        session = await conversation(shared, client, metadata={"view": "maze"}, run_id="back")
        await listed(http, run_id="back")
        for one in (await client.stored_session(session.session_id)).trajectories:
            values = np.where(one.loss_mask, np.resize([1, -2], len(one.loss_mask)), np.nan)
            await client.annotate(
                session.session_id, "advantages", values, trajectory_id=one.trajectory_id
            )
        async with browser(str(http.base_url)) as page:
            await page.open(f"#/session/{session.session_id}", "maze of 3")
            await page.click("Tokens")
            await page.click("advantages")
            for colour, count in (("above2", 8), ("below4", 8)):
                found = f"document.querySelectorAll('.tokens.by b.{colour}').length"
                assert await page.until(found) == count
            title = await page.run("document.querySelector('b[class*=above]').title")
            assert "advantages" in title
            assert page.events == []


async def test_tokens_are_coloured_by_the_advantage_in_the_group(shared: Mesh) -> None:
    async with shared.client() as client, viewer(shared) as http:
        best = ""
        for at in range(2):
            async with client.session(
                group_id="pair", group_size=2, run_id="pair", sample_index=at
            ) as session:
                await turn(shared, session, "Which way?")
                session.rewards = Rewards(session=at)
                best = session.session_id

        async def are_there() -> bool:
            return bool((await listed(http, run_id="pair"))["total"] == 2)

        await until(are_there)
        async with browser(str(http.base_url)) as page:
            await page.open(f"#/session/{best}", "Metadata")
            await page.click("Tokens")
            await page.click("group advantage")
            trained = "document.querySelectorAll('.tokens.by b.above2').length"
            assert await page.until(trained) == 8
            title = await page.run("document.querySelector('b.above2').title")
            assert "group advantage 1.000" in title
            special = await page.run("document.querySelector('b.special').title")
            assert "special token" in special
            await page.open("#/sessions?group_id=pair", "standard deviation")
            assert page.events == []


async def test_the_mesh_and_the_run_show_alarms_with_their_remedies(shared: Mesh) -> None:
    async with shared.client() as client, viewer(shared) as http:
        async with client.subscribe("trainer", unit="session"):
            await client.state_dict("trainer")
            await client.report_step("trainer", 1, {"loss": float("nan")})
            async with browser(str(http.base_url)) as page:
                for name in ("mesh", "run"):
                    await page.open(f"#/{name}", "Restore the last checkpoint")
                assert page.events == []
        await client.delete_consumer("trainer")


async def test_runs_and_models_are_side_by_side_with_engines_and_what_consumers_did_not_get(
    shared: Mesh,
) -> None:
    async with shared.client() as client, viewer(shared) as http:
        for run_id in ("one, with: signs", "two"):
            await conversation(shared, client, run_id=run_id, group_id=run_id, group_size=1)
            await listed(http, run_id=run_id)
        async with client.subscribe("reader", unit="session"), browser(str(http.base_url)) as page:
            await client.state_dict("reader")  # waits for the consumer
            await page.open("#/run?run_id=two", "Reward")
            await page.until("document.querySelector('[name=run_id]').value === 'two'")
            for label in ("one, with: signs", "policy"):
                options = "[...document.querySelectorAll('optgroup option')]"
                option = f"{options}.find(one => one.text === '{label}')"
                await page.until(f"Boolean({option})")
                await page.run(
                    f"(one => {{ one.selected = true; one.closest('select')"
                    f".dispatchEvent(new Event('change')); }})({option})"
                )
                await page.until(f"document.querySelector('.key').textContent.includes('{label}')")
            names = await page.run("document.querySelector('.key').textContent")
            assert names == "twoone, with: signspolicy"
            tables = "[...document.querySelectorAll('table')].map(one => one.innerText).join()"
            text = await page.run(tables)
            for shown in ("of ", "reader", "filtered", "leases"):
                assert shown in text
            assert page.events == []
        await client.delete_consumer("reader")


async def test_hostile_text_is_shown_and_never_run(shared: Mesh) -> None:
    async with shared.client() as client, viewer(shared) as http:
        metadata = {HOSTILE: HOSTILE, "error": HOSTILE, "view": "javascript:alert(3)"}
        session = await conversation(
            shared, client, run_id=HOSTILE, group_id=HOSTILE, group_size=1, metadata=metadata
        )
        await listed(http, run_id=HOSTILE)
        async with browser(str(http.base_url)) as page:
            for address, text in (
                ("#/run", "Reward"),
                ("#/groups", HOSTILE),
                ("#/sessions", HOSTILE),
                (f"#/session/{session.session_id}", HOSTILE),
                (f"#/compare/{session.session_id}/{session.session_id}", "They share"),
                (f"#/{HOSTILE}?words={HOSTILE}", "There is no such page"),
            ):
                await page.open(address, text)
            assert await page.run("document.querySelectorAll('main img, main script').length") == 0
            assert page.events == []


async def test_an_open_session_grows_while_it_is_read(shared: Mesh) -> None:
    step = {"step_id": 1, "source": "user", "message": "first"}
    name = "<b>d</b>"
    document = {"schema_version": "ATIF-v1.8", "session_id": name, "agent": {}, "steps": [step]}
    start = start_of_atif(document)
    async with shared.client() as client, viewer(shared) as http:
        async with client.session(start=start) as session, browser(str(http.base_url)) as page:
            answer = await turn(shared, session, "first")
            await page.open(f"#/session/{session.session_id}", "OPEN")
            assert await page.run("document.querySelectorAll('.node').length") == 2
            await page.until("document.body.textContent.includes('document <b>d</b>, as text')")
            await turn(shared, session, "first", answer, "second")
            await page.until("document.querySelectorAll('.node').length === 4")
            assert page.events == []


async def test_the_keyboard_alone_goes_from_the_run_to_why_a_token_is_not_trained(
    shared: Mesh,
) -> None:
    async with shared.client() as client, viewer(shared) as http:
        group = {"group_id": "walked", "group_size": 1, "run_id": "walk"}
        session = await conversation(shared, client, **group)
        await listed(http, run_id="walk")
        async with browser(str(http.base_url)) as page:
            await page.open("#/run", "Reward")
            for name, shown in (
                ("Groups", "mean reward"),
                ("walked", "Compare two"),
                (session.session_id, "Metadata"),
            ):
                await page.tab_to(name)
                await page.press("Enter")
                await page.until(f"document.body.textContent.includes('{shown}')")
            await page.tab_to("Tokens")
            await page.press("Enter")
            answer = await page.until(
                "document.querySelector('.node.sampled .tokens')?.getAttribute('aria-label')"
            )
            await page.tab_to(answer)
            told = "document.activeElement.nextSibling.value"
            await page.press("ArrowRight")
            assert "the model did not sample it" in (await page.run(told)).lower()
            await page.press("End")
            assert (await page.run(told)).endswith("trained, version 0.")
            await page.press("Enter")
            focused = "document.activeElement.parentElement"
            assert await page.run(f"{focused}.open")
            why = await page.run(f"{focused}.textContent")
            assert "It follows node" in why
            assert "A rule of the gateway gave the branch its label" in why
            assert "max_tokens" in why
            assert page.events == []


async def test_a_turn_grows_while_it_is_sampled_and_the_reader_keeps_the_place(
    tmp_path: Path,
) -> None:
    model = make_tokenizer_dir(tmp_path / "model", context=16_384)
    rules = [(HOSTILE, "on and on " * 1200)]  # minutes, also for a browser that starts slowly
    slow: dict[str, Any] = {"tokens_per_second": 50}
    async with scripted_mesh(tmp_path, model, rules, **slow) as mesh, mesh.client() as client:
        async with client.session() as session, viewer(mesh) as http:
            asking = asyncio.create_task(turn(mesh, session, HOSTILE))
            async with browser(str(http.base_url)) as page:
                sampled = "Number(/SAMPLING, (\\d+)/.exec(document.body.textContent)?.[1])"

                async def opened() -> bool:  # the session's first turn has begun
                    rows = (await http.get("/api/open")).json()["rows"]
                    return any(one["in_flight"] for one in rows)

                await until(opened)
                await page.open(f"#/session/{session.session_id}", "OPEN")
                first = await page.until(sampled)
                await page.run("document.querySelector('.tree [tabindex=\"0\"]').focus()")
                node = await page.run("document.activeElement.dataset.nodes")
                await page.run("document.querySelector('.why').open = true")
                why = await page.run("document.querySelector('.why').textContent")
                assert "not trained" not in why
                assert "decided when the session closes" in why
                await page.until(f"{sampled} > {first}")
                assert await page.run("document.activeElement.dataset.nodes") == node
                opened_now = "[...document.querySelectorAll('details')].filter(one => one.open)"
                assert await page.run(f"{opened_now}.map(one => one.className)") == ["why"]
                await page.click("Tokens")
                tokens = "document.querySelectorAll('.node:last-child .tokens b').length"
                shown = await page.until(tokens)
                await page.until(f"{tokens} > {shown}")
                assert await page.run("document.querySelectorAll('main img').length") == 0
                assert page.events == []
            asking.cancel()
            await asyncio.wait([asking])


async def test_every_control_is_reached_by_keyboard_and_has_a_name(shared: Mesh) -> None:
    async with shared.client() as client, viewer(shared) as http:
        await conversation(shared, client, run_id="keys", group_id="keys", group_size=1)
        await listed(http, run_id="keys")
        async with browser(str(http.base_url)) as page:
            await page.open("#/sessions?run_id=keys", "1 found")
            for name in ("Run", "Groups", "Dark or light", "outcome", "words", "order", "Show"):
                await page.tab_to(name)
            found = await page.call("Accessibility.getFullAXTree")
            controls = ("button", "link", "combobox", "searchbox", "checkbox")
            nameless = [
                one["role"]["value"]
                for one in found["nodes"]
                if one.get("role", {}).get("value") in controls and not one["name"].get("value")
            ]
            assert nameless == []


SCALES = {"mask": ("train", "sampled"), "logprob": ("l1", "l2", "l3", "l4")}
SCALES["by"] = tuple(f"{side}{at}" for side in ("above", "below") for at in (1, 2, 3, 4))
SCALES["version"] = ("v0", "v1", "v2", "v3")
SCALES["reason"] = tuple(f"r{at}" for at in range(8))


async def test_all_text_and_marks_have_the_contrast_of_wcag_aa_in_both_themes(shared: Mesh) -> None:
    async with shared.client() as client, viewer(shared) as http:
        group = {"group_id": "seen", "group_size": 1, "run_id": "seen"}
        metadata = {"error": "a failure"}
        session = await conversation(shared, client, metadata=metadata, **group)
        await listed(http, run_id="seen")
        scale = ""
        for of, names in SCALES.items():
            scale += (
                f"<p class='tokens {of}'>{''.join(f'<b class={one}>x</b>' for one in names)}</p>"
            )
        async with browser(str(http.base_url)) as page:
            for address, shown in (
                ("#/run?by=time", "Requests that wait"),
                ("#/groups", "mean reward"),
                ("#/sessions", "found"),
                ("#/mesh", "Consumers"),
                (f"#/session/{session.session_id}", "Metadata"),
            ):
                await page.open(address, shown)
                if "session/" in address:
                    await page.run(
                        "document.querySelector('.node').insertAdjacentHTML('beforeend',"
                        f" {json.dumps(scale)})"
                    )
                for _ in range(2):
                    count, weak = await too_weak(page)
                    assert count > 20
                    assert weak == [], address
                    await page.click("Dark or light")
            assert page.events == []


async def test_a_browser_logs_in_with_the_key(shared: Mesh, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("k" * 40)
    async with viewer(shared, key_file=key) as http, browser(str(http.base_url)) as page:
        await page.until("document.querySelector('h1').innerText === 'Log in'")
        await page.run("document.querySelector('input').value = 'k'.repeat(40)")
        await page.click("Log in")
        await page.until("document.querySelector('h1').innerText === 'Run'")
        assert "k" * 40 not in await page.run("location.href + document.cookie")
        await page.call("Network.clearBrowserCookies")  # as after a restart of the viewer
        await page.run("dispatchEvent(new Event('hashchange'))")
        await page.until("document.querySelector('h1').innerText === 'Log in'")
        await page.run("document.querySelector('input').focus()")
        await page.call("Input.insertText", text="k" * 40)
        await page.press("Enter")
        await page.until("document.querySelector('h1').innerText === 'Run'")
        page.events.clear()  # the refused requests of both logins
        await asyncio.gather(page.open("#/mesh", "Members"))
        assert page.events == []


async def test_a_page_keeps_its_content_while_the_mesh_is_away_and_goes_on(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    async with scripted_mesh(tmp_path, tokenizer_dir) as mesh, mesh.client() as client:
        async with client.session() as session, viewer(mesh) as http:
            answer = await turn(mesh, session, "first")
            async with browser(str(http.base_url)) as page:
                await page.open(f"#/session/{session.session_id}", "OPEN")
                await page.run("document.querySelector('.why').open = true")
                state = "document.getElementById('state').textContent"
                await page.until(f"{state} === 'live'")
                await mesh.processes["gateway"].kill()
                await page.until(f"{state}.startsWith('not live: ')")
                nodes = "document.querySelectorAll('.node').length"
                assert await page.run(f"[{nodes}, document.querySelector('.why').open]") == [
                    2,
                    True,
                ]
                await mesh.start("gateway")
                await page.until(f"{state} === 'live'")
                await turn(mesh, session, "first", answer, "second")
                await page.until(f"{nodes} === 4")
                assert await page.run("document.querySelector('.why').open")
