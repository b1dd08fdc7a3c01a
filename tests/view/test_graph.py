"""The graph of a session in a real browser, drawn from trees that no small mesh makes."""

import json
import os
import random
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from rollmesh.v1 import session_pb2, trajectory_pb2
from tests.processes import running
from tests.view.browser import CHROMIUM, Page, browser

pytest.importorskip("pyarrow")
from rollmesh.record import Writer
from tests.collector.records import record, with_images, with_messages

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.skipif(not CHROMIUM, reason="chromium is not installed: apt-get install chromium"),
]
HOSTILE = "<script>alert(1)</script>\u202e\u2066{}\x00"
LONG = HOSTILE.format("x" * 1_000_000)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def page(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Page]:
    """A page of a viewer that has one recorded session."""
    folder = tmp_path_factory.mktemp("graph")
    write(folder)
    async with (
        running("view", folder, record=folder / "record") as process,
        browser(f"http://127.0.0.1:{process.port}") as found,
    ):
        await found.open("#/sessions", "3 found")  # a page that stays as it is
        yield found


def write(folder: Path) -> None:
    """Two siblings of a group. Agents and tools of both are hostile."""
    with Writer(folder / "record") as writer:
        for at in range(2):
            session = with_images(record(f"recorded-{at}", "g", at, 2), b"cat")
            said = with_messages(session).messages
            call = {"name": LONG, "arguments": HOSTILE}
            answer: dict[str, Any] = {
                "role": "assistant",
                "content": f"answer {at}",
                "reasoning_content": LONG,
            }
            answer["tool_calls"] = [{"id": HOSTILE, "type": "function", "function": call}]
            image = {
                "type": "image_url",
                "image_url": {"url": f"sha256:{session.images[0].sha256}"},
            }
            asked = [{"role": "user", "content": [{"type": "text", "text": HOSTILE}, image]}]
            for node, messages in zip(said, (asked, [answer]), strict=True):
                node.data = json.dumps(messages).encode()
                node.data_bytes = len(node.data)
            tokens = np.array([1, 2, 3, 4, 5, 6 + at], "<u4")
            session.trajectories[0].tokens.token_ids_u32le = tokens.tobytes()
            session.metadata["error"] = LONG[:1000]
            writer.add(session)
        writer.add(called())
        writer.commit()


def called() -> session_pb2.SessionRecord:
    """A session that is recorded as text: two calls, and their results in the other order."""
    names = ("first", "second")
    calls = [{"id": one, "function": {"name": one, "arguments": "{}"}} for one in names]
    said: list[list[dict[str, Any]]] = [
        [{"role": "user", "content": "Call."}],
        [{"role": "assistant", "content": None, "tool_calls": calls}],
        [{"role": "tool", "tool_call_id": one, "content": f"of {one}"} for one in names[::-1]],
    ]
    session = session_pb2.SessionRecord(session_id="called", capture=session_pb2.CAPTURE_TEXT)
    session.outcome = session_pb2.SESSION_OUTCOME_COMPLETED
    for at, messages in enumerate(said):
        data = json.dumps(messages).encode()
        session.messages.add(node_id=at + 1, parent_node_id=at, data=data, data_bytes=len(data))
    return session


def node(id_: int, parent: int | None, **given: Any) -> dict[str, Any]:
    sampled = id_ % 2 == 0
    role = "ASSISTANT" if sampled else "USER"
    shown: dict[str, Any] = {"node_id": id_, "parent": parent, "role": role, "sampled": sampled}
    return {**shown, "reasons": [], "ids": [1] * id_, "lineage": "MAIN", **given}


def chain(first: int, last: int, parent: int | None) -> list[dict[str, Any]]:
    return [node(at, at - 1 if at > first else parent) for at in range(first, last + 1)]


DRAW = """
import("/tree.js").then(({ graph, focus }) => {
  const box = document.createElement("div");
  box.className = "tree";
  document.querySelector("main").replaceChildren(box);
  const draw = (at) => graph(box, FOUND, at, window.opened, (to, id) => {
    window.chosen = to;
    draw(to);
    focus(box, id);
  });
  Object.assign(window, { opened: new Set(), chosen: 0, refocus: (id) => focus(box, id) });
  draw(0);
})
"""


async def drawn(page: Page, nodes: list[dict[str, Any]], *paths: tuple[str, list[int]]) -> None:
    """Draws a graph alone on the page. What the reader chose is in `window.chosen`."""
    found = {"nodes": nodes, "paths": [{"lineage": one, "nodes": ids} for one, ids in paths]}
    await page.run(DRAW.replace("FOUND", json.dumps(found)))


