"""A parser of vLLM's, by its name, in a process of its own."""

import asyncio
import importlib.util
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from rollmesh.chat import TextEvent, ToolCallEvent
from rollmesh.chat.parsing import AnswerFormat, Reading, WholeCallParser, vllm_problem
from rollmesh.gateway import VllmParser
from tests.chat.parsing.test_formats import CONTEXT, TOOLS
from tests.meshes import scripted_mesh

CALL = '[f(n=1, s="it\'s"), g()]'
CALLS = (("f", '{"n": 1, "s": "it\'s"}'), ("g", "{}"))


def whole(text: str, reading: Reading | None) -> WholeCallParser:
    parser = AnswerFormat("vllm:any", reasoning=False).parser(CONTEXT)
    assert isinstance(parser, WholeCallParser)
    assert parser.feed(text[:3]) == parser.feed(text[3:]) == []
    parser.take(reading)
    parser.finish()
    return parser


@pytest.mark.parametrize(
    ("text", "reading", "expected"),
    [
        ("Now. CALL", Reading("Now. ", (("f", "{}"),)), ("Now.", [("f", "{}")], False)),
        (" just text\n", Reading(" just text\n", ()), (" just text\n", [], False)),
        ("", Reading("", ()), ("", [], False)),
        ("CALL", None, ("CALL", [], True)),
        ("a CALL", Reading("a", ()), ("a CALL", [], True)),
        ("CALL", Reading("", (("no", "{}"),)), ("CALL", [], True)),
        ("CALL", Reading("", (("f", "{}"), ("f", '{"n"'))), ("CALL", [], True)),
        ("CALL", Reading("", (("f", "[1]"),)), ("CALL", [], True)),
        ("CALL", Reading("CALL", (("no", "{}"),)), ("CALL", [], True)),
    ],
)
def test_calls_count_only_if_all_are_whole_and_known(
    text: str, reading: Reading | None, expected: tuple[str, list[tuple[str, str]], bool]
) -> None:
    parser = whole(text, reading)
    assert (parser.content, parser.calls, parser.malformed) == expected


def test_the_pieces_come_at_the_end() -> None:
    parser = WholeCallParser({"f"})
    assert parser.feed("text and a call") == []
    parser.take(Reading("text", (("f", "{}"),)))
    assert parser.finish() == [
        TextEvent("text"),
        ToolCallEvent(0, name="f"),
        ToolCallEvent(0, arguments="{}"),
    ]


@pytest.mark.vllm
def test_what_cannot_work_is_known_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not vllm_problem("pythonic")
    assert "vLLM has no parser 'pythnic'; it has apertus, " in vllm_problem("pythnic")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "needs the vllm package, which is not" in vllm_problem("pythonic")


@pytest.mark.vllm
async def test_the_check_does_not_import_vllm() -> None:
    code = (
        "import sys; from rollmesh.chat.parsing import vllm_problem; "
        "vllm_problem('pythonic'); sys.exit('vllm' in sys.modules)"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code)
    assert await process.wait() == 0


