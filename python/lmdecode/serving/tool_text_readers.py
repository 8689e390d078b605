"""Readers of calls that are no JSON: tags, Python, Markdown, keys and values."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from lmdecode.serving.tool_readers import (
    MORE,
    BracedReader,
    Extent,
    FoundCalls,
    JsonReader,
    NoCall,
    after_closes,
    begins,
    calls_of,
    dump_json,
    load_json,
    skip_space,
)
from lmdecode.serving.tool_values import read_arguments, typed_value

__all__ = ["FencedReader", "KeyValueReader", "PythonicReader", "TaggedReader"]

_CALL = re.compile(r"\s*call:(?P<name>[\w.\-]+)")
_TAG = re.compile(r"<function=([^<>\n]{1,200})>")
_PARAMETER = re.compile(r"\s*<parameter=([^<>\n]{1,200})>\n?(.*?)\n?</parameter>", re.DOTALL)


class TaggedReader:
    """``<function=name>``, ``<parameter=key>value</parameter>`` and ``</function>``, or JSON.

    Values are text. ``schemas`` says which are of another type.

    Parameters
    ----------
    at : int
        Where it begins.
    schemas : mapping
        The schema of the parameters of each tool by its name.
    closes, names, is_bare
        As for ``JsonReader``.
    """

    def __init__(
        self,
        at: int,
        schemas: Mapping[str, Mapping[str, Any]],
        closes: Sequence[str] = (),
        names: Collection[str] | None = None,
        is_bare: bool = False,
    ) -> None:
        self._at, self._schemas, self._closes = at, schemas, closes
        self._json = JsonReader(at, closes, names, is_bare)
        self._is_tagged = False
        self._sought = at
        self._found: tuple[str, str] | None = None
        self._end = 0

    def read(self, text: str, is_last: bool) -> FoundCalls | None:
        """Return calls, or ``MORE``; raise ``NoCall``."""
        if not self._is_tagged:
            at = skip_space(text, self._at)
            is_it = begins(text, at, "<function=", is_last)
            if is_it is None:
                return MORE
            if not is_it:
                return self._json.read(text, is_last)
            self._is_tagged, self._at, self._sought = True, at, at
        if self._found is None:
            close = "</function>"
            end = text.find(close, self._sought)
            if end < 0:
                if is_last:
                    raise NoCall("no end of the function")
                self._sought = max(self._sought, len(text) - len(close) + 1)
                return MORE
            self._found = self._call_of(text[self._at : end])
            self._end = end + len(close)
        behind = after_closes(text, self._end, self._closes, is_last)
        return MORE if behind is None else FoundCalls([self._found], behind)

    def _call_of(self, text: str) -> tuple[str, str]:
        found = _TAG.match(text)
        if found is None:
            raise NoCall("no name")
        name, at = found[1].strip(), found.end()
        schema = self._schemas.get(name, {})
        values: dict[str, Any] = {}
        while text[at:].strip():
            parameter = _PARAMETER.match(text, at)
            if parameter is None:
                raise NoCall("no parameter")
            key = parameter[1].strip()
            values[key] = typed_value(parameter[2], schema, key)
            at = parameter.end()
        return name, dump_json(values)


class PythonicReader:
    """Calls as Python writes them: ``[f(a=1), g(b="x")]``, or lines of them.

    Parameters
    ----------
    at : int
        Where it begins.
    closes : sequence of str
        Words that may follow.
    until : str
        The word that ends lines of calls. Empty: the calls are in square brackets.
    names : collection of str, optional
        Names of tools, one of which each call must have.
    """

    def __init__(
        self,
        at: int,
        closes: Sequence[str] = (),
        until: str = "",
        names: Collection[str] | None = None,
    ) -> None:
        self._at, self._closes, self._until, self._names = at, closes, until, names
        self._extent: Extent | None = None
        self._calls: list[tuple[str, str]] | None = None
        self._end, self._sought = 0, at

    def read(self, text: str, is_last: bool) -> FoundCalls | None:
        """Return calls, or ``MORE``; raise ``NoCall``."""
        if self._calls is None:
            found = self._lines(text) if self._until else self._brackets(text, is_last)
            if found is None:
                if is_last:
                    raise NoCall("calls that do not end")
                return MORE
            calls = pythonic_calls(found)
            if self._names is not None and any(name not in self._names for name, _ in calls):
                raise NoCall("no tool")
            self._calls = calls
        behind = after_closes(text, self._end, self._closes, is_last)
        return MORE if behind is None else FoundCalls(self._calls, behind)

    def _lines(self, text: str) -> str | None:
        end = text.find(self._until, self._sought)
        if end < 0:
            self._sought = max(self._sought, len(text) - len(self._until) + 1)
            return MORE
        self._end = end + len(self._until)
        return text[self._at : end]

    def _brackets(self, text: str, is_last: bool) -> str | None:
        if self._extent is None:
            self._at = skip_space(text, self._at)
            if self._at == len(text) and not is_last:
                return MORE
            if text[self._at : self._at + 1] != "[":
                raise NoCall("no list")
            self._extent = Extent(self._at, ('"', "'"))
        end = self._extent.end(text)
        if end is None:
            return MORE
        self._end = end
        return text[self._at + 1 : end - 1]


def pythonic_calls(text: str) -> list[tuple[str, str]]:
    """Return the calls ``f(a=1), g()`` of a text; raise ``NoCall``."""
    calls, at = [], 0
    begin = re.compile(r"[\s,;]*([A-Za-z_][\w.\-]*)\(")
    while text[at:].strip(" \t\r\n,;"):
        found = begin.match(text, at)
        if found is None:
            raise NoCall("no call")
        try:
            arguments, at = read_arguments(text, found.end(), ")", "=", ('"', "'"))
        except ValueError as error:
            raise NoCall(str(error)) from None
        calls.append((found[1], dump_json(arguments)))
    if not calls:
        raise NoCall("no call")
    return calls


class FencedReader:
    """What is between marks of Markdown: JSON of calls, or calls as Python writes them.

    Parameters
    ----------
    at : int
        Where it begins.
    names : collection of str, optional
        Names of tools, one of which each call must have.
    """

    def __init__(self, at: int, names: Collection[str] | None) -> None:
        self._at, self._names, self._sought = at, names, at

    def read(self, text: str, is_last: bool) -> FoundCalls | None:
        """Return calls, or ``MORE``; raise ``NoCall``."""
        end = text.find("```", self._sought)
        if end < 0:
            if is_last:
                raise NoCall("no end")
            self._sought = max(self._sought, len(text) - 2)
            return MORE
        inner = text[self._at : end].strip()
        if inner[:1] in ("{", "["):
            return FoundCalls(calls_of(load_json(inner), self._names, True), end + 3)
        calls = pythonic_calls(inner)
        if self._names is not None and any(name not in self._names for name, _ in calls):
            raise NoCall("no tool")
        return FoundCalls(calls, end + 3)


class KeyValueReader(BracedReader):
    """``call:name{key:value,...}``, whose strings are between tokens.

    Parameters
    ----------
    at : int
        Where it begins.
    quote : str
        What is before and behind a string.
    closes : sequence of str
        Words that may follow.
    """

    def __init__(self, at: int, quote: str, closes: Sequence[str] = ()) -> None:
        super().__init__(at, _CALL, (quote,), False, closes)

    def _arguments(self, text: str, brace: int) -> str:
        try:
            arguments, _ = read_arguments(text, brace + 1, "}", ":", self._quotes, False)
        except ValueError as error:
            raise NoCall(str(error)) from None
        return dump_json(arguments)
