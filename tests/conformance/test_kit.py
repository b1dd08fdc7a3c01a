"""What the kit says of servers that are wrong, absent, slow or confused."""

import asyncio
import json
import runpy
import sys
from collections.abc import Callable
from typing import Any
from unittest.mock import patch
from xml.etree import ElementTree as ET

import httpx2
import pytest

from rollmesh.conformance import (
    CHECKS,
    Check,
    FailedError,
    NotSeenError,
    Result,
    Server,
    Verdict,
    junit,
    run_checks,
    table,
)

Handler = Callable[[httpx2.Request], httpx2.Response]


def server(handle: Handler) -> Server:
    transport = httpx2.MockTransport(handle)
    client = httpx2.AsyncClient(transport=transport, base_url="http://server/v1")
    return Server(client, "policy", key="key")


def check(name: str) -> Check:
    (found,) = (one for one in CHECKS if one.name == name)
    return found


def raising(error: Exception | None) -> Check:
    async def run(_server: Server) -> None:
        if error is not None:
            raise error

    return Check("http.made.up", "It holds.", "Nobody: nothing.", run)


async def results(handle: Handler, *checks: Check, required: tuple[str, ...] = ()) -> list[Result]:
    return await run_checks(server(handle), checks, required, 5)


def fixed(status: int, value: Any) -> Handler:
    return lambda _request: httpx2.Response(status, json=value)


def streamed(*datas: Any) -> Handler:
    lines = [one if isinstance(one, str) else json.dumps(one) for one in datas]
    text = "".join(f"data: {one}\n\n" for one in lines)
    headers = {"content-type": "text/event-stream"}
    return lambda _request: httpx2.Response(200, text=text, headers=headers)


def chunk(finish: str | None = None, **fields: Any) -> dict[str, Any]:
    delta = {"role": "assistant", "content": "42"}
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    common = {"id": "a", "object": "chat.completion.chunk", "created": 1, "model": "policy"}
    return {**common, "choices": [choice], **fields}


def answer(answer_id: str = "a", **message: Any) -> dict[str, Any]:
    said = {"role": "assistant", "content": "42", **message}
    choices = [{"index": 0, "message": said, "finish_reason": "stop"}]
    common = {"id": answer_id, "object": "chat.completion", "created": 1, "model": "policy"}
    usage = {"prompt_tokens": 2, "completion_tokens": 1, "total_tokens": 3}
    return {**common, "choices": choices, "usage": usage}


def test_names_are_unique_and_every_check_says_what_breaks() -> None:
    assert len({one.name for one in CHECKS}) == len(CHECKS) > 70
    for one in CHECKS:
        assert one.name.count(".") == 2
        assert one.what.endswith(".")
        assert one.breaks.endswith(".")


@pytest.mark.parametrize(
    ("error", "verdict", "detail"),
    [
        (None, Verdict.PASSED, ""),
        (FailedError("status 500"), Verdict.FAILED, "status 500"),
        (NotSeenError("no call"), Verdict.NOT_SEEN, "no call"),
        (TimeoutError(), Verdict.FAILED, "not done within 5 s"),
        (ExceptionGroup("all", [FailedError("of two")]), Verdict.FAILED, "of two"),
        (KeyError("id"), Verdict.FAILED, "unexpected form of an answer: KeyError: 'id'"),
    ],
)
async def test_the_error_of_a_check_is_its_verdict(
    error: Exception | None, verdict: Verdict, detail: str
) -> None:
    (found,) = await results(fixed(200, {}), raising(error))
    assert (found.verdict, found.detail) == (verdict, detail)


async def test_a_protocol_that_is_not_served_is_one_row_which_fails_where_it_is_required() -> None:
    checks = [one for one in CHECKS if one.protocol == "chat"]
    (skipped,) = await results(fixed(404, {}), *checks)
    assert (skipped.check.name, skipped.verdict) == ("chat.served", Verdict.SKIPPED)
    (failed,) = await results(fixed(404, {}), *checks, required=("chat",))
    assert (failed.check.name, failed.verdict) == ("chat.served", Verdict.FAILED)


async def test_a_server_that_hangs_costs_each_check_its_time_and_no_more() -> None:
    async def hangs(_request: httpx2.Request) -> httpx2.Response:
        await asyncio.Event().wait()
        raise AssertionError

    transport = httpx2.MockTransport(hangs)
    client = httpx2.AsyncClient(transport=transport, base_url="http://server/v1")
    found = await run_checks(Server(client, "policy"), [check("chat.answers.ids")], (), 0.05)
    assert [one.detail for one in found] == ["not done within 0.05 s"]


GOOD = (chunk(), chunk("stop"), "[DONE]")


