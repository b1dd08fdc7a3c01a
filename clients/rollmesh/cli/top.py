"""`rollmesh top`: a mesh on a terminal, as it is now. Keys sort, filter, and open a session."""

import argparse
import asyncio
import logging
import os
import signal
import sys
import termios
import tty
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from itertools import islice
from typing import NamedTuple

from rich.cells import cell_len, get_character_cell_size, set_cell_size
from rich.console import ConsoleDimensions
from rich.live import Live
from rich.text import Text

from rollmesh.cli.doctor import seconds
from rollmesh.client import Client, MeshAddresses, Observer, message_of, states_of
from rollmesh.runtime import (
    Alarm,
    Observation,
    label_of,
    line_of,
    printable,
    told,
    told_reasons,
    why,
    words_of,
)
from rollmesh.runtime.access import identity
from rollmesh.runtime.codec import name_of
from rollmesh.runtime.config import ConfigError
from rollmesh.runtime.errors import RollmeshError, SessionUnknownError
from rollmesh.v1 import gateway_pb2, router_pb2, trajectory_pb2

_CALL_S, _LEAST_S = 5.0, 0.1
_LOOKS = 60
_MOST_TEXT = 20_000
_MOST_ALARMS = 3
_KEYS = "q quit  j k move  enter open  s sort  e engines  / filter  a alarms"
_KEYS_OPEN = "q quit  j k scroll  esc back"


# The lines of the screen, and the keys: pure.


class Line(NamedTuple):
    """A line of the screen."""

    text: str
    style: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Screen:
    """The choices of the user."""

    width: int = 80
    height: int = 24
    order: int = 0
    """Index into the orders of sessions."""
    engine_order: int = 0
    words: str = ""
    """Only members and sessions with this text."""
    typing: bool = False
    """Whether keys are added to `words`."""
    selected: str = ""
    """Id of the session under the cursor."""
    opened: str = ""
    """`alarms`, or the id of the session whose transcript is shown. Empty shows the mesh."""
    offset: int = 0
    """First line of a transcript that is shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """The mesh as it was read last."""

    router: str = ""
    clock: str = ""
    """The time, for people."""
    history: Sequence[Observation] = ()
    alarms: Sequence[Alarm] = ()
    reports: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Numbers of the last step of each consumer."""
    transcript: Sequence[str] = ()
    """Paragraphs of the opened session."""


_Open = gateway_pb2.OpenSession
_ORDERS: tuple[tuple[str, Callable[[_Open], tuple[int, str]]], ...] = (
    ("idle", lambda one: (-one.idle_ms, one.session_id)),
    ("turns", lambda one: (-one.turns, one.session_id)),
    ("opened", lambda one: (one.opened_unix_ms, one.session_id)),
    ("group", lambda one: (one.sample_index, f"{one.run_id} {one.group_id}")),
)
_ENGINE_ORDERS: tuple[tuple[str, Callable[[router_pb2.Replica], tuple[int, int, str]]], ...] = (
    ("id", lambda one: (one.hello.kind, 0, one.hello.replica_id)),
    ("running", lambda one: (one.hello.kind, -one.hello.load.running, one.hello.replica_id)),
    ("waiting", lambda one: (one.hello.kind, -one.hello.load.waiting, one.hello.replica_id)),
    ("version", lambda one: (one.hello.kind, one.hello.load.policy_version, one.hello.replica_id)),
)


def sessions_of(seen: Seen, screen: Screen) -> list[_Open]:
    """Returns the open sessions that the filter leaves, in the chosen order."""
    listed = seen.history[-1].sessions if seen.history else ()
    found = [
        one
        for one in listed or ()
        if screen.words in f"{one.session_id} {one.run_id} {one.group_id} {_state(one)}"
    ]
    return sorted(found, key=_ORDERS[screen.order][1])


