"""Tools of a request: checked, chosen, their schemas, and the grammars of their calls."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from lmdecode.serving.fields import shown
from lmdecode.serving.grammar_source import SHORT_SPACE, literal, schema_text

__all__ = [
    "VALUE_END", "CallForm", "Tool", "allowed_types", "check_tools", "choices_of", "chosen_tools",
    "is_named", "lark_of_calls", "properties_of", "resolved", "tokens_of_words", "types_of",
    "words_of",
]  # fmt: skip

_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,128}")
_MAX_TOOLS = 512


class Tool(NamedTuple):
    """A tool: its name, and the JSON schema of its arguments, an object.

    ``strict``: a keyword of the schema that cannot be kept is an error.
    """

    name: str
    parameters: dict[str, Any]
    strict: bool


def check_tools(tools: Any) -> list[Tool]:
    """Return the tools of a request; raise ValueError, which names the field.

    Each is ``{"type": "function", "function": {"name", "parameters", "strict"}}``.
    """
    if not isinstance(tools, Sequence) or isinstance(tools, str):
        raise ValueError(f"tools is of type {type(tools).__name__}; expected a list")
    if len(tools) > _MAX_TOOLS:
        raise ValueError(f"tools has {len(tools)} entries; expected at most {_MAX_TOOLS}")
    found: dict[str, Tool] = {}
    for index, entry in enumerate(tools):
        where = f"tools[{index}]"
        _check_type(where, entry, Mapping, "an object")
        if entry.get("type", "function") != "function":
            raise ValueError(f"{where}.type is {shown(entry['type'])}; expected 'function'")
        function = entry.get("function", entry)
        _check_type(f"{where}.function", function, Mapping, "an object")
        name = function.get("name")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ValueError(
                f"{where}.function.name is {shown(name)}; expected 1 to 128 letters, digits, _, - "
                "and ."
            )
        if name in found:
            raise ValueError(f"{where}.function.name is {name!r}, as of another tool")
        strict = function.get("strict")
        _check_type(f"{where}.function.strict", strict, bool | None, "a bool")
        parameters = function.get("parameters")
        _check_type(f"{where}.function.parameters", parameters, Mapping | None, "an object")
        found[name] = Tool(name, _object_schema(parameters), bool(strict))
    return list(found.values())


def _check_type(where: str, value: Any, kind: Any, expected: str) -> None:
    if not isinstance(value, kind):
        raise ValueError(f"{where} is of type {type(value).__name__}; expected {expected}")


def _object_schema(parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the schema of arguments: an object without keys that the schema does not have."""
    schema: dict[str, Any] = dict(parameters or {"properties": {}})
    schema.setdefault("type", "object")
    if not schema.keys() & {"additionalProperties", "patternProperties", "allOf", "anyOf",
                            "oneOf", "$ref"}:  # fmt: skip
        schema["additionalProperties"] = False
    return schema


def chosen_tools(tools: Sequence[Tool], tool_choice: Any) -> tuple[list[Tool], bool]:
    """Return the tools that may be called, and whether one has to be.

    A choice is ``"none"``, ``"auto"`` or None, ``"required"``, ``{"type": "function", "function":
    {"name": ...}}``, or ``{"type": "allowed_tools", "allowed_tools": {"mode", "tools"}}``. Raises
    ValueError, which names the field.
    """
    if tool_choice == "none":
        return [], False
    if tool_choice is None or tool_choice == "auto":
        return list(tools), False
    if not tools:
        raise ValueError(f"tool_choice is {shown(tool_choice)} without tools; expected tools")
    if tool_choice in ("required", "any"):
        return list(tools), True
    if isinstance(tool_choice, Mapping):
        if tool_choice.get("type") == "allowed_tools":
            allowed = tool_choice.get("allowed_tools", tool_choice)
            if isinstance(allowed, Mapping) and isinstance(allowed.get("tools"), list):
                named = [_named(tools, entry) for entry in allowed["tools"]]
                return _without_repeats(named), allowed.get("mode") == "required"
        elif is_named(tool_choice):
            return [_named(tools, tool_choice)], True
    raise ValueError(
        f"tool_choice is {shown(tool_choice)}; expected 'none', 'auto', 'required' or "
        "{'type': 'function', 'function': {'name': ...}}"
    )


def is_named(tool_choice: Any) -> bool:
    """Whether a tool choice names the one function to call."""
    return isinstance(tool_choice, Mapping) and tool_choice.get("type", "function") == "function"


