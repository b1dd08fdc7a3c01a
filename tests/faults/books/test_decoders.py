"""Decoders of a peer's bytes: typed errors, the same whole and in pieces, and nothing else."""

import json
import logging
import random
import subprocess
from pathlib import Path

import pytest

from benchmarks.fuzz.decoders.feeding import FOUND, Feeder
from benchmarks.fuzz.decoders.table import TARGETS
from benchmarks.fuzz.decoders.target import Target, any_bytes, expect, framed, frames
from benchmarks.fuzz.findings import Findings
from tests.paths import ROOT

GUIDED = ROOT / ".venv-fast"


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL + 1)


def kept(folder: Path) -> str:
    return "".join(path.read_text() for path in folder.glob("findings*"))


def test_each_target_takes_its_seeds_and_earlier_findings(tmp_path: Path) -> None:
    feeder = Feeder(TARGETS, Findings(tmp_path / "findings"))
    for at, data in feeder.inputs():
        feeder.feed(at, data)
    assert kept(tmp_path) == ""


def test_each_finding_belongs_to_a_target() -> None:
    names = {json.loads(line)["target"] for line in FOUND.read_text().splitlines()}
    assert names <= {target.name for target in TARGETS}


def test_names_of_targets_are_unique_and_fit_a_byte() -> None:
    names = [target.name for target in TARGETS]
    assert len(set(names)) == len(names) < 256


def test_seconds_of_changed_inputs_find_nothing(tmp_path: Path) -> None:
    feeder, rng = Feeder(TARGETS, Findings(tmp_path / "findings")), random.Random(13)
    for _ in range(8_000):
        feeder.feed(*feeder.made(rng))
    assert kept(tmp_path) == ""


def test_an_untyped_error_and_a_broken_property_are_findings(tmp_path: Path) -> None:
    def broken(data: bytes) -> None:
        expect(data != b"a", "is a")
        raise KeyError(data)

    findings = Findings(tmp_path / "findings")
    feeder = Feeder([Target("broken", broken, lambda: [b"a", b"b"], any_bytes)], findings)
    for at, data in feeder.inputs():
        feeder.feed(at, data)
    assert findings.counts["untyped_errors"] == 2
    assert "is a" in kept(tmp_path)
    assert "KeyError" in kept(tmp_path)


def test_frames_are_read_as_they_were_written() -> None:
    assert frames(framed([b"", b"ab", b"c"])) == [b"", b"ab", b"c"]
    assert frames(framed([b"abc"])[:-1]) == [b"ab"]


@pytest.mark.long
@pytest.mark.skipif(not (GUIDED / ".ready").exists(), reason="make .venv-fast/.ready")
def test_half_a_minute_guided_by_coverage_finds_nothing(tmp_path: Path) -> None:
    files = [tmp_path / "findings", tmp_path / "counts"]
    module = "benchmarks.fuzz.decoders.guided"
    command = [str(GUIDED / "bin" / "python"), "-m", module, *map(str, files), "13"]
    said = subprocess.run(
        [*command, "--seconds=30"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert kept(tmp_path) == ""
    assert json.loads(files[1].read_text())["decoder_inputs"] > 1_000
    assert "NEW" in said.stderr  # coverage was counted