def stand_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, program: str) -> None:
    """Puts a program in the place of the worker."""
    script = tmp_path / "python"
    script.write_text(f"#!{sys.executable}\nimport json, sys\n{program}\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))


ECHO = """
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    question = json.loads(line)
    if question["text"] == "die":
        sys.exit(3)
    if question["text"] == "raise":
        print(json.dumps({"id": question["id"], "error": "KeyError: 5"}), flush=True)
        continue
    if question["text"] == "stuck":
        sys.stdin.read()
    if question["text"] == "garbage":
        print("5", flush=True)
        continue
    print(json.dumps({"id": question["id"], "content": "ok", "calls": []}), flush=True)
"""


@pytest.fixture
async def parser(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> AsyncIterator[VllmParser]:
    stand_in(monkeypatch, tmp_path, ECHO)
    parser = VllmParser("any", tmp_path, timeout_ms=30_000, max_waiting=2)
    yield parser
    await parser.close()
    assert parser.pid is None


async def test_failures_give_none_and_the_next_answer_is_read(parser: VllmParser) -> None:
    for broken in ("die", "raise", "garbage"):
        assert await parser.read(broken, b"[]") is None
        assert await parser.read("text", b"[]") == Reading("ok", ())
    three = await asyncio.gather(*(parser.read("text", b"[]") for _ in range(3)))
    assert three == [Reading("ok", ()), Reading("ok", ()), None]


async def test_a_killed_worker_is_started_again(parser: VllmParser) -> None:
    assert parser.pid is None
    assert await parser.read("text", b"[]") == Reading("ok", ())
    before = parser.pid
    assert before is not None
    os.kill(before, signal.SIGKILL)
    assert await parser.read("text", b"[]") == Reading("ok", ())
    assert parser.pid not in {None, before}


async def test_a_cancelled_and_a_late_caller_do_not_disturb_others(parser: VllmParser) -> None:
    assert await parser.read("text", b"[]") == Reading("ok", ())
    worker = psutil.Process(parser.pid)
    worker.suspend()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await parser.read("left", b"[]")
    worker.resume()
    assert await parser.read("text", b"[]") == Reading("ok", ())
    assert parser.pid == worker.pid
    worker.suspend()
    parser._timeout_s = 0.2  # noqa: SLF001 - no start is that fast
    assert await parser.read("late", b"[]") is None
    await asyncio.to_thread(worker.wait, 10)


async def test_an_answer_that_never_ends_takes_no_other_with_it(parser: VllmParser) -> None:
    assert await parser.read("text", b"[]") == Reading("ok", ())
    before = parser.pid
    parser._timeout_s = 16  # noqa: SLF001 - a quarter of it is the time of one answer
    both = await asyncio.gather(parser.read("stuck", b"[]"), parser.read("text", b"[]"))
    assert list(both) == [None, Reading("ok", ())]
    assert parser.pid != before


async def test_a_worker_that_cannot_start_is_not_tried_again_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    count = tmp_path / "count"
    stand_in(
        monkeypatch,
        tmp_path,
        f'open({str(count)!r}, "a").write("x")\n'
        'print(json.dumps({"error": "RuntimeError: no such token"}), flush=True)',
    )
    parser = VllmParser("any", tmp_path, timeout_ms=30_000)
    assert await parser.read("text", b"[]") is None
    assert await parser.read("text", b"[]") is None
    assert count.read_text() == "x"
    await parser.close()


async def test_a_worker_that_the_system_does_not_start_fails_no_answer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "missing"))
    reasons: list[str] = []
    parser = VllmParser("any", tmp_path, timeout_ms=30_000, on_failure=reasons.append)
    assert await parser.read("text", b"[]") is None
    assert reasons == ["error"]


@pytest.mark.long
@pytest.mark.vllm
async def test_a_turn_has_the_calls_that_vllm_found_and_survives_its_worker(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    rules = [("call", CALL), ("again", CALL), ("talk", "Just text."), ("wrong", "[h(n=1)]")]
    parser = {"tool_parser": "vllm:pythonic", "tool_parser_timeout_ms": 200_000}
    async with (
        scripted_mesh(tmp_path, tokenizer_dir, rules, first={"gateway": parser}) as mesh,
        mesh.client() as client,
    ):
        gateway = mesh.processes["gateway"]
        async with client.session() as session:
            agent = mesh.openai(session, timeout=200)

            async def ask(text: str) -> Any:
                answer = await agent.chat.completions.create(
                    model="policy",
                    messages=[{"role": "user", "content": text}],
                    tools=TOOLS,  # type: ignore[arg-type]
                )
                return answer.choices[0]

            def found(choice: Any) -> Any:
                calls = choice.message.tool_calls or []
                return [(one.function.name, one.function.arguments) for one in calls]

            first = await ask("call")
            assert (found(first), first.finish_reason) == (list(CALLS), "tool_calls")
            (worker,) = psutil.Process(gateway.pid).children()
            worker.kill()
            assert found(await ask("again")) == list(CALLS)
            assert (await ask("talk")).message.content == "Just text."
            assert (await ask("wrong")).message.content == "[h(n=1)]"
        async with client.subscribe("trainer", unit="session") as deliveries:
            delivery = await anext(deliveries)
            await deliveries.acknowledge(delivery)
        (worker,) = psutil.Process(gateway.pid).children()
        assert await gateway.terminate() == 0
        assert not worker.is_running()
    reasons = [sorted(one.reasons) for one in delivery.sessions[0].trajectories]
    assert reasons.count(["MALFORMED_TOOL_CALL"]) == 1
