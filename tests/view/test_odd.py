"""Pages of runs and sessions that are seldom so, in a real browser."""

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any
from urllib.parse import quote, unquote

import numpy as np
import pytest
import pytest_asyncio

from rollmesh.v1 import session_pb2, trajectory_pb2
from tests.processes import running
from tests.token_arrays import pack_tokens
from tests.view.browser import CHROMIUM, Page, browser
from tests.waiting import until

pytest.importorskip("pyarrow")
from rollmesh.record import Writer
from tests.collector.records import record, trajectory, with_messages

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.skipif(not CHROMIUM, reason="chromium is not installed: apt-get install chromium"),
]
IDS = (
    "a#b?c=%2F&d", "slash/ed/id", "🎉 אבג \u202e<b>", "a%zz", ".", "..", "a/images/b", "../..",
    "constructor", "__proto__",
)  # fmt: skip
SIBLINGS = 150
NONE = "\u2013"
TEXT = "document.querySelector('main').textContent"


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def page(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Page]:
    folder = tmp_path_factory.mktemp("odd")
    with Writer(folder / "record") as writer:
        for session in sessions():
            writer.add(session)
        writer.commit()
    async with (
        running("view", folder, record=folder / "record") as process,
        browser(f"http://127.0.0.1:{process.port}") as found,
    ):
        total = len(list(sessions()))
        await found.open("#/groups", "found")  # this page follows the record
        await found.until(
            f"fetch('/api/sessions').then(a => a.json()).then(a => a.total == {total})"
        )
        await found.until("fetch('/api/choices').then(a => a.json()).then(a => a.run_id.length)")
        yield found


def sessions() -> Iterator[session_pb2.SessionRecord]:
    yield from map(record, IDS)
    for at in range(SIBLINGS):
        yield record(f"sibling-{at}", "many", at, SIBLINGS)
    for at, reward in enumerate((float("inf"), float("nan"), -1e300, 1e300)):
        session = record(f"reward-{at}", "odd", at, 4)
        session.run_id, session.reward, session.trajectories[0].reward = "odd", reward, reward
        yield session
    for at in range(3):
        equal = record(f"equal-{at}", "equal", at, 3)
        equal.reward, equal.run_id, equal.closed_unix_ms = 0.1, "equal", 2**60
        yield equal
    superseded = record("superseded", "many", 0, SIBLINGS)
    superseded.superseded, superseded.reward = True, 1000.0
    yield superseded
    for at, version in enumerate((5, 5, 5, 5, 6)):  # the last version has just begun
        late = record(f"late-{at}")
        late.run_id, late.closed_unix_ms = "late", 1_700_000_000_000 + at * 60_000
        late.trajectories[0].version_spans[0].policy_version = version
        yield late
    infinite = record("infinite")
    infinite.trajectories[0].CopyFrom(trajectory("infinite", 9))
    logprobs = np.array([0, 0, np.nan, -np.inf, -0.05, -0.5, -1, -3, -5], "<f4")
    infinite.trajectories[0].tokens.logprobs_f32le = logprobs.tobytes()
    yield infinite
    turned = record("turned")
    turned.trajectories[0].lineage = trajectory_pb2.LINEAGE_SIBLING
    turned.trajectories[0].leaf_node_id = 2
    main = turned.trajectories.add()
    main.CopyFrom(trajectory("turned"))
    main.trajectory_id, main.leaf_node_id, main.segments[1].node_id = "turned-3", 3, 3
    yield turned
    yield said("shapes", *SHAPES)
    yield said("long", [{"role": "user", "content": "x"}], [{"role": "assistant", "content": LONG}])
    yield reasoned()
    for at in range(2):
        yield text_only(at)
    unsaid = text_only(2)
    unsaid.session_id = "unsaid"
    unsaid.messages[0].data, unsaid.messages[0].data_bytes = b"", 0
    unsaid.messages[1].data = b'[{"role": "assistant", "content": "an answer"}]'
    yield unsaid
    yield branches()
    yield said("huge", [{"role": "user", "content": "q"}], [{"role": "assistant", **HUGE}])
    named = record("named")
    named.run_id = named.metadata["task"] = NAME
    yield named


LONG = "🎉" * 300_000 + "end"
CALLS: list[Any] = [{"id": 1}, {"function": {"name": None, "arguments": {"x": 1}}}, None]
SHAPES: tuple[list[Any], list[Any]] = (
    [{"role": "user", "content": [None, "text", 5, {"type": "image_url"}]}],
    [{"role": "assistant", "content": {"a": 1}, "tool_calls": CALLS, "reasoning_content": ["r"]}],
)


