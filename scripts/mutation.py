"""Mutation tests of the cores: mutmut changes one expression, and the core's tests must notice.

python -m scripts.mutation [CORE ...] [--sample N] [--processes N]

`[tool.mutation]` in pyproject.toml names the cores, their modules and the tests that guard them.
Each core is tested on a sample: the mutants whose names have the smallest hashes, so that an edit
changes the sample only where it changes the code. Survivors must be in `tests/mutants.toml`, with
the reason why no test should notice them.

A core is tested in a folder of its own, `build/mutation/CORE`, because mutmut needs one source
root and ours are several. A mutant that was killed there is not run again until its function
changes.
"""

import argparse
import configparser
import contextlib
import hashlib
import re
import shutil
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mutmut.configuration import reset_config
from mutmut.mutation.data import SourceFileMutationData
from mutmut.mutation.diff_apply import get_diff_for_mutant
from mutmut.mutation.file_mutation import mutate_file_contents
from mutmut.stats import status_by_exit_code
from mutmut.utils.format_utils import get_mutant_name

ROOT = Path(__file__).parents[1]
ARGUED = ROOT / "tests/mutants.toml"
_MUTMUT = str(Path(sys.executable).with_name("mutmut"))
# Only whether a test fails counts: mutmut takes a report that cannot be printed for a timeout, and
# collecting garbage at the end of a session takes a fifth of a mutant's time.
_PYTEST = ("-p", "no:cacheprovider", "-p", "no:unraisableexception", "--tb=no", "-rN")
# Its environment is that of `make test-fast`, so it leaves out the same tests.
_PYTEST += ("--hypothesis-profile=mutation", "-m", "not long and not vllm")
_KILLED = frozenset({"killed", "timeout", "segfault"})
# mutmut says "timeout" of tests that pytest could not even begin, which shows nothing.
_NOT_RUN = 255
_PATIENCE = 8
_BESIDE = ("examples", "docs")
"""Folders that tests read."""
_MUTANT = re.compile(r"(?P<module>.+)\.x[_ǁ](?P<path>\w+)__mutmut_\d+")


@dataclass(frozen=True, slots=True)
class Argument:
    """A reason why a mutant may survive."""

    function: str
    """Qualified name, such as "rollmesh.router.leases.LeaseTable.acquire"."""
    line: str
    """The mutated code, see `change_of`."""


@dataclass(frozen=True, slots=True)
class Core:
    """Modules that decide, and the tests that guard them."""

    name: str
    package: Path
    """The package that contains the modules, from the repository's root."""
    modules: tuple[str, ...]
    """Globs of the modules, from the package."""
    tests: tuple[str, ...]
    """Files and folders of tests, from the repository's root."""
    settings: dict[str, Any]
    """`[tool.mutation]`, without the cores."""

    @property
    def folder(self) -> Path:
        """Where the core is tested."""
        return ROOT / "build/mutation" / self.name

    @property
    def source(self) -> Path:
        """The package below `folder`."""
        return Path("src/rollmesh") / self.package.name

    def stage(self) -> None:
        """Copies the package, the tests and what they need. Keeps what mutmut knows already."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for stale in (
            "src",
            "tests",
            *_BESIDE,
            *(f"mutants/{name}" for name in ("tests", *_BESIDE)),
        ):
            shutil.rmtree(self.folder / stale, ignore_errors=True)
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / self.package, self.folder / self.source, ignore=ignored)
        for name in ("tests", *_BESIDE):
            shutil.copytree(ROOT / name, self.folder / name, ignore=ignored)
        shutil.copy2(ROOT / "pyproject.toml", self.folder)
        self._configure(self.settings["timeout_factor"])

    def _configure(self, timeout_factor: float) -> None:
        config = configparser.ConfigParser(interpolation=None)
        config["mutmut"] = {
            "source_paths": "src",
            "only_mutate": _lines(map(str, self._paths())),
            "do_not_mutate_patterns": _lines(self.settings["do_not_mutate_patterns"]),
            "also_copy": _lines(_BESIDE),
            "pytest_add_cli_args": _lines(_PYTEST),
            "pytest_add_cli_args_test_selection": _lines(self.tests),
            "process_isolation": "forkserver",
            "timeout_constant": "5",
            "timeout_multiplier": str(timeout_factor),
            "use_git_change_detection": "false",
        }
        with (self.folder / "setup.cfg").open("w") as file:
            config.write(file)

    def mutants(self) -> list[str]:
        """Returns the names of all mutants, in the order in which a sample takes them."""
        made: list[str] = []
        with self._mutmut():
            for path in self._paths():
                names = mutate_file_contents(str(path), path.read_text()).mutant_names
                made += [get_mutant_name(path, name) for name in names]
        told = [name for name in made if "ǁ__repr__" not in name]  # for people who debug
        return sorted(told, key=lambda name: hashlib.sha256(name.encode()).digest())

    def results(self) -> dict[str, str]:
        """Returns what became of each mutant: "killed", "survived", "not checked" ..."""
        found: dict[str, str] = {}
        with self._mutmut():
            for path in self._paths():
                data = SourceFileMutationData(path=path)
                data.load()
                found |= {
                    name: "not run" if code == _NOT_RUN else status_by_exit_code[code]
                    for name, code in data.exit_code_by_key.items()
                }
        return found

    def run(self, names: Sequence[str], processes: int) -> None:
        """Runs the tests on mutants. Those that were killed before are not run again.

        If pytest's arguments changed, mutmut forgets all results when it starts: what it has not
        checked is run once more. Other work slows tests too: a timeout counts if it is repeated
        with more patience.
        """
        timeout_factor = self.settings["timeout_factor"]
        known = self.results()
        self._run([one for one in names if known.get(one) != "killed"], processes, timeout_factor)
        for status, patience in (("not checked", 1), ("timeout", _PATIENCE)):
            results = self.results()
            left = [name for name in names if results[name] == status]
            self._run(left, processes, patience * timeout_factor)

    def _run(self, names: Sequence[str], processes: int, timeout_factor: float) -> None:
        if not names:  # mutmut would run all
            return
        self._configure(timeout_factor)
        command = [_MUTMUT, "run", "--max-children", str(processes), *names]
        log = self.folder / "log.txt"
        with log.open("w") as file:
            done = subprocess.run(command, cwd=self.folder, stdout=file, stderr=file, check=False)
        if done.returncode:
            sys.exit(f"mutation: mutmut failed; see {log}")

    def change_of(self, name: str) -> str:
        """Returns the mutated code in one line: what was added, or what was removed after a "-"."""
        with self._mutmut():
            diff = get_diff_for_mutant(name)
        parts: dict[str, list[str]] = {"+": [], "-": []}
        for line in diff.splitlines():
            if line[:1] in parts and not line.startswith(("+++", "---")):
                parts[line[0]].append(line[1:].strip())
        return " ".join(parts["+"]) or "- " + " ".join(parts["-"])

    def _paths(self) -> list[Path]:
        """Returns the modules to mutate, from `folder`."""
        source = self.folder / self.source
        found = {path for glob in self.modules for path in source.glob(glob)}
        return sorted(path.relative_to(self.folder) for path in found)

    @contextlib.contextmanager
    def _mutmut(self) -> Iterator[None]:
        """Enters the folder, where mutmut's functions work. They read its settings once."""
        with contextlib.chdir(self.folder):
            reset_config()
            yield


