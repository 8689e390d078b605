"""GBNF, llama.cpp's grammars: read into rules over characters, and written in Lark."""

from __future__ import annotations

import bisect
import itertools
import re
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import NamedTuple, NoReturn

__all__ = [
    "Alternatives", "Chars", "Node", "Reference", "Repeated", "Row", "Token", "lark_of_gbnf",
    "rules_of",
]  # fmt: skip

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
    """Parts in a row; without parts the empty text."""


class Alternatives(Node):
    """One of some parts."""


class Repeated(Node):
    """A part, ``least`` to ``most`` times; ``most`` is at least 1, or None for any number."""

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


_MAX_SYMBOLS = 50_000  # of rules
_MAX_REGEX = 100_000  # characters of a terminal
_MAX_NESTED = 100  # brackets in it
_MAX_PAIRS = 200_000  # of its places that may follow each other
_WORK = 500_000  # steps for terminals, and for what may follow: then they are taken apart


def lark_of_gbnf(
    text: str, token_of: Callable[[str], int | None], vocab: int, special: Collection[int]
) -> str:
    """Return a grammar in Lark that allows the texts of one in GBNF; see ``rules_of``.

    ``special`` are tokens without text: the grammar has only those that it names.
    """
    writer = _Writer(rules_of(text, token_of, vocab), special)
    rules = writer.rules()
    while writer.take_apart(rules):
        rules = writer.rules()
    if (count := sum(len(row) + 1 for rows in rules for row in rows)) > _MAX_SYMBOLS:
        raise ValueError(f"the grammar has {count} parts; expected at most {_MAX_SYMBOLS}")
    return _written(rules)


class _Terminal(NamedTuple):
    """A part without recursion: a regular expression for Rust's crate ``regex``, and its places.

    ``sets`` has the characters of each place as bits, ``next`` the places that may follow each,
    ``first`` and ``last`` the places where a text may begin and end, and ``begins`` the first
    places of the parts of a row. Counts of repetitions are in the regular expression alone.
    ``nested`` is the depth of brackets, and ``is_nullable`` whether the empty text is allowed.
    """

    regex: str
    nested: int
    is_nullable: bool
    sets: list[int]
    first: list[int]
    last: list[int]
    next: list[set[int]]
    begins: list[int]

    @property
    def size(self) -> int:
        """Number of its places, and of pairs of places that may follow each other."""
        return len(self.sets) + sum(map(len, self.next))

    def takes(self, places: Iterable[int]) -> int:
        """Return the characters of some places."""
        bits = 0
        for place in places:
            bits |= self.sets[place]
        return bits


class _Symbol(NamedTuple):
    """A part of a row: a terminal, the number of a rule, or a token as Lark has it."""

    of: _Terminal | int | str
    least: int = 1
    most: int | None = 1


_Rules = list[list[list[_Symbol]]]


def _written(rules: _Rules) -> str:
    names: dict[str, str] = {}

    def written(symbol: _Symbol) -> str:
        name = f"r{symbol.of}" if isinstance(symbol.of, int) else symbol.of
        if isinstance(name, _Terminal):
            name = names.setdefault(name.regex, f"T{len(names)}")
        if (symbol.least, symbol.most) == (1, 1):
            return name
        return f"{name}{{{symbol.least},{'' if symbol.most is None else symbol.most}}}"

    lines = ['%llguidance {"no_forcing": true}', "start: r0"]
    for index, rows in enumerate(rules):
        texts = dict.fromkeys(" ".join(map(written, row)) or '""' for row in rows)
        lines.append(f"r{index}: {' | '.join(texts)}")
    return "\n".join([*lines, *(f"{name}: /{regex}/" for regex, name in names.items())])


