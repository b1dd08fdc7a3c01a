"""Generates docs/errors.md.

    python -m scripts.pages.errors > docs/errors.md

What an error means and what to do about it are the two paragraphs of its comment in errors.proto.
For errors of the sidecar and the SDK, which are not part of the contract, they are those of the
class's docstring.
"""

import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import rollmesh.batches.rows
import rollmesh.client.evaluations
import rollmesh.client.weights  # noqa: F401 - defines errors
from rollmesh.runtime.errors import RemoteError, RollmeshError
from rollmesh.sidecar import to_http

PROTO = Path(__file__).parents[2] / "protos" / "rollmesh" / "v1" / "errors.proto"
_COMMENTED = re.compile(r"((?:  //.*\n)+)  ERROR_REASON_(\w+) = [1-9]")
_PAGE = re.compile(r"docs/([\w-]+\.md)(#[\w-]+)?")
_INTRO = """# Errors

Every error carries a *reason*. Over gRPC it is the `reason` of a `google.rpc.ErrorInfo` (domain
`rollmesh`); over HTTP it is `error.code` in lower case; in Python it is the class. The message
names the field, the problem and the remedy. `RetryInfo`, or the header `retry-after`, is present
where trying again helps.

The HTTP status is the one that the sidecar sends, where the error can reach an agent. 429 and 503
carry `retry-after`; OpenAI's SDKs wait and try again by themselves.

| reason | gRPC | HTTP | what it means | what to do |
|---|---|---|---|---|
"""


def classes() -> dict[str, type[RollmeshError]]:
    """Returns all error classes by reason."""
    return dict(sorted((one.reason, one) for one in subclasses(RollmeshError)))


def contract(text: str) -> Mapping[str, list[str]]:
    """Returns the paragraphs of each reason's comment in errors.proto. The first has no code."""
    found: dict[str, list[str]] = {}
    for comment, reason in _COMMENTED.findall(text):
        lines = [line.strip().removeprefix("//").strip() for line in comment.splitlines()]
        meaning, *rest = "\n".join(lines).split("\n\n")
        paragraphs = [meaning.partition(". ")[2], *rest]
        found[reason] = [one.replace("\n", " ").strip() for one in paragraphs]
    return found


def page() -> str:
    """Returns the page."""
    texts = {reason: _documented(one) for reason, one in classes().items()}
    texts |= contract(PROTO.read_text("utf-8"))
    return _INTRO + "".join(_row(one, *texts[reason]) for reason, one in classes().items())


def _documented(one: type[RollmeshError]) -> list[str]:
    """Returns the first two paragraphs of a class's docstring."""
    paragraphs = (inspect.getdoc(one) or "").split("\n\n")
    return [paragraph.replace("\n", " ") for paragraph in paragraphs[:2]]


def _row(one: type[RollmeshError], meaning: str, remedy: str) -> str:
    error = one.__new__(one)
    RollmeshError.__init__(error, "")
    code, status = one.code, ""
    if isinstance(error, RemoteError):
        code = "any"
    elif one.__module__.startswith(("rollmesh.runtime", "rollmesh.sidecar")):
        status = str(_http_status(error))
    cells = (f"`{one.reason}`", f"`{code}`", status, meaning, _linked(remedy))
    return f"| {' | '.join(cells)} |\n"


def _linked(text: str) -> str:
    return _PAGE.sub(r"[\1](\1\2)", text)


def _http_status(error: RollmeshError) -> int:
    error.__dict__.setdefault("field", "")
    return to_http(error).status


def subclasses(root: type[RollmeshError]) -> Iterator[type[RollmeshError]]:
    """Yields an error class and all that derive from it."""
    yield root
    for child in root.__subclasses__():
        yield from subclasses(child)


if __name__ == "__main__":
    sys.stdout.write(page())