def _named(tools: Sequence[Tool], entry: Any) -> Tool:
    function = entry.get("function", entry) if isinstance(entry, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    for tool in tools:
        if tool.name == name:
            return tool
    raise ValueError(f"tool_choice names {shown(name)}; expected one of the tools")


def _without_repeats(tools: Sequence[Tool]) -> list[Tool]:
    return list({tool.name: tool for tool in tools}.values())


# Where a value between tags ends, for Python's ``re`` and Rust's: at its end tag before a next tag,
# or, where the end tag was left out, at a line that begins as such. So a text with words of the
# format is a value as long as these do not come in the order of a call.
_GAP = r"[ \t\r\n]*"
VALUE_END = (
    rf"\n?</parameter>{_GAP}(?:<parameter=|</function>|</tool_call>)"
    rf"|\n[ \t]*(?:<parameter=|</function>{_GAP}</tool_call>)"
)

_ANYTHING: dict[str, Any] = {}  # a schema, one for all: the rules of calls know it by its id
_TYPES = frozenset({"string", "integer", "number", "boolean", "null", "array", "object"})


def resolved(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a schema, or the one of ``root`` that it refers to; an empty one for anything else."""
    for _ in range(20):
        if not isinstance(schema, Mapping):
            return _ANYTHING
        reference = schema.get("$ref")
        if not isinstance(reference, str):
            return schema
        schema = root
        for part in reference.removeprefix("#").strip("/").split("/"):
            part = part.replace("~1", "/").replace("~0", "~")
            schema = schema.get(part) if isinstance(schema, Mapping) and part else schema
    return _ANYTHING


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
        return frozenset[str]().union(*map(types_of, values))
    return types_of(schema["const"]) if "const" in schema else _TYPES


def types_of(value: Any) -> frozenset[str]:
    """Return the types of JSON that a value has."""
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


_MAX_CALLS = 64
_ANY = "(.|\\n)"
_MAX_RULES = 4_000  # of all tools
_VALUE_END = re.compile(VALUE_END)
_VALUE_TAGS = ("</parameter>", "<parameter=", "</function>")  # one begins each VALUE_END


class CallForm(NamedTuple):
    """How calls are written: ``begin``, calls with ``between`` between them, ``end``.

    A call is ``open``, the tool's name, ``middle``, its arguments and ``close``. ``arguments`` are
    ``"json"``: an object; ``"keywords"``: ``a=1, b="x"``; ``"tags"``: ``<parameter=a>`` up to
    ``</function>``; or ``"key_values"``: ``a:1,b:`` and a string between two ``quote``.
    ``is_single``: there is one call at most.
    """

    open: str
    middle: str
    close: str
    between: str = ""
    begin: str = ""
    end: str = ""
    arguments: Literal["json", "keywords", "tags", "key_values"] = "json"
    quote: str = ""
    is_single: bool = False


def tokens_of_words(
    words: Collection[str], tokenizer: Any
) -> tuple[dict[str, int], frozenset[int]]:
    """Return the tokens of words that are tokens, and which of them texts leave out."""
    added = tokenizer.inner.get_added_tokens_decoder().items()
    known = {token.content: id_ for id_, token in added}
    token_ids = {word: known[word] for word in words if word in known}
    return token_ids, frozenset(token_ids.values()) & tokenizer.special_ids


def words_of(text: str, token_ids: Mapping[str, int]) -> str:
    """Return a text in Lark: literals, and tokens for the words that are tokens."""
    if not text:
        return '""'
    words = sorted(token_ids, key=len, reverse=True)
    parts = re.split(f"({'|'.join(map(re.escape, words))})", text) if words else [text]
    return " ".join(
        f"<[{token_ids[part]}]>" if part in token_ids else literal(part) for part in parts if part
    )


def lark_of_calls(
    form: CallForm,
    tools: Sequence[Tool],
    token_ids: Mapping[str, int],
    *,
    markers: Collection[str],
    is_forced: bool,
    is_parallel: bool,
) -> str:
    """Return the grammar of an answer that writes calls as ``form`` has them.

    ``tools`` are those that may be called, at least one, and ``token_ids`` the words that are
    tokens. Text before and after calls has none of the ``markers`` that begin with ``<`` or
    ``[``. ``is_forced``: the answer is calls alone, else a text in which what begins as a call is
    one. ``is_parallel``: there may be several calls, 64 at most. Raises ValueError that names the
    tool whose schema cannot be kept.
    """
    rules = _Rules(form, token_ids)
    calls = []
    for index, tool in enumerate(tools):
        try:
            arguments = rules.arguments(f"t{index}", tool)
        except (ValueError, TypeError) as error:
            raise ValueError(f"tools: the parameters of {tool.name}: {error}") from None
        first = words_of(form.open + tool.name + form.middle, token_ids)
        last = words_of(form.close, token_ids)
        calls.append(f"c{index}")
        rules.add(f"c{index}", f"{first} {arguments} {last}")
    rules.add("call", " | ".join(calls))
    several = is_parallel and not form.is_single
    between = words_of(form.between, token_ids)
    more = f" ({between} call){{0,{_MAX_CALLS - 1}}}" if several else ""
    begin, end = words_of(form.begin, token_ids), words_of(form.end, token_ids)
    rules.add("calls", f"{begin} call{more} {end}")
    if is_forced:
        rules.add("start", "calls")
    else:
        signs = [re.escape(marker) for marker in markers if marker[0] in "<["]
        _add_free_text(rules, form, token_ids, signs, several)
    return rules.text()


def _add_free_text(
    rules: _Rules,
    form: CallForm,
    token_ids: Mapping[str, int],
    signs: Sequence[str],
    several: bool,
) -> None:
    """Let the answer be text with calls in it."""
    first = form.begin + form.open
    token = next((word for word in token_ids if first.startswith(word)), None)
    repeat = "*" if several and not form.begin else "?"
    if token is not None:  # which is no part of a text
        rules.add("TEXT", f"/{_ANY}+/{_but_not(*signs)}")
        again = f"(calls TEXT?){repeat}"
        rules.add("start", f"TEXT? {again}")
        return
    tag = re.match(r"<[^<>]+>|\[[A-Z_]+\]", first)
    if tag is None:  # an answer that begins as a call
        character = re.escape(first[0]).replace("/", "\\/")
        rules.add("TEXT", f"/\\s*[^\\s{character}]{_ANY}*/{_but_not(*signs)}")
        rules.add("start", "TEXT | calls")
        return
    word = re.escape(tag[0])
    others = [sign for sign in signs if not sign.startswith(word)]
    rules.add("BEFORE", f"/{_ANY}*/{_but_not(*others)}")
    rules.add("before[lazy]", f"BEFORE {literal(tag[0])}")
    rules.rest_of("calls", tag[0])
    rules.add("TEXT", f"/{_ANY}*/{_but_not(word, *others)}")
    rules.add("start", f"(before calls_rest){repeat} behind")
    rules.add("behind", "TEXT")


def _but_not(*ends: str) -> str:
    """Return the end of a regex of texts in which none of some regexes fits a part."""
    any_end = "|".join(ends).replace("/", "\\/")
    return f" & ~/{_ANY}*({any_end}){_ANY}*/" if ends else ""


class _Rules:
    """Rules of Lark by their names."""

    def __init__(self, form: CallForm, token_ids: Mapping[str, int]) -> None:
        self._form, self._tokens = form, token_ids
        self._rules: dict[str, str] = {}
        self._of_schema: dict[int, str] = {}  # of key_values, by the schema's id
        self._kept: list[Any] = []  # so that no id is given twice
        self._root: Mapping[str, Any] = {}  # of the tool whose rules are written
        self._is_strict = False

    def add(self, name: str, body: str) -> str:
        """Add a rule; return its name."""
        if len(self._rules) >= _MAX_RULES:
            raise ValueError(f"more than {_MAX_RULES} rules; expected fewer or smaller schemas")
        self._rules[name] = body
        return name.split("[")[0]

    def rest_of(self, name: str, first: str) -> None:
        """Add ``name_rest``: the rules of calls without their first word, which has been read."""
        form, tokens = self._form, self._tokens
        if form.begin:
            start = words_of(form.begin, tokens)
            rest = words_of(form.begin[len(first) :], tokens)
            self.add(f"{name}_rest", self._rules[name].replace(start, rest, 1))
            return
        calls = self._rules["call"].split(" | ")
        start = literal(form.open)[1:-1]
        rest = literal(form.open[len(first) :])[1:-1]
        for call in calls:
            self.add(f"{call}_rest", self._rules[call].replace(start, rest, 1))
        self.add(f"{name}_rest", " | ".join(f"{call}_rest" for call in calls))

    def text(self) -> str:
        """Return all rules."""
        lines = [f"{name}: {body}" for name, body in self._rules.items()]
        return "\n".join(["%llguidance {}", *lines])

    def arguments(self, name: str, tool: Tool) -> str:
        """Add the rules of a tool's arguments; return a term of Lark for them."""
        kind, root = self._form.arguments, tool.parameters
        self._root, self._is_strict = root, tool.strict
        if kind == "json":
            return self.add(f"{name}_a", self._json(root))
        found = resolved(root, root)
        if kind == "key_values":
            return self._entries(name, found, ":", ",", self._key_value)
        if kind == "keywords":
            return self._entries(name, found, "=", ", ", self._keyword)
        keys, required = '"/function>"', _required(found)
        for index, (key, value) in reversed([*enumerate(properties_of(found).items())]):
            part = self._tag(f"{name}_p{index}", key, value)
            with_key = f"{literal(f'parameter={key}>')} {part} {keys}"
            keys = self.add(
                f"{name}_k{index}", with_key if key in required else f"{with_key} | {keys}"
            )
        return self.add(f"{name}_a", f'"<" {keys}')

    def _json(self, schema: Any, shared: Sequence[str] = ("$defs", "definitions")) -> str:
        if isinstance(schema, dict):
            schema = {**{key: self._root[key] for key in shared if key in self._root}, **schema}
        return f"%json {schema_text(schema, strict=self._is_strict, space=SHORT_SPACE)}"

    def _tag(self, name: str, key: str, schema: Any) -> str:
        """Add the rules of a value; return what stands for it and for all up to the next ``<``."""
        if not re.fullmatch(r"[^<>\n]{1,200}", key):
            raise ValueError(
                f"the key {key!r} is none between tags; expected 1 to 200 characters without <, > "
                "and new lines"
            )
        close = "\n</parameter>\n<"
        found = resolved(schema, self._root)
        if allowed_types(schema, self._root) != {"string"}:
            value = self.add(f"{name}_v", self._json(schema))
            return self.add(name, f'"\\n" {value} {literal(close)}')
        choices = choices_of(found)
        if choices is not None:
            texts = {choice for choice in choices if isinstance(choice, str)}
            if not texts:
                raise ValueError("enum has no string; expected one")
            for text in texts:
                ends = (end.start() for end in re.finditer(r"[\n<]", text))
                if any(_VALUE_END.match(text, at) and text[:at] in texts for at in ends):
                    raise ValueError(f"the value {text!r} begins as another one and its end")
            return self.add(name, " | ".join(literal(f"\n{text}{close}") for text in sorted(texts)))
        _check_string(found, self._is_strict)
        count = _lengths(found)
        text = "v" + re.sub("[^0-9]", "_", count)
        if f"{text}[lazy]" not in self._rules:
            body = f"/{_ANY}*/{_but_not(VALUE_END)}"
            if count != "*":  # the intersection of both would take too long
                body = f"/{_ANY}{count}/ & {_without(_VALUE_TAGS)}"
            end = close.replace("/", "\\/").replace("\n", "\\n")
            self.add(f"{text}[lazy]", f"/\\n/ {self.add(text.upper(), body)} /{end}/")
        return text

    def _entries(
        self,
        name: str,
        schema: Mapping[str, Any],
        between: str,
        comma: str,
        value_of: Callable[[str, Any], str],
    ) -> str:
        """Add rules of keys and values in the order of a schema, with commas between them."""
        items = []
        required = _required(schema)
        for index, (key, value) in enumerate(properties_of(schema).items()):
            if not re.fullmatch(r"[A-Za-z_][\w.\-]*", key):
                raise ValueError(f"the key {key!r} is no name; expected letters, digits and _")
            rule = value_of(f"{name}_v{index}", value)
            items.append((f"{literal(key + between)} {rule}", key in required))
        first = later = '""'
        for index in reversed(range(len(items))):
            item, is_required = items[index]
            with_comma = f"{literal(comma)} {item} {later}"
            begins = f"{item} {later}"
            if not is_required:
                with_comma, begins = f"{with_comma} | {later}", f"{begins} | {first}"
            first = self.add(f"{name}_f{index}", begins)
            later = self.add(f"{name}_l{index}", with_comma)
        return first

    def _keyword(self, name: str, schema: Any) -> str:
        is_boolean = allowed_types(schema, self._root) == {"boolean"}
        if is_boolean and "const" not in resolved(schema, self._root):
            return self.add(name, '"True" | "False"')
        return self.add(name, self._json(schema))

    def _key_value(self, name: str, schema: Any) -> str:
        found = resolved(schema, self._root)
        known = self._of_schema.get(id(found))
        if known is not None:
            return known
        self._kept.append(found)
        self._of_schema[id(found)] = name
        return self.add(name, self._key_value_body(name, found))

    def _key_value_body(self, name: str, schema: Mapping[str, Any]) -> str:
        quote = words_of(self._form.quote, self._tokens)
        parts = next((schema[key] for key in ("anyOf", "oneOf") if key in schema), None)
        if isinstance(parts, list) and parts:
            return " | ".join(self._key_value(f"{name}_{i}", one) for i, one in enumerate(parts))
        choices = choices_of(schema)
        if choices is not None:
            return " | ".join(self._value_text(choice, quote) for choice in choices)
        types = allowed_types(schema, self._root)
        bodies = []
        if "string" in types:
            _check_string(schema, self._is_strict)
            bodies.append(self._string(name, quote, schema))
        if "array" in types:
            item = self._key_value(f"{name}_i", schema.get("items", _ANYTHING))
            bodies.append(_list_of(item, schema))
        if "object" in types:
            inner = self._entries(f"{name}_o", schema, ":", ",", self._key_value)
            bodies.append(f'"{{" {inner} "}}"')
        rest = types & {"integer", "number", "boolean", "null"}
        if "number" in rest:
            rest -= {"integer"}
        keys = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
        limits = {key: schema[key] for key in keys if key in schema}
        if rest:
            bodies.append(
                self.add(f"{name}_n", self._json({"type": sorted(rest), **limits}, shared=()))
            )
        return " | ".join(bodies)

    def _string(self, name: str, quote: str, schema: Mapping[str, Any]) -> str:
        word = self._form.quote
        body = f"/{_ANY}{_lengths(schema)}/ & {_without([word])}"
        text = self.add(f"{name.upper()}_S", body)
        if quote.startswith("<["):  # a token is no part of a text, but its letters are
            return f"{quote} {text} {quote}"
        return f"{quote} {self.add(f'{name}_s[lazy]', f'{text} {literal(word)}')}"

    def _value_text(self, value: Any, quote: str) -> str:
        """Return the one way in which a value is written."""
        if isinstance(value, str):
            if self._form.quote in value:
                raise ValueError(f"the value {value!r} has {self._form.quote}; expected none")
            return f"{quote} {literal(value)} {quote}"
        if isinstance(value, (list, dict)):
            raise ValueError("enum has lists or objects; expected none for this model")
        return literal(json.dumps(value))


def _list_of(item: str, schema: Mapping[str, Any]) -> str:
    least, most = _count(schema, "minItems") or 0, _count(schema, "maxItems")
    if most == 0:
        return '"[" "]"'
    upper = "" if most is None else str(most - 1)
    several = f'{item} ("," {item}){{{max(least - 1, 0)},{upper}}}'
    return f'"[" {several} "]"' if least else f'"[" ({several})? "]"'


def _count(schema: Mapping[str, Any], key: str) -> int | None:
    value = schema.get(key)
    return value if isinstance(value, int) and value >= 0 else None


def _lengths(schema: Mapping[str, Any]) -> str:
    """Return how many characters a string has, as a count of a regex."""
    least, most = _count(schema, "minLength") or 0, _count(schema, "maxLength")
    if most is not None and least > most:
        raise ValueError(f"minLength is {least} and maxLength {most}; expected no less")
    if most is None:
        return f"{{{least},}}" if least else "*"
    return f"{{{least},{most}}}"


def _without(words: Sequence[str]) -> str:
    """Return a regex of texts that have none of some words, each with one ``<``, its first letter.

    It says what may follow ``<``: a complement, within a count, takes the compiler too long.
    """

    def behind(ends: Sequence[str]) -> str:
        firsts = sorted({end[0] for end in ends})
        parts = [f"[^<{''.join(firsts)}][^<]*"]
        for first in firsts:
            rest = [end[1:] for end in ends if end[0] == first]
            if all(rest):
                parts.append(re.escape(first) + behind(rest))
        return f"({'|'.join(parts)})?"

    return "/" + f"[^<]*(<{behind([word[1:] for word in words])})*".replace("/", "\\/") + "/"


def _check_string(schema: Mapping[str, Any], is_strict: bool) -> None:
    lost = [key for key in ("pattern", "format") if key in schema]
    if lost and is_strict:
        raise ValueError(f"{lost[0]} of a string cannot be kept in this model's calls")


def _required(schema: Mapping[str, Any]) -> frozenset[str]:
    found = schema.get("required")
    keys = found if isinstance(found, list) else ()
    return frozenset(key for key in keys if isinstance(key, str))
