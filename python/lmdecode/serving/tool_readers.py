"""Readers of calls of tools in the text that a model writes: each begins where a marker ends.

A reader gets the text so far again and again, and looks at each character once. It returns
``MORE``, or the calls and where they end. It raises ``NoCall`` where the text is no call and so
part of the answer. How the text is cut into pieces makes no difference.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

from lmdecode.serving.tools import (
    VALUE_END,
    allowed_types,
    choices_of,
    properties_of,
    resolved,
    types_of,
)

__all__ = [
    "CallReader", "FencedReader", "FoundCalls", "JsonReader", "KeyValueReader", "NamedReader",
    "NoCall", "PythonicReader", "TaggedReader",
]  # fmt: skip

_MAX_DEPTH = 50
_NUMBER = re.compile(r"(?:[+-]\s*)?\.?[0-9](?:[0-9A-Za-z_.]|(?<=[eE])[+-])*")
_INTEGER = re.compile(r"[+-]?(?:[0-9_]+|0[xXoObB]\w+)")
_WORD = re.compile(r"[A-Za-z_][\w.\-]*")
_WORDS = {"True": True, "true": True, "False": False, "false": False,
          "None": None, "null": None, "none": None}  # fmt: skip
_SPACE = re.compile(r"\s*")
# As Python has them; "\\/" is JSON's, which models write in Python's strings too.
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "\n": "",
            "\\": "\\", "'": "'", '"': '"', "/": "/"}  # fmt: skip
_OCTAL = re.compile(r"[0-7]{1,3}")


class _Values:
    """Reads values from a text at a place; raises ValueError.

    With ``is_python`` strings and numbers are Python's literals.
    """

    def __init__(self, text: str, at: int, quotes: Sequence[str], is_python: bool) -> None:
        self.text, self.at, self._is_python = text, at, is_python
        prefix = "([rRuU]?)" if is_python else "()"
        self._begin = re.compile(f"{prefix}({'|'.join(map(re.escape, quotes))})")

    def skip(self) -> str:
        """Skip space; return the next character, empty at the end."""
        found = _SPACE.match(self.text, self.at)
        assert found is not None
        self.at = found.end()
        return self.text[self.at : self.at + 1]

    def take(self, word: str) -> bool:
        """Take a word if it is next."""
        self.skip()
        if self.text.startswith(word, self.at):
            self.at += len(word)
            return True
        return False

    def value(self, depth: int = 0) -> Any:
        """Return the next value."""
        if depth > _MAX_DEPTH:
            raise ValueError(f"values of more than {_MAX_DEPTH} levels")
        if (text := self._strings()) is not None:
            return text
        if self.take("["):
            return self._list("]", depth)
        if self.take("("):
            begin, found = self.at, self._list(")", depth)
            is_tuple = len(found) != 1 or self.text[begin : self.at - 1].rstrip().endswith(",")
            return found if is_tuple else found[0]
        if self.take("{"):
            return self.entries("}", ":", depth + 1)
        number = _NUMBER.match(self.text, self.at)
        if number is not None:
            self.at = number.end()
            return _number("".join(number[0].split()), self._is_python)
        word = _WORD.match(self.text, self.at)
        if word is not None and word[0] in _WORDS:
            self.at = word.end()
            return _WORDS[word[0]]
        raise ValueError(f"no value at {self.text[self.at : self.at + 20]!r}")

    def _list(self, close: str, depth: int) -> list[Any]:
        found: list[Any] = []
        while not self.take(close):
            found.append(self.value(depth + 1))
            if not self.take(","):
                if not self.take(close):
                    raise ValueError(f"a list without {close}")
                break
        return found

    def entries(self, close: str, between: str, depth: int) -> dict[str, Any]:
        """Return keys and values up to what closes them."""
        found: dict[str, Any] = {}
        while not self.take(close):
            key = self._key()
            if not self.take(between):
                raise ValueError(f"{key} without {between}")
            if between == "=" and key in found:
                raise ValueError(f"{key} twice")
            found[key] = self.value(depth)
            if not self.take(","):
                if not self.take(close):
                    raise ValueError(f"arguments without {close}")
                break
        return found

    def _key(self) -> str:
        if (text := self._strings()) is not None:
            return text
        found = _WORD.match(self.text, self.at)
        if found is None:
            raise ValueError(f"no key at {self.text[self.at : self.at + 20]!r}")
        self.at = found.end()
        return found[0]

    def _strings(self) -> str | None:
        """Return the next string, Python's several as one; None if there is none."""
        parts: list[str] = []
        self.skip()
        while (found := self._begin.match(self.text, self.at)) is not None:
            self.at = found.end()
            parts.append(self._string(found[2], found[1].lower() == "r"))
            if not self._is_python:
                break
            self.skip()
        # Two surrogates become the one character that JSON has for them.
        data = "".join(parts).encode("utf-16-le", "surrogatepass")
        return data.decode("utf-16-le", "surrogatepass") if parts else None

    def _string(self, quote: str, is_raw: bool) -> str:
        parts: list[str] = []
        while True:
            end = self.text.find(quote, self.at)
            if end < 0:
                raise ValueError("a string that does not end")
            escape = self.text.find("\\", self.at, end) if self._is_python else -1
            if escape < 0:
                parts.append(self.text[self.at : end])
                self.at = end + len(quote)
                return "".join(parts)
            parts.append(self.text[self.at : escape])
            self.at = escape + 1
            if is_raw:  # where a backslash keeps a quote from ending it, too
                parts.append(self.text[escape : escape + 2])
                self.at += 1
            else:
                parts.append(self._escape())

    def _escape(self) -> str:
        kind = self.text[self.at : self.at + 1]
        self.at += 1
        if kind == "N":
            raise ValueError("a character by its name")
        digits = {"x": 2, "u": 4, "U": 8}.get(kind)
        if digits is None:
            octal = _OCTAL.match(self.text, self.at - 1)
            if octal is None:
                return _ESCAPES.get(kind, "\\" + kind)  # a backslash that is none, as in Python
            self.at = octal.end()
            return chr(int(octal[0], 8))
        code = self.text[self.at : self.at + digits]
        if not re.fullmatch(r"[0-9A-Fa-f]+", code) or len(code) < digits:
            raise ValueError(f"no character \\{kind}{code}")
        self.at += digits
        return chr(min(int(code, 16), 0x110000))  # for which it raises ValueError


