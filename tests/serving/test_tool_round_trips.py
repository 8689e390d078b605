"""What a tool grammar takes its reader reads back (LMDECODE_DRAWN_CALLS: texts a format)."""

import json
import os
import random
import re
from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest

from lmdecode.serving.grammar import GrammarCompiler
from lmdecode.serving.tokenizer import Tokenizer
from lmdecode.serving.tool_calls import FORMATS, ToolFormat
from lmdecode.serving.tools import CallForm
from tests.serving.grammar_cases import KJV, function
from tests.serving.test_tool_calls import parsed, streamed

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
def compiler_of(has_tokens: bool) -> GrammarCompiler:
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
    grammar, taken = compiler_of(has_tokens).compile(source), 0
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
