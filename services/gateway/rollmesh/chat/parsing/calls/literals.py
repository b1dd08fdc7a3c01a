"""Reads values that are written in a language like Python's or JSON's, from the front."""

import re
from collections.abc import Iterator

_WHITESPACE = re.compile(r"\s*")
_MOST_DEPTH = 64


class NoLiteralError(Exception):
    """The text does not match the reader."""


class LiteralReader:
    """The position in a text. Whitespace between values and delimiters is skipped."""

    def __init__(self, source: str, at: int = 0) -> None:
        self._source = source
        self._at = at
        self._depth = 0

    def take(self, pattern: re.Pattern[str]) -> str:
        """Takes the match of a pattern here.

        Raises:
            NoLiteralError: It does not match here.
        """
        found = pattern.match(self._source, self._at)
        if found is None:
            raise NoLiteralError
        self._at = found.end()
        return found.group()

    def take_delimiter(self, delimiter: str) -> None:
        """Takes a delimiter and the whitespace around it.

        Raises:
            NoLiteralError: Something else stands here.
        """
        self.skip()
        if not self.stands(delimiter):
            raise NoLiteralError
        self._at += len(delimiter)
        self.skip()

    def stands(self, delimiter: str) -> bool:
        """Returns whether a delimiter stands here."""
        return self._source.startswith(delimiter, self._at)

    def skip(self) -> None:
        """Skips whitespace."""
        self.take(_WHITESPACE)

    def entries(self, begin: str, end: str) -> Iterator[None]:
        """Takes a list's delimiters and commas. Yields where the caller has to take an entry.

        Raises:
            NoLiteralError: There is no such list here, or it is nested too deeply.
        """
        self._depth += 1
        if self._depth > _MOST_DEPTH:
            raise NoLiteralError
        self.take_delimiter(begin)
        while not self.stands(end):
            yield
            self.skip()
            if not self.stands(end):
                self.take_delimiter(",")
        self._at += len(end)
        self._depth -= 1

    def end(self) -> None:
        """Checks that nothing but whitespace is left.

        Raises:
            NoLiteralError: There is more.
        """
        self.skip()
        if self._at != len(self._source):
            raise NoLiteralError