def _number(text: str, is_python: bool) -> int | float:
    """Return a number; raise ValueError for other text, such as 0123 of Python."""
    if len(text) > 1000:
        raise ValueError("a number of more than 1000 digits")
    if _INTEGER.fullmatch(text):
        return int(text, 0 if is_python else 10)
    return float(text)


def read_arguments(
    text: str, at: int, close: str, between: str, quotes: Sequence[str], is_python: bool = True
) -> tuple[dict[str, Any], int]:
    """Read keys and values from ``at`` to ``close``; return the values by key, and where they end.

    ``between`` stands between a key and its value, and a string is between two of ``quotes``. With
    ``is_python`` strings and numbers are Python's literals: with escapes, prefixes, several strings
    as one, numbers in other bases; without, a string has no escape. Raises ValueError for other
    text.
    """
    values = _Values(text, at, quotes, is_python)
    return values.entries(close, between, 0), values.at


def is_json(text: str) -> bool:
    """Whether a text is JSON."""
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return True


def typed_value(text: str, schema: Mapping[str, Any], key: str) -> Any:
    """Return the value of a parameter that is written as text.

    It is a string where the schema allows nothing else, or has no such key, and where the text is
    no JSON of a type that it allows.
    """
    found = properties_of(resolved(schema, schema)).get(key)
    if found is None:
        return text
    types = allowed_types(found, schema)
    if types == {"string"}:
        return text
    word = text.strip()
    if word in ("True", "False", "None"):
        word = {"True": "true", "False": "false", "None": "null"}[word]
    try:
        value = json.loads(word, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return text
    return value if types_of(value) & types else text


def _refuse(word: str) -> Any:
    raise ValueError(word)


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
    """An object ``{"name": ..., "arguments": ...}``, or a list of such; ``closes`` may follow.

    ``is_bare``: no marker tells a call from other JSON, so its name has to be one of ``names``.
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
    """A header with a tool's name, and arguments in braces, which each subclass reads in its way.

    The group ``name`` of ``header`` is the tool's name. Between two of ``quotes`` a brace counts as
    text; ``escapes``: a backslash takes the meaning of a quote. Words of ``closes`` may follow.
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

    Values are text. ``schemas``, each tool's by its name, say which are of another type. A value
    ends as ``VALUE_END`` says, but not within JSON that it is, nor within a text of its ``enum``.
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
        """Return the earliest end of a value that seems to end at ``end``, or ``MORE``."""
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
    """Calls as Python writes them: ``[f(a=1), g(b="x")]``, or lines of them up to ``until``.

    Each call must have one of ``names``, if there are any; words of ``closes`` may follow.
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
    """A block of Markdown: JSON of calls, or calls as Python writes them, of tools in ``names``."""

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
    """``call:name{key:value,...}``, whose strings are between two ``quote``, which are tokens."""

    def __init__(self, at: int, quote: str, closes: Sequence[str] = ()) -> None:
        super().__init__(at, _CALL, (quote,), False, closes)

    def _arguments(self, text: str, brace: int) -> str:
        try:
            arguments, _ = read_arguments(text, brace + 1, "}", ":", self._quotes, False)
        except ValueError as error:
            raise NoCall(str(error)) from None
        return dump_json(arguments)
