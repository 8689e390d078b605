"""Grammars as text: JSON schemas as the compiler takes them, and the fields that ask for them.

The fields are OpenAI's, vLLM's and llama.cpp's.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any, Literal, NamedTuple

__all__ = [
    "GRAMMAR_FIELDS", "FieldError", "GrammarSource", "choice", "grammar_field", "grammar_of_body",
    "json_object", "json_schema", "schema_text",
]  # fmt: skip

MAX_TEXT = 256 * 1024
MAX_DEPTH = 60  # of JSON, which the compiler reads by recursion
_MAX_ENTRIES = 20_000
_MAX_KEYS = 2_000  # of all schemas in one, as the time is quadratic
_MAX_MULTIPLE = 10_000  # an automaton has a state for each remainder
_MAX_BRACKETS = 10_000  # that open, and rules: the compiler goes through them by recursion
_MAX_TERMINAL = 100_000  # characters of a terminal with all that it names
# Between the parts of JSON: nothing, a space, or a new line and its indentation. Without a bound a
# small model never leaves it.
SPACE = r"( |\n{1,2}[ \t]{0,20})"
SHORT_SPACE = " "
# Whose values are schemas by names, or no schemas.
_MAPS = "properties patternProperties $defs definitions dependentSchemas dependencies".split()
_VALUES = ("enum", "const", "default", "examples")
_DEFINITION = re.compile(r"^[ \t]*[?!]?([A-Za-z_][\w-]*)(?:\[[^\]\n]*\])?[ \t]*:", re.MULTILINE)
# A literal that does not end goes to the end of its line: or else each quote in it begins a search.
_QUOTED = re.compile(
    r'"(?:[^"\\\n]|\\.)*+(?:"i?|\\?(?=\n|\Z))'
    r"|/(?![/*])(?:[^/\\\n]|\\.)++(?:/[a-z]*|\\?(?=\n|\Z))"
    r"|//[^\n]*|#[^\n]*"
)


class GrammarSource(NamedTuple):
    """A grammar as text, of at most 256 KiB. The kind "calls" is Lark of ``ToolFormat.grammar``."""

    kind: Literal["json_schema", "regex", "lark", "gbnf", "calls"]
    text: str


def json_object() -> GrammarSource:
    """Return the grammar of any JSON object."""
    return GrammarSource("json_schema", schema_text({"type": "object"}))


def json_schema(schema: Any, **options: Any) -> GrammarSource:
    """Return the grammar of JSON that a schema allows; see ``schema_text``."""
    return GrammarSource("json_schema", schema_text(schema, **options))


def _changed(
    schema: Any, change: Callable[[dict[str, Any]], dict[str, Any]], is_map: bool = False
) -> Any:
    """Return a schema with what becomes of each schema in it, inner ones first."""
    if isinstance(schema, list):
        return [_changed(one, change) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found = {
        name: value
        if name in _VALUES and not is_map
        else _changed(value, change, not is_map and name in _MAPS)
        for name, value in schema.items()
    }
    return found if is_map else change(found)


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema in which objects with ``properties`` have no others, unless it says so."""
    has_names = any(isinstance(schema.get(name), dict) for name in _MAPS[:2])
    if has_names:
        schema.setdefault("additionalProperties", False)
    return schema


def choice(choices: Sequence[str]) -> GrammarSource:
    """Return the grammar of some texts; TypeError or ValueError if one is empty or no str."""
    if isinstance(choices, str) or not isinstance(choices, Sequence):
        raise TypeError(f"choices are of type {type(choices).__name__}; expected a list of str")
    if not choices:
        raise ValueError("there are no choices; expected at least one")
    for one in choices:
        if not isinstance(one, str):
            raise TypeError(f"a choice is of type {type(one).__name__}; expected str")
        if not one:
            raise ValueError("a choice is empty; expected text")
    return GrammarSource("lark", "start: " + " | ".join(map(literal, choices)))


