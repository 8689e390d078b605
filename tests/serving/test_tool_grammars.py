"""Grammars of calls of tools: what they force, what they let through, what is refused."""

import json
import os
import random
import re
from collections.abc import Mapping
from functools import cache
from typing import Any

import jsonschema
import pytest

from lmdecode.serving.grammar import GrammarCompiler
from lmdecode.serving.tokenizer import Tokenizer
from lmdecode.serving.tool_calls import FORMATS, ToolFormat
from lmdecode.serving.tools import CallForm, check_tools
from tests.serving.grammar_cases import KJV, TOOLS, accepts, allowed, compiler_of, function, written
from tests.serving.test_tool_calls import parsed, streamed

ADDED = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<escape>", "<|python_tag|>"]


def marked() -> Tokenizer:
    """The shipped tokenizer with words of formats as tokens."""
    found = Tokenizer.load(KJV).inner
    found.add_special_tokens(ADDED[2:])
    found.add_tokens(ADDED[:2])
    return Tokenizer(found, special_tokens={"eos_token": "</s>"})


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return marked()


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, tokenizer.vocab_size, [1])


def texts(
    compiler: GrammarCompiler, tokenizer: Tokenizer, source: Any, seeds: int = 6
) -> list[str]:
    grammar = compiler.compile(source)
    return [written(grammar, tokenizer, seed, 900, tokenizer.vocab_size) for seed in range(seeds)]


