"""Values of arguments that are no JSON: of Python, of tokens around strings, of plain text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = [
    "VALUE_END",
    "allowed_types",
    "choices_of",
    "is_json",
    "properties_of",
    "read_arguments",
    "resolved",
    "typed_value",
]

# Where a value between tags ends, for Python's ``re`` and Rust's: at its end tag before a next tag,
# or, where the end tag was left out, at a line that begins as such. So a text with words of the
# format is a value as long as these do not come in the order of a call.
_GAP = r"[ \t\r\n]*"
VALUE_END = (
    rf"\n?</parameter>{_GAP}(?:<parameter=|</function>|</tool_call>)"
    rf"|\n[ \t]*(?:<parameter=|</function>{_GAP}</tool_call>)"
)
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
_TYPES = frozenset({"string", "integer", "number", "boolean", "null", "array", "object"})


class _Values:
    """Reads values from a text at a place; raises ValueError.

    With ``is_python`` strings and numbers are Python's literals.
    """

    def __init__(self, text: str, at: int, quotes: Sequence[str], is_python: bool) -> None:
        self.text, self.at, self._is_python = text, at, is_python
        prefix = "([rRuU]?)" if is_python else "()"
        self._begin = re.compile(f"{prefix}({'|'.join(map(re.escape, quotes))})")

    def skip(self) -> str:
        """Skip space; return what is next, empty at the end."""
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
        """Return the string that is next; of Python all of them as one; None: there is none."""
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
    """Return a number; raise ValueError for what is none, such as 0123 of Python."""
    if len(text) > 1000:
        raise ValueError("a number of more than 1000 digits")
    if _INTEGER.fullmatch(text):
        return int(text, 0 if is_python else 10)
    return float(text)


def read_arguments(
    text: str, at: int, close: str, between: str, quotes: Sequence[str], is_python: bool = True
) -> tuple[dict[str, Any], int]:
    """Read keys and values.

    Parameters
    ----------
    text, at : str, int
        Where the first key begins.
    close, between : str
        What ends them, and what stands between a key and its value.
    quotes : sequence of str
        What is before and behind a string.
    is_python : bool
        Whether strings and numbers are Python's literals: with escapes, prefixes, several strings
        as one, numbers in other bases. False: a string has no escape.

    Returns
    -------
    dict, int
        The values by their keys, and where they end.

    Raises
    ------
    ValueError
        The text is something else.
    """
    values = _Values(text, at, quotes, is_python)
    return values.entries(close, between, 0), values.at


def resolved(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a schema, or the one of ``root`` that it refers to; an empty one for anything else."""
    for _ in range(20):
        if not isinstance(schema, Mapping):
            return {}
        reference = schema.get("$ref")
        if not isinstance(reference, str):
            return schema
        schema = root
        for part in reference.removeprefix("#").strip("/").split("/"):
            part = part.replace("~1", "/").replace("~0", "~")
            schema = schema.get(part) if isinstance(schema, Mapping) and part else schema
    return {}


def allowed_types(schema: Any, root: Mapping[str, Any], depth: int = 0) -> frozenset[str]:
    """Return the types of JSON that a schema of ``root`` allows, as far as it says so."""
    schema = resolved(schema, root)
    if depth > 20:
        return _TYPES
    found = schema.get("type")
    if isinstance(found, str):
        return frozenset({found})
    if isinstance(found, list):
        return frozenset(t for t in found if isinstance(t, str))
    for name in ("anyOf", "oneOf"):
        if isinstance(parts := schema.get(name), list):
            return frozenset[str]().union(*(allowed_types(p, root, depth + 1) for p in parts))
    if isinstance(values := schema.get("enum"), list):
        return frozenset[str]().union(*map(_types_of, values))
    return _types_of(schema["const"]) if "const" in schema else _TYPES


def _types_of(value: Any) -> frozenset[str]:
    if isinstance(value, bool):
        return frozenset({"boolean"})
    if isinstance(value, int):
        return frozenset({"integer", "number"})
    if isinstance(value, float):
        return frozenset({"number", "integer"} if value.is_integer() else {"number"})
    kinds = {str: "string", list: "array", dict: "object", type(None): "null"}
    return frozenset({kinds.get(type(value), "object")})


def properties_of(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schemas of an object's keys."""
    found = schema.get("properties")
    return found if isinstance(found, Mapping) else {}


def choices_of(schema: Mapping[str, Any]) -> list[Any] | None:
    """Return the values that a schema names, None where it does not."""
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) and values else None


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
    return value if _types_of(value) & types else text


def _refuse(word: str) -> Any:
    raise ValueError(word)
