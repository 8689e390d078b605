"""Readers of calls of tools in the text that a model writes: each begins where a marker ends.

A reader is a generator over the text so far, and looks at each character once. It yields where it
needs more text, and returns the calls and where they end. It raises ``NoCall`` where the text is no
call and so part of the answer. How the text is cut into pieces makes no difference.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias, TypeVar

from lmdecode.serving.tools import (
    VALUE_END,
    allowed_types,
    choices_of,
    properties_of,
    resolved,
    types_of,
)

__all__ = [
    "FoundCalls", "NoCall", "Output", "Reading", "fenced_calls", "json_calls", "key_value_calls",
    "named_calls", "python_calls", "tagged_calls",
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


_ARGUMENTS = ("arguments", "parameters", "args")
MAX_HEADER = 400  # characters before the arguments of a call


class NoCall(ValueError):
    """The text is no call."""


class FoundCalls(NamedTuple):
    """Calls, as pairs of a name and arguments in JSON, and where they end in the text."""

    calls: list[tuple[str, str]]
    end: int


_Place: TypeAlias = tuple[str, int]  # the quote that is open, and where in the whole answer
_UNCLOSED, _WRONG = -1, -2  # the answer ends first; another bracket closes


class _Scans:
    """What scans for closing brackets found: the bracket that closes the level of each place.

    A scan goes on from a place as any other does, so none goes again where another one has been.
    """

    def __init__(self) -> None:
        self.passed: list[tuple[list[_Place], int]] = []  # places of a level, and what closes it
        self._known: dict[_Place, int] = {}

    def known(self) -> dict[_Place, int]:
        """Return what closes the levels of all places."""
        for places, close in self.passed:
            self._known.update(dict.fromkeys(places, close))
        self.passed.clear()
        return self._known


@dataclass
class Output:
    """The text that a model has written so far; ``is_last``: there is no more of it.

    The first ``taken`` characters of the answer are no part of it any more.
    """

    text: str = ""
    is_last: bool = False
    taken: int = 0
    scans: dict[tuple[Sequence[str], bool], _Scans] = field(default_factory=dict)


_T = TypeVar("_T")
_Waiting: TypeAlias = Generator[None, None, _T]
Reading: TypeAlias = _Waiting[FoundCalls]


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
    try:  # a new line within a string is one
        return json.loads(text, strict=False, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise NoCall(str(error)) from None


def _after(written: Output, at: int, space: re.Pattern[str] = _SPACE) -> _Waiting[int]:
    """Return where something follows a space, or the text ends."""
    while True:
        found = space.match(written.text, at)
        assert found is not None
        if (at := found.end()) < len(written.text) or written.is_last:
            return at
        yield


def _begins(written: Output, at: int, word: str) -> _Waiting[bool]:
    """Return whether a word is at a place."""
    while word != (found := written.text[at : at + len(word)]):
        if written.is_last or not word.startswith(found):
            return False
        yield
    return True


def _end_of(
    written: Output, at: int, quotes: Sequence[str] = ('"',), escapes: bool = True
) -> _Waiting[int]:
    """Return where brackets close that open at a place; a bracket between two quotes is text."""
    quoted = "|".join(map(re.escape, quotes))  # one that begins with another one stands before it
    outside = re.compile(rf"[(){{}}\[\]]|{quoted}")
    within = {q: re.compile(rf"\\|{re.escape(q)}" if escapes else re.escape(q)) for q in quotes}
    longest = max(map(len, quotes))
    scans = written.scans.setdefault((quotes, escapes), _Scans())
    known, passed, taken = scans.known(), scans.passed, written.taken
    depth, levels, quote = list[str](), list[list[_Place]](), ""
    while True:
        text = written.text
        close = known.get((quote, taken + at)) if depth else None
        if close == _WRONG:
            passed += [(places, _WRONG) for places in levels]
            raise NoCall("another bracket closes")
        if close is not None and close != _UNCLOSED:
            quote, at = "", close - taken
        found, is_sure = None, False
        if close != _UNCLOSED:
            found = (within[quote] if quote else outside).search(text, at)
            if found is None:  # a quote may begin at the end
                at = max(at, len(text) - longest + 1)
        if found is None:
            pass
        elif found[0] == "\\":
            is_sure = found.end() < len(text)
            at = found.end() + 1 if is_sure else found.start()
        else:
            begun = text[found.start() : found.start() + longest]
            # A longer quote may begin here.
            is_sure = bool(quote) or not any(q != begun and q.startswith(begun) for q in quotes)
            at = found.end() if is_sure else found.start()
        if not is_sure:
            if written.is_last:
                passed += [(places, _UNCLOSED) for places in levels]
                raise NoCall("brackets that do not close")
            yield
            continue
        assert found is not None
        word = found[0]
        if quote:
            quote = quote if word == "\\" else ""
        elif word in "([{":
            depth.append(")]}"["([{".index(word)])
            levels.append([])
        elif word in ")]}":
            passed.append((levels.pop(), taken + found.start()))
            if depth.pop() != word:
                passed += [(places, _WRONG) for places in levels]
                raise NoCall(f"{word} closes what is not open")
            if not depth:
                return at
        else:
            quote = word
        levels[-1].append((quote, taken + at))


def _closed(
    written: Output, calls: list[tuple[str, str]], at: int, closes: Sequence[str]
) -> Reading:
    """Read the words that may close calls, in their order."""
    for close in closes:
        start = yield from _after(written, at)
        if (yield from _begins(written, start, close)):
            at = start + len(close)
    return FoundCalls(calls, at)


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


def json_calls(
    written: Output,
    at: int,
    closes: Sequence[str] = (),
    names: Collection[str] | None = None,
    is_bare: bool = False,
) -> Reading:
    """Read an object ``{"name": ..., "arguments": ...}``, or a list; ``closes`` may follow.

    ``is_bare``: no marker tells a call from other JSON, so its name has to be one of ``names``.
    """
    at = yield from _after(written, at)
    if not written.text.startswith(("{", "["), at):
        raise NoCall("no JSON")
    if written.text[at] == "[":
        inside = yield from _after(written, at + 1)
        if not written.text.startswith("{", inside):
            raise NoCall("a list of no objects")
    end = yield from _end_of(written, at)
    calls = calls_of(load_json(written.text[at:end]), names, is_bare)
    return (yield from _closed(written, calls, end, closes))


def _braced(
    written: Output,
    at: int,
    header: re.Pattern[str],
    arguments: Callable[[str, int], str],
    closes: Sequence[str],
    quote: str = '"',
    escapes: bool = True,
) -> Reading:
    """Read a header, whose group ``name`` is the tool's name, and ``arguments`` in braces.

    These are a function of a text that ends with the braces, and of where they begin. Between two
    ``quote`` a brace counts as text; ``escapes``: a backslash takes the meaning of a quote.
    """
    while (brace := written.text.find("{", at, at + MAX_HEADER)) < 0:
        if written.is_last or len(written.text) >= at + MAX_HEADER:
            raise NoCall("no arguments")
        yield
    found = header.fullmatch(written.text, at, brace)
    if found is None:
        raise NoCall("no name")
    end = yield from _end_of(written, brace, (quote,), escapes)
    call = found["name"], arguments(written.text[:end], brace)
    return (yield from _closed(written, [call], end, closes))


def named_calls(
    written: Output, at: int, header: re.Pattern[str], closes: Sequence[str] = ()
) -> Reading:
    """Read a name, a word, and an object: ``name[ARGS]{...}``; ``closes`` may follow."""

    def arguments(text: str, brace: int) -> str:
        return dump_json(load_json(text[brace:]))

    return _braced(written, at, header, arguments, closes)


def key_value_calls(written: Output, at: int, quote: str, closes: Sequence[str] = ()) -> Reading:
    """Read ``call:name{key:value,...}``, whose strings are between two ``quote``, tokens."""

    def arguments(text: str, brace: int) -> str:
        try:
            return dump_json(read_arguments(text, brace + 1, "}", ":", (quote,), False)[0])
        except ValueError as error:
            raise NoCall(str(error)) from None

    return _braced(written, at, _CALL, arguments, closes, quote, escapes=False)


_CALL = re.compile(r"\s*call:(?P<name>[\w.\-]+)")
_QUOTES = ('"""', "'''", '"', "'")
_BETWEEN = re.compile(r"[\s,;]*")
_NAME = re.compile(r"[\w.\-]{1,128}")
_TAG = re.compile(r"[^<>\n]{1,200}")
_VALUE_END = re.compile(VALUE_END.replace("*", "{0,200}"))  # so that it has a bound:
_MOST_END = 500  # characters
_LAST_END = re.compile(r"(?:\n?</parameter>|\n[ \t]*</function>)[ \t\r\n]*\Z")
_BEFORE_TAG = re.compile(r"\n?(?:</parameter>)?[ \t\r\n]*")
_IN_STRING = re.compile(r'["\\\n]')