def literal(text: str) -> str:
    """Return a text as a literal of Lark."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def schema_text(
    schema: Any, *, strict: bool = True, space: str = SPACE, is_closed: bool = False
) -> str:
    """Return a JSON schema, or its JSON, as the compiler takes it, and after ``%json`` in Lark.

    Keys of ``properties`` are written in their order. ``strict``: a keyword that cannot be kept is
    an error, else it is left out, and ``oneOf`` is ``anyOf``. ``space`` is a regular expression for
    the space between the parts of JSON. ``is_closed``: an object that names its keys has no others
    unless it says so.

    Raises TypeError or ValueError if it is no schema or too large: 256 KiB, 60 levels, 20,000
    values and 2,000 properties are the most, and 10,000 the least common multiple of all
    ``multipleOf``.
    """
    if isinstance(schema, str):
        check_text("the schema", schema)
        try:
            schema = json.loads(schema)
        except RecursionError:
            raise ValueError(f"the schema is no JSON of at most {MAX_DEPTH} levels") from None
        except ValueError as error:
            raise ValueError(f"the schema is no JSON ({error})") from None
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        what = "false, which allows nothing" if schema is False else type(schema).__name__
        raise TypeError(f"the schema is {what}; expected an object")
    _check_schema(schema)
    if is_closed:
        schema = _changed(schema, _closed)
    options: dict[str, Any] = {"whitespace_pattern": space}
    if not strict:
        options["lenient"] = True
    schema = _changed(schema, _with_any_of)
    try:
        text = json.dumps({**schema, "x-guidance": options}, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"the schema is no JSON ({error})") from None
    check_text("the schema", text)
    return text


def _with_any_of(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema whose ``oneOf`` is ``anyOf`` where numbers show that no two fit one value.

    The compiler itself sees that types and other constants differ.
    """
    parts = schema.get("oneOf")
    if "anyOf" not in schema and isinstance(parts, list):
        if all(itertools.starmap(_are_apart, itertools.combinations(map(_facts_of, parts), 2))):
            return {"anyOf" if key == "oneOf" else key: value for key, value in schema.items()}
    return schema


_Facts = tuple[frozenset[str], list[Any]]


def _facts_of(schema: Any) -> _Facts:
    """Return the types of a schema's values, and the ranges of its numbers.

    Behind both ends of a range is whether it is behind (1) or before (-1) that number.
    """
    given = schema if isinstance(schema, dict) else {}
    values = [given["const"]] if "const" in given else given.get("enum")
    if isinstance(values, list):
        names = {bool: "boolean", str: "string", int: "number", float: "number", dict: "object",
                 list: "array"}  # fmt: skip
        numbers = [value for value in values if type(value) in (int, float)]
        types = frozenset(names.get(type(value), "null") for value in values)
        return types, [((number, 0), (number, 0)) for number in numbers]
    kinds = given.get("type", "all")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    of = {key: value for key, value in given.items() if type(value) in (int, float)}
    low = max((of.get("minimum", -math.inf), 0), (of.get("exclusiveMinimum", -math.inf), 1))
    high = min((of.get("maximum", math.inf), 0), (of.get("exclusiveMaximum", math.inf), -1))
    return frozenset("number" if kind == "integer" else str(kind) for kind in kinds), [(low, high)]


def _are_apart(one: _Facts, other: _Facts) -> bool:
    both = one[0] & other[0]
    if both - {"number"} or "all" in one[0] | other[0]:
        return False
    pairs = itertools.product(one[1], other[1])
    return not both or all(a[1] < b[0] or b[1] < a[0] for a, b in pairs)


def _check_schema(schema: dict[str, Any]) -> None:
    entries, keys, multiple = 0, 0, 1
    waiting: list[tuple[Any, int]] = [(schema, 1)]
    while waiting:
        value, depth = waiting.pop()
        entries += 1
        if depth > MAX_DEPTH:
            raise ValueError(f"the schema has more than {MAX_DEPTH} levels; expected fewer")
        if isinstance(value, dict):
            for name in ("properties", "$defs", "definitions", "patternProperties"):
                if isinstance(found := value.get(name), dict):
                    keys += len(found)
            multiple = _common_multiple(multiple, value.get("multipleOf"))
            waiting += [(entry, depth + 1) for entry in value.values()]
        elif isinstance(value, (list, tuple)):
            waiting += [(entry, depth + 1) for entry in value]
        if entries + len(waiting) > _MAX_ENTRIES:
            raise ValueError(f"the schema has more than {_MAX_ENTRIES} values; expected fewer")
    if keys > _MAX_KEYS:
        raise ValueError(f"the schema has {keys} properties; expected at most {_MAX_KEYS}")
    if multiple > _MAX_MULTIPLE:
        raise ValueError(
            f"the least common multiple of multipleOf in the schema is {multiple}, without its "
            f"decimal point; expected at most {_MAX_MULTIPLE}"
        )