@pytest.mark.parametrize("name", FORMATS)
def test_random_calls_parse(name: str, compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    format = FORMATS[name].with_tokenizer(tokenizer)
    source = format.grammar(TOOLS, "required")
    counts = set()
    for text in texts(compiler, tokenizer, source, 10):
        content, calls = format.parse(text, TOOLS)
        assert content is None and calls, text
        counts.add(len(calls))
        for call in calls:
            if call.name == "get_weather":
                jsonschema.validate(json.loads(call.arguments), TOOLS[0]["function"]["parameters"])
            else:
                assert call.arguments == "{}"
    assert name == "harmony" or max(counts) > 1


HARD = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "maybe": {"type": ["string", "null"], "maxLength": 4},
        "either": {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 99},
                             {"type": "string", "maxLength": 3}]},
        "ref": {"$ref": "#/$defs/level"},
        "list": {"type": "array", "items": {"$ref": "#/$defs/level"}, "minItems": 1, "maxItems": 2},
        "const": {"const": "x y"},
        "number": {"type": "number", "minimum": -1, "maximum": 1},
    },
    "required": ["text", "either", "ref", "list", "const"],
    "additionalProperties": False,
    "$defs": {"level": {"enum": ["low", "high"]}},
}  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_hard_schemas(name: str, compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    format = FORMATS[name].with_tokenizer(tokenizer)
    tools = [function("f", {**HARD, "properties": {**HARD["properties"],
             "text": {"type": "string", "minLength": 1, "maxLength": 6}}})]  # fmt: skip
    for text in texts(compiler, tokenizer, format.grammar(tools, "required", False)):
        content, calls = format.parse(text, tools)
        assert content is None and len(calls) == 1, text
        jsonschema.validate(json.loads(calls[0].arguments), tools[0]["function"]["parameters"])


@pytest.mark.parametrize("name", FORMATS)
def test_strict_tools_let_text_through(
    name: str, compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    """With tool_choice auto an answer is text, and what begins as a call is one."""
    format = FORMATS[name].with_tokenizer(tokenizer)
    assert format.grammar(TOOLS, "auto") is None
    strict = [function("now", {"type": "object", "properties": {}}, strict=True)]
    source = format.grammar(strict, "auto")
    assert source is not None
    grammar = compiler.compile(source)
    forced = format.grammar(strict, "required", False)
    assert forced is not None
    call = written(compiler.compile(forced), tokenizer, 1, 400, tokenizer.vocab_size)
    signs = [(f"So {word} is it.", False) for word in format.markers if word[0] in "<["]
    for text, is_right in (("And God said.", True), (call, True), (call[:-1] + "x", False), *signs):
        state, ok = grammar.start(), True
        for token in tokenizer.encode(text, add_special_tokens=False):
            ok = ok and token in allowed(state, tokenizer.vocab_size)
            if ok:
                state.accept_token(token)
        ok = ok and 1 in allowed(state, tokenizer.vocab_size)
        assert ok == is_right, text


@pytest.mark.parametrize(
    ("value", "is_taken"),
    [
        ("", True), ("\n", True), ("</parameter>", True), ("a</parameter>\nb", True),
        ("</function>\n", True), ("<function=f>\n</function>\n</tool", True),
        ("<parameter=text>", True), ("</tool_call>", True), ("</parameter>  </parameter>", True),
        ("a\n</parameter>\n</function>", False), ("a</parameter> <parameter=x", False),
        ("a\n  <parameter=text>", False), ("a\n</function></tool_call>", False),
    ],
)  # fmt: skip
def test_texts_between_tags(value: str, is_taken: bool) -> None:
    """They may have the words of the format, but not as they follow each other in a call."""
    format = FORMATS["qwen3_coder"]
    tools = [function("f", {"properties": {"text": {"type": "string"}}, "required": ["text"]})]
    source = format.grammar(tools, "required")
    assert source is not None
    text = (f"<tool_call>\n<function=f>\n<parameter=text>\n{value}\n</parameter>\n</function>"
            "\n</tool_call>")  # fmt: skip
    state, plain = compiler_of().compile(source).start(), Tokenizer.load(KJV)
    tokens = plain.encode(text, add_special_tokens=False)
    taken = []
    for token in tokens:
        if token not in allowed(state):
            break
        state.accept_token(token)
        taken.append(token)
    assert (taken == tokens and state.is_accepting) == is_taken


def test_markers_are_the_tokens_that_they_are(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    format = ToolFormat.of_template("<tool_call>", tokenizer)
    begin, end = (tokenizer.inner.token_to_id(word) for word in ADDED[:2])
    assert format.token_ids == {"<tool_call>": begin, "</tool_call>": end}
    assert format.kept_special_ids == frozenset()  # they are no special ones
    source = format.grammar(TOOLS, "required")
    assert source is not None
    assert allowed(compiler.compile(source).start(), tokenizer.vocab_size) == [begin]
    mistral = ToolFormat.of_template("[TOOL_CALLS] [ARGS]", tokenizer)
    ids = {tokenizer.inner.token_to_id(word) for word in ADDED[2:4]}
    assert mistral.kept_special_ids == ids


def test_a_schema_may_allow_anything(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    format = FORMATS["functiongemma"].with_tokenizer(tokenizer)
    tools = [function("f", {"properties": {"a": {"type": "array"}, "b": {}, "c": True}})]
    grammar = compiler.compile(format.grammar(tools, "required"))
    text = "call:f{a:[1,[<escape>x<escape>]],b:[[{}]],c:null}"
    text = f"<start_function_call>{text}<end_function_call>"
    assert accepts(grammar, tokenizer, text, tokenizer.vocab_size)


def test_no_grammar_where_none_is_needed() -> None:
    format = FORMATS["hermes"]
    for choice in ("none", "auto", None):
        assert format.grammar(TOOLS, choice) is None
    assert format.grammar([], "auto") is None
    allowed_tools = {"mode": "required", "tools": [{"type": "function", "name": "get"}]}
    for choice in ({"type": "allowed_tools", "allowed_tools": allowed_tools},
                   {"type": "allowed_tools", **allowed_tools}):  # fmt: skip
        source = format.grammar(TOOLS, choice)
        assert source is not None and "get_weather" not in source.text


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"enum": ["x", "x\n</parameter>\n</function>"]}, "begins as another one and its end"),
        ({"type": "string", "enum": [3]}, "enum has no string"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, "minLength is 3 and maxLength 2"),
    ],
)
def test_what_tags_cannot_tell_apart(schema: Any, message: str) -> None:
    tools = [function("f", {"properties": {"text": schema}})]
    with pytest.raises(ValueError, match=f"the parameters of f: .*{message}"):
        FORMATS["qwen3_coder"].grammar(tools, "required")


def nested(levels: int) -> Any:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return {"type": "object", "properties": {"a": schema}}


