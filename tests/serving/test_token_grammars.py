"""``GrammarCompiler``: what grammars allow, what is refused, and how long that takes."""

import functools
import json
import re
import threading
import time
from typing import Any

import jsonschema
import pytest
import torch

import lmdecode
from lmdecode.serving.grammar import CompiledGrammar, GrammarCompiler
from lmdecode.serving.grammar_source import (
    GRAMMAR_FIELDS,
    FieldError,
    GrammarSource,
    choice,
    grammar_field,
    grammar_of_body,
    json_object,
    json_schema,
)
from lmdecode.serving.reasoning import ReasoningFormat
from lmdecode.serving.tokenizer import Tokenizer
from lmdecode.serving.tool_calls import FORMATS
from tests.serving.grammar_cases import KJV, SCHEMAS, TOOLS, accepts, allowed, compiler_of, written
from tests.serving.tokenizer_kinds import KINDS, tokenizer_of

VOCAB = 4101  # more than the tokenizer has


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(KJV)


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return compiler_of(VOCAB)


@pytest.mark.parametrize("kind", SCHEMAS)
def test_what_is_written_validates(
    compiler: GrammarCompiler, tokenizer: Tokenizer, kind: str
) -> None:
    grammar = compiler.json_schema(SCHEMAS[kind])
    for seed in range(5):
        text = written(grammar, tokenizer, seed, vocab=VOCAB)
        jsonschema.validate(json.loads(text), SCHEMAS[kind])


