"""`--progress=FILE`: where a run is. A line when a test starts and one when it ended, at once."""

import time
from collections import defaultdict
from collections.abc import Generator
from multiprocessing import forkserver
from pathlib import Path
from typing import TextIO

import psutil
import pytest

_CPU = "cpu_s"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--progress", metavar="FILE", help="writes which test starts and ends when")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Clock(), "progress-clock")
    path = config.getoption("--progress")
    if path and not hasattr(config, "workerinput"):  # xdist's controller hears of every test
        config.pluginmanager.register(_Progress(config.rootpath / str(path)), "progress")


class _Clock:
    """Notes the CPU time of a test, with that of the processes that it has waited for."""

    def __init__(self) -> None:
        self._before = _cpu_s()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        now = _cpu_s()
        report.user_properties = [*report.user_properties, (_CPU, now - self._before)]
        self._before = now
        return report


class _Progress:
    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: TextIO = path.open("w", encoding="utf-8")
        self._wall: defaultdict[str, float] = defaultdict(float)
        self._cpu: defaultdict[str, float] = defaultdict(float)
        self._ended = 0

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write(f"start {nodeid}")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test = report.nodeid
        self._wall[test] += report.duration
        self._cpu[test] += sum(float(str(s)) for name, s in report.user_properties if name == _CPU)
        if report.failed or report.skipped:
            self._write(f"{report.outcome} {report.when} {test}")
        if report.when == "teardown":
            self._ended += 1
            wall, cpu = self._wall.pop(test), self._cpu.pop(test)
            self._write(f"end {self._ended} {wall:.1f} s, CPU {cpu:.1f} s {test}")

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        self._write(f"finished with status {int(exitstatus)}")

    def pytest_unconfigure(self) -> None:
        self._file.close()

    def _write(self, line: str) -> None:
        print(time.strftime("%H:%M:%S"), line, file=self._file, flush=True)


def _cpu_s() -> float:
    """Of this process and all that it has waited for. The fork server waits for what it forked."""
    times = [psutil.Process().cpu_times()]
    server = getattr(forkserver._forkserver, "_forkserver_pid", None)  # noqa: SLF001 - no other name
    if server is not None:
        times.append(psutil.Process(server).cpu_times())
    return float(sum(t.user + t.system + t.children_user + t.children_system for t in times))
