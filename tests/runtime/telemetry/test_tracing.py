"""Spans: where they begin, which are kept, and what a receiver that does not take them costs."""

import asyncio
import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY

from rollmesh.runtime.config import ConfigError, TracesConfig
from rollmesh.runtime.telemetry import (
    NOWHERE,
    Exporter,
    Place,
    carried,
    content_of,
    genai,
    genai_message,
    join,
    place_of,
    span,
    tracing,
)
from tests.paths import ROOT
from tests.processes import run_to_end
from tests.receivers import Receiver, hanging_receiver, http_receiver

HEADER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@contextlib.contextmanager
def sent_to(receiver: Receiver, **settings: Any) -> Iterator[None]:
    config = TracesConfig(traces_endpoint=receiver.url, **settings)
    with tracing.sending("test", config):
        yield


def spans_counted(end: str) -> float:
    return REGISTRY.get_sample_value("rollmesh_trace_spans_total", {"end": end}) or 0.0


@pytest.mark.parametrize(
    "header",
    [
        "", "00", "00-x-y-01", HEADER[:-1], HEADER.upper(), f"{HEADER} ", f"ff{HEADER[2:]}",
        f"00-{'0' * 32}-b7ad6b7169203331-01", f"00-0af7651916cd43dd8448eb211c80319c-{'0' * 16}-01",
    ],
)  # fmt: skip
def test_another_header_is_no_trace(header: str) -> None:
    assert place_of(header) == NOWHERE


def test_a_later_version_of_the_header_is_read() -> None:
    assert place_of(f"01{HEADER[2:]}-more") == place_of(HEADER)
    assert place_of(HEADER).header == HEADER


def test_without_an_endpoint_nothing_is_begun_or_carried() -> None:
    with tracing.sending("test", TracesConfig()):
        join(HEADER)
        with span("a", "server", of_agent=HEADER) as one:
            assert (one, carried(), tracing.is_on()) == (None, "", False)


def test_blocks_are_children_of_the_outer_block() -> None:
    with http_receiver() as receiver, sent_to(receiver):
        assert carried() == ""
        with span("outer", "server") as outer:
            assert outer is not None
            assert carried() == outer.place.header
            with contextlib.suppress(KeyError), span("inner", "client") as inner:
                assert inner is not None
                assert (inner.place.trace_id, inner.parent_id) == outer.place[:2]
                raise KeyError("x")
            assert carried() == outer.place.header
        assert carried() == ""
    inner_sent, outer_sent = receiver.spans
    assert (inner_sent.parent_id, outer_sent.parent_id) == (outer_sent.span_id, "")
    assert (inner_sent.is_error, inner_sent.attributes["error.type"]) == (True, "KeyError")
    assert not outer_sent.is_error


def test_a_caller_decides_and_an_agent_decides_within_the_ratio() -> None:
    left_out = f"{HEADER[:-2]}00"
    with http_receiver() as receiver, sent_to(receiver, traces_ratio=0.0):
        with span("a", "server", of_caller=HEADER) as kept:
            assert kept is not None
        cases: list[dict[str, Any]]
        cases = [{"of_agent": HEADER}, {"of_caller": left_out}, {"of_caller": ""}, {}]
        for given in cases:
            with span("b", "server", **given) as none:
                assert none is None
                assert carried().endswith("" if given.get("of_caller") == "" else "-00")
                with span("c", "client") as inner:  # it does not begin a trace of its own
                    assert inner is None
    assert [one.name for one in receiver.spans] == ["a"]


def test_the_ratio_takes_that_share_and_every_service_the_same_traces() -> None:
    with http_receiver() as receiver, sent_to(receiver, traces_ratio=0.25):
        places = [tracing.place_of_session(str(number)) for number in range(4000)]
        assert 800 < sum(one.sampled for one in places) < 1200
        assert places == [tracing.place_of_session(str(number)) for number in range(4000)]
        headers = [Place(one.trace_id, 1, sampled=True).header for one in places]
        for place, header in zip(places, headers, strict=True):
            with span("a", "server", of_agent=header) as one:
                assert (one is not None) == place.sampled


async def test_only_tasks_of_a_caller_are_in_its_trace() -> None:
    async def of(header: str) -> str:
        join(header)
        await asyncio.sleep(0)
        return carried()

    with http_receiver() as receiver, sent_to(receiver):
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(of(header)) for header in (HEADER, "", HEADER)]
        assert [one.result() for one in tasks] == [HEADER, "", HEADER]


