"""Readers of calls of tools in the text that a model writes: each begins where a marker ends.

A reader gets the text so far again and again, and looks at each character once. It says ``MORE``,
or the calls with where they end. It raises ``NoCall`` where the text is no call: that is a part of
the answer. Readers see no difference between ways of cutting the text into pieces.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from typing import Any, Final, NamedTuple, Protocol

__all__ = [
    "MAX_HEADER",
    "MORE",
    "BracedReader",
    "CallReader",
    "Extent",
    "FoundCalls",
    "JsonReader",
    "NamedReader",
    "NoCall",
    "after_closes",
    "begins",
    "calls_of",
    "dump_json",
    "load_json",
    "skip_space",
]

MORE: Final = None
_ARGUMENTS = ("arguments", "parameters", "args")
MAX_HEADER = 400  # characters before the arguments of a call


class NoCall(ValueError):
    """The text is no call."""


class FoundCalls(NamedTuple):
    """Calls, as pairs of a name and arguments in JSON, and where they end in the text."""

    calls: list[tuple[str, str]]
    end: int


class CallReader(Protocol):
    """Reads what begins at a marker."""

    def read(self, text: str, is_last: bool) -> FoundCalls | None:
        """Return calls, or ``MORE``; raise ``NoCall``."""


def dump_json(value: Any) -> str:
    """Return a value as JSON of characters that UTF-8 has; raise ``NoCall``."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value)
    except (ValueError, RecursionError) as error:
        raise NoCall(str(error)) from None
    return text