def test_every_kind(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    for grammar, yes, no in (
        (compiler.regex(r"[a-c]{2,3}(x|/y)"), ["abx", "abc/y"], ["ax", "abxx", "abcdx"]),
        (compiler.lark('start: "a" b*\nb: "b" | "(" b ")"'), ["a", "abb", "a((b))"], ["b", "a(b"]),
        (compiler.gbnf('root ::= thing+ "."\nthing ::= [a-z] | "A"  # a comment'),
         ["aA.", "z."], [".", "a"]),
        (compiler.choice(["yes", "no, \"never\"", "n"]), ["yes", 'no, "never"', "n"], ["no", ""]),
        (compiler.json_object(), ["{}", '{"a": [1, {"b":null}]}', '{\n  "a": ""\n}'],
         ["[]", "{", '{"a":      1}', "{a: 1}"]),
        (compiler.json_schema(True), ["[1]", '"a"'], ["", "]"]),
        (compiler.json_schema('{"type": "null"}'), ["null"], ["nul"]),
    ):  # fmt: skip
        for text in yes:
            assert accepts(grammar, tokenizer, text, VOCAB), text
        for text in no:
            assert not accepts(grammar, tokenizer, text, VOCAB), text


def test_end_tokens_are_allowed_exactly_where_the_text_may_end(tokenizer: Tokenizer) -> None:
    compiler = GrammarCompiler(tokenizer, VOCAB, [2, 1])
    state = compiler.regex("a{1,2}").start()
    a = tokenizer.encode("a", add_special_tokens=False)[0]
    assert not {1, 2} & set(allowed(state, VOCAB)) and not state.is_accepting
    state.accept_token(a)
    assert {1, 2, a} <= set(allowed(state, VOCAB)) and state.is_accepting
    state.accept_token(a)
    assert allowed(state, VOCAB) == [1, 2]
    state.accept_token(2)
    assert allowed(state, VOCAB) == [1, 2] and state.is_accepting
    state.accept_token(1)
    with pytest.raises(ValueError, match=f"does not take token {a}"):
        state.accept_token(a)


def test_tokens_that_the_tokenizer_does_not_have_are_forbidden(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    state = compiler.regex("(?s:.)*").start()
    tokens = allowed(state, VOCAB)
    assert max(tokens) < 4096 and 1 in tokens and not {0, 2} & set(tokens)
    narrow = GrammarCompiler(tokenizer, 1000, [1])
    state = narrow.regex("(?s:.)*").start()
    assert max(allowed(state, 1000)) < 1000
    with pytest.raises(ValueError, match=r"bitmask is torch.int32 \[5\]; expected int32 \[32\]"):
        state.fill_bitmask(torch.zeros(5, dtype=torch.int32))


@pytest.mark.parametrize("kind", KINDS)
def test_tokenizers_of_every_kind(kind: str) -> None:
    tokenizer = Tokenizer(tokenizer_of(kind))
    vocab = tokenizer.vocab_size + 3
    end = tokenizer.inner.token_to_id("</s>")
    state = GrammarCompiler(tokenizer, vocab, [end]).regex("a*b?").start()
    texts = {tokenizer.token_bytes(token) for token in allowed(state, vocab) if token != end}
    assert texts and all(re.fullmatch(b"a*b?", text) for text in texts)


def test_added_words_are_no_text() -> None:
    """A word such as <think> comes by its token alone, where the grammar names it."""
    tokenizer = Tokenizer(tokenizer_of("byte_level"))
    vocab, end = tokenizer.vocab_size, tokenizer.inner.token_to_id("</s>")
    think = tokenizer.inner.token_to_id("<think>")
    compiler = GrammarCompiler(tokenizer, vocab, [end])
    assert think not in allowed(compiler.regex("(?s:.)*").start(), vocab)
    state = compiler.lark(f'start: <[{think}]> "a"').start()
    assert allowed(state, vocab) == [think]


def test_an_added_word_is_its_text_in_a_grammar() -> None:
    """Of letters that stand for bytes in other words."""
    inner = type(tokenizer_of("byte_level")).from_str(tokenizer_of("byte_level").to_str())
    inner.add_tokens(["na\u00efve"])
    tokenizer = Tokenizer(inner)
    word, end = (inner.token_to_id(name) for name in ("na\u00efve", "</s>"))
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, [end])
    for text, is_allowed in (("na\u00efve art", True), ("naive art", False)):
        state = compiler.choice([text]).start()
        assert (word in allowed(state, tokenizer.vocab_size)) == is_allowed


NUMBERS = {"type": "integer", "minimum": 0, "maximum": 5}, {"type": "integer", "minimum": 10}


@pytest.mark.parametrize(
    ("parts", "yes", "no"),
    [
        (NUMBERS, ["3", "15"], ["7"]),
        ([{"type": "number", "exclusiveMaximum": 1}, {"type": "number", "minimum": 1}], ["1"], []),
        ([{"const": 1}, {"const": 2.5}, {"type": "string"}], ["1", "2.5", '"a"'], ["2"]),
        ([{"enum": [1, None]}, {"const": True}, {"type": "integer", "minimum": 2}],
         ["1", "null", "true", "2"], ["0", "false"]),
        ([{"oneOf": list(NUMBERS)}, {"type": "array"}], ["3", "[]"], ["7"]),
        ([{"const": 1}, {"const": 1.0}], None, None),
        ([{"type": "integer"}, {"type": "number"}], None, None),
        ([{"minimum": 3}, {"maximum": 1}], None, None),  # any text fits both
        ([{"type": "integer", "maximum": 3}, {"type": "integer", "minimum": 3}], None, None),
    ],
)  # fmt: skip
def test_one_of_schemas_that_no_value_fits_twice(
    compiler: GrammarCompiler, tokenizer: Tokenizer, parts: Any, yes: Any, no: Any
) -> None:
    """llguidance 1.9.1 alone refuses all whose types are numbers."""
    schema = {"properties": {"oneOf": {"oneOf": list(parts)}}, "additionalProperties": False}
    if yes is None:
        with pytest.raises(ValueError, match="cannot keep oneOf, two of whose schemas may fit one"):
            compiler.json_schema(schema)
        return
    grammar = compiler.json_schema(schema)
    for values, is_allowed in ((yes, True), (no, False)):
        for value in values:
            assert accepts(grammar, tokenizer, f'{{"oneOf": {value}}}', VOCAB) == is_allowed, value


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c: c.json_schema({"type": "foo"}), "Invalid type: foo"),
        (lambda c: c.json_schema({"not": {}}), r'cannot keep the keywords \["not"\]'),
        (lambda c: c.json_schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (lambda c: c.json_schema({"type": "string", "format": "odd"}), "Unknown format: odd"),
        (lambda c: c.json_schema({"$ref": "http://a.b/c"}), "does not fetch"),
        (lambda c: c.json_schema({"$ref": "#"}), "allows no text"),
        (lambda c: c.json_schema({"type": "string", "pattern": "(?=a)b"}), "look-around"),
        (lambda c: c.json_schema({"minimum": 3, "maximum": 1, "type": "integer"}), "greater"),
        (lambda c: c.json_schema("{"), "is no JSON"),
        (lambda c: c.json_schema("[" * 100_000), "is no JSON of at most 60 levels"),
        (lambda c: c.json_schema('{"const": ' * 9000 + "1" + "}" * 9000), "at most 60 levels"),
        (lambda c: c.json_schema({"const": float("nan")}), "is no JSON"),
        (lambda c: c.json_schema({"const": "\ud800"}), "no surrogates"),
        (lambda c: c.regex("(a"), "unclosed group"),
        (lambda c: c.regex("x" * 300_000), "300000 bytes; expected at most 262144"),
        (lambda c: c.regex("a\0"), "null character"),
        (lambda c: c.lark(""), "no start rule"),
        (lambda c: c.lark("start: x"), 'unknown name: "x"'),
        (lambda c: c.lark("start: start"), "allows no text"),
        (lambda c: c.lark("start: <nothing>"), "unknown special token"),
        (lambda c: c.lark("start: A\nA: /a.*/ & /.*b/"), "has & or ~ in A"),
        (lambda c: c.lark("start: A\nA: B\nB: A"), "names itself"),
        (lambda c: c.lark('start[stop="x"]: /.*/'), "has stop="),
        (lambda c: c.lark("start: %json {"), "behind %json is no JSON"),
        (lambda c: c.lark("start: %json " + "[" * 9000), "behind %json is no JSON of at most 60"),
        (lambda c: c.lark('start: %json {"type": "integer", "multipleOf": 999983}'), "multipleOf"),
        (lambda c: c.gbnf("root ::= x"), "no GBNF: line 1, column 10, 'x': there is no rule"),
        (lambda c: c.gbnf("rule ::= \"a\""), "no GBNF: it has no rule root"),
        (lambda c: c.gbnf("root ::= " + "(" * 9000), "no GBNF"),
        (lambda c: c.choice([]), "at least one"),
        (lambda c: c.choice([""]), "a choice is empty"),
    ],
)  # fmt: skip
def test_what_is_wrong_has_one_line(compiler: GrammarCompiler, call: Any, message: str) -> None:
    for _ in range(2):  # an error is not kept
        with pytest.raises(ValueError, match=message) as caught:
            call(compiler)
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


