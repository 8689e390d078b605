"""The grammar that a request's fields ask for: OpenAI's, vLLM's and llama.cpp's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lmdecode.serving.grammar_source import (
    GrammarSource,
    check_text,
    choice,
    json_object,
    json_schema,
)

__all__ = ["GRAMMAR_FIELDS", "FieldError", "grammar_field", "grammar_of_body"]


class FieldError(ValueError):
    """A field of a request that does not fit.

    Attributes
    ----------
    param : str
        Its name, such as ``"response_format.json_schema.schema"``.
    sentence : str
        What is wrong, with its name.
    """

    def __init__(self, param: str, message: str, between: str = " ") -> None:
        super().__init__(f"{param}: {message}")
        self.param, self.sentence = param, f"{param}{between}{message}"


def _text(param: str, value: Any) -> str:
    if not isinstance(value, str):
        raise FieldError(param, f"is of type {type(value).__name__}; expected a string")
    check_text("the grammar", value)
    return value


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
    if not isinstance(value, bool):
        raise FieldError(param, f"is of type {type(value).__name__}; expected a bool")
    return value


def _choice(param: str, value: Any) -> GrammarSource:
    return choice(value)


def _response_format(param: str, value: Any) -> GrammarSource | None:
    if not isinstance(value, Mapping):
        raise FieldError(param, f"is of type {type(value).__name__}; expected an object")
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
        if not isinstance(named, Mapping):
            raise FieldError(where, f"is of type {type(named).__name__}; expected an object")
        strict = named.get("strict")
        if strict is not None and not isinstance(strict, bool):
            kind = type(strict).__name__
            raise FieldError(f"{where}.strict", f"is of type {kind}; expected a bool")
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
    if not isinstance(value, Mapping):
        raise FieldError(param, f"is of type {type(value).__name__}; expected an object")
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
    """Return what a function makes of a field; its error names the field."""
    try:
        return read(param, value)
    except FieldError:
        raise
    except (TypeError, ValueError) as error:
        raise FieldError(param, str(error), ": ") from None


_SWITCHES = ("disable_additional_properties", "disable_any_whitespace")
# Of vLLM, whose grammars have one compiler or another, and none reads the pattern.
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
    """Return the grammar that a request asks for.

    Parameters
    ----------
    fields : mapping
        Fields of the request's body; those of ``GRAMMAR_FIELDS`` are read. None is no field.

    Returns
    -------
    GrammarSource or None
        What ``GrammarCompiler.compile`` takes. None: the answer is free.

    Raises
    ------
    FieldError
        Names the field; also where two fields ask for a grammar.
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