def function_of(name: str) -> str:
    """Returns the qualified name of a mutant's function."""
    match = _MUTANT.fullmatch(name)
    assert match, name
    return f"{match['module']}.{match['path'].replace('ǁ', '.')}"


def read_arguments(path: Path = ARGUED) -> dict[Argument, str]:
    """Returns the reasons why mutants may survive."""
    found = tomllib.loads(path.read_text())["argued"]
    return {
        Argument(one["function"], line): one["reason"] for one in found for line in one["mutants"]
    }


def check(core: Core, sample: int, processes: int) -> list[str]:
    """Tests the mutants of a core.

    Args:
        core: The core.
        sample: How many mutants are tested, at most.
        processes: Processes that test at the same time.

    Returns:
        The survivors without an argument.
    """
    core.stage()
    every = core.mutants()
    chosen = every[:sample]
    print(f"{core.name}: {len(every)} mutants, {len(chosen)} of them tested", flush=True)
    core.run(chosen, processes)
    results = core.results()
    arguments, argued, survivors = read_arguments(), 0, []
    for name in sorted(chosen):
        if results[name] in _KILLED:
            continue
        change = Argument(function_of(name), core.change_of(name))
        if change in arguments:
            argued += 1
            continue
        survivors.append(name)
        print(f"\n{name} ({results[name]})\n    {change.function}\n    {change.line}", flush=True)
    counts = Counter(results[name] for name in chosen)
    killed = sum(counts[status] for status in _KILLED)
    print(
        f"{core.name}: {killed} of {len(chosen)} mutants killed ({killed / len(chosen):.1%}), "
        f"{argued} argued, {len(survivors)} survived",
        flush=True,
    )
    return survivors


def cores() -> dict[str, Core]:
    """Returns the cores by name."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mutation"]
    return {
        name: Core(name, Path(one["package"]), tuple(one["modules"]), tuple(one["tests"]), settings)
        for name, one in settings["cores"].items()
    }


def main() -> None:
    """Tests the cores that are named, or all of them. Survivors without an argument fail."""
    known = cores()
    parser = argparse.ArgumentParser(prog="python -m scripts.mutation")
    parser.add_argument("cores", nargs="*", choices=[*known, []], help="default: all")
    parser.add_argument("--sample", type=int, help="mutants of each core, instead of the default")
    parser.add_argument("--processes", type=int, default=1)
    given = parser.parse_args()
    survivors = [
        name
        for core in (known[name] for name in given.cores or known)
        for name in check(core, given.sample or core.settings["sample"], given.processes)
    ]
    if survivors:
        sys.exit(
            f"mutation: {len(survivors)} survivors: write tests, or argue them in {ARGUED.name}"
        )


def _lines(values: Any) -> str:
    return "\n" + "\n".join(values) + "\n"


if __name__ == "__main__":
    main()
