"""Results as a table for people and as JUnit XML."""

import textwrap
from collections import Counter
from collections.abc import Sequence
from xml.etree import ElementTree as ET

from rollmesh.conformance.checks import Result, Verdict

_WIDTH = 100
_JUNIT = {Verdict.FAILED: "failure", Verdict.NOT_SEEN: "skipped", Verdict.SKIPPED: "skipped"}


def table(results: Sequence[Result]) -> str:
    """Returns one line for each check. A failed one says why, and which clients break."""
    width = max((len(one.check.name) for one in results), default=0)
    lines: list[str] = []
    for one in results:
        lines.append(f"{one.verdict:<9} {one.check.name:<{width}}  {one.check.what}")
        if one.verdict == Verdict.FAILED:
            lines += _indented("seen:   ", one.detail) + _indented("breaks: ", one.check.breaks)
        elif one.detail:
            lines += _indented("why:    ", one.detail)
    counts = Counter(one.verdict for one in results)
    totals = ", ".join(f"{counts[one]} {one.lower()}" for one in Verdict if counts[one])
    return "\n".join([*lines, "", totals or "nothing checked"])


def _indented(label: str, text: str) -> list[str]:
    indent = " " * 10
    return textwrap.wrap(
        text, _WIDTH, initial_indent=indent + label, subsequent_indent=indent + " " * len(label)
    )


def junit(results: Sequence[Result]) -> bytes:
    """Returns the results as one JUnit test suite. `classname` is the family of the check."""
    suite = ET.Element("testsuite", name="rollmesh-conformance", tests=str(len(results)))
    suite.set("failures", str(sum(one.verdict == Verdict.FAILED for one in results)))
    suite.set("errors", "0")
    suite.set("skipped", str(sum(_JUNIT.get(one.verdict) == "skipped" for one in results)))
    suite.set("time", f"{sum(one.seconds for one in results):.3f}")
    for one in results:
        family, _, name = one.check.name.rpartition(".")
        case = ET.SubElement(suite, "testcase", classname=family, name=name)
        case.set("time", f"{one.seconds:.3f}")
        if (kind := _JUNIT.get(one.verdict)) is not None:
            found = ET.SubElement(case, kind, message=_printable(one.detail))
            found.text = f"{one.check.what} {one.check.breaks}"
    root = ET.Element("testsuites")
    root.append(suite)
    ET.indent(root)
    return bytes(ET.tostring(root, encoding="utf-8", xml_declaration=True))


def _printable(text: str) -> str:
    """Returns text without characters that XML cannot hold: details quote servers."""
    return "".join(one if one.isprintable() else "\ufffd" for one in text)
