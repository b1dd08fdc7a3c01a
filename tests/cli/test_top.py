"""`rollmesh top`: its screen as lines, and the command itself in a terminal."""

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import metadata
from typing import Any

import pytest
from rich.cells import cell_len

from rollmesh.cli import Screen, Seen, keys_of, lines, main, pressed, sessions_of, transcript_of
from rollmesh.runtime import (
    ALARM_RULES,
    REASONS,
    Alarm,
    Labels,
    Observation,
    Rule,
    Server,
    label_words,
)
from rollmesh.v1 import collector_pb2, gateway_pb2, router_pb2, trajectory_pb2
from tests.meshes import Mesh
from tests.waiting import until

HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b31m\rwide 漢字\u202e"


def observation(at_ms: int = 0, engines: int = 2, **counts: float) -> Observation:
    replicas = []
    for at in range(engines):
        hello = router_pb2.ReplicaHello(
            replica_id=f"engine-{at}", kind=router_pb2.REPLICA_KIND_ENGINE, lease_capacity=8
        )
        hello.load.running = at
        replicas.append(router_pb2.Replica(hello=hello, leases=at, fenced=at == 1))
    gateway = router_pb2.ReplicaHello(replica_id="g", kind=router_pb2.REPLICA_KIND_GATEWAY)
    consumer = collector_pb2.ConsumerStats(name="trainer", ready=3, step=7)
    sessions = [
        gateway_pb2.OpenSession(session_id="busy", in_flight=1, turns=9, group_id="g"),
        gateway_pb2.OpenSession(session_id="calm", idle_ms=65_000, run_id=HOSTILE),
    ]
    tokens: dict[Labels, float] = {(("kind", "sampled"),): counts.get("sampled", 0.0)}
    return Observation(
        at_ms=at_ms,
        servers=[Server(kind="engine", name="e", samples={"rollmesh_engine_tokens_total": tokens})],
        members=router_pb2.ListReplicasResponse(
            replicas=[*replicas, router_pb2.Replica(hello=gateway)],
            models=[router_pb2.ModelWeights(model="policy", target_policy_version=5)],
        ),
        stores=[collector_pb2.GetStatsResponse(sessions=1234, consumers=[consumer])],
        sessions=sessions,
    )


def seen(**given: Any) -> Seen:
    return Seen(
        **{
            "router": "host:7100",
            "history": [observation(), observation(10_000, sampled=500.0)],
            "alarms": [Alarm("queue_grows", "host:7100", HOSTILE)],
            "reports": {"trainer": {"lag_mean": 0.5, "reward_mean": 0.25}},
        }
        | given
    )


def shown(screen: Screen, **given: Any) -> list[str]:
    found = lines(seen(**given), screen)
    assert len(found) == screen.height
    for one in found:
        assert cell_len(one.text) <= screen.width
        assert one.text.isprintable()
    return [one.text for one in found]


@pytest.mark.parametrize(("width", "height"), [(80, 24), (200, 60)])
def test_a_screen_has_everything(width: int, height: int) -> None:
    text = "\n".join(shown(Screen(width=width, height=height)))
    for part in (
        "rollmesh top  host:7100", "1 alarms  policy: version 5", "queue_grows", "50 tokens/s",
        "1 sampling, 1 idle", "leases 1 of 16", "1,234 sessions", "engine-1", "fenced", "gateway",
        "trainer", "0.25", "busy", "65 s", "q quit",
    ):  # fmt: skip
        assert part in text, part


@pytest.mark.parametrize(("width", "height"), [(20, 5), (1, 1), (0, 0), (80, 2), (500, 200)])
@pytest.mark.parametrize("opened", ["", "alarms", "busy"])
def test_any_size_is_filled_and_never_exceeded(width: int, height: int, opened: str) -> None:
    screen = Screen(width=width, height=height, opened=opened, offset=3)
    shown(screen, transcript=[HOSTILE * 50])
    shown(screen, history=[Observation(at_ms=0)])
    shown(screen, history=[])


def test_many_engines_leave_room_for_the_sessions() -> None:
    text = "\n".join(shown(Screen(), history=[observation(engines=100)]))
    assert "more" in text
    assert "calm" in text


def test_unknown_numbers_are_told() -> None:
    text = "\n".join(shown(Screen(), history=[Observation(at_ms=0)], alarms=[]))
    for part in ("no router answers", "no collector answers", "is no operator's", "no alarms"):
        assert part in text