@pytest.mark.parametrize(
    ("name", "handle", "seen"),
    [
        ("chat.answers.fields", fixed(200, {"choices": []}), "no choices[0].message"),
        ("chat.answers.fields", fixed(200, [1]), "not a JSON object"),
        ("chat.answers.fields", fixed(200, {**answer(), "created": None}), "created is None"),
        ("chat.answers.ids", fixed(200, answer()), "two answers have the id 'a'"),
        ("chat.answers.request-id", fixed(200, answer()), "no x-request-id with status 200"),
        ("chat.answers.tool-call", fixed(200, answer(tool_calls=[{"id": ""}])), "call's id is ''"),
        ("chat.streams.done", streamed(chunk("stop")), "no [DONE]"),
        ("chat.streams.done", fixed(500, {}), "status 500"),
        ("chat.streams.chunk-fields", streamed(chunk(), chunk(id="b")), "id is 'a', 'b'"),
        ("chat.streams.first-role", streamed(chunk(choices=[])), "the first delta is []"),
        ("chat.streams.finish", streamed(chunk(), chunk()), "finish reasons are []"),
        ("chat.streams.finish", streamed(chunk("stop"), chunk()), "after the finish_reason"),
        ("chat.streams.usage-unasked", streamed(chunk(usage={"a": 1})), "there is usage"),
        ("chat.streams.usage-asked", streamed(*GOOD), "usage of the last chunk is None"),
        ("chat.streams.refusal", streamed(*GOOD), "status 200"),
        ("chat.streams.at-once", streamed(*GOOD), "the ids of the streams"),
        ("chat.echoes.developer", fixed(400, {"error": 1}), 'status 400: {"error":1}'),
        ("chat.branches.siblings", fixed(500, {}), "status 500"),
        ("chat.retries.unmarked-repeat", fixed(200, answer()), "both answers have the id"),
        ("chat.retries.key-reused", fixed(200, answer()), "is answered with status 200"),
        ("chat.refusals.messages", fixed(500, {}), "missing: 500; null: 500"),
        ("chat.refusals.extremes", fixed(500, {}), "temperature=1e999: status 500"),
        ("chat.refusals.error-body", fixed(422, {"detail": []}), "error is None, not an object"),
        ("http.server.models", fixed(200, {"object": "list", "data": []}), "the list is empty"),
    ],
)
async def test_a_fault_is_found(name: str, handle: Handler, seen: str) -> None:
    found = (await results(handle, check(name)))[-1]
    assert found.verdict == Verdict.FAILED
    assert seen in found.detail


async def test_a_retry_that_is_sampled_again_is_found() -> None:
    ids = iter(range(99))
    handle: Handler = lambda _: httpx2.Response(200, json=answer(f"a{next(ids)}"))  # noqa: E731
    for name in ("idempotency-key", "sdk-retry", "retry-in-flight"):
        (found,) = (await results(handle, check(f"chat.retries.{name}")))[-1:]
        assert "the retry is another answer" in found.detail


@pytest.mark.parametrize("drifts", [False, True])
async def test_a_prompt_that_drifts_is_found_where_it_drifts(*, drifts: bool) -> None:
    def handle(request: httpx2.Request) -> httpx2.Response:
        turns = len(json.loads(request.content or b"{}").get("messages", [])) // 2
        prompt = [1, 2, *([3, 9 if drifts else 4, 5] * turns)]
        body = answer()
        body["choices"][0]["token_ids"] = [3, 4]
        return httpx2.Response(200, json={**body, "prompt_token_ids": prompt})

    (found,) = (await results(handle, check("chat.tokens.prefix-as-sent")))[-1:]
    where = "the next prompt leaves the 4 tokens of the turn before at 3, in its answer: "
    assert found.detail == (f"{where}[4] became [9, 5]" if drifts else "")


async def test_token_checks_are_not_seen_where_no_tokens_are_shown() -> None:
    checks = [one for one in CHECKS if one.name.startswith("chat.tokens.prefix-as")]
    found = await results(fixed(200, answer()), *checks)
    assert [one.verdict for one in found] == [Verdict.NOT_SEEN]


async def test_a_busy_server_that_names_no_delay_is_found() -> None:
    busy = check("http.observed.retry-after")
    for delay, verdict in (
        ("1", Verdict.PASSED), ("300", Verdict.FAILED), ("soon", Verdict.FAILED),
    ):  # fmt: skip
        tested = server(fixed(200, {}))
        tested.seen.append((429, httpx2.Headers({"retry-after": delay})))
        assert [one.verdict for one in await run_checks(tested, [busy], (), 5)] == [verdict]


def test_the_report_names_the_fault_and_its_victims() -> None:
    failed = Result(raising(None), Verdict.FAILED, "status 500: \x00<b>", 1.0)
    found = [failed, Result(raising(None), Verdict.NOT_SEEN, "no call")]
    text = table(found)
    assert "FAILED    http.made.up  It holds." in text
    assert "breaks: Nobody: nothing." in text
    assert text.endswith("1 failed, 1 not seen")
    suite = ET.fromstring(junit(found))[0]  # noqa: S314 - our own text
    counts = [suite.attrib[name] for name in ("tests", "failures", "skipped")]
    assert counts == ["2", "1", "1"]
    assert suite[0][0].attrib["message"] == "status 500: \ufffd<b>"


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--base-url", "server"], "--base-url"),
        (["--base-url", "http://server", "--protocols", "chat,grpc"], "--protocols: grpc"),
        (["--base-url", "http://server", "--timeout-s", "0"], "--timeout-s"),
        ([], "--base-url"),
    ],
)
def test_wrong_usage_ends_with_2_and_names_the_flag(
    capsys: pytest.CaptureFixture[str], flags: list[str], named: str
) -> None:
    assert ended(flags) == 2
    assert named in capsys.readouterr().err


def test_a_server_that_does_not_answer_ends_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(["--base-url", "http://127.0.0.1:1/v1"]) == 2
    assert "http://127.0.0.1:1/v1" in capsys.readouterr().err


def ended(flags: list[str]) -> Any:
    """Exit code of the command."""
    with patch.object(sys, "argv", ["conformance", *flags]), pytest.raises(SystemExit) as found:
        runpy.run_module("rollmesh.conformance", run_name="__main__")
    return found.value.code
