"""Generates docs/errors.md from the error classes.

    python -m scripts.pages.errors > docs/errors.md

What an error means is its class's docstring; what to do about it is in advice.toml.
"""

import inspect
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import rollmesh.batches.errors
import rollmesh.client.weights.push  # noqa: F401 - defines errors
from rollmesh.runtime.errors import RemoteError, RollmeshError
from rollmesh.sidecar.errors import to_http

ADVICE: dict[str, str] = tomllib.loads(Path(__file__).with_name("advice.toml").read_text("utf-8"))
_UNEXPECTED = "Something unexpected failed inside a service."
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


def page() -> str:
    """Returns the page."""
    return _INTRO + "".join(_row(reason, one) for reason, one in classes().items())


def _row(reason: str, one: type[RollmeshError]) -> str:
    error = one.__new__(one)
    RollmeshError.__init__(error, "")
    code, status = one.code, ""
    if isinstance(error, RemoteError):
        code = "any"
    elif one.__module__.startswith(("rollmesh.runtime", "rollmesh.sidecar")):
        status = str(_http_status(error))
    meaning = _UNEXPECTED if one is RollmeshError else _first_paragraph(one)
    return f"| `{reason}` | `{code}` | {status} | {meaning} | {ADVICE[reason]} |\n"


def _first_paragraph(one: type[RollmeshError]) -> str:
    return (inspect.getdoc(one) or "").split("\n\n")[0].replace("\n", " ")


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