def _common_multiple(multiple: int, value: object) -> int:
    """Return the least common multiple with a value of multipleOf, without its decimal point."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return multiple  # the compiler raises the error
    if value <= 0 or (isinstance(value, float) and not math.isfinite(value)):
        return multiple
    digits = Fraction(str(value))
    while digits.denominator > 1:
        digits *= 10
    return math.lcm(multiple, min(int(digits), _MAX_MULTIPLE + 1))


def check_text(what: str, text: str) -> None:
    """Raise ValueError for a text that is too long, or is no Unicode."""
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise ValueError(f"{what} has {text[error.start]!r}; expected no surrogates") from None
    if size > MAX_TEXT:
        raise ValueError(f"{what} has {size} bytes; expected at most {MAX_TEXT}")
    if "\0" in text:
        raise ValueError(f"{what} has a null character; expected none")


def check_lark(text: str, *, allows_not: bool = False) -> None:
    """Raise ValueError for a grammar that takes the compiler long, or much memory."""
    text = _without_schemas(text)
    bare = _QUOTED.sub(lambda found: "'" * min(len(found[0]), 40), text)
    if re.search(r"^[ \t]*[?!]?[\w-]+\[[^\]\n]*\bstop[ \t]*=", bare, re.MULTILINE):
        raise ValueError("the grammar has stop=, which takes tokens back; expected suffix= or lazy")
    names = list(_DEFINITION.finditer(bare))
    count = len(names) + sum(map(bare.count, "(["))
    if count > _MAX_BRACKETS:
        raise ValueError(
            f"the grammar has {count} rules and brackets; expected at most {_MAX_BRACKETS}"
        )
    bodies: dict[str, str] = {}
    ends = [*(found.start() for found in names[1:]), len(bare)]
    for found, end in zip(names, ends[: len(names)], strict=True):
        body = bare[found.end() : end]
        name = found[1]
        bodies[name] = bodies.get(name, "") + body
        if not allows_not and re.search(r"[&~](?![0-9])", body):
            raise ValueError(f"the grammar has & or ~ in {name:.80}; expected none")
    sizes: dict[str, int] = {}
    for name in bodies:
        if name.isupper():
            _size_of(name, bodies, sizes, set())


def _without_schemas(text: str) -> str:
    """Return a grammar without the schemas after ``%json``, which are checked."""
    parts, at = [], 0
    while (found := re.compile(r"%json\s*").search(text, at)) is not None:
        parts.append(text[at : found.start()])
        try:
            schema, at = json.JSONDecoder().raw_decode(text, found.end())
        except RecursionError:
            raise ValueError(
                f"a schema behind %json is no JSON of at most {MAX_DEPTH} levels"
            ) from None
        except ValueError as error:
            raise ValueError(f"a schema behind %json is no JSON ({error})") from None
        if isinstance(schema, dict):
            _check_schema(schema)
    return "".join([*parts, text[at:]])


def _size_of(name: str, bodies: dict[str, str], sizes: dict[str, int], open_: set[str]) -> int:
    """Return how long a terminal is with all that it names."""
    if name not in sizes:
        if len(open_) > 200 or name in open_:
            raise ValueError(f"the terminal {name:.80} names itself, or others 200 levels deep")
        size = len(bodies[name])
        for part in re.findall(r"[A-Z_][A-Z_0-9-]*", bodies[name]):
            if part in bodies:
                size += _size_of(part, bodies, sizes, {*open_, name})
        if size > _MAX_TERMINAL:
            raise ValueError(
                f"the terminal {name:.80} has more than {_MAX_TERMINAL} characters with all that "
                "it names; expected fewer"
            )
        sizes[name] = size
    return sizes[name]


class FieldError(ValueError):
    """A field of a request that does not fit; ``sentence`` is the message with the field's name."""

    def __init__(self, param: str, message: str, between: str = " ") -> None:
        super().__init__(f"{param}: {message}")
        self.param, self.sentence = param, f"{param}{between}{message}"


def _check_type(param: str, value: Any, kind: Any, expected: str) -> None:
    if not isinstance(value, kind):
        raise FieldError(param, f"is of type {type(value).__name__}; expected {expected}")


def _text(param: str, value: Any) -> str:
    _check_type(param, value, str, "a string")
    check_text("the grammar", value)
    return str(value)


def _regex(param: str, value: Any) -> GrammarSource:
    return GrammarSource("regex", _text(param, value))


def _grammar(param: str, value: Any) -> GrammarSource:
    """Return a grammar in GBNF, or in Lark, which has ``start:`` or begins with ``%llguidance``."""
    text = _text(param, value)
    lines = (line.strip() for line in text.splitlines())
    is_lark = any(line.startswith(("%llguidance", "start:", "start :")) for line in lines)
    return GrammarSource("lark" if is_lark else "gbnf", text)


def _schema(param: str, value: Any) -> GrammarSource:
    return json_schema(value)


def _switch(param: str, value: Any) -> bool:
    _check_type(param, value, bool, "a bool")
    return bool(value)


def _choice(param: str, value: Any) -> GrammarSource:
    return choice(value)