def test_what_is_no_argument(tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    with pytest.raises(TypeError, match="the schema is list; expected an object"):
        compiler.json_schema([])
    with pytest.raises(TypeError, match="pattern is of type int; expected str"):
        compiler.regex(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="a choice is of type int"):
        compiler.choice([3])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="eos_token_ids is empty"):
        GrammarCompiler(tokenizer, VOCAB, [])
    with pytest.raises(ValueError, match="eos_token_ids is 4101; expected 0 to 4100"):
        GrammarCompiler(tokenizer, VOCAB, [VOCAB])
    with pytest.raises(ValueError, match="expected json_schema, regex"):
        compiler.compile(GrammarSource("odd", "x"))  # type: ignore[arg-type]


def test_without_strict_what_cannot_be_kept_is_left_out(compiler: GrammarCompiler) -> None:
    schema = {"type": "array", "uniqueItems": True, "items": {"type": "string", "format": "odd"}}
    compiler.json_schema(schema, strict=False)


def deep(levels: int) -> Any:
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    "call",
    [
        lambda c: c.json_schema(deep(70)),
        lambda c: c.json_schema(deep(20_000)),
        lambda c: c.json_schema({"properties": {f"p{i}": {} for i in range(9000)}}),
        lambda c: c.json_schema({"enum": list(range(30_000))}),
        lambda c: c.json_schema({"type": "integer", "multipleOf": 999_983}),
        lambda c: c.json_schema({"allOf": [{"type": "integer", "multipleOf": 9973},
                                           {"multipleOf": 9967}]}),
        lambda c: c.json_schema({"allOf": [{"anyOf": [
            {"properties": {f"p{i}_{j}": True}, "required": [f"p{i}_{j}"]} for j in range(7)]}
            for i in range(7)]}),
        lambda c: c.lark("start: " + "(" * 11_000 + '"a"' + ")" * 11_000),
        lambda c: c.lark("start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(11_000))
                         + '\nr11000: "a"'),
        lambda c: c.lark("start: A0\n" + "\n".join(f"A{i}: A{i + 1} A{i + 1}" for i in range(100))
                         + '\nA100: "a"'),
    ],
)  # fmt: skip
def test_what_takes_long_is_refused_soon(compiler: GrammarCompiler, call: Any) -> None:
    begin = time.monotonic()
    with pytest.raises(ValueError, match=r"expected|too large|too deep|levels"):
        call(compiler)
    assert time.monotonic() - begin < 10