def load_json(text: str) -> Any:
    def refuse(word: str) -> Any:
        raise NoCall(word)

    try:  # a new line within a string is one
        return json.loads(text, strict=False, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise NoCall(str(error)) from None


class Extent:
    """Finds where brackets close that open at a place of a text."""

    def __init__(self, at: int, quotes: Sequence[str], escapes: bool = True) -> None:
        self.at, self._depth, self._quote = at, [], ""  # type: ignore[var-annotated]
        self._quotes = quotes  # one that begins with another one stands before it
        quoted = "|".join(map(re.escape, quotes))
        self._outside = re.compile(rf"[(){{}}\[\]]|{quoted}")
        self._within = {q: re.compile(rf"\\|{re.escape(q)}" if escapes else re.escape(q))
                        for q in quotes}  # fmt: skip
        self._longest = max(map(len, quotes))

    def end(self, text: str) -> int | None:
        """Return the end, or ``MORE``; raise ``NoCall``."""
        while True:
            pattern = self._within[self._quote] if self._quote else self._outside
            found = pattern.search(text, self.at)
            if found is None:  # a quote may begin at the end
                self.at = max(self.at, len(text) - self._longest + 1)
                return MORE
            word = found[0]
            if word == "\\":
                if found.end() == len(text):
                    self.at = found.start()
                    return MORE
                self.at = found.end() + 1
                continue
            begun = text[found.start() : found.start() + self._longest]
            if not self._quote and any(q != begun and q.startswith(begun) for q in self._quotes):
                self.at = found.start()  # a longer quote may begin here
                return MORE
            self.at = found.end()
            if self._quote:
                self._quote = ""
            elif word in "([{":
                self._depth.append(")]}"["([{".index(word)])
            elif word in ")]}":
                if not self._depth or self._depth.pop() != word:
                    raise NoCall(f"{word} closes what is not open")
                if not self._depth:
                    return self.at
            else:
                self._quote = word


def skip_space(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at


def after_closes(text: str, at: int, closes: Sequence[str], is_last: bool) -> int | None:
    """Return where the words end that may close a call, in their order, or ``MORE``."""
    for close in closes:
        start = skip_space(text, at)
        if text.startswith(close, start):
            at = start + len(close)
        elif not is_last and close.startswith(text[start:]):
            return MORE
    return at


def begins(text: str, at: int, word: str, is_last: bool) -> bool | None:
    """Whether a word is at a place; ``MORE`` where that is not yet certain."""
    if text.startswith(word, at):
        return True
    return MORE if not is_last and word.startswith(text[at:]) else False


def calls_of(value: Any, names: Collection[str] | None, is_bare: bool) -> list[tuple[str, str]]:
    """Return the calls that a JSON value is; raise ``NoCall``."""
    if isinstance(value, list):
        if not value:
            raise NoCall("an empty list")
        return [call for one in value for call in _calls_of_one(one, names, is_bare)]
    return _calls_of_one(value, names, is_bare)


def _calls_of_one(
    value: Any, names: Collection[str] | None, is_bare: bool
) -> list[tuple[str, str]]:
    if not isinstance(value, dict):
        raise NoCall("no object")
    function = value.get("function")
    if isinstance(function, dict):
        value = function
    elif isinstance(function, str):
        value = {**value, "name": function}
    name = value.get("name")
    if not isinstance(name, str) or not name:
        raise NoCall("no name")
    keys = [key for key in _ARGUMENTS if key in value]
    if is_bare and (not keys or (names is not None and name not in names)):
        raise NoCall("no call")
    arguments = value[keys[0]] if keys else {}
    if isinstance(arguments, str):
        arguments = load_json(arguments)
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise NoCall("arguments are no object")
    return [(name, dump_json(arguments))]


class JsonReader:
    """An object ``{"name": ..., "arguments": ...}``, or a list of such.

    Parameters
    ----------
    at : int
        Where it begins.
    closes : sequence of str
        Words that may follow it.
    names : collection of str, optional
        Of the tools.
    is_bare : bool
        Whether no marker tells a call from other JSON: the name has to be a tool's.
    """

    def __init__(
        self,
        at: int,
        closes: Sequence[str] = (),
        names: Collection[str] | None = None,
        is_bare: bool = False,
    ) -> None:
        self._at, self._closes, self._names, self._is_bare = at, closes, names, is_bare
        self._extent: Extent | None = None
        self._calls: list[tuple[str, str]] | None = None
        self._end = 0

    def read(self, text: str, is_last: bool) -> FoundCalls | None:
        """Return calls, or ``MORE``; raise ``NoCall``."""
        if self._calls is None:
            if self._extent is None:
                self._at = skip_space(text, self._at)
                if self._at == len(text) and not is_last:
                    return MORE
                if text[self._at : self._at + 1] not in ("{", "["):
                    raise NoCall("no JSON")
                if text[self._at] == "[":
                    inside = skip_space(text, self._at + 1)
                    if inside == len(text) and not is_last:
                        return MORE
                    if text[inside : inside + 1] != "{":
                        raise NoCall("a list of no objects")
                self._extent = Extent(self._at, ('"',))
            end = self._extent.end(text)
            if end is None:
                if is_last:
                    raise NoCall("JSON that does not end")
                return MORE
            self._calls = calls_of(load_json(text[self._at : end]), self._names, self._is_bare)
            self._end = end
        behind = after_closes(text, self._end, self._closes, is_last)
        return MORE if behind is None else FoundCalls(self._calls, behind)


class BracedReader:
    """A header with a tool's name, and arguments in braces; what these hold is of each kind.

    Parameters
    ----------
    at : int
        Where it begins.
    header : re.Pattern
        What stands before the braces; its group ``name`` is the tool's.
    quotes : sequence of str
        Words between which a brace is no brace.
    escapes : bool
        Whether a backslash takes the meaning of a quote.
    closes : sequence of str
        Words that may follow.
    """

    def __init__(
        self,
        at: int,
        header: re.Pattern[str],
        quotes: Sequence[str],
        escapes: bool,
        closes: Sequence[str] = (),
    ) -> None:
        self._at, self._header, self._closes = at, header, closes
        self._quotes, self._escapes = tuple(quotes), escapes
        self._name = ""
        self._extent: Extent | None = None
        self._found: tuple[str, str] | None = None
        self._end = 0

    def read(self, text: str, is_last: bool) -> FoundCalls | None:
        """Return calls, or ``MORE``; raise ``NoCall``."""
        if self._extent is None:
            brace = text.find("{", self._at, self._at + MAX_HEADER)
            if brace < 0:
                if is_last or len(text) >= self._at + MAX_HEADER:
                    raise NoCall("no arguments")
                return MORE
            found = self._header.fullmatch(text, self._at, brace)
            if found is None:
                raise NoCall("no name")
            self._name, self._at = found["name"], brace
            self._extent = Extent(brace, self._quotes, escapes=self._escapes)
        if self._found is None:
            end = self._extent.end(text)
            if end is None:
                if is_last:
                    raise NoCall("arguments that do not end")
                return MORE
            self._found = self._name, self._arguments(text[:end], self._at)
            self._end = end
        behind = after_closes(text, self._end, self._closes, is_last)
        return MORE if behind is None else FoundCalls([self._found], behind)

    def _arguments(self, text: str, brace: int) -> str:
        """Return the arguments as JSON; the text ends with their braces."""
        raise NotImplementedError


class NamedReader(BracedReader):
    """A name, a word, and an object: ``name[ARGS]{...}``; see ``BracedReader``."""

    def __init__(self, at: int, header: re.Pattern[str], closes: Sequence[str] = ()) -> None:
        super().__init__(at, header, ('"',), True, closes)

    def _arguments(self, text: str, brace: int) -> str:
        return dump_json(load_json(text[brace:]))