async def rows(page: Page) -> list[str]:
    """The rows as a screen reader hears them."""
    items = (
        "[...document.querySelectorAll('.tree .item')].map(one => one.getAttribute('aria-label'))"
    )
    found: list[str] = await page.run(items)
    return found


async def test_a_run_is_opened_and_folded_again_by_keys_and_by_clicks(page: Page) -> None:
    await drawn(page, chain(1, 20, None), ("MAIN", list(range(1, 21))))
    folded = await rows(page)
    assert [one.split(",")[0] for one in folded] == ["1 user", "18 nodes", "20 assistant"]
    expanded = "document.activeElement.getAttribute('aria-expanded')"
    await page.run("refocus(9)")  # it is in the run
    assert await page.run(expanded) == "false"
    await page.press("Enter")
    assert len(await rows(page)) == 20
    assert await page.run(expanded) == "true"
    await page.press("Enter")
    assert await rows(page) == folded
    for count in (20, 3):
        await page.run("document.activeElement.dispatchEvent(new MouseEvent('click'))")
        assert len(await rows(page)) == count
    assert await page.run(expanded) == "false"
    assert page.events == []


async def test_an_opened_run_of_another_path_is_chosen_before_it_is_folded(page: Page) -> None:
    nodes = [*chain(1, 2, None), *chain(3, 12, 2), *chain(13, 30, 2)]
    paths = [list(range(1, 3)) + list(range(3, 13)), list(range(1, 3)) + list(range(13, 31))]
    await drawn(page, nodes, ("SIBLING", paths[0]), ("MAIN", paths[1]))
    await page.run("refocus(20)")
    await page.press("Enter")
    assert await page.run("[window.opened.size, window.chosen]") == [1, 0]
    await page.press("Enter")
    assert await page.run("[window.opened.size, window.chosen]") == [1, 1]
    await page.press("Enter")
    assert await page.run("window.opened.size") == 0


async def test_each_node_of_any_tree_is_in_one_row_that_hangs_on_its_parent(page: Page) -> None:
    chance = random.Random(1)
    trees = []
    for _ in range(200):
        parents = [chance.choice((at - 1, at - 1, chance.randrange(at))) for at in range(1, 40)]
        trees.append([node(at, parent or None) for at, parent in enumerate(parents, 1)])
    shape = "row => [row.nodes.map(one => one.node_id), row.above?.nodes.at(-1).node_id ?? null]"
    found = await page.run(
        f"import('/tree.js').then(({{ layout }}) => {json.dumps(trees)}"
        f".map((nodes) => layout(nodes, new Set([9, 10, 11])).map({shape})))"
    )
    for nodes, rows_ in zip(trees, found, strict=True):
        assert sorted(id_ for ids, _ in rows_ for id_ in ids) == list(range(1, 40))
        expected = {one["node_id"]: one["parent"] for one in nodes}
        assert [above for _, above in rows_] == [expected[ids[0]] for ids, _ in rows_]


async def test_labels_stand_at_each_branch_and_where_they_change_also_in_a_run(page: Page) -> None:
    nodes = [*chain(1, 20, None), *chain(21, 22, 3)]
    for one in nodes[8:20]:
        one["lineage"] = "COMPACTION"
    main, sub = list(range(1, 21)), [1, 2, 3, 21, 22]
    await drawn(page, nodes, ("MAIN", main), ("SUB_AGENT", sub))
    found = await rows(page)
    assert next(one for one in found if "compaction" in one).startswith("15 nodes")
    assert next(one for one in found if "sub agent" in one).startswith("21 user")
    assert "main" in found[0]
    assert sum("compaction" in one or "sub agent" in one for one in found) == 2


async def test_every_label_of_the_contract_is_drawn(page: Page) -> None:
    names = [one.removeprefix("LINEAGE_") for one in trajectory_pb2.Lineage.keys()[1:]]
    nodes = [node(1, None), *(node(at, 1) for at in range(2, 2 + len(names)))]
    await drawn(page, nodes, *((name, [1, at + 2]) for at, name in enumerate(names)))
    text = " ".join(await rows(page))
    for name in names:
        assert name.lower().replace("_", " ") in text