def pressed(screen: Screen, key: str, ids: Sequence[str]) -> Screen | None:
    """Returns the screen after a key. None quits.

    Args:
        screen: The screen before.
        key: A character, or `up`, `down`, `enter`, `escape` or `backspace`.
        ids: Ids of the sessions that are shown, in their order.
    """
    if screen.typing:
        if key in ("enter", "escape"):
            return replace(screen, typing=False, words=screen.words if key == "enter" else "")
        words = screen.words[:-1] if key == "backspace" else screen.words + key * (len(key) == 1)
        return replace(screen, words=words[:64])
    step = {"j": 1, "down": 1, "k": -1, "up": -1}.get(key, 0)
    if key == "q":
        return None
    if screen.opened:
        if key in ("escape", "backspace", "enter"):
            return replace(screen, opened="", offset=0)
        return replace(screen, offset=max(0, screen.offset + step))
    if step and ids:
        at = ids.index(screen.selected) + step if screen.selected in ids else 0
        return replace(screen, selected=ids[min(max(at, 0), len(ids) - 1)])
    match key:
        case "s":
            return replace(screen, order=(screen.order + 1) % len(_ORDERS))
        case "e":
            return replace(screen, engine_order=(screen.engine_order + 1) % len(_ENGINE_ORDERS))
        case "/":
            return replace(screen, typing=True, words="")
        case "a":
            return replace(screen, opened="alarms", offset=0)
        case "enter" if ids:
            chosen = screen.selected if screen.selected in ids else ids[0]
            return replace(screen, selected=chosen, opened=chosen, offset=0)
    return screen


def lines(seen: Seen, screen: Screen) -> list[Line]:
    """Returns the lines of the screen, `height` of them, none wider than `width` cells."""
    body = list(_page(seen, screen) if screen.opened else _mesh(seen, screen))
    room = max(screen.height - 1, 0)
    body = [*body[:room], *[Line("")] * (room - len(body))]
    if screen.typing:
        foot = Line(f"filter: {screen.words}_  (enter keeps it, esc drops it)", "bold")
    else:
        foot = Line(_KEYS_OPEN if screen.opened else _KEYS, "reverse")
    return [Line(_fit(one.text, screen.width), one.style) for one in (*body, foot)][: screen.height]


