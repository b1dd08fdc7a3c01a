"""The checks of training records against a recorder in memory, which has one fault at a time."""

import json
from itertools import count
from typing import Any

import httpx2
import pytest

from rollmesh.conformance import (
    CHECKS,
    NO_IDS,
    NO_TEXT,
    OTHER_IDS,
    Result,
    Server,
    Verdict,
    run_checks,
)

RECORDS = [one for one in CHECKS if one.protocol == "training"]
NAMES = [one.name.rpartition(".")[2] for one in RECORDS]


class Recorder:
    """A server whose ids are words. It has a row for each request, and labels splits and cuts."""

    def __init__(self, *faults: str) -> None:
        self.faults = faults
        self.words: dict[str, int] = {}
        self.samples = count()
        self.rows: list[dict[str, Any]] = []
        self.calls: list[dict[str, Any]] = []
        self.replays: dict[str, dict[str, Any]] = {}
        self.version = 0
        self.sampling: dict[str, Any] = {}

    def __call__(self, request: httpx2.Request) -> httpx2.Response:
        path = request.url.path
        if path.endswith("/version"):
            self.version += "one-version" not in self.faults
            return httpx2.Response(501 if "no-versions" in self.faults else 200, json={})
        if request.method == "DELETE":
            record: dict[str, Any] = {"rows": self.rows}
            if "no-log" not in self.faults:
                record["calls"] = self.calls
            return httpx2.Response(200, json=record)
        if path.endswith("/sessions"):
            self.rows, self.calls = [], []
            self.sampling = json.loads(request.content)["sampling"]
            opened = {"id": "s", "base_url": "http://server/s/v1/", "key": "secret"}
            return httpx2.Response(200, json=opened)
        assert path == "/s/v1/chat/completions"
        assert request.headers["authorization"] == "Bearer secret"
        body = json.loads(request.content)
        assert self.sampling.items() <= body.items()
        return self.answer(body, request.headers.get("idempotency-key", ""))

    def answer(self, body: dict[str, Any], key: str) -> httpx2.Response:
        if body.get("n", 1) > 1 and "no-choices" in self.faults:
            return httpx2.Response(400, json={})
        if key and key in self.replays and "resamples" not in self.faults:
            return httpx2.Response(200, json=self.replays[key])
        asked = body["messages"][-1]["content"]
        shown = not asked.endswith(NO_IDS) or "shows-ids" in self.faults
        if not shown and "refuses" in self.faults:
            return httpx2.Response(502, json={})
        prompt = self.prompt(body)
        choices = [self.choice(body, asked) for _ in range(body.get("n", 1))]
        sampled = [ids if shown else None for ids, _, _ in choices]
        self.calls.append({"prompt": prompt, "sampled": sampled})
        for at, (ids, _, finish) in enumerate(choices):
            self.record(prompt, ids if shown else [], finish, at)
        answered = [
            {
                "index": at,
                "finish_reason": finish,
                "message": {"role": "assistant", "content": text},
            }
            for at, (_, text, finish) in enumerate(choices)
        ]
        self.replays[key] = {"id": f"a{next(self.samples)}", "choices": answered}
        return httpx2.Response(200, json=self.replays[key])

    def prompt(self, body: dict[str, Any]) -> list[int]:
        text = "".join(
            f" <{one['role']}> {self.retold(one)} <end>" if one["content"] else " <assistant> <end>"
            for one in body["messages"]
        )
        glue = " <glue>" if body.get("chat_template_kwargs") else ""
        return self.ids(f"{text} <assistant>{glue}")

    def retold(self, message: dict[str, Any]) -> str:
        drifts = "drifts" in self.faults and message["role"] == "assistant"
        return f"{message['content']}~" if drifts else str(message["content"])

    def choice(self, body: dict[str, Any], asked: str) -> tuple[list[int], str, str]:
        name = "same" if body.get("temperature") == 0 else f"number {next(self.samples)}"
        text = "" if asked.endswith(NO_TEXT) else f"It is 42, I am sure. Sample {name}"
        most = 192 if "never-cuts" in self.faults else body["max_tokens"]
        words = [*text.split(), "<end>"][:most]
        if (stop := body.get("stop")) and stop[0] in text:
            return self.ids(text), text.partition(stop[0])[0], "stop-string"
        finish = "stop" if words[-1] == "<end>" else "length"
        other = asked.endswith(OTHER_IDS) and "same-ids" not in self.faults
        return (
            self.ids(" ".join(f"{w}+" if other else w for w in words)),
            " ".join(w for w in words if w != "<end>"),
            finish,
        )

    def ids(self, text: str) -> list[int]:
        return [self.words.setdefault(word, len(self.words)) for word in text.split()]

    def record(self, prompt: list[int], ids: list[int], finish: str, choice: int) -> None:
        if self.lost(finish, ids, choice):
            return
        earlier = [row["token_ids"] for row in self.rows]
        continues = not earlier or any(prompt[: len(one)] == one for one in earlier)
        labels = ([] if continues else ["split"]) + ([] if finish == "stop" else [finish])
        if not ids:
            labels.append("no ids")
        context = [*prompt[:-1], 0] if "shifts" in self.faults else prompt
        span = {
            "start": len(context), "end": len(context) + len(ids), "trained": True,
            "labels": [] if "unlabelled" in self.faults else labels, "version": str(self.version),
            "logprobs": [-0.5] * (len(ids) - ("no-logprobs" in self.faults)),
        }  # fmt: skip
        row = {"token_ids": context + ids, "sampled": [span]}
        if "leaves" in self.faults:
            begun = [
                one for one in self.rows if one["token_ids"] == prompt[: len(one["token_ids"])]
            ]
            row["sampled"] = [span, *(each for one in begun for each in one["sampled"])]
        self.rows += [row] * (2 if "twice" in self.faults else 1)

    def lost(self, finish: str, ids: list[int], choice: int) -> bool:
        return (
            ("loses-cut" in self.faults and finish == "length")
            or ("loses-empty" in self.faults and len(ids) == 1)
            or ("first-choice" in self.faults and choice > 0)
            or ("first-turn" in self.faults and bool(self.rows))
            or ("loses-branches" in self.faults and len(self.rows) > 1)
        )