async def test_hostile_names_of_any_length_leave_the_graph_its_shape(page: Page) -> None:
    wide = LONG
    nodes = [node(1, None, role=wide), *chain(2, 3, 1)]
    nodes[1]["reasons"] = [wide]
    await drawn(page, nodes, (wide, [1, 2, 3]), ("MAIN", [1]))
    assert await page.run("document.querySelectorAll('main script, main img').length") == 0
    box = "document.querySelector('.tree svg').getBoundingClientRect().width"
    assert await page.run(f"{box} < 400")
    texts = "[...document.querySelectorAll('.tree text')].map(one => one.textContent.length)"
    assert await page.run(f"Math.max(...{texts})") < 200
    assert page.events == []


async def test_a_curve_is_marked_where_something_happened(page: Page) -> None:
    names = ("engine e left", "version 2 of policy pushed", "gateway g took 1 journals over")
    given = {"events": [{"x": 2, "name": one} for one in names]}
    points = [{"x": at, "y": at} for at in (1, 3)]
    drawn_curve = f"chart('c', [{{points: {json.dumps(points)}}}], {json.dumps(given)})"
    shown = f"document.querySelector('main').replaceChildren({drawn_curve})"
    await page.run(f"import('/chart.js').then(({{ chart }}) => {shown})")
    titles = "[...document.querySelectorAll('.event title')].map(one => one.textContent)"
    assert await page.run(titles) == list(names)
    assert page.events == []


async def test_siblings_are_side_by_side_from_where_they_part_with_calls_and_images(
    page: Page,
) -> None:
    await page.open("#/compare/recorded-0/recorded-1", "They share 1 nodes")
    columns = "[...document.querySelectorAll('.pair > div')].map(one => one.textContent)"
    left, right = await page.run(columns)
    assert ("answer 0" in left, "answer 1" in right) == (True, True)
    assert await page.run("document.querySelectorAll('.pair .call').length") == 2
    assert await page.run("document.querySelectorAll('details img').length") == 1
    await a_page_keeps_its_width_and_runs_nothing(page)
    await page.open("#/sessions", "3 found")


async def test_a_transcript_shows_hostile_text_of_any_length_as_text(page: Page) -> None:
    await page.open("#/session/recorded-1", "answer 1")
    assert await page.run("document.querySelector('.call strong').textContent.length") == len(LONG)
    assert await page.run("document.querySelectorAll('main img').length") == 1
    folded = (
        "[...document.querySelectorAll('summary')].some(one => one.textContent === 'Reasoning')"
    )
    assert await page.run(folded)
    await a_page_keeps_its_width_and_runs_nothing(page)
    # A name that reverses the text leaves what comes after it as it is.
    isolated = "getComputedStyle(document.querySelector('.call strong')).unicodeBidi"
    assert await page.run(isolated) == "isolate"
    await page.open("#/sessions", "3 found")


async def test_results_of_tool_calls_stand_next_to_them(page: Page) -> None:
    await page.open("#/session/called", "next to their calls")
    calls = "[...document.querySelectorAll('.call')].map(one => one.textContent)"
    assert await page.run(calls) == [
        "first first{}resultof first",
        "second second{}resultof second",
    ]
    sides = "[...document.querySelector('.call').children].map(one => one.offsetTop)"
    left, right = await page.run(sides)
    assert left == right
    assert (await page.run("document.querySelector('main').textContent")).count("of first") == 1
    await page.open("#/sessions", "3 found")


async def a_page_keeps_its_width_and_runs_nothing(page: Page) -> None:
    assert await page.run("document.querySelectorAll('main script').length") == 0
    assert await page.run("document.documentElement.scrollWidth <= innerWidth")
    assert page.events == []


async def test_two_thousand_branches_are_drawn_and_walked(page: Page) -> None:
    nodes = [node(1, None), *(node(at, 1) for at in range(2, 2002))]
    await drawn(page, nodes, *(("SIBLING", [1, at]) for at in range(2, 2002)))
    await page.run("refocus(2)")
    await page.press("ArrowUp")
    await page.press("ArrowDown")
    assert len(await rows(page)) == 2001
    assert await page.run("document.activeElement.getAttribute('role')") == "treeitem"


async def test_a_killed_viewer_leaves_no_file(tmp_path: Path, monkeypatch: Any) -> None:
    write(tmp_path)
    place = tmp_path / "tmp"
    place.mkdir()
    monkeypatch.setenv("SQLITE_TMPDIR", str(place))
    monkeypatch.setenv("TMPDIR", str(place))
    async with running("view", tmp_path, record=tmp_path / "record") as process:
        os.kill(process.pid, signal.SIGKILL)
        await process.exit_code()
    assert list(place.iterdir()) == []