def test_deep_grammars_have_the_stack_that_they_need(compiler: GrammarCompiler) -> None:
    rules = "\n".join(f'r{i}: (r{i + 1} "b")?' for i in range(4900))
    compiler.lark(f'start: r0\n{rules}\nr4900: "a"')
    found = {f"d{i}": {"properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(900)}
    compiler.json_schema({"$ref": "#/$defs/d0", "$defs": {**found, "d900": True}})


def test_a_grammar_is_compiled_once_for_all_threads(tokenizer: Tokenizer) -> None:
    compiler = GrammarCompiler(tokenizer, VOCAB, [1], max_cached=2)
    found: list[Any] = []
    threads = [
        threading.Thread(target=lambda: found.append(compiler.regex("a+"))) for _ in range(16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 16 and len(set(map(id, found))) == 1
    assert compiler.regex("a+") is found[0]
    compiler.regex("b+"), compiler.regex("c+")
    assert compiler.regex("a+") is not found[0]


def test_states_are_apart(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    """Of one grammar, on several threads: each has its own place in it."""
    grammar = compiler.json_schema(SCHEMAS["nested"])
    want = [written(grammar, tokenizer, seed, vocab=VOCAB) for seed in range(8)]
    got: dict[int, list[str]] = {}

    def write(seed: int) -> None:
        got[seed] = [written(grammar, tokenizer, seed, vocab=VOCAB) for _ in range(3)]

    threads = [threading.Thread(target=write, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == {seed: [text] * 3 for seed, text in enumerate(want)}


LONG = "x" * 9000


@pytest.mark.parametrize(
    "call",
    [
        lambda c: c.regex(f"({LONG}"),
        lambda c: c.regex(f"a{LONG}(?=b)"),
        lambda c: c.json_schema({"type": LONG}),
        lambda c: c.json_schema({"type": "string", "format": LONG}),
        lambda c: c.json_schema({"type": "string", "pattern": f"{LONG}("}),
        lambda c: c.json_schema({"$ref": f"#/{LONG}"}),
        lambda c: c.json_schema({LONG: 1, "not": {}}),
        lambda c: c.json_schema({"const": 10**4000, "not": {}}),
        lambda c: c.lark(f"start: {LONG}"),
        lambda c: c.lark(f"start: A{LONG.upper()}\nA{LONG.upper()}: /a/ & /b/"),
        lambda c: c.lark(f"start: A{LONG.upper()}\nA{LONG.upper()}: A{LONG.upper()}"),
        lambda c: c.lark(f"start: A{LONG.upper()}\nA{LONG.upper()}: /{LONG * 12}/"),
        lambda c: c.lark(f"start: <{LONG}>"),
        lambda c: c.gbnf(f"root ::= {LONG}"),
        lambda c: c.gbnf(f'root ::= "{LONG}'),
        lambda c: c.gbnf(f"{LONG}"),
        lambda c: c.compile(GrammarSource(LONG, "x")),
    ],
)
def test_errors_repeat_little(compiler: GrammarCompiler, call: Any) -> None:
    with pytest.raises(ValueError) as caught:
        call(compiler)
    assert len(str(caught.value)) <= 200, str(caught.value)


# The words before thoughts, and between them and an answer.
THOUGHTS = {
    "think": ("<think>", "</think>"),
    "think_brackets": ("[THINK]", "[/THINK]"),
    "gemma4": ("<|channel>thought", "<channel|>"),
    "start_thinking": ("<|START_THINKING|>", "<|END_THINKING|>"),
    "seed": ("<seed:think>", "</seed:think>"),
    "thought": ("<thought>", "</thought>"),
    "granite": ("Here is my thought process:", "Here is my response:"),
    "harmony": ("<|channel|>analysis<|message|>",
                "<|end|><|start|>assistant<|channel|>final<|message|>"),
}  # fmt: skip
# Of each kind of a grammar: what it allows, and what not.
GRAMMARS: dict[str, tuple[GrammarSource, str, str]] = {
    "json_schema": (json_schema({"type": "array", "items": {"enum": [1, "a"]}}), '[1,"a"]', "[2]"),
    "json_object": (json_object(), '{"a": [1, true]}', "[1]"),
    "regex": (GrammarSource("regex", "ab+"), "abb", "ac"),
    "choice": (choice(["yes", "no"]), "no", "nono"),
    "lark": (GrammarSource("lark", 'start: "a" b\nb: "(" b? ")"'), "a(())", "a(()"),
    "lark with an option": (GrammarSource("lark", '%llguidance {}\nstart: T\nT: /b+/'), "bb", "ba"),
    "gbnf": (GrammarSource("gbnf", 'root ::= "a" b\nb ::= "(" b? ")"'), "a(())", "a(()"),
    "a call": (FORMATS["hermes"].grammar(TOOLS[1:], "required", False) or json_object(),
               '<tool_call>\n{"name": "get", "arguments": {}}\n</tool_call>', "get"),
}  # fmt: skip


@functools.cache
def thinker(
    name: str, has_tokens: bool
) -> tuple[ReasoningFormat, GrammarCompiler, Tokenizer, dict[str, int]]:
    """Return a format of thoughts whose words are tokens or are none, and what compiles for it."""
    source = "".join(THOUGHTS[name])
    found = ReasoningFormat.of_template(source)
    assert found is not None and found.name == name
    inner = type(tokenizer_of("byte_level")).from_str(tokenizer_of("byte_level").to_str())
    if has_tokens:
        inner.add_special_tokens(list(found.words))
    tokenizer, end = Tokenizer(inner), inner.token_to_id("</s>")
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, [end])
    found = ReasoningFormat.of_template(source, tokenizer)
    assert found is not None and set(found.token_ids) >= (set(found.words) if has_tokens else set())
    return found, compiler, tokenizer, {"vocab": tokenizer.vocab_size, "end": end}


@pytest.mark.parametrize("has_tokens", [True, False], ids=["tokens", "texts"])
@pytest.mark.parametrize("name", THOUGHTS)
@pytest.mark.parametrize("kind", GRAMMARS)
def test_thoughts_come_before_every_kind_of_a_grammar(
    kind: str, name: str, has_tokens: bool
) -> None:
    format, compiler, tokenizer, sizes = thinker(name, has_tokens)
    (first, last), (source, yes, no) = THOUGHTS[name], GRAMMARS[kind]
    for is_inside in (True, False):
        is_open = is_inside and name != "harmony"  # whose prompts end before thoughts
        grammar = compiler.compile(source, prefix=format.grammar_prefix(is_inside))
        thoughts = f"{'' if is_open else first}{{ Hm,\n[no].{last}"
        assert accepts(grammar, tokenizer, thoughts + yes, **sizes)
        for text in (thoughts + no, thoughts, f"{first}Hm.{yes}"):
            assert not accepts(grammar, tokenizer, text, **sizes), text
        alone = "<|channel|>final<|message|>" if name == "harmony" else ""
        assert accepts(grammar, tokenizer, alone + yes, **sizes) != is_open


def test_a_grammar_that_came_to_a_limit_is_compiled_anew(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = compiler_of(VOCAB)
    limits = compiler._module.LLParserLimits(max_lexer_states=300, verbose_errors=False)
    monkeypatch.setattr(compiler, "_limits", limits)

    def follow(text: str) -> None:
        state = compiler.regex("q[ab]*a[ab]{12}c").start()
        bitmask = torch.zeros(-(-VOCAB // 32), dtype=torch.int32)
        for token in tokenizer.encode(text, add_special_tokens=False):
            state.fill_bitmask(bitmask)
            state.accept_token(token)

    many = "".join(f"{number:012b}" for number in range(0, 4096, 61))  # texts for an automaton
    many = many.replace("0", "a").replace("1", "b")
    for _ in range(2):
        follow("qab")
        with pytest.raises(RuntimeError, match="too many states: 300"):
            follow("q" + many)
    assert compiler.regex("q[ab]*a[ab]{12}c") is compiler.regex("q[ab]*a[ab]{12}c")


def test_a_token_that_is_not_allowed_is_a_value_error(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    (digit,) = tokenizer.encode("3", add_special_tokens=False)[-1:]
    grammar = compiler.regex("[a-z]+")
    for _ in range(2):  # nothing is lost by it
        with pytest.raises(ValueError, match=f"the grammar does not take token {digit} here"):
            grammar.start().accept_token(digit)
    for number in (-1, VOCAB, 1 << 40):
        with pytest.raises(ValueError, match=f"token is {number}; expected 0 to {VOCAB - 1}"):
            grammar.start().accept_token(number)
    assert not grammar.is_spent
    assert accepts(grammar, tokenizer, "abc", VOCAB)


SCHEMA = {"type": "array", "items": {"type": "integer"}}
GBNF, LARK = 'root ::= "a"', 'start: "a"'


@pytest.mark.parametrize(
    ("body", "want"),
    [
        ({}, None),
        ({"response_format": None, "guided_json": None, "grammar": ""}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, json_object()),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, json_schema(SCHEMA)),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x",
          "schema": SCHEMA}}}, json_schema(SCHEMA)),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": False,
          "schema": SCHEMA}}}, json_schema(SCHEMA, strict=False)),
        ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, json_schema(SCHEMA)),
        ({"response_format": {"type": "grammar", "grammar": GBNF}}, ("gbnf", GBNF)),
        ({"response_format": {"type": "regex", "pattern": "a+"}}, ("regex", "a+")),
        ({"guided_json": SCHEMA}, json_schema(SCHEMA)),
        ({"guided_json": '{"type": "null"}'}, json_schema({"type": "null"})),
        ({"guided_regex": "a+"}, ("regex", "a+")),
        ({"guided_choice": ["a", "b"]}, choice(["a", "b"])),
        ({"guided_grammar": LARK}, ("lark", LARK)),
        ({"guided_grammar": GBNF}, ("gbnf", GBNF)),
        ({"grammar": GBNF}, ("gbnf", GBNF)),
        ({"grammar": "%llguidance {}\nstart: x\nx: /a/"}, ("lark",
          "%llguidance {}\nstart: x\nx: /a/")),
        ({"json_schema": SCHEMA, "response_format": {"type": "text"}}, json_schema(SCHEMA)),
        ({"structured_outputs": {"json": SCHEMA, "whitespace_pattern": " "}}, json_schema(SCHEMA)),
        ({"structured_outputs": {"choice": ["a"], "regex": None}}, choice(["a"])),
        ({"structured_outputs": {"json_object": True}}, json_object()),
        ({"structured_outputs": {"json_object": False}}, None),
        ({"structured_outputs": {}}, None),
    ],
)  # fmt: skip
def test_fields(body: dict[str, Any], want: Any) -> None:
    assert grammar_of_body({"temperature": 1, **body}) == want