class _Writer:
    def __init__(self, rules: dict[str, Node], special: Collection[int]) -> None:
        self._of_name, self._special = rules, special
        self._edges = sorted(
            {edge for rule in rules.values() for node in _nodes_of(rule) if isinstance(node, Chars)
             for first, last in node.ranges for edge in (first, last + 1)}
        )  # fmt: skip
        self._all = (1 << len(self._edges)) - 1
        self._terminals: dict[Node, _Terminal] = {}
        # Terminals that are taken apart, by their regular expressions: between which places.
        self._cuts: dict[str, tuple[int, int]] = {}
        self._unrolled: dict[Node, Row] = {}
        self._only_single = False
        self._work = _WORK
        self._find_terminals()
        self._work = _WORK

    def _find_terminals(self) -> None:
        """Find the terminals of all parts, of a rule after the rules that it names."""
        users: dict[str, list[str]] = {name: [] for name in self._of_name}
        missing = dict.fromkeys(self._of_name, 0)
        for name, rule in self._of_name.items():
            for node in _nodes_of(rule):
                if isinstance(node, Reference):
                    users[node.name].append(name)
                    missing[name] += 1
        order = [name for name, count in missing.items() if count == 0]
        for name in order:
            for user in users[name]:
                missing[user] -= 1
                if missing[user] == 0:
                    order.append(user)
        in_order = set(order)
        for name in [*order, *(name for name in self._of_name if name not in in_order)]:
            for node in reversed(list(_nodes_of(self._of_name[name]))):
                if (found := self._new_terminal(node)) is not None:
                    self._terminals[node] = found

    def _new_terminal(self, node: Node) -> _Terminal | None:
        if isinstance(node, Chars):
            bits = 0
            for first, last in node.ranges:
                low = bisect.bisect_left(self._edges, first)
                high = bisect.bisect_left(self._edges, last + 1)
                bits |= (1 << high) - (1 << low)
            return _Terminal(_class(node.ranges), 0, False, [bits], [0], [0], [set()], [])
        if isinstance(node, Reference):
            return self._terminals.get(self._of_name[node.name])
        parts = [self._terminals[part] for part in node.parts if part in self._terminals]
        if isinstance(node, Token) or len(parts) < len(node.parts):
            return None
        if isinstance(node, Repeated):
            return self._repeated(parts[0], node.least, node.most)
        return self._joined(parts, isinstance(node, Alternatives))

    def _repeated(self, part: _Terminal, least: int, most: int | None) -> _Terminal | None:
        count = f"{{{least},{'' if most is None else most}}}"
        pairs = part.size + len(part.first) * len(part.last)
        if self._is_too_large(len(part.regex), part.nested + 1, pairs):
            return None
        next = part.next
        if most != 1:
            next = [set(places) for places in next]
            for place in part.last:
                next[place].update(part.first)
        return part._replace(
            regex=f"(?:{part.regex}){count}",
            nested=part.nested + 1,
            is_nullable=part.is_nullable or least == 0,
            next=next,
            begins=[],
        )

    def _joined(self, parts: Sequence[_Terminal], is_choice: bool) -> _Terminal | None:
        nested = is_choice + max((part.nested for part in parts), default=0)
        pairs = sum(part.size for part in parts)
        if self._is_too_large(sum(len(part.regex) + 1 for part in parts), nested, pairs):
            return None
        sets, next = list[int](), list[set[int]]()
        first, last, starts = list[int](), list[int](), list[int]()
        is_nullable = not is_choice
        for part in parts:
            begin = len(sets)
            starts.append(begin)
            begins = [begin + place for place in part.first]
            sets += part.sets
            next += [{begin + place for place in places} for places in part.next]
            if is_choice or is_nullable:
                first += begins
            if not is_choice:
                pairs += len(last) * len(begins)
                if pairs > _MAX_PAIRS:
                    return None
                for place in last:
                    next[place].update(begins)
                if not part.is_nullable:
                    last = []
            last += [begin + place for place in part.last]
            is_nullable = (
                is_nullable or part.is_nullable if is_choice else is_nullable and part.is_nullable
            )
        regex = "".join(part.regex for part in parts)
        if is_choice:
            regex = f"(?:{'|'.join(part.regex for part in parts)})"
        starts = [] if is_choice else starts
        return _Terminal(regex, nested, is_nullable, sets, first, last, next, starts)

    def _is_too_large(self, regex: int, nested: int, pairs: int) -> bool:
        self._work -= pairs
        sizes = (regex, _MAX_REGEX), (nested, _MAX_NESTED), (pairs, _MAX_PAIRS), (0, self._work)
        return any(size > most for size, most in sizes)

    # Rules

    def rules(self) -> _Rules:
        """Return the rules of Lark by their numbers, the first for ``root``."""
        numbers: dict[Node, int] = {self._of_name["root"]: 0}
        found: _Rules = []
        waiting = list(numbers)

        def number_of(node: Node) -> int:
            if node not in numbers:
                numbers[node] = len(numbers)
                waiting.append(node)
            return numbers[node]

        for node in waiting:
            parts = node.parts if isinstance(node, Alternatives) else [node]
            whole = [one for one in map(self._whole, parts) if one is not None]
            joined = self._joined(whole, True) if len(whole) > 1 and not self._only_single else None
            if joined is not None and joined.regex in self._cuts:
                joined = None
            rows = [
                self._row(part, number_of)
                for part in parts
                if joined is None or self._whole(part) is None
            ]
            found.append(rows if joined is None else [*rows, _symbols_of([joined])])
        return found

    def _row(self, node: Node, number_of: Callable[[Node], int]) -> list[_Symbol]:
        row, whole = list[_Symbol](), list[_Terminal]()
        for part in [*(node.parts if isinstance(node, Row) else [node]), None]:
            terminal = None if part is None else self._whole(part)
            if terminal is not None:
                whole.append(terminal)
                continue
            row += _symbols_of(self._pieces(whole))
            whole = []
            if part is not None:
                row.append(self._symbol(part, number_of))
        return row

    def _symbol(self, node: Node, number_of: Callable[[Node], int]) -> _Symbol:
        if isinstance(node, Token):
            others = ",".join(map(str, sorted({node.id, *self._special})))
            return _Symbol(f"<[^{others}]>" if node.is_other else f"<[{node.id}]>")
        if isinstance(node, Reference):
            return _Symbol(number_of(self._of_name[node.name]))
        if isinstance(node, Repeated):
            if (row := self._unroll(node)) is not None:
                return _Symbol(number_of(row))
            part = node.parts[0]
            whole = self._whole(part)
            of = number_of(part) if whole is None or not whole.sets else whole
            return _Symbol(of, node.least, node.most)
        return _Symbol(number_of(node))

    def _whole(self, node: Node) -> _Terminal | None:
        """Return the terminal of a part, None if it is written as a rule."""
        found = self._terminals.get(node)
        if found is None or found.regex in self._cuts or (self._only_single and any(found.next)):
            return None
        return found

    def _pieces(self, parts: list[_Terminal]) -> list[_Terminal]:
        """Join terminals that stand in a row."""
        waiting, pieces = [parts], list[_Terminal]()
        while waiting:
            parts = waiting.pop()
            joined = None if self._only_single or len(parts) < 2 else self._joined(parts, False)
            cut = None if joined is None else self._cuts.get(joined.regex)
            if joined is None or cut is None:
                pieces += parts if joined is None else [joined]
                continue
            # Behind the part that has the first of the places, and before it if it has both.
            part, part_too = (bisect.bisect_right(joined.begins, place) - 1 for place in cut)
            edges = sorted({0, part if part == part_too else 0, part + 1, len(parts)})
            waiting += [parts[begin:end] for begin, end in itertools.pairwise(edges)][::-1]
        return pieces

    def _unroll(self, node: Repeated) -> Row | None:
        """Return ``(a | b)*`` as ``a* (b a*)*``, where a is a terminal and b is none."""
        choice = node.parts[0]
        if node.most is not None or not isinstance(choice, Alternatives):
            return None
        if node not in self._unrolled:
            plain = [part for part in choice.parts if part in self._terminals]
            others = [part for part in choice.parts if part not in self._terminals]
            if not plain or not others:
                return None
            new: list[Node] = [Alternatives(plain)]
            new.append(Repeated(new[0], 0, None))
            again = Repeated(Row([Alternatives(others), new[1]]), 0, None)
            first = [Repeated(choice, node.least, node.least)] if node.least else []
            self._unrolled[node] = Row([*first, new[1], again])
            for part in new:
                if (found := self._new_terminal(part)) is not None:
                    self._terminals[part] = found
        return self._unrolled[node]

    # What a terminal could go on with

    def take_apart(self, rules: _Rules) -> bool:
        """Find terminals that must be taken apart; return whether there are any."""
        if self._only_single:
            return False
        behind = self._behind(rules)
        terminals = [(one, bits, one.takes(one.first)) for one, bits in behind.values()]
        goes_on = {one.regex: one.takes(set().union(*one.next)) for one, _ in behind.values()}
        found: dict[str, tuple[int, int]] = {}
        for one, bits, begins in terminals:
            self._work -= len(terminals) // 8
            for other, _, begins_too in terminals:
                regex = other.regex
                if begins & begins_too and bits & goes_on[regex] and regex not in found:
                    if (places := self._goes_on(one, other, bits)) is not None:
                        found[regex] = places
                if self._work < 0:
                    self._only_single = True
                    return True
        self._cuts |= found
        return bool(found)

    def _goes_on(self, one: _Terminal, other: _Terminal, bits: int) -> tuple[int, int] | None:
        """Return where, after a text of one terminal, another goes on with some characters.

        These are the place of the text's last character in it, and the next.
        """
        last = set(one.last)
        seen = set[tuple[int, int]]()
        waiting: list[tuple[Iterable[int], Iterable[int]]] = [(one.first, other.first)]
        while waiting and self._work >= 0:
            for pair in itertools.product(*waiting.pop()):
                self._work -= 1
                place, place_too = pair
                if self._work < 0:
                    break
                if pair in seen or not one.sets[place] & other.sets[place_too]:
                    continue
                seen.add(pair)
                if place in last:
                    for next in other.next[place_too]:
                        if other.sets[next] & bits:
                            return place_too, next
                waiting.append((one.next[place], other.next[place_too]))
        return None

    def _behind(self, rules: _Rules) -> dict[str, tuple[_Terminal, int]]:
        """Return all terminals by their regex, with the characters that may follow them."""
        first, nullable = [0] * len(rules), [False] * len(rules)

        def begin_of(symbol: _Symbol) -> tuple[int, bool]:
            of = symbol.of
            if isinstance(of, str):  # a token that is no other is no text
                return (self._all if "^" in of else 0), symbol.least == 0
            if isinstance(of, int):
                return first[of], nullable[of] or symbol.least == 0
            return of.takes(of.first), of.is_nullable or symbol.least == 0

        users: list[set[int]] = [set() for _ in rules]
        for index, rows in enumerate(rules):
            for symbol in (symbol for row in rows for symbol in row):
                if isinstance(symbol.of, int):
                    users[symbol.of].add(index)

        def find_first(index: int) -> Iterable[int]:
            bits, is_empty = 0, False
            for row in rules[index]:
                for symbol in row:
                    self._work -= 1
                    begin, is_nullable = begin_of(symbol)
                    bits |= begin
                    if not is_nullable:
                        break
                else:
                    is_empty = True
            if (bits, is_empty) == (first[index], nullable[index]):
                return ()
            first[index], nullable[index] = bits, is_empty
            return users[index]

        follow = [0] * len(rules)
        found: dict[str, tuple[_Terminal, int]] = {}

        def find_follow(index: int) -> Iterable[int]:
            again = []
            for row in rules[index]:
                after = follow[index]
                for symbol in reversed(row):
                    self._work -= 1
                    begin, is_nullable = begin_of(symbol)
                    here = after if symbol.most == 1 else after | begin
                    if isinstance(symbol.of, int) and here & ~follow[symbol.of]:
                        follow[symbol.of] |= here
                        again.append(symbol.of)
                    elif isinstance(symbol.of, _Terminal):
                        before = found.get(symbol.of.regex, (symbol.of, 0))[1]
                        found[symbol.of.regex] = symbol.of, before | here
                    after = begin | (after if is_nullable else 0)
            return again

        for find in (find_first, find_follow):
            waiting, waits = deque(range(len(rules))), [True] * len(rules)
            while waiting:
                waits[index := waiting.popleft()] = False
                for again in find(index):
                    if not waits[again]:
                        waits[again] = True
                        waiting.append(again)
        return found


def _symbols_of(terminals: Iterable[_Terminal]) -> list[_Symbol]:
    return [_Symbol(one) for one in terminals if one.sets]


def _nodes_of(rule: Node) -> Iterator[Node]:
    waiting = [rule]
    while waiting:
        node = waiting.pop()
        yield node
        waiting += node.parts


def _class(ranges: Ranges) -> str:
    """Return a class as Rust's crate has it, with escapes for all but letters and digits."""

    def written(point: int) -> str:
        character = chr(point)
        is_plain = character.isascii() and character.isalnum()
        return character if is_plain else f"\\u{{{point:X}}}"

    texts = [
        written(first) if first == last else f"{written(first)}-{written(last)}"
        for first, last in ranges
    ]
    is_one = len(ranges) == 1 and ranges[0][0] == ranges[0][1]
    return texts[0] if is_one else f"[{''.join(texts)}]"