async def results(*faults: str, only: str = "", capture: str = "http://capture") -> list[Result]:
    client = httpx2.AsyncClient(
        transport=httpx2.MockTransport(Recorder(*faults)), base_url="http://server/v1"
    )
    tested = Server(client, "policy", capture_url=capture)
    checks = [one for one in RECORDS if one.name.rpartition(".")[2] == only or not only]
    return await run_checks(tested, checks, (), 5)


async def test_a_recorder_that_labels_splits_and_cuts_passes() -> None:
    found = await results()
    assert {one.check.name: one.detail for one in found if one.verdict != Verdict.PASSED} == {}
    assert len(found) == len(RECORDS)


PLAIN = "trained as any other, and no label tells it apart"
OWN = "begins a sequence of its own"
FAULTS = [
    ("one-sequence", "drifts", f"answer 2 {OWN}"),
    ("one-sequence", "no-logprobs", "another number of log-probabilities"),
    ("one-sequence", "twice", "answer 1 is trained 2 times"),
    ("one-sequence", "shifts", "answer 1 is not in the record as it was sampled"),
    ("missing-ids", "unlabelled", "no label tells the answer without ids apart"),
    ("cut-answers", "loses-cut", "answer 1 is not in the record"),
    ("cut-answers", "first-turn", "answer 2 is not in the record"),
    ("retry", "resamples unlabelled", f"the first attempt is {PLAIN}"),
    ("retry", "resamples first-turn", "answer 2 is not in the record"),
    ("edited-history", "unlabelled", f"answer 3 {OWN}, and no label"),
    ("shared-answer", "leaves", "answer 1 is trained 3 times"),
    ("shared-answer", "loses-branches", "answer 3 is not in the record"),
    ("template-glue", "unlabelled", f"answer 2 {OWN}, and no label"),
    ("other-ids", "unlabelled", f"answer 2 {OWN}, and no label"),
    ("stop-string", "unlabelled", f"answer 2 {OWN}, and no label"),
    ("stop-string", "shifts", "answer 1 is not in the record"),
    ("empty-answer", "loses-empty", "answer 2 is not in the record"),
    ("dropped-cut-answer", "unlabelled", f"answer that was thrown away is {PLAIN}"),
    ("choices", "first-choice", "answer 2 is not in the record"),
    ("versions", "one-version", "both turns have the version ['0']"),
]


@pytest.mark.parametrize(("name", "fault", "seen"), FAULTS)
async def test_a_record_with_a_fault_is_found(name: str, fault: str, seen: str) -> None:
    (found,) = await results(*fault.split(), only=name)
    assert found.verdict == Verdict.FAILED
    assert seen in found.detail


def test_every_check_of_records_has_a_fault() -> None:
    assert {name for name, _, _ in FAULTS} == set(NAMES)


@pytest.mark.parametrize(
    ("name", "fault", "verdict"),
    [
        ("missing-ids", "refuses", Verdict.PASSED),
        ("missing-ids", "shows-ids", Verdict.NOT_SEEN),
        ("choices", "no-choices", Verdict.PASSED),
        ("versions", "no-versions", Verdict.NOT_SEEN),
        ("one-sequence", "no-log", Verdict.NOT_SEEN),
        ("retry", "resamples", Verdict.FAILED),
        ("cut-answers", "never-cuts", Verdict.NOT_SEEN),
        ("dropped-cut-answer", "never-cuts", Verdict.NOT_SEEN),
        ("other-ids", "same-ids", Verdict.NOT_SEEN),
    ],
)
async def test_a_refusal_passes_and_no_occasion_is_no_fault(
    name: str, fault: str, verdict: Verdict
) -> None:
    (found,) = await results(fault, only=name)
    assert found.verdict == verdict, found.detail


async def test_without_a_capture_the_checks_are_one_skipped_row() -> None:
    (found,) = await results(capture="")
    assert (found.check.name, found.verdict) == ("training.served", Verdict.SKIPPED)