BRANCHES = 300
NAME = ("🎉🧑\u200d🚀שלום\u202eعربي" * 40)[:500]
ARGUMENTS = json.dumps([{"key": at, "value": "x" * 60} for at in range(25_000)])
CALL = {"id": "call-1", "type": "function", "function": {"name": "f", "arguments": ARGUMENTS}}
HUGE: dict[str, Any] = {"content": None, "tool_calls": [CALL]}


def branches() -> session_pb2.SessionRecord:
    """A question with an answer in each of its paths. The last is the main one."""
    session = record("branches")
    del session.trajectories[:]
    for node_id in range(2, BRANCHES + 2):
        row = session.trajectories.add()
        row.CopyFrom(trajectory("branches"))
        row.trajectory_id, row.leaf_node_id = f"branches-{node_id}", node_id
        row.segments[1].node_id = node_id
        row.lineage = trajectory_pb2.LINEAGE_SIBLING
    session.trajectories[-1].lineage = trajectory_pb2.LINEAGE_MAIN
    return session


def said(name: str, *messages: list[Any]) -> session_pb2.SessionRecord:
    session = with_messages(record(name))
    for node, one in zip(session.messages, messages, strict=True):
        node.data = json.dumps(one).encode()
        node.data_bytes = len(node.data)
    return session