def _tag(written: Output, at: int) -> _Waiting[tuple[str, int]]:
    """Return what stands up to the end of a tag, and where it ends; raise ``NoCall``."""
    while True:
        found = _TAG.match(written.text, at)
        end = at if found is None else found.end()
        if found is not None and written.text.startswith(">", end):
            return found[0], end + 1
        if end < len(written.text) or written.is_last:
            raise NoCall("a tag without a name")
        yield


def tagged_calls(
    written: Output,
    at: int,
    schemas: Mapping[str, Mapping[str, Any]],
    closes: Sequence[str] = (),
) -> Reading:
    """Read ``<function=name>``, ``<parameter=key>value</parameter>``, ``</function>``; or JSON.

    Values are text. ``schemas``, each tool's by its name, say which are of another type.
    """
    start = yield from _after(written, at)
    if not (yield from _begins(written, start, "<function=")):
        return (yield from json_calls(written, at, closes))
    tag, at = yield from _tag(written, start + len("<function="))
    name, values = tag.strip(), dict[str, Any]()
    while not values or at < len(written.text):  # the end of the answer may end the last value
        at = yield from _after(written, at)
        for word in ("<parameter=", "</function>", "</tool_call>"):
            if (yield from _begins(written, at, word)):
                break
        else:
            raise NoCall("no parameter")
        if word != "<parameter=":
            at += len(word) if word == "</function>" else 0
            break
        tag, at = yield from _tag(written, at + len(word))
        at = yield from _TaggedValue(written, tag, values, schemas.get(name, {})).read(at)
    return (yield from _closed(written, [(name, dump_json(values))], at, closes))