def _mesh(seen: Seen, screen: Screen) -> Iterator[Line]:
    yield Line(f"rollmesh top  {seen.router}  {seen.clock}", "bold")
    if not seen.history:
        yield Line("the mesh is asked ...")
        return
    look = seen.history[-1]
    yield from map(Line, _numbers(seen, look))
    for one in seen.alarms[:_MOST_ALARMS]:
        yield Line(f"! {one.name}  {one.where}: {one.message}", "red")
    if more := len(seen.alarms) - _MOST_ALARMS:
        yield Line(f"! {more} more alarms: press a" if more > 0 else "", "red")
    replicas = look.members.replicas if look.members else ()
    members = [
        one
        for one in replicas
        if screen.words in f"{one.hello.replica_id} {' '.join(states_of(one))}"
    ]
    members.sort(key=_ENGINE_ORDERS[screen.engine_order][1])
    consumers = look.stores[0].consumers if look.stores else ()
    room = max(screen.height - 11 - len(seen.alarms[:_MOST_ALARMS]) - len(consumers), 6)
    order = f"MEMBER by {_ENGINE_ORDERS[screen.engine_order][0]}"
    yield Line(
        _row(screen, order, "KIND", "VERSION", "LEASES", "RUN", "WAIT", "SESS", "STATE"), "bold"
    )
    most = max(room // 2, room - len(look.sessions or ()) - 1)
    for member in members[:most]:
        yield Line(_member(screen, member), "yellow" if states_of(member) else "")
    if len(members) > most:
        yield Line(f"  and {len(members) - most} more")
    if consumers:
        yield Line(
            _row(screen, "CONSUMER", "READY", "LEASED", "ACK", "STEP", "LAG", "REWARD"), "bold"
        )
    for found in consumers:
        report = seen.reports.get(found.name, {})
        numbers = (
            f"{report[name]:.3g}" if name in report else "-" for name in ("lag_mean", "reward_mean")
        )
        step = str(found.step) if found.HasField("step") else "-"
        counts = (str(found.ready), str(found.leased), str(found.acknowledged))
        yield Line(_row(screen, found.name, *counts, step, *numbers))
    yield from _sessions(seen, screen)


def _sessions(seen: Seen, screen: Screen) -> Iterator[Line]:
    if seen.history[-1].sessions is None:
        yield Line("open sessions: no gateway answers, or the token is no operator's")
        return
    shown = sessions_of(seen, screen)
    order = f"SESSION by {_ORDERS[screen.order][0]}"
    yield Line(_row(screen, order, "RUN", "GROUP", "TURNS", "IDLE", "STATE"), "bold")
    ids = [one.session_id for one in shown]
    start = ids.index(screen.selected) if screen.selected in ids else 0
    for one in shown[max(0, start - 2) :]:
        group = f"{one.group_id} {one.sample_index}" if one.group_id else "-"
        idle = f"{one.idle_ms / 1000:.0f} s"
        row = _row(
            screen, one.session_id, one.run_id or "-", group, str(one.turns), idle, _state(one)
        )
        yield Line(row, "reverse" if one.session_id == screen.selected else "")


def _state(one: _Open) -> str:
    return "sampling" if one.in_flight else "idle"


def _numbers(seen: Seen, look: Observation) -> Iterator[str]:
    models = look.members.models if look.members else ()
    weights = ", ".join(f"{one.model}: {told(one.target_policy_version)}" for one in models)
    alarms = f"{len(seen.alarms)} alarms" if seen.alarms else "no alarms"
    yield f"{alarms}  {weights or 'no router answers'}"
    queue = sum(one.total("rollmesh_router_queue_length") or 0 for one in look.of("router"))
    leases = sum(one.leases for one in look.engines())
    slots = sum(one.hello.lease_capacity for one in look.engines())
    busy = sum(bool(one.in_flight) for one in look.sessions or ())
    idle = len(look.sessions or ()) - busy
    yield f"queue {queue:.0f}  leases {leases} of {slots}  sessions: {busy} sampling, {idle} idle"
    if look.stores:
        one = look.stores[0]
        yield (
            f"stored {one.sessions:,} sessions, {one.complete_groups:,} complete groups, "
            f"{one.open_groups:,} open, {one.waiting_for_rewards:,} wait for rewards"
        )
    else:
        yield "no collector answers"
    first = seen.history[0]
    seconds = (look.at_ms - first.at_ms) / 1000
    sampled = _gain(first, look, "engine", "rollmesh_engine_tokens_total", kind="sampled")
    tokens = [
        _gain(first, look, "gateway", "rollmesh_gateway_tokens_total", kind=kind)
        for kind in ("cached", "prompt")
    ]
    rewards = [
        _gain(first, look, "collector", f"rollmesh_collector_session_rewards_{part}")
        for part in ("sum", "count")
    ]
    parts = [f"{sampled / seconds:,.0f} tokens/s" if seconds else "- tokens/s"]
    parts += [f"{tokens[0] / tokens[1]:.0%} of prompts cached"] if tokens[1] else []
    parts += [f"reward {rewards[0] / rewards[1]:.3f} of {rewards[1]:.0f}"] if rewards[1] else []
    yield "  ".join(parts) + f"  (in {seconds:.0f} s)"


def _gain(first: Observation, last: Observation, of: str, metric: str, **labels: str) -> float:
    """Returns the gain of a counter at the servers of a kind between two looks."""
    before = {one.name: one.total(metric, **labels) or 0 for one in first.of(of)}
    found = 0.0
    for one in last.of(of):
        now = one.total(metric, **labels) or 0
        found += now - before[one.name] if now >= before.get(one.name, now + 1) else 0
    return found


def _member(screen: Screen, one: router_pb2.Replica) -> str:
    hello, load = one.hello, one.hello.load
    kind = name_of(router_pb2.ReplicaKind.DESCRIPTOR, hello.kind).lower()
    state = ", ".join(states_of(one))
    if kind != "engine":
        sessions = str(load.live_sessions) if kind == "gateway" else "-"
        return _row(screen, hello.replica_id, kind, "-", "-", "-", "-", sessions, state)
    version = told(load.policy_version).removeprefix("version ").replace(" of run ", "/")
    leases = f"{one.leases}/{hello.lease_capacity}"
    counts = (str(load.running), str(load.waiting), str(one.sessions))
    return _row(screen, hello.replica_id, kind, version, leases, *counts, state)


def _row(screen: Screen, name: str, *values: str) -> str:
    """Returns columns that fill the width: the name takes the rest."""
    width = max(7, min(14, (screen.width - 36) // len(values) - 1))
    name_width = max(screen.width - (width + 1) * len(values), 10)
    columns = [_fit(name, name_width), *(_fit(one, width) for one in values)]
    return " ".join(columns)


def _page(seen: Seen, screen: Screen) -> Iterator[Line]:
    """Yields the alarms, or the transcript of a session, from the offset on."""
    if screen.opened == "alarms":
        yield Line(f"{len(seen.alarms)} alarms", "bold")
        paragraphs = [f"{one.name}  {one.where}: {one.message}." for one in seen.alarms]
    else:
        yield Line(f"session {screen.opened}", "bold")
        paragraphs = list(seen.transcript) or ["it is read ..."]
    found = (one for text in paragraphs for one in _wrapped(text, screen.width))
    at, last = 0, ""
    for at, last in enumerate(islice(found, screen.offset + screen.height)):  # not megabytes below
        if at >= screen.offset:
            yield Line(last)
    if at < screen.offset:
        yield Line(last)


def _wrapped(text: str, width: int) -> Iterator[str]:
    """Yields a text in lines of at most `width` cells. The time is linear in the text."""
    for line in map(printable, text.split("\n")):
        start = cells = 0
        for at, char in enumerate(line):
            size = get_character_cell_size(char)
            if at > start and cells + size > width:
                yield line[start:at]
                start, cells = at, 0
            cells += size
        yield line[start:]


def _fit(text: str, width: int) -> str:
    """Returns a text of exactly `width` cells, without characters that move the cursor."""
    text = printable(text[: 4 * width])
    if cell_len(text) > width:
        text = set_cell_size(text, max(width - 1, 0)) + "~"
    return set_cell_size(text, width)


def transcript_of(found: gateway_pb2.GetSessionResponse) -> list[str]:
    """Returns an open session as paragraphs: its facts, and its messages with their tool calls."""
    one = found.session
    facts = (
        f"{_state(one)}, {one.turns} turns, run {one.run_id or '-'}, group {one.group_id or '-'}"
    )
    said = [facts, *(f"{name}: {value}"[:500] for name, value in one.metadata.items())]
    labels: dict[int, str] = {}
    for node in found.nodes:
        labels[node.node_id] = label_of(node)
        if labels[node.node_id] != labels.get(node.parent_node_id, ""):
            lineage = name_of(trajectory_pb2.Lineage.DESCRIPTOR, node.lineage)
            said.append(f"node {node.node_id}: {lineage}. {labels[node.node_id]}")
        said += [f"node {node.node_id}: {one}" for one in told_reasons(node.reasons)]
        for message in node.messages:
            shown = message_of(message)
            calls = [f"{one.name}({one.arguments_json})" for one in message.tool_calls]
            parts = [shown.get("reasoning_content"), shown["content"], *calls]
            text = "\n".join(one for one in parts if one)
            said.append(f"[{shown['role']}] {text[:_MOST_TEXT]}")
    return said


def keys_of(data: bytes) -> list[str]:
    """Returns the keys that a terminal sent."""
    keys: list[str] = []
    text = data.decode(errors="ignore")
    named = {"\r": "enter", "\n": "enter", "\x7f": "backspace", "\b": "backspace"}
    while text:
        arrow = {"\x1b[A": "up", "\x1b[B": "down", "\x1bOA": "up", "\x1bOB": "down"}.get(text[:3])
        if arrow:
            keys, text = [*keys, arrow], text[3:]
        elif text[0] == "\x1b":  # alone, or the beginning of a key that is not used
            keys, text = [*keys, *["escape"] * (len(text) == 1)], ""
        else:
            keys, text = [*keys, named.get(text[0], text[0])], text[1:]
    return keys


# The terminal and the mesh.


def main() -> int:
    """Returns the exit code: 0 after `q`, 1 after an error, 2 for a bad flag or no terminal."""
    parser = argparse.ArgumentParser(prog="rollmesh top", description=__doc__)
    parser.add_argument("--every", type=seconds, default=2.0, help="time between two looks")
    MeshAddresses.add_flags(parser)
    options = parser.parse_args()
    return identity.run_tool(parser.prog, options, os.environ, partial(_run, options))


async def _run(options: argparse.Namespace) -> list[str]:
    """Shows the mesh until `q` or a signal.

    Raises:
        ConfigError: There is no terminal, or none whose cursor moves.
    """
    is_dumb = os.environ.get("TERM", "dumb").lower() in ("dumb", "unknown")
    if is_dumb or not sys.stdin.isatty() or not sys.stdout.isatty():
        raise ConfigError("needs a terminal (TERM); `rollmesh status` prints the mesh once")
    logging.getLogger().addHandler(logging.NullHandler())  # a log would cover the screen
    addresses = MeshAddresses.of(options)
    async with Client(addresses) as client, Observer(addresses, looks=_LOOKS) as observer:
        await _Top(client, observer, max(options.every, _LEAST_S)).run()
    return []


class _Top:
    """The screen, the mesh as it was read last, and the tasks that change both."""

    def __init__(self, client: Client, observer: Observer, every_s: float) -> None:
        self._client = client
        self._observer = observer
        self._every_s = every_s
        self._screen = Screen()
        self._seen = Seen(router=observer.addresses.router)
        self._changed, self._opened, self._over = (asyncio.Event() for _ in range(3))

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._over.set)
        loop.add_signal_handler(signal.SIGWINCH, self._changed.set)
        with _keyboard(self._press), Live(screen=True, auto_refresh=False) as live:
            async with asyncio.TaskGroup() as group:
                work = (self._watch(), self._read(), self._draw(live))
                tasks = [group.create_task(one) for one in work]
                await self._over.wait()
                for one in tasks:
                    one.cancel()

    def _press(self, data: bytes) -> None:
        for key in keys_of(data):
            ids = [one.session_id for one in sessions_of(self._seen, self._screen)]
            after = pressed(self._screen, key, ids)
            if after is None:
                self._over.set()
                return
            if after.opened != self._screen.opened:
                self._seen = replace(self._seen, transcript=())
                self._opened.set()
            self._screen = after
        self._changed.set()

    async def _draw(self, live: Live) -> None:
        while True:
            self._changed.clear()
            width, height = os.get_terminal_size(sys.stdout.fileno())
            live.console.size = ConsoleDimensions(width, height)  # not that of COLUMNS
            self._screen = replace(self._screen, width=width, height=height)
            shown = [Text(one.text, one.style) for one in lines(self._seen, self._screen)]
            live.update(Text("\n", end="", no_wrap=True).join(shown), refresh=True)
            await self._changed.wait()

    async def _watch(self) -> None:
        """Looks at the mesh again and again. Servers have a bounded time for their answers."""
        while True:
            alarms = await self._observer.watch()
            reports: dict[str, Mapping[str, float]] = {}
            for store in self._observer.history[-1].stores[:1]:
                for one in store.consumers:
                    if not one.HasField("step"):
                        continue
                    with suppress(RollmeshError, TimeoutError):
                        async with asyncio.timeout(_CALL_S):
                            for step in await self._client.steps(one.name, 1):
                                reports[one.name] = step.metrics
            self._seen = replace(
                self._seen,
                clock=datetime.now(UTC).strftime("%H:%M:%S UTC"),
                history=list(self._observer.history),
                alarms=alarms,
                reports=reports,
            )
            self._changed.set()
            self._opened.set()
            await asyncio.sleep(self._every_s)

    async def _read(self) -> None:
        """Reads the opened session whenever it was opened or the mesh was looked at."""
        while True:
            await self._opened.wait()
            self._opened.clear()
            session_id = self._screen.opened
            if session_id in ("", "alarms"):
                continue
            try:
                async with asyncio.timeout(_CALL_S):
                    found = await self._transcript(session_id)
            except (RollmeshError, TimeoutError) as error:
                found = [getattr(error, "message", "its gateway does not answer in time")]
            if session_id == self._screen.opened:
                self._seen = replace(self._seen, transcript=found)
                self._changed.set()

    async def _transcript(self, session_id: str) -> list[str]:
        try:
            return transcript_of(await self._client.open_session_tree(session_id))
        except SessionUnknownError:
            found = await self._client.stored_sessions(session_id=session_id)
            return [
                text
                for one in found
                for text in (words_of(line_of(one.session)), *why(one.session))
            ]


@contextmanager
def _keyboard(press: Callable[[bytes], None]) -> Iterator[None]:
    """Passes keys on as they are pressed, and restores the terminal at the end."""
    loop, terminal = asyncio.get_running_loop(), sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    tty.setcbreak(terminal)
    loop.add_reader(terminal, lambda: press(os.read(terminal, 4096) or b"q"))
    try:
        yield
    finally:
        loop.remove_reader(terminal)
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


if __name__ == "__main__":
    sys.exit(main())
