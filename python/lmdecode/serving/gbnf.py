"""Reads GBNF, llama.cpp's grammars: a text becomes rules over characters."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NoReturn

__all__ = ["Alternatives", "Chars", "Node", "Reference", "Repeated", "Row", "Token", "rules_of"]

_MAX_DEPTH = 200  # rules are read and written by recursion
_MAX_PARTS = 10_000  # rules, brackets and repetitions: the compiler goes through them by recursion
_MAX_COUNT = 100_000
_TEXT = ((1, 0xD7FF), (0xE000, 0x10FFFF))  # the characters of texts

_SPACE = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_SPACES = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
_NAME = re.compile(r"[A-Za-z0-9_-]+")
_CHARACTER = re.compile(
    r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|"
    r'([trn\\"\[\]-]))|[^\\]',
    re.DOTALL,
)
_ESCAPES = {"t": "\t", "r": "\r", "n": "\n"}
_TOKEN = re.compile(r"(!?)(<(?:\[([0-9]{1,9})\]|[^\[>\r\n][^>\r\n]*)>)")
_SIGNS: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
_NUMBER = re.compile(r"[0-9]+")

Ranges = tuple[tuple[int, int], ...]


class Node:
    """A part of a rule, which has ``parts`` of its own."""

    def __init__(self, parts: Sequence[Node] = ()) -> None:
        self.parts = parts
        self.depth: int = 1 + max((part.depth for part in parts), default=0)


class Row(Node):
    """Parts one behind the other; without parts the empty text."""


class Alternatives(Node):
    """One of some parts."""


class Repeated(Node):
    """A part at least and at most so many times; ``most`` is at least 1, None: any number."""

    def __init__(self, part: Node, least: int, most: int | None) -> None:
        super().__init__([part])
        self.least, self.most = least, most


class Chars(Node):
    """A character in ranges of code points, both ends included; there is one at least."""

    def __init__(self, ranges: Ranges) -> None:
        super().__init__()
        self.ranges = ranges


class Token(Node):
    """A token, or one that it is not."""

    def __init__(self, id: int, is_other: bool) -> None:
        super().__init__()
        self.id, self.is_other = id, is_other


class Reference(Node):
    """What a rule says."""

    def __init__(self, name: str, at: int) -> None:
        super().__init__()
        self.name, self.at = name, at


def rules_of(text: str, token_of: Callable[[str], int | None], vocab: int) -> dict[str, Node]:
    """Return the rules of a grammar by their names, ``root`` among them.

    ``token_of`` returns the token of a word such as ``"<think>"``, None if it is none; ``vocab`` is
    the number of tokens. Raises ValueError that names line and column if it is no GBNF, or is too
    large.
    """
    return _Reader(text, token_of, vocab).rules()


class _Reader:
    def __init__(self, text: str, token_of: Callable[[str], int | None], vocab: int) -> None:
        self._text, self._token_of, self._vocab = text, token_of, vocab
        self._at = self._count = self._level = 0
        self._references: list[Reference] = []
        self._points: dict[int, Chars] = {}  # of texts in quotes

    def rules(self) -> dict[str, Node]:
        rules: dict[str, Node] = {}
        self._skip(_SPACES)
        while self._next():
            self._count_part()
            if (name := _NAME.match(self._text, self._at)) is None:
                more = ", as a rule goes on in a new line only behind | or within brackets"
                self._fail(f"expected the name of a rule{more if self._next() == '|' else ''}")
            self._skip(_NAME)
            self._skip(_SPACE)
            self._expect("::=", "expected ::= behind the name of a rule")
            self._skip(_SPACES)
            rules[name[0]] = self._alternatives()  # the last of one name counts
            if self._next() not in ("", "\r", "\n"):
                self._fail("expected a part of a rule, or the end of the line")
            self._skip(_SPACES)
        for reference in self._references:
            if reference.name not in rules:
                self._fail("there is no rule of this name", reference.at)
        if "root" not in rules:
            raise ValueError("the grammar is no GBNF: it has no rule root")
        return rules

    def _alternatives(self) -> Node:
        rows, parts = list[Node](), list[Node]()
        while True:
            part = self._part()
            if part is not None:
                parts.append(part)
            elif self._next() and self._next() in "*+?{":
                self._repeat(parts)
            else:
                rows.append(parts[0] if len(parts) == 1 else Row(parts))
                if self._next() != "|":
                    break
                parts = []
                self._at += 1
                self._skip(_SPACES)
                continue
            self._skip(_SPACES if self._level else _SPACE)
            if parts and parts[-1].depth > _MAX_DEPTH:
                self._fail(f"expected at most {_MAX_DEPTH} levels")
        return rows[0] if len(rows) == 1 else Alternatives(rows)

    def _part(self) -> Node | None:
        """Read what may be repeated, None if there is nothing."""
        sign, begin = self._next(), self._at
        if (name := _NAME.match(self._text, begin)) is not None:
            self._at = name.end()
            self._references.append(Reference(name[0], begin))
            return self._references[-1]
        if sign in ("<", "!"):
            return self._token()
        if sign == "" or sign not in '"[.(':
            return None
        self._at += 1
        if sign == "(":
            self._count_part()
            self._level += 1
            if self._level > _MAX_DEPTH:
                self._fail(f"expected at most {_MAX_DEPTH} levels")
            self._skip(_SPACES)
            part = self._alternatives()
            self._level -= 1
            self._expect(")", "expected a part of a rule, or )")
            return part
        if sign == "[":
            return self._class(begin)
        if sign == ".":
            return Chars(_TEXT)
        characters = list[Node]()
        while self._next() != '"':
            at = self._at
            point = self._character(begin)
            if point not in self._points:
                self._points[point] = self._set([(point, point)], at)
            characters.append(self._points[point])
        self._at += 1
        return characters[0] if len(characters) == 1 else Row(characters)

    def _class(self, begin: int) -> Node:
        is_other = self._next() == "^"
        self._at += is_other
        ranges: list[tuple[int, int]] = []
        while self._next() != "]":
            at = self._at
            first = last = self._character(begin)
            if self._next() == "-" and not self._text.startswith("]", self._at + 1):
                self._at += 1
                last = self._character(begin)
                if last < first:
                    self._fail("expected a range whose end is not before its beginning", at)
            ranges.append((first, last))
        self._at += 1
        if not ranges:  # as llama.cpp has it
            return Row()
        if is_other:
            edges = [(0, 0), *sorted(ranges), (0x110000, 0x110000)]
            ranges, most = [], 0
            for first, last in edges:
                ranges.append((most + 1, first - 1))
                most = max(most, last)
        return self._set(ranges, begin)

    def _set(self, ranges: Sequence[tuple[int, int]], at: int) -> Chars:
        kept = sorted(
            (max(first, low), min(last, high))
            for first, last in ranges
            for low, high in _TEXT
            if max(first, low) <= min(last, high)
        )
        if not kept:
            self._fail("expected a character of texts, no null character and no surrogate", at)
        merged = kept[:1]
        for first, last in kept[1:]:
            if first <= merged[-1][1] + 1:
                merged[-1] = merged[-1][0], max(merged[-1][1], last)
            else:
                merged.append((first, last))
        return Chars(tuple(merged))

    def _character(self, begin: int) -> int:
        """Read a code point of what begins there."""
        found = _CHARACTER.match(self._text, self._at)
        if found is None:
            if self._next():
                self._fail(
                    r"expected \t, \r, \n, \\, \", \[, \], \-, or \x, \u or \U and 2, 4 or 8 digits"
                )
            self._fail(
                f"expected {']' if self._text[begin] == '[' else 'a quote'} at its end", begin
            )
        self._at = found.end()
        digits = found[1] or found[2] or found[3]
        if digits is not None:
            return int(digits, 16)
        return ord(found[0] if found[4] is None else _ESCAPES.get(found[4], found[4]))

    def _token(self) -> Token:
        begin = self._at
        if (found := _TOKEN.match(self._text, begin)) is None:
            self._fail("expected a token, such as <think>, <[7]> or !<[7]>")
        self._at = found.end()
        id = self._token_of(found[2]) if found[3] is None else int(found[3])
        if id is None or id >= self._vocab:
            self._fail("the model has no such token", begin)
        return Token(id, found[1] == "!")

    def _repeat(self, parts: list[Node]) -> None:
        """Read how often the last of some parts is repeated."""
        begin = self._at
        if not parts:
            self._fail("expected a part of a rule before it")
        self._count_part()
        self._at += 1
        if (sign := self._text[begin]) in _SIGNS:
            least, most = _SIGNS[sign]
        else:
            space = _SPACES if self._level else _SPACE
            self._skip(space)
            least = most = self._number()
            self._skip(space)
            if self._next() == ",":
                self._at += 1
                self._skip(space)
                most = None if self._next() == "}" else self._number()
                self._skip(space)
            self._expect("}", "expected }")
            if most is not None and most < least:
                self._fail("expected a second number that is not below the first", begin)
        part = parts[-1]
        if most == 0 or (isinstance(part, Row) and not part.parts):
            parts[-1] = Row()
            return
        if isinstance(part, Repeated) and all(
            low <= 1 and high in (1, None) for low, high in ((part.least, part.most), (least, most))
        ):
            least *= part.least
            most = 1 if part.most == most == 1 else None
            part = part.parts[0]
        parts[-1] = Repeated(part, least, most)

    def _number(self) -> int:
        begin = self._at
        if (found := _NUMBER.match(self._text, begin)) is None:
            self._fail("expected a number")
        self._at = found.end()
        if len(found[0].lstrip("0")) > 9 or int(found[0]) > _MAX_COUNT:
            self._fail(f"expected at most {_MAX_COUNT}", begin)
        return int(found[0])

    def _next(self) -> str:
        return self._text[self._at : self._at + 1]

    def _skip(self, space: re.Pattern[str]) -> None:
        found = space.match(self._text, self._at)
        self._at = self._at if found is None else found.end()

    def _expect(self, sign: str, what: str) -> None:
        if not self._text.startswith(sign, self._at):
            self._fail(what)
        self._at += len(sign)

    def _count_part(self) -> None:
        self._count += 1
        if self._count > _MAX_PARTS:
            raise ValueError(
                f"the grammar has more than {_MAX_PARTS} rules, brackets and repetitions; expected "
                "fewer"
            )

    def _fail(self, what: str, at: int | None = None) -> NoReturn:
        at = self._at if at is None else at
        lines = re.split(r"\r\n?|\n", self._text[:at])
        rest = re.compile(r"[^\r\n]{0,30}").match(self._text, at)
        shown = repr(rest[0]) if rest is not None and rest[0] else "the end of the line"
        if at >= len(self._text):
            shown = "the end"
        place = f"line {len(lines)}, column {len(lines[-1]) + 1}"
        raise ValueError(f"the grammar is no GBNF: {place}, {shown}: {what}")