def test_keys_sort_filter_and_open() -> None:
    screen: Screen | None = Screen(height=60)

    def press(*keys: str) -> list[str]:
        nonlocal screen
        for key in keys:
            assert screen is not None
            screen = pressed(screen, key, [one.session_id for one in sessions_of(seen(), screen)])
        return [] if screen is None else [one.session_id for one in sessions_of(seen(), screen)]

    assert press() == ["calm", "busy"]
    assert press("s") == ["busy", "calm"]
    assert press("s", "s", "s") == ["calm", "busy"]
    assert press("/", "i", "d", "x", "backspace", "l") == ["calm"]
    assert press("q", "escape") == ["calm", "busy"]  # q was a letter, and the filter is dropped
    press("j", "j", "j", "enter")
    assert screen is not None
    assert screen.opened == "busy"
    press("escape", "up", "enter")
    assert screen.opened == "calm"
    press("j", "j", "k")
    assert screen.offset == 1
    press("escape", "a")
    assert screen.opened == "alarms"
    press("q")
    assert screen is None


@pytest.mark.parametrize("rule", ALARM_RULES, ids=lambda rule: rule.name)
def test_every_alarm_is_told_whole_with_its_remedy(rule: Rule) -> None:
    screen = Screen(opened="alarms", height=60)
    text = "".join(shown(screen, alarms=[Alarm(rule.name, "here", f"It is so. {rule.remedy}")]))
    assert f"{rule.name} here: It is so. {rule.remedy}." in " ".join(text.split())


def test_a_transcript_tells_the_reasons_of_its_turns() -> None:
    found = gateway_pb2.GetSessionResponse()
    found.nodes.add(node_id=4, reasons=[trajectory_pb2.FIDELITY_REASON_ORPHANED])
    assert f"node 4: ORPHANED. {REASONS['ORPHANED']}" in transcript_of(found)


def test_engines_are_sorted() -> None:
    rows = shown(Screen(engine_order=1))
    assert [row[:8] for row in rows if row.startswith("engine-")] == ["engine-1", "engine-0"]


def test_a_transcript_tells_the_rule_of_each_branch_where_it_begins() -> None:
    found = gateway_pb2.GetSessionResponse()
    rule = {"lineage_source": trajectory_pb2.LINEAGE_SOURCE_RULE}
    main, own = trajectory_pb2.LINEAGE_RULE_MAIN_PATH, trajectory_pb2.LINEAGE_RULE_OWN_ROOT
    for node_id, parent_id, one in ((1, 0, main), (2, 1, main), (3, 0, own), (4, 3, own)):
        found.nodes.add(node_id=node_id, parent_node_id=parent_id, lineage_rule=one, **rule)
    assert [one for one in transcript_of(found) if one.startswith("node ")] == [
        f"node {node_id}: UNSPECIFIED. {label_words('', 'RULE', name)}"
        for node_id, name in ((1, "MAIN_PATH"), (3, "OWN_ROOT"))
    ]


@pytest.mark.parametrize(
    "text",
    ["a" * 20_000, "漢" * 20_000, "a漢" * 10_000, "\t" * 20_000],
    ids=["letters", "wide", "mixed", "blank"],
)
def test_a_transcript_of_long_lines_is_wrapped_without_a_loss(text: str) -> None:
    screen = Screen(opened="a", height=600)
    rows = [one.rstrip() for one in shown(screen, transcript=[text, "The end."])[1:-1]]
    end = rows.index("The end.")
    assert "".join(rows[:end]) == text.strip()
    assert end <= 2 + cell_len(text.replace("\t", " ")) // 79  # a wide character may not fit
    beyond = shown(Screen(opened="a", offset=10**6), transcript=[text, "The end."])
    assert beyond[1].rstrip() == "The end."


def test_keys_are_read_as_terminals_send_them() -> None:
    assert keys_of(b"j\x1b[A\x1bOB\r\x7f") == ["j", "up", "down", "enter", "backspace"]
    assert keys_of(b"\x1b") == ["escape"]
    assert keys_of(b"\x1b[5~") == []
    assert keys_of(b"\xff") == []


# The command.


class Terminal:
    """A program in a terminal."""

    def __init__(
        self, *command: str, width: int = 80, height: int = 24, term: str = "xterm-256color"
    ) -> None:
        self.primary, secondary = pty.openpty()
        self.resize(width, height)
        os.set_blocking(self.primary, False)
        self.before = termios.tcgetattr(secondary)
        self.process = subprocess.Popen(
            [sys.executable, *command], stdin=secondary, stdout=secondary, stderr=secondary,
            env={**os.environ, "TERM": term}, start_new_session=True,
        )  # fmt: skip
        self._secondary = secondary
        self.written = b""

    def resize(self, width: int, height: int) -> None:
        size = struct.pack("HHHH", height, width, 0, 0)
        fcntl.ioctl(self.primary, termios.TIOCSWINSZ, size)

    def press(self, keys: str) -> None:
        os.write(self.primary, keys.encode())

    def read(self) -> str:
        """Its output since the start, without its own control sequences."""
        try:
            while part := os.read(self.primary, 1 << 16):
                self.written += part
        except (BlockingIOError, OSError):
            pass
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.written.decode(errors="replace"))

    async def shows(self, *texts: str, after: int = 0) -> int:
        """Waits for texts after a mark. Returns the next mark."""
        await until(lambda: all(text in self.read()[after:] for text in texts), 60)
        return len(self.read())

    async def ended(self) -> int:
        await until(lambda: (self.read(), self.process.poll() is not None)[1], 60)
        assert termios.tcgetattr(self._secondary) == self.before  # as it was
        return self.process.returncode

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.primary)
        os.close(self._secondary)


