"""Answers as models write them and spoil them, made from seeds, in every format of tool calls."""

import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tests.chat.parsing.writers import (
    TAGS,
    WRITERS,
    Arguments,
    Call,
    Writer,
)

_WORDS = (
    "I will look.",
    "So: 2 < 3.",
    "Let me see;",
    "Gut, das mache ich.",
    "\u597d\u7684",
    "a & b",
)
_STRINGS = (
    *("", "x", " two words ", "caf\u00e9 \u2603 \U0001f600", 'say "yes"', "back\\slash", "a\nb\n"),
    *("{", "}}", "[1, 2", "a<b>c</b>", "7", "true", "'", "http://x.y/z?a=1&b=2", "\t", "\\u00e9"),
)


@dataclass(frozen=True)
class Output:
    """One answer."""

    kind: str
    text: str
    meant: list[Call] | None
    """The calls in it, where it is whole. None where it is spoiled."""


class Maker:
    """Makes answers in one format from one seed."""

    def __init__(self, writer: Writer, seed: int) -> None:
        self.writer = writer
        self.rng = random.Random(f"{writer.name} {seed}")

    def arguments(self) -> Arguments:
        """Arguments that fit the schema of the tool `f`."""
        rng = self.rng
        kinds: dict[str, Callable[[], Any]] = {
            "n": lambda: rng.randrange(-5, 1000),
            "x": lambda: rng.choice([None, 1.5, -2.25e-3, 3]),
            "s": lambda: rng.choice(_STRINGS),
            "b": lambda: rng.random() < 0.5,
            "l": lambda: [rng.choice(_STRINGS), [rng.randrange(9)], {"k": None}][
                : rng.randrange(4)
            ],
            "o": lambda: rng.choice([None, {}, {"a": {"b": [1, {"c": rng.choice(_STRINGS)}]}}]),
        }
        keys = rng.sample(sorted(kinds), rng.randrange(1, 5))
        return {key: kinds[key]() for key in keys}

    def calls(self, count: int) -> list[Call]:
        return [
            ("f", self.arguments()) if self.rng.random() < 0.8 else ("g", {}) for _ in range(count)
        ]

    def words(self) -> str:
        return self.writer.said(" ".join(self.rng.choices(_WORDS, k=self.rng.randrange(1, 4))))

    # --- whole answers ---

    def plain(self) -> Output:
        return Output("plain", self.words(), [])

    def one(self) -> Output:
        calls = self.calls(1)
        return Output("one", self.writer.write(calls), calls)

    def several(self) -> Output:
        calls = self.calls(self.rng.randrange(2, 5))
        return Output("several", self.writer.write(calls), calls)

    def lead(self) -> Output:
        calls = self.calls(self.rng.randrange(1, 3))
        joint = self.rng.choice(["", " ", "\n", "\n\n"])
        return Output("lead", self.words() + joint + self.writer.write(calls), calls)

    def escaped(self) -> Output:
        calls = [("f", {"s": self.rng.choice(_STRINGS), "l": [self.rng.choice(_STRINGS)]})]
        spell = json.dumps if self.writer.pretty else None
        return Output("escaped", self.writer.write(calls, spell), calls)

    def indented(self) -> Output:
        calls = self.calls(self.rng.randrange(1, 3))
        pretty = self.writer.pretty
        spell = (lambda arguments: json.dumps(arguments, indent=2)) if pretty else None
        return Output("indented", self.writer.write(calls, spell), calls)

    def tag_in_string(self) -> Output:
        calls = [("f", {"s": f"a{self.writer.tag}b", "n": self.rng.randrange(9)})]
        return Output("tag in string", self.writer.write(calls), calls)

    def empty(self) -> Output:
        calls: list[Call] = [(self.rng.choice("fg"), {})]
        return Output("empty", self.writer.write(calls), calls)

    def turned(self) -> Output:
        if self.writer.turned is None:
            return self.several()
        calls = [("f", self.arguments())]
        return Output("turned", self.writer.turned("f", self.writer.spell(calls[0][1])), calls)

    def argless(self) -> Output:
        """A call without a key for arguments, where the format has keys."""
        if self.writer.turned is None:
            return self.empty()
        text = re.sub(r', "(?:arguments|parameters)": \{\}', "", self.writer.write([("g", {})]))
        return Output("argless", text, [("g", {})])

    def spelled(self) -> Output:
        """Values as models spell them, where they carry no types."""
        if self.writer.pretty:
            return self.plain()
        odd = (
            "True",
            "None",
            "007",
            "+5",
            "1e3",
            "4.0",
            "nan",
            "0",
            " 7 ",
            "[1",
            "NULL",
            "-0.0",
            "yes",
        )
        arguments = {key: self.rng.choice(odd) for key in self.rng.sample("nxsblo", 3)}
        return self._spoiled("spelled", self.writer.write([("f", arguments)]))

    # --- spoiled answers ---

    def _spoiled(self, kind: str, text: str) -> Output:
        return Output(kind, text, None)

    def _whole(self) -> str:
        lead = self.words() if self.rng.random() < 0.3 else ""
        return lead + self.writer.write(self.calls(self.rng.randrange(1, 3)))

    def tail(self) -> Output:
        return self._spoiled("tail", self._whole() + self.rng.choice(["", "\n"]) + self.words())

    def between(self) -> Output:
        text = self.writer.write(self.calls(1)) + "\n" + self.words() + "\n"
        return self._spoiled("between", text + self.writer.write(self.calls(1)))

    def cut(self) -> Output:
        text = self._whole()
        return self._spoiled("cut", text[: self.rng.randrange(len(text))])

    def commas(self) -> Output:
        return self._spoiled("commas", self._one_of(self._whole(), ",", lambda found: found * 2))

    def unclosed(self) -> Output:
        ends = r"\}|</\w+>|<[^<>]*end[^<>]*>"
        return self._spoiled("unclosed", self._one_of(self._whole(), ends, lambda _: ""))

    def nameless(self) -> Output:
        return self._spoiled("nameless", self.writer.write([("", self.arguments())]))

    def unknown(self) -> Output:
        calls = [*self.calls(self.rng.randrange(2)), ("no_such", self.arguments())]
        self.rng.shuffle(calls)
        return self._spoiled("unknown", self.words() + self.writer.write(calls))

    def blanks(self) -> Output:
        text = self._one_of(self._whole(), r"\s", lambda found: found * 3)
        return self._spoiled("blanks", self._one_of(text, r"[>:,\]]", lambda found: found + " \n"))

    def crlf(self) -> Output:
        return self._spoiled("crlf", self._whole().replace("\n", "\r\n"))

    def noise(self) -> Output:
        text = self._whole()
        at = self.rng.randrange(len(text))
        return self._spoiled("noise", text[:at] + self.rng.choice('"{}[]<>\\:x') + text[at + 1 :])

    def no_object(self) -> Output:
        source = self.rng.choice(['"x"', "null", "[1]", "5", "", "not JSON"])
        call = self.writer.call("f", source, 0)
        return self._spoiled("no object", self.writer.before + call + self.writer.after)

    def doubled(self) -> Output:
        tag = self.rng.choice([tag for tag in TAGS if tag in self._whole()] or ["{"])
        return self._spoiled(
            "doubled", self._one_of(self._whole(), re.escape(tag), lambda f: f * 2)
        )

    def _one_of(self, text: str, pattern: str, change: Callable[[str], str]) -> str:
        places = list(re.finditer(pattern, text))
        if not places:
            return text
        place = self.rng.choice(places)
        return text[: place.start()] + change(place.group()) + text[place.end() :]


KINDS: tuple[Callable[[Maker], Output], ...] = (
    *(Maker.plain, Maker.one, Maker.several, Maker.lead, Maker.escaped, Maker.indented),
    *(Maker.tag_in_string, Maker.empty, Maker.turned, Maker.tail, Maker.between, Maker.cut),
    *(Maker.commas, Maker.unclosed, Maker.nameless, Maker.unknown, Maker.blanks, Maker.crlf),
    *(Maker.noise, Maker.no_object, Maker.doubled, Maker.argless, Maker.spelled),
)


def outputs(name: str, seeds: int) -> Iterator[Output]:
    """`seeds` answers of every kind in one format."""
    for kind in KINDS:
        for seed in range(seeds):
            yield kind(Maker(WRITERS[name], seed))