def test_objects_may_be_closed_and_have_no_space() -> None:
    """vLLM 0.32.0 has both as options of its engine, by these rules; here a request has them."""
    inner = {"type": "object", "properties": {"b": {"type": "integer"}}}
    odd = {"additionalProperties": {"type": "object"}, "properties": {}}
    schema = {"properties": {"properties": {"anyOf": [inner, odd]}, "c": {"type": "object"}},
              "$defs": {"x": inner}, "items": [inner], "enum": [inner]}  # fmt: skip
    closed = {**inner, "additionalProperties": False}
    wanted = {"properties": {"properties": {"anyOf": [closed, odd]}, "c": {"type": "object"}},
              "$defs": {"x": closed}, "items": [closed], "enum": [inner],
              "additionalProperties": False}  # fmt: skip

    def source(**fields: Any) -> Any:
        return grammar_of_body({"structured_outputs": fields})

    for one in (schema, json.dumps(schema)):
        assert source(json=one, disable_additional_properties=True) == json_schema(wanted)
        assert source(json=one, disable_additional_properties=False) == json_schema(schema)
    tight = source(json=schema, disable_any_whitespace=True)
    assert json.loads(tight.text)["x-guidance"] == {"whitespace_pattern": ""}
    tight = source(json_object=True, disable_any_whitespace=True)
    assert json.loads(tight.text)["x-guidance"] == {"whitespace_pattern": ""}