def reasoned() -> session_pb2.SessionRecord:
    """Four nodes of 2 tokens. The last two have reasons. The last begins with the template."""
    session, node = record("reasoned"), trajectory_pb2.TrajectorySegment
    session.metadata["where it ran"] = 'a "quoted" \\ place'
    exact, special = (
        trajectory_pb2.FIDELITY_REASON_EXACT,
        trajectory_pb2.FIDELITY_REASON_SPECIAL_TEXT,
    )
    two = (
        trajectory_pb2.FIDELITY_REASON_ORPHANED,
        trajectory_pb2.FIDELITY_REASON_RESTARTED,
    )
    row = session.trajectories[0]
    del row.segments[:], row.version_spans[:]
    row.tokens.CopyFrom(
        pack_tokens(np.arange(8, dtype=np.uint32), np.zeros(8, np.float32), np.arange(8) // 2 == 1)
    )
    row.segments.extend(
        [
            node(start=0, end=2, node_id=1),
            node(start=2, end=4, node_id=2, sampled=True, trained=True, reasons=[exact]),
            node(start=4, end=6, node_id=3, reasons=[special]),
            node(start=6, end=7, node_id=4, reasons=two),
            node(start=7, end=8, node_id=4, sampled=True, reasons=two),
        ]
    )
    for start, end, version in ((2, 4, 2), (7, 8, 6)):
        row.version_spans.add(start=start, end=end, policy_version=version)
    row.leaf_node_id = 4
    return session


def text_only(at: int) -> session_pb2.SessionRecord:
    """A session without token ids. Two of them part after the question."""
    session = record(f"text-{at}")
    del session.trajectories[:]
    session.capture = session_pb2.CAPTURE_TEXT
    for node, (role, content) in enumerate((("user", "same"), ("assistant", f"other {at}")), 1):
        data = json.dumps([{"role": role, "content": content}]).encode()
        session.messages.add(node_id=node, parent_node_id=node - 1, data=data, data_bytes=len(data))
    return session


async def test_ids_of_any_signs_are_opened_from_the_list(page: Page) -> None:
    for name in IDS:
        await page.open("#/sessions?order=oldest", "found")
        same = f"one => one.textContent === {json.dumps(name)}"
        link = f"[...document.querySelectorAll('td.id a')].find({same})"
        await page.until(f"Boolean({link})")
        await page.run(f"{link}.click()")
        await page.open(await page.run("location.hash"), f"Session {name}")
        assert page.events == []
    assert page.events == []


async def test_an_address_of_no_page_says_so_and_links_home(page: Page) -> None:
    home = "document.querySelector('main a').getAttribute('href')"
    names = ("constructor", "__proto__", "toString?words=x", "runs", "%", "session/", "compare/one")
    for name in names:
        await page.open(f"#/{name}", "There is no such page")
        assert await page.run(home) == "#/run"
        assert await page.run("document.title") == "There is no such page - rollmesh"
    await page.click("Go to the run")
    await page.until(f"{TEXT}.includes('Reward')")
    assert page.events == []


async def test_nodes_whose_messages_are_empty_are_shown_and_said_to_lack_them(page: Page) -> None:
    await page.open("#/session/unsaid", "No messages and no tokens of this node are recorded")
    drawn = "document.querySelectorAll('section.node').length"
    assert (await page.run(drawn), "answer" in await page.run(TEXT)) == (2, True)
    assert page.events == []


@pytest.mark.parametrize("theme", ["light", "dark"])
async def test_no_page_is_wider_than_a_narrow_screen(page: Page, theme: str) -> None:
    assert len(ARGUMENTS) > 2_000_000
    size = {"width": 360, "height": 740, "deviceScaleFactor": 1, "mobile": False}
    await page.call("Emulation.setDeviceMetricsOverride", **size)
    at = "document.querySelector('main').dataset.at === location.hash"
    try:
        await page.run(f"document.documentElement.dataset.theme = {json.dumps(theme)}")
        for address in (
            *("#/run", f"#/run?run_id={quote(NAME)}", "#/groups", "#/sessions", "#/evaluations"),
            *("#/session/branches", "#/session/huge", "#/session/named", "#/compare/named/huge"),
            "#/nothing",
        ):
            await page.run(f"location.hash = {json.dumps(address)}")
            await page.until(at)
            widths = "[document.scrollingElement.scrollWidth, innerWidth]"
            wide, screen = await page.run(widths)
            assert wide <= screen, address
        assert page.events == []
    finally:
        await page.call("Emulation.clearDeviceMetricsOverride")
        await page.run("document.documentElement.dataset.theme = 'light'")


async def test_three_hundred_branches_are_walked_by_keyboard(page: Page) -> None:
    await page.open("#/session/branches", "Session branches")
    await page.tab_to(f"{BRANCHES + 1} assistant, sampled, 4 tokens, main")
    for _ in range(2):
        await page.press("ArrowLeft")
    await page.press("Enter")
    node = "document.querySelector('section.node:last-child').getAttribute('aria-label')"
    await page.until(f"{node} === 'Node {BRANCHES - 1}'")
    focused = "document.activeElement.dataset.nodes"
    assert await page.run(focused) == str(BRANCHES - 1)
    assert page.events == []


async def test_advantages_are_of_the_whole_group_and_not_of_the_page(page: Page) -> None:
    expected = (0 - np.arange(SIBLINGS).mean()) / np.arange(SIBLINGS).std()
    await page.open(
        "#/sessions?group_id=many&order=highest+reward&offset=100", "standard deviation"
    )
    last = "[...document.querySelectorAll('tbody tr')].at(-1).textContent"
    assert f"{expected:.3f}" in await page.run(last)
    await page.open("#/sessions?group_id=many&order=highest+reward", "superseded")
    first = "document.querySelector('tbody tr').cells[5].textContent"
    assert await page.run(first) == NONE
    await page.open("#/compare/sibling-0/sibling-1", "They share")
    assert f"advantage {expected:.3f}" in await page.run(TEXT)
    await page.open("#/sessions?group_id=equal&run_id=equal", "standard deviation")
    cells = "[...document.querySelectorAll('tbody tr')].map(one => one.cells[5].textContent)"
    assert await page.run(cells) == [NONE] * 3  # their mean differs from 0.1 by rounding
    assert page.events == []


async def test_rewards_and_log_probabilities_that_are_no_numbers_leave_the_pages(
    page: Page,
) -> None:
    for address, shown in (
        ("#/run?run_id=odd", "Reward"),
        ("#/run?by=time", "Sampled tokens per second"),
        ("#/groups?order=largest+spread", "1.00e+300"),
        ("#/session/reward-0", f"Session reward-0COMPLETED reward {NONE}"),
        ("#/session/reward-3", "reward 1.00e+300"),
        ("#/session/infinite", "Session infinite"),
    ):
        await page.open(address, shown)
        drawn = await page.run("document.querySelector('main').innerHTML")
        assert "NaN" not in drawn
        assert "Infinity" not in drawn
    await page.click("Tokens")
    await page.click("log-probability")
    tokens = "[...document.querySelectorAll('.tokens.logprob b')]"
    await page.until(f"{tokens}.length === 9")
    titles = await page.run(f"{tokens}.map(one => one.title)")
    assert ["log-prob" in one for one in titles] == [False] * 4 + [True] * 5
    shades = await page.run(f"{tokens}.map(one => /l\\d/.exec(one.className)?.[0] ?? '')")
    assert shades == [""] * 5 + ["l1", "l2", "l3", "l4"]
    await page.click("trained")
    await page.click("Tokens")
    assert page.events == []


async def test_a_run_of_one_version_and_numbers_of_any_size_are_told_as_they_are(
    page: Page,
) -> None:
    await page.open("#/run?run_id=equal", "Reward")
    texts = "[...document.querySelectorAll('figure text')].map(one => one.textContent)"
    assert "v0" in await page.run(texts)
    assert "v-0.5" not in await page.run(texts)
    values = [0, 1e-6, -0.0004, 0.5, 1234567, 1e300, 2**60]
    numbers = (
        f"import('/dom.js').then(({{ number }}) => {json.dumps(values)}.map(one => number(one)))"
    )
    told = ["0", "1.00e-6", "-4.00e-4", "0.500", "1,234,567", "1.00e+300", "1.15e+18"]
    assert await page.run(numbers) == told


async def test_a_version_that_has_just_begun_is_a_mark_and_no_point_of_a_curve(
    page: Page,
) -> None:
    await page.open("#/run?run_id=late", "Reward")
    figure = "document.querySelector('figure svg').getAttribute('aria-label')"
    await page.until(f"{figure}.includes('from v5 to v5')")
    await page.open("#/run?run_id=late&by=time", "Sampled tokens per second")
    marks = "[...document.querySelectorAll('.event title')].map(one => one.textContent)"
    assert set(await page.until(marks)) == {"first tokens of version 6"}
    assert page.events == []


async def test_a_filter_leaves_the_comparison_and_a_page_waits_for_a_typing_reader(
    page: Page,
) -> None:
    await page.open("#/run?compare=run_id:odd,run_id:equal", "one curve only")
    await page.run(
        "(one => { one.value = 'TRAIN'; one.dispatchEvent(new Event('change', {bubbles: true})); })"
        "(document.querySelector('[name=purpose]'))"
    )
    await page.until("location.hash.includes('purpose=TRAIN')")
    assert "run_id:odd,run_id:equal" in unquote(await page.run("location.hash"))
    await page.open("#/groups", "mean reward")
    await page.tab_to("where")
    await page.call("Input.insertText", text="rew")
    read = "performance.getEntriesByType('resource').filter(o => o.name.includes('groups')).length"
    frames = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
    mark = (
        "document.activeElement.value = ''; document.activeElement.blur();"
        "getSelection().selectAllChildren(document.querySelector('h1'))"
    )
    for using, kept, text in (
        ("", "document.activeElement.value", "rew"),
        (mark, "getSelection().toString()", "Groups"),
    ):
        before = await page.run(using + f"; {read}")
        await page.run("dispatchEvent(new Event('hashchange'))")
        await page.until(f"{read} > {before}")
        await page.run(frames)
        assert await page.run(kept) == text
    await page.run("getSelection().empty()")
    assert page.events == []


async def test_sessions_without_a_run_are_chosen_and_compared(page: Page) -> None:
    choose = """(name => {
      const select = document.querySelector("[name=run_id]");
      select.selectedIndex = [...select.options].findIndex(one => one.textContent === name);
      select.dispatchEvent(new Event("change", {bubbles: true}));
    })"""
    chosen = "document.querySelector('[name=run_id]').selectedOptions[0].textContent"
    runs = [one.run_id for one in sessions()]
    await page.open("#/sessions", "Compare two")
    await page.until("document.querySelector('main').dataset.at === '#/sessions'")
    for name, count in (("(none)", runs.count("")), ("odd", runs.count("odd")), ("any", len(runs))):
        await page.run(f"{choose}({json.dumps(name)})")
        await page.until(f"{TEXT}.includes('{count} found')")
        await page.until(f"{chosen} === {json.dumps(name)}")
    await page.run("location.hash = '#/sessions?run_id=other'")
    await page.until(f"{chosen} === 'other'")
    await page.open("#/run?compare=run_id:odd,run_id:", "one curve only")
    await page.until("document.querySelector('.charts').textContent.includes('(none)')")
    assert page.events == []


async def test_a_session_is_opened_at_its_main_path(page: Page) -> None:
    await page.open("#/session/turned", "Session turned")
    assert await page.run("document.querySelector('.session > div .badge').textContent") == "MAIN"
    assert page.events == []


async def test_tokens_are_coloured_by_reason_and_by_the_versions_of_the_session(
    page: Page,
) -> None:
    await page.open("#/session/reasoned", "Session reasoned")
    await page.click("Tokens")
    await page.click("reason")
    key = "[...document.querySelectorAll('.key b')].map(one => [one.className, one.textContent])"
    assert await page.until(key) == [["r0", "SPECIAL_TEXT"], ["r1", "ORPHANED + RESTARTED"]]
    tokens = "[...document.querySelectorAll('.tokens.reason b')]"
    await page.until(f"{tokens}.length === 8")
    shades = "one => /r\\d/.exec(one.className.replace('train', ''))?.[0] ?? ''"
    found = await page.run(f"{tokens}.map({shades})")
    assert found == [""] * 4 + ["r0"] * 2 + ["", "r1"]
    titles = await page.run(f"{tokens}.map(one => one.title)")
    assert ["ORPHANED + RESTARTED" in one for one in titles] == [False] * 7 + [True]
    painted = f"new Set({tokens}.map(one => getComputedStyle(one).backgroundColor)).size"
    assert await page.run(painted) == 3
    await page.click("version")
    assert await page.until(key) == [["v0", "v2"], ["v1", "v6"]]
    await page.click("Tokens")
    assert page.events == []


async def test_ids_of_a_node_are_copied_by_keyboard(page: Page) -> None:
    permissions = ["clipboardReadWrite", "clipboardSanitizedWrite"]
    await page.call("Browser.grantPermissions", permissions=permissions)
    await page.call("Emulation.setFocusEmulationEnabled", enabled=True)
    await page.open("#/session/reasoned", "Session reasoned")
    await page.click("Tokens")
    await page.tab_to("Copy ids")
    await page.press("Enter")
    assert await page.run("navigator.clipboard.readText()") == "0 1"
    assert await page.run("document.activeElement.innerText") == "Copy ids"
    await page.click("Tokens")
    assert page.events == []


async def test_sessions_are_found_by_a_pair_and_a_bound_by_link_and_by_keyboard(
    page: Page,
) -> None:
    await page.open("#/session/reasoned", "Session reasoned")
    await page.run("document.querySelector('summary').click()")
    await page.click('a "quoted" \\ place')
    await page.until(f"{TEXT}.includes('1 found')")
    await page.open("#/groups", "mean reward")
    await page.tab_to("where")
    await page.call("Input.insertText", text="reward>148 trained>=4")
    await page.press("Enter")
    await page.until(f"{TEXT}.includes('2 found')")  # and the group of a huge reward
    assert await page.run("location.hash.includes('where=reward%3E148+trained')")
    assert page.events == []
    await page.run("location.hash = '#/sessions?where=turns'")
    await page.until(f"{TEXT}.includes('none of NAME=VALUE')")
    assert await page.run("document.querySelector('[name=where]').value") == "turns"
    page.events.clear()  # the refusal


async def test_sessions_without_tokens_part_where_their_messages_do(page: Page) -> None:
    await page.open("#/compare/text-0/text-1", "They share 1 nodes")
    columns = "[...document.querySelectorAll('.pair > div')].map(one => one.textContent)"
    left, right = await page.run(columns)
    assert ("other 0" in left, "other 1" in right) == (True, True)
    assert page.events == []


async def test_messages_of_any_shape_and_length_are_shown(page: Page) -> None:
    await page.open("#/session/shapes", "Session shapes")
    shown = await page.run(TEXT)
    for text in ("null", "text", "5", '{"type":"image_url"}', '{"a":1}', '{"x":1}', '["r"]'):
        assert text in shown
    await page.open("#/session/long", "more characters")
    pieces = "[...document.querySelectorAll('.node:last-child pre')].map(one => one.textContent)"
    assert await page.run(f"{pieces}.slice(-2).join('')") == LONG
    assert page.events == []


async def test_a_page_that_is_drawn_many_times_leaves_nothing_behind(page: Page) -> None:
    await page.open("#/session/reasoned", "Session reasoned")
    await page.click("Tokens")
    again = """(async () => {
      for (let at = 0; at < COUNT; at += 1) {
        const old = document.querySelector("main h1");
        dispatchEvent(new Event("hashchange"));
        while (document.contains(old)) await new Promise(requestAnimationFrame);
      }
    })()"""

    async def left() -> dict[str, int]:
        await page.call("HeapProfiler.collectGarbage")
        counted: dict[str, int] = await page.call("Memory.getDOMCounters")
        return counted

    async def is_as_before() -> bool:
        last = await left()  # a task of the browser may hold the last page for a while
        return all(last[of] < 1.5 * first[of] for of in ("nodes", "jsEventListeners"))

    await page.run(again.replace("COUNT", "5"))
    first = await left()
    await page.run(again.replace("COUNT", "40"))
    await until(is_as_before, 30)
    await page.click("Tokens")
    assert page.events == []