@asynccontextmanager
async def top(*flags: str, **given: Any) -> AsyncIterator[Terminal]:
    terminal = Terminal("-m", "rollmesh.cli.top", "--every=0.2", *flags, **given)
    try:
        yield terminal
    finally:
        terminal.close()


async def test_it_sorts_and_opens_a_session_whose_agent_is_hostile(mesh: Mesh) -> None:
    async with mesh.client() as client, client.session(metadata={"m": HOSTILE}) as session:
        messages: list[Any] = [{"role": "user", "content": f"{HOSTILE} Say hello."}]
        create = mesh.openai(session).chat.completions.create
        await create(model="policy", messages=messages)
        flags = ("--router", mesh.address("router"), "--collector", mesh.address("collector"))
        async with top(*flags) as terminal:
            mark = await terminal.shows("no alarms", "engine", session.session_id, "by idle")
            terminal.press("s")
            mark = await terminal.shows("by turns", after=mark)
            terminal.press("j\r")
            mark = await terminal.shows("[user]", "Say hello.", "[assistant]", "m: ", after=mark)
            terminal.press("\x1b")
            mark = await terminal.shows("by turns", after=mark)
            terminal.resize(120, 40)
            terminal.process.send_signal(signal.SIGWINCH)
            mark = await terminal.shows("MEMBER by id" + " " * 20, after=mark)
            await mesh.processes["collector"].kill()
            await mesh.processes["router"].kill()
            mark = await terminal.shows("no router answers", "server_silent", after=mark)
            await mesh.start("router")
            await mesh.start("collector")
            await terminal.shows("no alarms", session.session_id, after=mark)
            terminal.press("q")
            assert await terminal.ended() == 0
    for sequence in (b"\x1b]0;", b"\x07", b"\x1b[2J\x9b", "\x9b".encode(), "\u202e".encode()):
        assert sequence not in terminal.written


@pytest.mark.parametrize(
    "term",
    ["xterm", *(pytest.param(one, marks=pytest.mark.long) for one in ("vt100", "screen", "linux"))],
)
async def test_terminals_of_any_kind_show_the_mesh_at_80_columns(mesh: Mesh, term: str) -> None:
    async with top("--router", mesh.address("router"), term=term) as terminal:
        await terminal.shows("no alarms", "MEMBER by id", "SESSION by idle", "q quit")
        terminal.press("q")
        assert await terminal.ended() == 0


async def test_a_terminal_whose_cursor_does_not_move_is_told_of_another_command() -> None:
    async with top(term="dumb") as terminal:
        assert await terminal.ended() == 2
        assert "`rollmesh status` prints the mesh once" in terminal.read()


@pytest.mark.long
async def test_a_frozen_gateway_delays_no_key(mesh: Mesh) -> None:
    async with top("--router", mesh.address("router")) as terminal:
        await terminal.shows("MEMBER")
        mesh.processes["gateway"].freeze()
        try:
            mark = await terminal.shows("")
            terminal.press("/x")
            await terminal.shows("filter: x_", after=mark)
            terminal.process.send_signal(signal.SIGTERM)
            assert await terminal.ended() == 0
        finally:
            mesh.processes["gateway"].thaw()


@pytest.mark.parametrize(
    ("flags", "problem"), [((), "needs a terminal"), (("--every=nan",), "invalid seconds value")]
)
def test_wrong_flags_are_refused(flags: tuple[str, ...], problem: str) -> None:
    command = (sys.executable, "-m", "rollmesh.cli.top", *flags)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, problem in done.stderr) == (2, True)


def test_a_missing_package_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", lambda _: ['rich>=13; extra == "top"'])
    monkeypatch.setattr(metadata, "distribution", missing)
    monkeypatch.setattr(sys, "argv", ["rollmesh", "top"])
    assert main() == 2
    assert "rich not installed; run: pip install 'rollmesh[top]'" in capsys.readouterr().err