def _end_of_string(written: Output, at: int) -> _Waiting[int]:
    """Return where a string of JSON ends whose first character is at a place; 0: it does not."""
    while True:
        found = _IN_STRING.search(written.text, at)
        at = len(written.text) if found is None else found.end()
        if found is not None and found[0] != "\\":
            return at if found[0] == '"' else 0
        while at == len(written.text):
            if written.is_last:
                return 0
            yield
        if found is not None:  # of an escape
            if written.text[at] == "\n":
                return 0
            at += 1


class _TaggedValue:
    """Reads a value between tags, and puts it to others.

    It ends as ``VALUE_END`` says, but not within JSON that it is, nor within a text of its
    ``enum``.
    """

    def __init__(
        self, written: Output, tag: str, values: dict[str, Any], schema: Mapping[str, Any]
    ) -> None:
        self._written, self._values, self._schema = written, values, schema
        self._known = properties_of(resolved(schema, schema))
        self._key = self._key_of(tag)
        self._json_end: int | None = None  # of JSON that is the value

    def _key_of(self, tag: str) -> str:
        return tag if tag in self._known else tag.strip()

    def read(self, at: int) -> _Waiting[int]:
        """Read the value; return where a tag follows, or the text ends."""
        written = self._written
        while at == len(written.text) and not written.is_last:
            yield
        sought = start = at + written.text.startswith("\n", at)
        while True:
            found = _VALUE_END.search(written.text, sought)
            if found is not None:
                sought = found.start() + 1
                if (yield from self._may_end(found)):
                    sought = yield from self._end_beyond(start, found.start())
                    if sought == found.start():
                        break
            elif written.is_last:
                found = _LAST_END.search(written.text, self._json_end or start)
                if found is None:
                    raise NoCall("a value that does not end")
                break
            else:
                sought = max(sought, len(written.text) - _MOST_END)
                yield
        text = written.text[start : found.start()]
        self._values[self._key] = typed_value(text, self._schema, self._key)
        before = _BEFORE_TAG.match(written.text, found.start())
        assert before is not None
        return before.end()

    def _may_end(self, found: re.Match[str]) -> _Waiting[bool]:
        """Return False before the tag of a key that may not follow."""
        if not found[0].endswith("="):
            return True
        try:
            tag, _ = yield from _tag(self._written, found.end())
        except NoCall:
            return False
        key = self._key_of(tag)
        if key == self._key or key in self._values:
            return False
        return "</parameter>" in found[0] or not self._known or key in self._known

    def _end_beyond(self, start: int, end: int) -> _Waiting[int]:
        """Return the earliest end of a value that seems to end at ``end``."""
        schema, written = self._known.get(self._key), self._written
        if schema is None:
            return end
        if allowed_types(schema, self._schema) != {"string"}:
            if self._json_end is None:
                self._json_end = yield from self._end_of_json(start, end)
            return max(end, self._json_end)
        choices = choices_of(resolved(schema, self._schema)) or ()
        texts = [choice for choice in choices if isinstance(choice, str)]
        for choice in sorted(texts, key=len, reverse=True):
            behind = start + len(choice)
            if behind <= end:
                break
            while choice.startswith(written.text[start:behind]):
                is_whole = len(written.text) >= behind
                tag = _VALUE_END.match(written.text, behind) if is_whole else None
                if tag is not None and tag[0].lstrip().startswith("</parameter>"):
                    return behind
                if written.is_last or len(written.text) >= behind + _MOST_END:
                    break
                yield
        return end

    def _end_of_json(self, start: int, end: int) -> _Waiting[int]:
        """Return the end of JSON that goes beyond ``end``, or ``end``."""
        written, behind = self._written, end
        at = yield from _after(written, start)
        if written.text.startswith('"', at):
            behind = yield from _end_of_string(written, at + 1)
        elif written.text.startswith(("{", "["), at):
            try:
                behind = yield from _end_of(written, at)
            except NoCall:
                return end
        return behind if behind > end and is_json(written.text[at:behind]) else end