def _response_format(param: str, value: Any) -> GrammarSource | None:
    _check_type(param, value, Mapping, "an object")
    kind = value.get("type")
    if kind == "text":
        return None
    if kind == "json_object":  # llama.cpp takes a schema with it
        schema = value.get("schema")
        return json_object() if schema is None else _within(f"{param}.schema", schema, _schema)
    if kind == "json_schema":
        named = value.get("json_schema")
        if named is None and "schema" in value:
            return _within(f"{param}.schema", value["schema"], _schema)
        where = f"{param}.json_schema"
        _check_type(where, named, Mapping, "an object")
        strict = named.get("strict")
        _check_type(f"{where}.strict", strict, bool | None, "a bool")
        if "schema" not in named:
            raise FieldError(f"{where}.schema", "is missing; expected a JSON schema")
        return _within(
            f"{where}.schema",
            named["schema"],
            lambda _, schema: json_schema(schema, strict=strict is not False),
        )
    if kind in ("grammar", "regex"):
        read = _grammar if kind == "grammar" else _regex
        found = value.get(kind, value.get("pattern"))
        return _within(f"{param}.{kind}", found, read)
    raise FieldError(
        f"{param}.type", f"is {kind!r:.80}; expected 'text', 'json_object' or 'json_schema'"
    )


def _structured_outputs(param: str, value: Any) -> GrammarSource | None:
    _check_type(param, value, Mapping, "an object")
    on = [value.get(n) is not None and _switch(f"{param}.{n}", value[n]) for n in _SWITCHES]
    options = {"is_closed": on[0], **({"space": ""} if on[1] else {})}

    def schema(_: str, given: Any) -> GrammarSource:
        return json_schema(given, **options)

    def any_object(where: str, given: Any) -> GrammarSource | None:
        return schema(where, {"type": "object"}) if _switch(where, given) else None

    readers: dict[str, _Reader] = {"json": schema, "json_object": any_object, **_STRUCTURED}
    found: dict[str, GrammarSource] = {}
    for name, given in value.items():
        if given is None or name in (*_SWITCHES, *_WITHOUT_EFFECT):
            continue
        if name not in readers:
            expected = ", ".join((*readers, *_SWITCHES))
            raise FieldError(f"{param}.{name:.80}", f"is unknown; expected one of {expected}")
        source = _within(f"{param}.{name}", given, readers[name])
        if source is not None:
            found[name] = source
    if len(found) > 1:
        raise FieldError(param, f"has {' and '.join(found)}; expected one of them")
    return next(iter(found.values()), None)


def _within(param: str, value: Any, read: Callable[[str, Any], Any]) -> Any:
    """Return a field as a function reads it; its error names the field."""
    try:
        return read(param, value)
    except FieldError:
        raise
    except (TypeError, ValueError) as error:
        raise FieldError(param, str(error), ": ") from None


_SWITCHES = ("disable_additional_properties", "disable_any_whitespace")
# Fields of vLLM that choose among its compilers; none of them reads the pattern.
_WITHOUT_EFFECT = ("disable_fallback", "whitespace_pattern")
_Reader = Callable[[str, Any], GrammarSource | None]
_STRUCTURED: dict[str, _Reader] = {
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
}
_FIELDS: dict[str, _Reader] = {
    "response_format": _response_format,
    "structured_outputs": _structured_outputs,
    "guided_json": _schema,
    "guided_regex": _regex,
    "guided_choice": _choice,
    "guided_grammar": _grammar,
    "json_schema": _schema,
    "grammar": _grammar,
}

#: Fields of a request that ask for a grammar.
GRAMMAR_FIELDS = tuple(_FIELDS)


def grammar_of_body(fields: Mapping[str, Any]) -> GrammarSource | None:
    """Return the grammar that a body's ``GRAMMAR_FIELDS`` ask for; None: the answer is free.

    Raises ``FieldError``, also where two fields ask for a grammar. A field of None is absent.
    """
    found = _sources(fields)
    if len(found) > 1:
        first, second = list(found)[:2]
        raise FieldError(second, f"is given beside {first}; expected one of them")
    return next(iter(found.values()), None)


def grammar_field(fields: Mapping[str, Any]) -> str | None:
    """Return the name of the field that asks for a grammar, None if there is none."""
    return next(iter(_sources(fields)), None)


def _sources(fields: Mapping[str, Any]) -> dict[str, GrammarSource]:
    found: dict[str, GrammarSource] = {}
    for name, read in _FIELDS.items():
        value = fields.get(name)
        if value is None or (value == "" and name == "grammar"):
            continue
        source = _within(name, value, read)
        if source is not None:
            found[name] = source
    return found
