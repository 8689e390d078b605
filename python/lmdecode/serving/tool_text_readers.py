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
    dump_json,
    skip_space,
)
from lmdecode.serving.tool_values import (
    VALUE_END,
    allowed_types,
    choices_of,
    is_json,
    properties_of,
    read_arguments,
    resolved,
    typed_value,
)

__all__ = ["FencedReader", "KeyValueReader", "PythonicReader", "TaggedReader"]

_CALL = re.compile(r"\s*call:(?P<name>[\w.\-]+)")
_QUOTES = ('"""', "'''", '"', "'")
_BETWEEN = re.compile(r"[\s,;]*")
_NAME = re.compile(r"[\w.\-]{1,128}")
_TAG = re.compile(r"[^<>\n]{1,200}")
_VALUE_END = re.compile(VALUE_END.replace("*", "{0,200}"))  # so that it has a bound:
_MOST_END = 500  # characters
_LAST_END = re.compile(r"(?:\n?</parameter>|\n[ \t]*</function>)[ \t\r\n]*\Z")
_BEFORE_TAG = re.compile(r"\n?(?:</parameter>)?[ \t\r\n]*")
_STRING = re.compile(r'"(?:[^"\\\n]|\\.)*+"')


def _tag(text: str, at: int, is_last: bool) -> tuple[str, int] | None:
    """Return what stands up to the end of a tag, and where it ends; ``MORE``; raise ``NoCall``."""
    found = _TAG.match(text, at)
    end = at if found is None else found.end()
    if found is not None and text.startswith(">", end):
        return found[0], end + 1
    if end == len(text) and not is_last:
        return MORE
    raise NoCall("a tag without a name")


