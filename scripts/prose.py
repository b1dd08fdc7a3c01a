"""Counts constructions that the documentation of good libraries does not have, and holds ceilings.

    python -m scripts.prose            prints the rate of each kind of text, fails above a ceiling
    python -m scripts.prose --list=docs:relative    prints each place

A rate is a number per 1,000 words. Ceilings only fall: lower them when a text improves.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
GENERATED = {
    "configuration.md",
    "conformance.md",
    "errors.md",
    "parsers.md",
    "peers.md",
    "templates.md",
}

RELATIVE = re.compile(
    r"\b(?:[Ww]hat (?:is|was|are|were|has|had|an?|the|it|they|its|comes|came|becomes|became|others"
    r"|only|each|one|this|that|nobody|no|some|makes|takes|finds|runs|waits|asks|follows|tells"
    r"|happens|ends|follow|counts|can|may|must|decides|determines|identifies|says|to|somebody"
    r"|agents|engines|gateways|clients|trainers|routers|callers|peers|you)"
    r"|[Ww]ho(?:ever)? (?:is|was|has|calls|makes|may|opened|asks|waits|reads|had|can|shows|writes"
    r"|starts|holds))\b"
)
"""A free relative: "what a client sends" instead of "a request", "who asks" for "the caller"."""
PRONOUN = re.compile(
    r"\b(?:[Oo]ne|[Tt]hose|[Oo]thers|[Tt]hat|[Ss]ome|[Aa]ll) (?:that|which|of which|of whom|whose)"
    r"\b|\b[Tt]h(?:ose|at) of\b"
)
"""A pronoun as a head: "those that wait" instead of "waiting requests"."""
SEMICOLON = re.compile(";")

CONSTRUCTIONS = {"relative": RELATIVE, "pronoun": PRONOUN, "semicolon": SEMICOLON}
CEILINGS = {
    "docs": {"relative": 0.4, "pronoun": 1.2, "semicolon": 1.6},
    "docstrings": {"relative": 0.2, "pronoun": 1.3, "semicolon": 0.2},
    "comments": {"relative": 1.1, "pronoun": 1.8, "semicolon": 0.2},
    "protos": {"relative": 0.3, "pronoun": 2.1, "semicolon": 0.0},
    "test names": {"relative": 0.1, "pronoun": 1.2, "semicolon": 0.0},
}

Place = tuple[Path, int, str]
"""A file, the first line of a text in it, from 1, and the text."""


def main(arguments: list[str]) -> int:
    """Prints rates, or the places of one construction. Returns the exit code."""
    wanted = next((one.removeprefix("--list=") for one in arguments if "--list=" in one), "")
    if wanted:
        kind, _, construction = wanted.partition(":")
        for place in _places(kind, CONSTRUCTIONS[construction]):
            sys.stdout.write(f"{place}\n")
        return 0
    is_above = False
    for kind, ceilings in CEILINGS.items():
        texts = [text for _, _, text in TEXTS[kind]()]
        words = sum(len(re.findall(r"[A-Za-z']+", text)) for text in texts)
        for construction, ceiling in ceilings.items():
            pattern = CONSTRUCTIONS[construction]
            rate = 1000 * sum(len(pattern.findall(text)) for text in texts) / max(words, 1)
            verdict = "" if rate <= ceiling else "  ABOVE"
            is_above |= bool(verdict)
            line = f"{kind:12}{construction:12}{rate:6.1f}  at most {ceiling:.1f}{verdict}\n"
            sys.stdout.write(line)
    if is_above:
        sys.stdout.write(
            "Write it with a noun, or as two sentences. "
            "`python -m scripts.prose --list=KIND:CONSTRUCTION` prints the places.\n"
        )
    return int(is_above)


def _places(kind: str, pattern: re.Pattern[str]) -> Iterator[str]:
    for path, first, text in TEXTS[kind]():
        for number, line in enumerate(text.splitlines(), first):
            if pattern.search(line):
                yield f"{path.relative_to(ROOT)}:{number}: {line.strip()}"


def _docs() -> Iterator[Place]:
    for path in [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md"]:
        if path.name not in GENERATED:
            yield path, 1, path.read_text()


def _docstrings() -> Iterator[Place]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for path in _sources():
        for node in ast.walk(ast.parse(path.read_text())):
            for one in node.body if isinstance(node, kinds) else ():
                value = one.value if isinstance(one, ast.Expr) else None
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    yield path, value.lineno, value.value


def _comments() -> Iterator[Place]:
    for path in _sources():
        for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
            text = token.string.lstrip("# ")
            if token.type == tokenize.COMMENT and not text.startswith(("noqa", "type:", "pyright")):
                yield path, token.start[0], text


def _protos() -> Iterator[Place]:
    for path in sorted((ROOT / "protos/rollmesh").rglob("*.proto")):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if "//" in line:
                yield path, number, line.split("//", 1)[1]


def _test_names() -> Iterator[Place]:
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
                and node.name[:5] == "test_"
            ):
                yield path, node.lineno, node.name.replace("_", " ")


def _sources() -> Iterator[Path]:
    for folder in ("services", "clients"):
        yield from sorted((ROOT / folder).rglob("*.py"))


TEXTS = {
    "docs": _docs,
    "docstrings": _docstrings,
    "comments": _comments,
    "protos": _protos,
    "test names": _test_names,
}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