def python_calls(
    written: Output,
    at: int,
    closes: Sequence[str] = (),
    until: str = "",
    names: Collection[str] | None = None,
) -> Reading:
    """Read calls as Python writes them: ``[f(a=1), g(b="x")]``, or lines of them up to ``until``.

    Each call must have one of ``names``, if there are any; words of ``closes`` may follow.
    """
    if not until:
        at = yield from _after(written, at)
        if not written.text.startswith("[", at):
            raise NoCall("no list")
        until, at = "]", at + 1
    calls: list[tuple[str, str]] = []
    while True:
        at = yield from _after(written, at, _BETWEEN)
        if (yield from _begins(written, at, until)):
            if not calls:
                raise NoCall("no call")
            return (yield from _closed(written, calls, at + len(until), closes))
        while (name := _NAME.match(written.text, at)) is not None:
            if name.end() < len(written.text) or written.is_last:
                break
            yield
        if name is None or not written.text.startswith("(", name.end()):
            raise NoCall("no call")
        if names is not None and name[0] not in names:
            raise NoCall("no tool")
        at = yield from _end_of(written, name.end(), _QUOTES)
        try:
            found, behind = read_arguments(written.text[:at], name.end() + 1, ")", "=", _QUOTES)
        except ValueError as error:
            raise NoCall(str(error)) from None
        if behind != at:
            raise NoCall("brackets that do not fit")
        calls.append((name[0], dump_json(found)))


def fenced_calls(written: Output, at: int, names: Collection[str] | None) -> Reading:
    """Read a block of Markdown: calls in JSON, or as Python writes them, of tools in ``names``."""
    at = yield from _after(written, at)
    if not written.text.startswith(("{", "["), at):
        return (yield from python_calls(written, at, (), "```", names))
    found = yield from json_calls(written, at, (), names, True)
    end = yield from _after(written, found.end)
    if not (yield from _begins(written, end, "```")):
        raise NoCall("no end of the block")
    return FoundCalls(found.calls, end + 3)