@pytest.mark.parametrize(
    ("tools", "choice", "message"),
    [
        (3, "auto", "tools is of type int; expected a list"),
        ([3], "auto", r"tools\[0\] is of type int"),
        ([{"type": "odd"}], "auto", r"tools\[0\].type is 'odd'"),
        ([{"type": "function", "function": 3}], "auto", r"tools\[0\].function is of type int"),
        ([function("a b")], "auto", r"tools\[0\].function.name is 'a b'"),
        ([function("a"), function("a")], "auto", r"tools\[1\].function.name is 'a', as of"),
        ([function("a", 3)], "auto", r"tools\[0\].function.parameters is of type int"),
        ([function("a", strict=3)], "auto", r"tools\[0\].function.strict is of type int"),
        ([function(f"f{i}") for i in range(513)], "auto", "at most 512"),
        ([], "required", "tool_choice is 'required' without tools"),
        (TOOLS, "odd", "tool_choice is 'odd'; expected 'none'"),
        (TOOLS, {"type": "function", "function": {"name": "odd"}}, "names 'odd'; expected one"),
        (TOOLS, {"type": "function"}, "names None"),
        (TOOLS, {"type": "function", "function": {"name": ["x"]}}, "names"),
        (TOOLS, 3, "tool_choice is 3"),
        ([function("a", {"not": {}}, strict=True)], "required", "cannot keep"),
        ([function("a", nested(99))], "required", "the parameters of a: .* levels"),
        ([function("a", {"properties": {"b": {"$ref": "#/odd"}}})], "required", "'/odd' does not"),
    ],
)  # fmt: skip
def test_what_is_wrong_names_its_field(
    compiler: GrammarCompiler, tools: Any, choice: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        source = FORMATS["hermes"].grammar(tools, choice)
        if source is not None:
            compiler.compile(source)
    if not isinstance(tools, list) or "tools[" in message:
        with pytest.raises(ValueError, match=message):
            check_tools(tools)


COUNT = int(os.environ.get("LMDECODE_DRAWN_CALLS", "40"))

Call = tuple[str, dict[str, Any]]
TAG_WORDS = [
    "<parameter=text>", "<parameter=path>\n", "<parameter=odd>", "</parameter>", "\n</parameter>",
    "</function>", "\n</function>\n", "<function=now>", "<function=", "<parameter=",
]  # fmt: skip
COMMON = [
    "", " ", "\n", "\n\n", "\t", '"', "'", '"""', "'''", "\\", "\\n", "\\u", "{", "}", "[", "]",
    "(", ")", "<", ">", "</", "```", "```json\n", "a", "\u00e9\u4e2d", "\U0001f600", ",", ":", ";",
    "=", "null", "12", "\u2028", "\x7f", "now()", '{"name": "now", "arguments": {}}', "<a>b</a>",
    "true",
]  # fmt: skip


def words_of_format(format: ToolFormat) -> list[str]:
    """Return the bits of which values are made: all that means something to the format."""
    form = format.form
    found = [*format.words, *format.markers, form.open, form.middle, form.close, form.between,
             form.begin, form.end, form.quote]  # fmt: skip
    return [*(word for word in found if word), *TAG_WORDS, *COMMON]


def enum_of(format: ToolFormat) -> list[str]:
    """Return texts of an ``enum``, some of which end a call where they are no value."""
    form = format.form
    found = [
        "plain", "plain\n</parameter>", "a\n</parameter>\n</function>\n</tool_call>\nb",
        "</parameter>", "\n<parameter=text>\n1\n</parameter>", "</function>",
        f"x{form.close}{form.end}", "\n</parameter>\n</function>",
    ]  # fmt: skip
    return [text for text in found if not form.quote or form.quote not in text]


def tools_of(format: ToolFormat) -> list[dict[str, Any]]:
    properties: dict[str, Any] = {
        "path": {"type": "string", "minLength": 1, "maxLength": 60},
        "count": {"type": "integer"},
        "text": {"type": "string"},
        "kind": {"type": "string", "enum": enum_of(format)},
        "lines": {"type": "array", "items": {"type": "string"}},
        "data": {"type": "object", "properties": {
            "a": {"type": "string"}, "b": {"type": "array", "items": {"type": "array", "items": {
                "type": "object", "properties": {"a": {"type": "string"}, "n": {"type": "number"}},
                "required": ["a"], "additionalProperties": False}}}},
            "additionalProperties": False},
        "maybe": {"type": ["string", "null"]},
        "least": {"type": "string", "minLength": 3},
        "on": {"type": "boolean"},
        "last": {"type": "string"},
    }  # fmt: skip
    write = {"type": "object", "properties": properties, "required": ["path", "text"]}
    two = {"type": "object", "properties": {"text": {"type": "string"}, "path": {"type": "string"}},
           "required": ["text", "path"]}  # fmt: skip
    return [function("write", write), function("3d-draw.v2", two), function("now")]


class Writer:
    """Draws calls, and writes them as a format's grammar has them."""

    def __init__(self, format: ToolFormat, form: CallForm, rng: random.Random) -> None:
        self._form, self._rng = form, rng
        self._words, self._kinds = words_of_format(format), enum_of(format)

    def text(self, least: int = 0, most: int = 10_000) -> str:
        count = self._rng.choice((0, 1, 1, 2, 3, 5, 8))
        return "".join(self._rng.choices(self._words, k=count)).ljust(least, "~")[:most]

    def some(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return some of the keys of an object."""
        return {key: value for key, value in values.items() if self._rng.random() < 0.4}

    def arguments(self, name: str) -> dict[str, Any]:
        """Return arguments in the order of the schema."""
        rng = self._rng
        if name == "now":
            return {}
        if name != "write":
            return {"text": self.text(), "path": self.text()}
        inner = {"a": self.text(), **self.some({"n": rng.choice((0, -1.5, 2e9))})}
        return {
            "path": self.text(1, 60),
            **self.some({"count": rng.randrange(-99, 99)}),
            "text": self.text(),
            **self.some({
                "kind": rng.choice(self._kinds),
                "lines": [self.text() for _ in range(rng.randrange(4))],
                "data": self.some({"a": self.text(), "b": [[inner], []]}),
                "maybe": rng.choice((None, self.text())),
                "least": self.text(3),
                "on": rng.random() < 0.5,
                "last": self.text(),
            }),
        }  # fmt: skip

    def calls(self) -> list[Call]:
        count = 1 if self._form.is_single else self._rng.choice((1, 1, 2, 4))
        names = self._rng.choices(("write", "3d-draw.v2", "now"), (5, 3, 1), k=count)
        return [(name, self.arguments(name)) for name in names]

    def written(self, calls: list[Call]) -> str:
        form = self._form
        return form.begin + form.between.join(map(self.call, calls)) + form.end

    def call(self, call: Call) -> str:
        name, arguments = call
        form, kind = self._form, self._form.arguments
        if kind == "json":
            text = _json(arguments)
        elif kind == "keywords":
            text = ", ".join(f"{key}={self._python(value)}" for key, value in arguments.items())
        elif kind == "key_values":
            text = ",".join(f"{key}:{self._quoted(value)}" for key, value in arguments.items())
        else:
            text = "".join(f"<parameter={key}>\n{self._tagged(key, value)}\n</parameter>\n"
                           for key, value in arguments.items()) + "</function>"  # fmt: skip
        return form.open + name + form.middle + text + form.close

    def _python(self, value: Any) -> str:
        return str(value) if isinstance(value, bool) else _json(value)

    def _tagged(self, key: str, value: Any) -> str:
        is_text = isinstance(value, str) and key != "maybe"
        return value if is_text else _json(value)

    def _quoted(self, value: Any) -> str:
        if isinstance(value, str):
            return self._form.quote + value + self._form.quote
        if isinstance(value, Mapping):
            return "{" + ",".join(f"{key}:{self._quoted(v)}" for key, v in value.items()) + "}"
        if isinstance(value, list):
            return "[" + ",".join(map(self._quoted, value)) + "]"
        return json.dumps(value)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


FIRST = 0xE000  # of characters that stand for words that are tokens: values have none


@cache
def tokenizer_of(has_tokens: bool) -> Tokenizer:
    """Return the shipped tokenizer, with or without the words of all formats as tokens."""
    found = Tokenizer.load(KJV).inner
    if has_tokens:
        found.add_special_tokens(sorted({word for form in FORMATS.values() for word in form.words}))
    return Tokenizer(found, special_tokens={"eos_token": "</s>"})


@cache
def compiler_with(has_tokens: bool) -> GrammarCompiler:
    tokenizer = tokenizer_of(has_tokens)
    return GrammarCompiler(tokenizer, tokenizer.vocab_size, [1])


def with_characters(form: CallForm, words: list[str]) -> CallForm:
    """Return a form with a character for each word that is a token."""
    for place, word in enumerate(words):
        form = form._replace(**{
            field: getattr(form, field).replace(word, chr(FIRST + place))
            for field in ("open", "middle", "close", "between", "begin", "end", "quote")
        })  # fmt: skip
    return form


@pytest.mark.parametrize("has_tokens", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_what_a_grammar_takes_is_read_back(name: str, has_tokens: bool) -> None:
    tokenizer, plain = tokenizer_of(has_tokens), tokenizer_of(False)
    format, rng = FORMATS[name].with_tokenizer(tokenizer), random.Random(f"{name} {has_tokens}")
    tools, words = tools_of(format), sorted(format.token_ids, key=len, reverse=True)
    source = format.grammar(tools, "required")
    assert source is not None
    grammar, taken = compiler_with(has_tokens).compile(source), 0
    writer = Writer(format, with_characters(format.form, words), rng)
    for _ in range(COUNT):
        calls = writer.calls()
        parts = re.split(f"([{chr(FIRST)}-{chr(FIRST + 99)}])", writer.written(calls))
        tokens, text = list[int](), ""
        for part in parts:
            if part and FIRST <= ord(part[0]) < FIRST + 100:
                word = words[ord(part[0]) - FIRST]
                tokens.append(format.token_ids[word])
                text += word
            else:
                tokens += plain.encode(part, add_special_tokens=False)
                text += part
        state = grammar.start()
        try:
            for token in tokens:
                state.accept_token(token)
        except ValueError as error:  # a lack of memory is a RuntimeError
            assert "does not take token" in str(error)
            continue
        if not state.is_accepting:
            continue
        taken += 1
        assert parsed(format, text, tools) == (None, calls), text
        cuts = sorted(rng.choices(range(len(text)), k=rng.choice((1, 3, 20))))
        cuts = rng.choice((cuts, list(range(len(text)))))
        assert streamed(format, text, cuts, tools) == (None, calls), (text, cuts)
    assert taken > COUNT / 3