def test_the_field_is_the_one_that_asks() -> None:
    text = {"response_format": {"type": "text"}, "structured_outputs": {}, "guided_json": None}
    assert grammar_field({**text, "guided_regex": "("}) == "guided_regex"
    assert grammar_field(text) is None


FORMAT = "response_format"


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({FORMAT: 3}, FORMAT, "of type int; expected an object"),
        ({FORMAT: {}}, f"{FORMAT}.type", "is None; expected 'text'"),
        ({FORMAT: {"type": "xml"}}, f"{FORMAT}.type", "is 'xml'"),
        ({FORMAT: {"type": "json_schema"}}, f"{FORMAT}.json_schema", "expected an object"),
        ({FORMAT: {"type": "json_schema", "json_schema": {}}}, f"{FORMAT}.json_schema.schema",
         "is missing"),
        ({FORMAT: {"type": "json_schema", "json_schema": {"schema": SCHEMA, "strict": 1}}},
         f"{FORMAT}.json_schema.strict", "expected a bool"),
        ({FORMAT: {"type": "json_schema", "json_schema": {"schema": 3}}},
         f"{FORMAT}.json_schema.schema", "the schema is int"),
        ({FORMAT: {"type": "regex"}}, f"{FORMAT}.regex", "of type NoneType; expected a string"),
        ({"guided_json": "{"}, "guided_json", "is no JSON"),
        ({"guided_regex": 3}, "guided_regex", "expected a string"),
        ({"guided_choice": "ab"}, "guided_choice", "expected a list"),
        ({"guided_choice": []}, "guided_choice", "at least one"),
        ({"grammar": "\ud800"}, "grammar", "no surrogates"),
        ({"grammar": "a" * 300_000}, "grammar", "at most 262144"),
        ({"structured_outputs": []}, "structured_outputs", "expected an object"),
        ({"structured_outputs": {"odd": 1}}, "structured_outputs.odd", "is unknown"),
        ({"structured_outputs": {"json_object": 1}}, "structured_outputs.json_object", "a bool"),
        ({"structured_outputs": {"json": SCHEMA, "disable_additional_properties": 1}},
         "structured_outputs.disable_additional_properties", "a bool"),
        ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "structured_outputs",
         "has json and regex; expected one"),
        ({"guided_json": SCHEMA, "grammar": GBNF}, "grammar", "beside guided_json"),
    ],
)  # fmt: skip
def test_errors_name_the_field(body: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(FieldError, match=message) as caught:
        grammar_of_body(body)
    assert caught.value.param == param and str(caught.value).startswith(f"{param}: ")
    rest = str(caught.value).removeprefix(f"{param}: ")
    joins = rest.split()[0] in ("is", "has")  # of the field, or a sentence of its own
    assert caught.value.sentence == f"{param}{' ' if joins else ': '}{rest}"


@pytest.mark.parametrize("name", GRAMMAR_FIELDS)
@pytest.mark.parametrize(
    "value",
    [0, 1.5, True, [], {}, [[]], "x", {"type": []}, {"json": {}}, ["a", None], float("nan")],
)
def test_odd_values_are_no_other_error(name: str, value: Any) -> None:
    try:
        grammar_of_body({name: value})
    except FieldError as error:
        assert error.param.startswith(name)


PROMPT = "And God said, "
SEEDS = range(5)


@pytest.fixture(scope="module")
def kjv_compiler() -> GrammarCompiler:
    return compiler_of()


@pytest.fixture(scope="module")
def decoding() -> lmdecode.Decoding:
    return lmdecode.Decoding.from_pretrained(str(KJV), dtype="int8")


def texts_of(
    decoding: lmdecode.Decoding,
    tokenizer: Tokenizer,
    grammars: list[CompiledGrammar],
    rows: int,
    **options: Any,
) -> list[list[str]]:
    """Return the texts of each grammar by the seeds, so many at a time."""
    engine = decoding.engine(max_requests=rows, capacity=512)
    prompt = tokenizer.encode(PROMPT)
    requests = [
        [
            engine.submit(
                prompt, grammar=grammar.start(), seed=seed, temperature=1.0, top_p=0.95,
                max_new_tokens=400, **options,
            )
            for seed in SEEDS
        ]
        for grammar in grammars
    ]  # fmt: skip
    results = [[request.result() for request in of_grammar] for of_grammar in requests]
    assert {result.finish_reason for found in results for result in found} == {"stop"}
    return [[tokenizer.decode(result.tokens) for result in found] for found in results]


def test_schemas_hold_alone_and_beside_others(
    decoding: lmdecode.Decoding, kjv_compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    grammars = [kjv_compiler.json_schema(schema) for schema in SCHEMAS.values()]
    beside = texts_of(decoding, tokenizer, grammars, rows=16)
    for schema, texts in zip(SCHEMAS.values(), beside, strict=True):
        for text in texts:
            jsonschema.validate(json.loads(text), schema)
    some = grammars[::4]
    assert texts_of(decoding, tokenizer, some, rows=1) == beside[::4]


def checked_calls(name: str, text: str, tokenizer: Tokenizer) -> list[Any]:
    """Return the calls of a text, whose arguments fit their schema."""
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") for tool in TOOLS}
    content, calls = FORMATS[name].with_tokenizer(tokenizer).parse(text, TOOLS)
    assert content is None and calls, text
    for call in calls:
        arguments = json.loads(call.arguments)
        jsonschema.validate(arguments, schemas[call.name] or {"maxProperties": 0})
    return calls


def test_forced_calls_have_valid_arguments(
    decoding: lmdecode.Decoding, kjv_compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    named = {"type": "function", "function": {"name": "get_weather"}}
    # The model, which has seen no calls, ends a text where it is told to, and no list of calls.
    cases = [
        (name, *case)
        for name, format in FORMATS.items()
        for case in (("required", True), ("required", False), (named, False))
        if not (case[1] and format.form.end)
    ]
    grammars = []
    for name, chosen, parallel in cases:
        source = FORMATS[name].with_tokenizer(tokenizer).grammar(TOOLS, chosen, parallel)
        assert source is not None
        grammars.append(kjv_compiler.compile(source))
    found = texts_of(decoding, tokenizer, grammars, rows=16, logit_bias={1: 10.0})
    for (name, chosen, parallel), texts in zip(cases, found, strict=True):
        for text in texts:
            calls = checked_calls(name, text, tokenizer)
            assert parallel or len(calls) == 1
            assert chosen == "required" or {call.name for call in calls} == {"get_weather"}


def test_a_grammar_that_ends_lets_others_go_on(
    decoding: lmdecode.Decoding, kjv_compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    engine = decoding.engine(max_requests=3, capacity=64)
    prompt = tokenizer.encode(PROMPT)
    free = engine.submit(prompt, max_new_tokens=12)
    want = free.result().tokens
    odd = engine.submit(prompt, max_new_tokens=12, grammar=kjv_compiler.regex("yes|no").start())
    again = engine.submit(prompt, max_new_tokens=12)
    assert tokenizer.decode(odd.result().tokens) in ("yes", "no")
    assert again.result().tokens == want
    source = json_schema(SCHEMAS["enum"])
    assert kjv_compiler.compile(source) is kjv_compiler.compile(source)