class TaggedReader:
    """``<function=name>``, ``<parameter=key>value</parameter>`` and ``</function>``, or JSON.

    Values are text. ``schemas`` says which are of another type. A value ends as ``VALUE_END`` says,
    but not within JSON that it is, nor within a text of its ``enum``.

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
        self._name: str | None = None
        self._schema: Mapping[str, Any] = {}
        self._known: Mapping[str, Any] = {}  # the schemas of its keys
        self._key: str | None = None  # whose value is being read
        self._sought = 0
        self._extent: Extent | None = None  # of JSON that is the value
        self._json_end: int | None = None
        self._values: dict[str, Any] = {}
        self._found: tuple[str, str] | None = None

    def read(self, text: str, is_last: bool) -> FoundCalls | None:
        """Return calls, or ``MORE``; raise ``NoCall``."""
        if not self._is_tagged:
            at = skip_space(text, self._at)
            is_it = begins(text, at, "<function=", is_last)
            if is_it is None:
                return MORE
            if not is_it:
                return self._json.read(text, is_last)
            self._is_tagged, self._at = True, at + len("<function=")
        if self._name is None:
            tag = _tag(text, self._at, is_last)
            if tag is None:
                return MORE
            self._name, self._at = tag[0].strip(), tag[1]
            self._schema = self._schemas.get(self._name, {})
            self._known = properties_of(resolved(self._schema, self._schema))
        while self._found is None:
            read_on = self._before_key if self._key is None else self._within_value
            if not read_on(text, is_last):
                return MORE
        behind = after_closes(text, self._at, self._closes, is_last)
        return MORE if behind is None else FoundCalls([self._found], behind)

    def _before_key(self, text: str, is_last: bool) -> bool:
        """Read a key, or the end of the call; return False for ``MORE``."""
        self._at = skip_space(text, self._at)
        for word in ("<parameter=", "</function>", "</tool_call>"):
            is_it = begins(text, self._at, word, is_last)
            if is_it is None:
                return False
            if is_it:
                break
        else:
            raise NoCall("no parameter")
        if word == "<parameter=":
            tag = _tag(text, self._at + len(word), is_last)
            if tag is None:
                return False
            self._key, self._at = self._key_of(tag[0]), tag[1]
            self._sought, self._extent, self._json_end = self._at, None, None
            return True
        if word == "</function>":
            self._at += len(word)
        self._found = self._name or "", dump_json(self._values)
        return True

    def _within_value(self, text: str, is_last: bool) -> bool:
        """Read a value; return False for ``MORE``."""
        if self._at == len(text) and not is_last:
            return False
        start = self._at + text.startswith("\n", self._at)
        self._sought = max(self._sought, start)
        while (found := _VALUE_END.search(text, self._sought)) is not None:
            is_end = self._is_end(text, found, is_last)
            beyond = self._beyond(text, start, found.start(), is_last) if is_end else None
            if is_end is None or (is_end and beyond is None):
                return False
            self._sought = found.start() + 1 if beyond is None else beyond
            if beyond == found.start():
                break
        else:
            found = _LAST_END.search(text, self._json_end or start) if is_last else None
        if found is None:
            if is_last:
                raise NoCall("a value that does not end")
            self._sought = max(self._sought, len(text) - _MOST_END)
            return False
        assert self._key is not None
        self._values[self._key] = typed_value(text[start : found.start()], self._schema, self._key)
        before = _BEFORE_TAG.match(text, found.start())
        assert before is not None
        self._key, self._at = None, before.end()
        if self._at == len(text):  # at the end of the answer
            self._found = self._name or "", dump_json(self._values)
        return True

    def _is_end(self, text: str, found: re.Match[str], is_last: bool) -> bool | None:
        """Whether a value may end there; False before the tag of a key that may not follow."""
        if not found[0].endswith("="):
            return True
        try:
            tag = _tag(text, found.end(), is_last)
        except NoCall:
            return False
        if tag is None:
            return MORE
        key = self._key_of(tag[0])
        if key == self._key or key in self._values:
            return False
        return "</parameter>" in found[0] or not self._known or key in self._known

    def _beyond(self, text: str, start: int, end: int, is_last: bool) -> int | None:
        """Return from where on a value may end that seems to end at a place, or ``MORE``."""
        schema = self._known.get(self._key or "")
        if schema is None:
            return end
        if allowed_types(schema, self._schema) != {"string"}:
            return self._behind_json(text, start, end, is_last)
        choices = choices_of(resolved(schema, self._schema)) or ()
        texts = [choice for choice in choices if isinstance(choice, str)]
        for choice in sorted(texts, key=len, reverse=True):
            behind = start + len(choice)
            if behind <= end:
                break
            if text.startswith(choice, start):
                end_tag = _VALUE_END.match(text, behind)
                if end_tag is not None and end_tag[0].lstrip().startswith("</parameter>"):
                    return behind
                if not is_last and len(text) < behind + _MOST_END:
                    return MORE
            elif not is_last and choice.startswith(text[start:]):
                return MORE
        return end

    def _behind_json(self, text: str, start: int, end: int, is_last: bool) -> int | None:
        if self._json_end is None:
            at = skip_space(text, start)
            self._json_end = end
            behind: int | None = end
            if text.startswith('"', at):
                string = _STRING.match(text, at)
                behind = None if string is None else string.end()
                is_last = is_last or text.find("\n", at) >= 0
            elif text.startswith(("{", "["), at):
                self._extent = self._extent or Extent(at, ('"',))
                try:
                    behind = self._extent.end(text)
                except NoCall:
                    return end
            if behind is None and not is_last:
                self._json_end = None
                return MORE
            if behind is not None and behind > end and is_json(text[at:behind]):
                self._json_end = behind
        return max(end, self._json_end)

    def _key_of(self, text: str) -> str:
        return text if text in self._known else text.strip()


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
        self._at, self._closes, self._names = at, closes, names
        self._is_open, self._until = bool(until), until or "]"
        self._extent: Extent | None = None  # of the arguments of the call that is being read
        self._name = ""
        self._calls: list[tuple[str, str]] = []
        self._has_ended = False

    def read(self, text: str, is_last: bool) -> FoundCalls | None:
        """Return calls, or ``MORE``; raise ``NoCall``."""
        if not self._is_open:
            self._at = skip_space(text, self._at)
            if self._at == len(text) and not is_last:
                return MORE
            if not text.startswith("[", self._at):
                raise NoCall("no list")
            self._is_open, self._at = True, self._at + 1
        while not self._has_ended:
            if not (self._between(text, is_last) if self._extent is None else self._call(text)):
                if is_last:
                    raise NoCall("calls that do not end")
                return MORE
        behind = after_closes(text, self._at, self._closes, is_last)
        return MORE if behind is None else FoundCalls(self._calls, behind)

    def _between(self, text: str, is_last: bool) -> bool:
        """Read a name, or the end; return False for ``MORE``."""
        space = _BETWEEN.match(text, self._at)
        assert space is not None
        self._at = space.end()
        is_end = begins(text, self._at, self._until, is_last)
        if is_end is None:
            return False
        if is_end:
            if not self._calls:
                raise NoCall("no call")
            self._has_ended, self._at = True, self._at + len(self._until)
            return True
        name = _NAME.match(text, self._at)
        if name is not None and name.end() == len(text) and not is_last:
            return False
        if name is None or not text.startswith("(", name.end()):
            raise NoCall("no call")
        if self._names is not None and name[0] not in self._names:
            raise NoCall("no tool")
        self._name, self._at = name[0], name.end()
        self._extent = Extent(self._at, _QUOTES)
        return True

    def _call(self, text: str) -> bool:
        """Read the arguments of a call; return False for ``MORE``."""
        assert self._extent is not None
        end = self._extent.end(text)
        if end is None:
            return False
        try:
            found, behind = read_arguments(text[:end], self._at + 1, ")", "=", _QUOTES)
        except ValueError as error:
            raise NoCall(str(error)) from None
        if behind != end:
            raise NoCall("brackets that do not fit")
        self._calls.append((self._name, dump_json(found)))
        self._extent, self._at = None, end
        return True


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
        self._at, self._names = at, names
        self._reader: JsonReader | PythonicReader | None = None

    def read(self, text: str, is_last: bool) -> FoundCalls | None:
        """Return calls, or ``MORE``; raise ``NoCall``."""
        if self._reader is None:
            self._at = skip_space(text, self._at)
            if self._at == len(text) and not is_last:
                return MORE
            if text.startswith(("{", "["), self._at):
                self._reader = JsonReader(self._at, (), self._names, True)
            else:
                self._reader = PythonicReader(self._at, (), "```", self._names)
        found = self._reader.read(text, is_last)
        if found is None or isinstance(self._reader, PythonicReader):
            return found
        end = skip_space(text, found.end)
        is_end = begins(text, end, "```", is_last)
        if is_end is False:
            raise NoCall("no end of the block")
        return FoundCalls(found.calls, end + 3) if is_end else MORE


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