@pytest.mark.parametrize(("content", "most"), [(False, 4_096), (True, 256)])
async def test_spans_beyond_the_queue_are_dropped_and_counted(*, content: bool, most: int) -> None:
    before = spans_counted("dropped")
    async with hanging_receiver() as url:
        with tracing.sending("test", TracesConfig(traces_endpoint=url, traces_content=content)):
            for _ in range(5_000):
                with span("a", "server"):
                    pass
            assert spans_counted("dropped") - before == 5_000 - most


def test_a_broken_description_breaks_only_its_span() -> None:
    def broken() -> dict[str, Any]:
        raise RuntimeError("no")

    with http_receiver() as receiver, sent_to(receiver):
        with span("a", "server") as one:
            assert one is not None
            one.describe(broken)
        with span("b", "strange"):
            pass
        with span("c", "server"):
            pass
    assert [one.name for one in receiver.spans] == ["a", "c"]


@pytest.mark.parametrize("url", ["127.0.0.1:4318", "ftp://a", "http://", "http://a:x", "http://[a"])
def test_another_endpoint_than_a_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="traces_endpoint: is"):
        TracesConfig(traces_endpoint=url)


def test_the_file_of_headers_is_private_and_has_headers(tmp_path: Path) -> None:
    path = tmp_path / "headers"
    path.write_text("authorization: Bearer a:b\nno header\n")
    path.chmod(0o600)
    settings: Any = {"traces_endpoint": "http://a:1", "traces_headers_file": str(path)}
    with pytest.raises(ConfigError, match="headers, line 2: is no header"):
        Exporter(TracesConfig(**settings))
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="traces_headers_file"):
        Exporter(TracesConfig(**settings))


async def test_the_packages_are_imported_if_wanted_and_named_if_missing() -> None:
    code = """
import sys
from rollmesh.runtime.config import ConfigError, TracesConfig
from rollmesh.runtime.process.main import run_service
from rollmesh.runtime.telemetry import tracing
with tracing.sending("test", TracesConfig()), tracing.span("a", "server"):
    assert not [one for one in sys.modules if one.startswith("opentelemetry")]
sys.modules["opentelemetry"] = None
try:
    with tracing.sending("test", TracesConfig(traces_endpoint="http://127.0.0.1:4318")):
        pass
except ConfigError as error:
    print(error)
"""
    out, _ = await run_to_end(sys.executable, "-c", code, cwd=ROOT, env=None, limit_s=120)
    assert "pip install 'rollmesh[traces]'" in out


def test_messages_have_the_form_of_opentelemetry_and_a_bound() -> None:
    asked = {"role": "user", "content": [
        {"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "sha256:ab"}},
    ]}  # fmt: skip
    assert genai_message(asked) == {
        "role": "user",
        "parts": [
            {"type": "text", "content": "see"},
            {"type": "uri", "modality": "image", "uri": "sha256:ab"},
        ],
    }
    answer: dict[str, Any] = {
        "role": "assistant", "content": None, "reasoning_content": "hm",
        "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{broken"}}],
    }  # fmt: skip
    assert genai_message(answer)["parts"] == [
        {"type": "reasoning", "content": "hm"},
        {"type": "tool_call", "id": "1", "name": "f", "arguments": "{broken"},
    ]
    for arguments in ('{"a": "\\ud800"}', '{"a": NaN}'):
        answer["tool_calls"] = [{"id": "1", "function": {"name": "f", "arguments": arguments}}]
        sent = content_of([], 0, answer, "stop")[genai.OUTPUT_MESSAGES]
        assert json.loads(sent.encode(), parse_constant=pytest.fail)
    many = [{"role": "user", "content": f"{number:05}" * 2_000} for number in range(100)]
    found = content_of(reversed(many), len(many), answer, "stop")
    assert len(found[genai.INPUT_MESSAGES]) < 70_000
    assert "00099" in found[genai.INPUT_MESSAGES]
    assert found[genai.LEFT_OUT] == 94
    large = content_of([{"role": "user", "content": "x" * 10**7}], 1, answer, "stop")
    assert len(large[genai.INPUT_MESSAGES]) < 200
